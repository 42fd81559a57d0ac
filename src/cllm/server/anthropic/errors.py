"""Recognizes Anthropic's requests, and builds their error answers."""

from __future__ import annotations

from typing import Literal, NotRequired

from pydantic_core import to_json
from starlette.datastructures import Headers
from typing_extensions import TypedDict

from cllm.server.errors import Dialect, Fault, describe_in_stream

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# The error code for a rejected parameter that makes Anthropic's clients retry without it.
ERROR_CODES = {"thread": "thread_unsupported_request"}


class ErrorDetails(TypedDict):
    error_code: str


class AnthropicErrorObject(TypedDict):
    """``details`` is for an error that Anthropic's clients handle themselves."""

    type: str
    message: str
    details: NotRequired[ErrorDetails]


class AnthropicErrorAnswer(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


def speaks_anthropic(path: str, headers: Headers) -> bool:
    """Return whether a request is in this dialect. OpenAI's dialect also has /v1/models, where the
    request's headers decide.
    """
    if is_within(path, "/v1/messages"):
        return True
    asks = "anthropic-version" in headers or "x-api-key" in headers
    return asks and is_within(path, "/v1/models")


def is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def anthropic_error(fault: Fault, request_id: str) -> tuple[int, AnthropicErrorAnswer]:
    """Build an error answer.

    A full queue gets 529, because it affects all clients; 429 is for a client's own limit. The
    error for a prompt that is too long has Anthropic's wording, which makes Claude Code shorten the
    conversation.
    """
    status = 529 if fault.code == "queue_full" else fault.status
    kind = TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    message = fault.message
    if fault.prompt_tokens:
        message = "prompt is too long: {} tokens > {} maximum".format(*fault.prompt_tokens)
    error: AnthropicErrorObject = {"type": kind, "message": message}
    if fault.code == "unsupported_parameter" and fault.param in ERROR_CODES:
        error["details"] = {"error_code": ERROR_CODES[fault.param]}
    return status, {"type": "error", "error": error, "request_id": request_id}


def error_event(error: Exception, request_id: str) -> bytes:
    return (
        b"event: error\ndata: "
        + to_json(anthropic_error(describe_in_stream(error), request_id)[1])
        + b"\n\n"
    )


DIALECT = Dialect(speaks_anthropic, anthropic_error)
OF_UNKNOWN_PATHS = Dialect(
    lambda path, headers: path.startswith("/v1/") and "anthropic-version" in headers,
    anthropic_error,
)
