"""Models of the answers about responses, files and batches, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from cllm.server.body import ResponseModel, example
from cllm.store.batches import Status

FILE = {
    "id": "file-1",
    "object": "file",
    "bytes": 120,
    "created_at": 1735689600,
    "filename": "requests.jsonl",
    "purpose": "batch",
    "status": "processed",
}
BATCH = {
    "id": "batch_1",
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "model": "cllm-builtin",
    "input_file_id": "file-1",
    "completion_window": "24h",
    "status": "in_progress",
    "created_at": 1735689600,
    "expires_at": 1735776000,
    "request_counts": {"total": 100, "completed": 40, "failed": 1},
    "usage": {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    },
    "metadata": None,
}


class InputTokensDetails(ResponseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(ResponseModel):
    """``output`` has items of the types message, reasoning, function_call and custom_tool_call."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None = None


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(ResponseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class Deleted(ResponseModel):
    id: str
    object: Literal["response", "file"]
    deleted: bool


class FileObject(ResponseModel):
    model_config = example(**FILE)

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: int | None = None


class FileList(ItemList):
    data: list[FileObject]  # type: ignore[assignment]


class RequestCounts(ResponseModel):
    total: int
    completed: int
    failed: int


class BatchInputDetails(ResponseModel):
    cached_tokens: int


class BatchUsage(ResponseModel):
    """Tokens of all answers together. Complete once the batch has ended."""

    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchObject(ResponseModel):
    model_config = example(**BATCH)

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: dict[str, Any] | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None


class BatchList(ItemList):
    data: list[BatchObject]  # type: ignore[assignment]
