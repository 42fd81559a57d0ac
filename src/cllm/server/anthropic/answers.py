"""Models of Anthropic's answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from cllm.server.body import ResponseModel, example


class ErrorDetails(ResponseModel):
    error_code: str


class ErrorObject(ResponseModel):
    """``details``: for an error that Anthropic's clients handle themselves."""

    type: str
    message: str
    details: ErrorDetails | None = None


class Error(ResponseModel):
    type: Literal["error"]
    error: ErrorObject
    request_id: str


class ContentBlock(ResponseModel):
    """text, thinking (with a signature) or tool_use (with id, name and input)."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}  # noqa: RUF012  # pydantic copies it


class OutputDetails(ResponseModel):
    thinking_tokens: int


class Usage(ResponseModel):
    """``input_tokens`` does not include the tokens from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    service_tier: Literal["standard"]


class MessageAnswer(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: Usage


class TokenCount(ResponseModel):
    model_config = example(input_tokens=18)

    input_tokens: int


class MessageBatchCounts(ResponseModel):
    """The requests by their state, while the batch is computed too. They add up to all."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(ResponseModel):
    """Times are in RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchList(ResponseModel):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatch(ResponseModel):
    id: str
    type: Literal["message_batch_deleted"]
