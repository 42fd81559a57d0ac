"""Errors of a front, after the first byte of a stream."""

from __future__ import annotations

from pydantic_core import to_json
from starlette.requests import Request

from cllm.server.anthropic import errors as anthropic
from cllm.server.errors import describe_in_stream, error_event
from cllm.server.http.request_id import request_id
from cllm.server.ollama import errors as ollama
from cllm.server.openai.stream import DONE

RESPONSES = "/v1/responses"


def write_fault(request: Request, error: Exception) -> bytes:
    """Return the last bytes of a stream that fails, in the form of its dialect."""
    path: str = request.scope["path"]
    if anthropic.speaks_anthropic(path, request.headers):
        return anthropic.error_event(error, request_id(request))
    if ollama.speaks_ollama(path, request.headers):
        return ollama.error_line(error)
    if path == RESPONSES:
        fault = describe_in_stream(error)
        event = {
            "type": "error",
            "code": fault.code,
            "message": fault.message,
            "param": fault.param,
            "sequence_number": 0,
        }
        return b"event: error\ndata: " + to_json(event) + b"\n\n"
    is_openai = path in ("/v1/chat/completions", "/v1/completions", "/chat/completions")
    return error_event(error) + (DONE if is_openai else b"")
