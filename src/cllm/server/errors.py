"""Errors to answers, in the form that OpenAI's clients read. Nothing of a fault of ours but its existence gets out."""

from __future__ import annotations

import logging
import math
from typing import Any

import pydantic_core
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cllm.errors import BadRequest, EngineError
from cllm.process.backlog import QueueFull
from cllm.server.sse import ClientGone
from cllm.service import RequestTimeout

log = logging.getLogger("cllm.server")

CLIENT_CLOSED_REQUEST = 499


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and OpenAI's error object, always with its four keys."""
    if isinstance(error, BadRequest):
        kind = "invalid_request_error"
        return error.status, body(str(error), kind, error.param, error.code)
    if isinstance(error, RequestTimeout):
        return 504, body(str(error), "timeout", None, error.code)
    if isinstance(error, QueueFull):  # OpenAI's type of a rate limit is what was too many
        return 429, body(str(error), "tokens" if error.bound == "tokens" else "requests", None, "queue_full")
    if isinstance(error, EngineError):
        return 503, body(str(error), "server_error", None, "engine_unavailable")
    return 500, body("Internal error; the log of the server says more.", "server_error", None, "internal_error")


def body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_event(error: Exception) -> bytes:
    """A fault after the first byte: an event with the error object, for a stream that then ends."""
    if not isinstance(error, (BadRequest, EngineError, RequestTimeout)):
        log.error("a stream failed", exc_info=error)
    return b"data: " + pydantic_core.to_json(describe(error)[1]) + b"\n\n"


def answer(status: int, content: dict[str, Any], retry_after: float = 1.0) -> Response:
    headers = {"retry-after": str(max(1, math.ceil(retry_after)))} if status in (429, 503) else {}
    if status == 413:
        headers["connection"] = "close"  # the rest of the body is not read
    return Response(pydantic_core.to_json(content), status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Answer every error of ``app`` in one form."""

    async def expected(_: Request, error: Exception) -> Response:
        return answer(*describe(error))

    async def later(_: Request, error: Exception) -> Response:
        assert isinstance(error, (QueueFull, EngineError))
        return answer(*describe(error), error.retry_after)

    async def invalid(_: Request, error: Exception) -> Response:  # what the framework has checked: a query
        assert isinstance(error, RequestValidationError)
        fault = error.errors()[0]
        param = str(fault["loc"][-1])
        message = f"Invalid '{param}': {fault['msg']}."
        return answer(400, body(message, "invalid_request_error", param, "invalid_value"))

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(*describe(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return answer(error.status_code, body(message[:300], "invalid_request_error", None, code))

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(BadRequest, expected)
    app.add_exception_handler(RequestTimeout, expected)
    app.add_exception_handler(QueueFull, later)
    app.add_exception_handler(EngineError, later)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
