"""Turns errors into answers, in the form of the request's dialect.

Internal error details are never sent to clients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pydantic_core
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from typing_extensions import TypedDict

from cllm.errors import (
    BadRequest,
    EngineError,
    FatalRequest,
    LoadFailed,
    PromptTooLong,
    RateLimited,
    Unauthorized,
)
from cllm.process.backlog import QueueFull
from cllm.server.auth import TooManyWrongKeys
from cllm.server.http.paths import KnownPaths
from cllm.server.http.recording import CLIENT_CLOSED_REQUEST, find_record
from cllm.server.http.request_id import request_id
from cllm.server.http.sse import ClientGone
from cllm.server.queueing import TICKET
from cllm.server.state import get_state
from cllm.serving.answer import RequestTimeout

log = logging.getLogger("cllm.server")

# error codes of requests that clients must not retry
FATAL = frozenset({"engine_crashed", "insufficient_quota", "model_load_failed"})


class Fault(NamedTuple):
    """An error in OpenAI's terms, which are the most detailed.

    ``status`` is the HTTP status. The client may retry after ``retry_after`` seconds; the
    ``ticket`` then claims its reserved queue position. ``prompt_tokens`` has the length of a prompt
    that is too long, and the limit.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after: float = 1.0
    ticket: str = ""
    prompt_tokens: tuple[int, int] | None = None


ErrorFormat = Callable[[Fault, str], tuple[int, Mapping[str, Any]]]
"""Takes a fault and the request id; returns the status and the body of a dialect's answer."""


class Dialect(NamedTuple):
    """Recognizes the requests of a dialect by path and headers, and builds their error answers."""

    recognizes: Callable[[str, Headers], bool]
    form: ErrorFormat


AnswerFault = Callable[[Request, Fault], Response]


def describe(error: Exception) -> Fault:
    if isinstance(error, BadRequest):
        fault = Fault(error.status, str(error), param=error.param, code=error.code)
        if isinstance(error, PromptTooLong):
            return fault._replace(prompt_tokens=(error.num_tokens, error.max_tokens))
        return fault
    if isinstance(error, RequestValidationError):  # of query parameters, which the framework checks
        first = error.errors()[0]
        param = str(first["loc"][-1])
        return Fault(400, f"Invalid '{param}': {first['msg']}.", param=param, code="invalid_value")
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return Fault(error.status_code, error.detail, code=code)
    if isinstance(error, RequestTimeout):
        return Fault(504, str(error), "timeout", code=error.code)
    if isinstance(error, Unauthorized):
        return Fault(401, str(error), code="invalid_api_key")
    if isinstance(error, RateLimited):
        kind = "requests" if "requests" in error.limit else "tokens"
        if error.retry_after is None:
            kind, code = "insufficient_quota", "insufficient_quota"
        else:
            code = "rate_limit_exceeded"
        return Fault(429, str(error), kind, error.limit, code, error.retry_after or 0)
    if isinstance(error, TooManyWrongKeys):
        return Fault(429, str(error), "requests", None, "too_many_wrong_keys", error.retry_after)
    if isinstance(error, QueueFull):  # OpenAI's error type for a rate limit names what was limited
        kind = "tokens" if error.bound == "tokens" else "requests"
        return Fault(
            429,
            str(error),
            kind,
            code="queue_full",
            retry_after=error.retry_after,
            ticket=error.ticket,
        )
    if isinstance(error, LoadFailed):
        return Fault(500, str(error), "server_error", code="model_load_failed")
    if isinstance(error, FatalRequest):
        return Fault(500, str(error), "server_error", code="engine_crashed")
    if isinstance(error, EngineError):
        return Fault(
            503,
            str(error),
            "server_error",
            code="engine_unavailable",
            retry_after=error.retry_after,
        )
    return Fault(
        500,
        "Internal error; see the server's log.",
        "server_error",
        code="internal_error",
    )


def describe_in_stream(error: Exception) -> Fault:
    """Return the fault for an error after the first byte of a stream. Log unexpected errors."""
    if not isinstance(error, (BadRequest, EngineError, LoadFailed, RequestTimeout, Unauthorized)):
        log.error("a stream failed", exc_info=error)
    return describe(error)


class ErrorObject(TypedDict):
    """OpenAI's error object. All four keys are always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    error: ErrorObject


def openai_error(fault: Fault, _: str = "") -> tuple[int, ErrorAnswer]:
    """Return the status and the body of OpenAI's error answers."""
    error: ErrorObject = {
        "message": fault.message,
        "type": fault.type,
        "param": fault.param,
        "code": fault.code,
    }
    return fault.status, {"error": error}


def error_event(error: Exception) -> bytes:
    """Return an event with OpenAI's error object, for a stream that has begun.

    The stream then ends.
    """
    return b"data: " + pydantic_core.to_json(openai_error(describe_in_stream(error))[1]) + b"\n\n"


def allowed_methods(request: Request) -> list[str]:
    """Return the methods that the path of ``request`` supports. HEAD works wherever GET does."""
    routes = get_state(request).routes
    known = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    methods = {method for route in known for method in route.methods or ()}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))


def make_answer(dialects: Sequence[Dialect], paths: KnownPaths) -> AnswerFault:
    """Return a function that answers a request with a fault. The answer has the form of the first
    of ``dialects`` that recognizes the request, or else OpenAI's.
    """

    def choose_form(request: Request) -> ErrorFormat:
        path: str = request.scope["path"]
        path, headers = paths.find(path) or path, request.headers
        forms = (dialect.form for dialect in dialects if dialect.recognizes(path, headers))
        return next(forms, openai_error)

    def answer(request: Request, fault: Fault) -> Response:
        record = find_record(request.scope)
        record.error_code, record.error_field = fault.code or "", (fault.param or "")[:100]
        form = choose_form(request)
        status, content = form(fault, request_id(request))
        headers = {}
        if fault.status in (429, 503) and fault.code not in FATAL:
            headers["retry-after"] = str(max(1, math.ceil(fault.retry_after)))
        if fault.status == 401:
            headers["www-authenticate"] = "Bearer"
        if fault.code in FATAL:
            headers["x-should-retry"] = "false"  # the clients of OpenAI and Anthropic read this
        if fault.ticket:
            headers[TICKET] = fault.ticket
        return Response(pydantic_core.to_json(content), status, headers, "application/json")

    return answer


def install(app: FastAPI, answer: AnswerFault) -> None:
    """Answer every error of ``app`` with ``answer``."""

    async def expected(request: Request, error: Exception) -> Response:
        return answer(request, describe(error))

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %r failed", request.method, request.scope["path"], exc_info=error)
        response = answer(request, describe(error))
        response.headers["connection"] = "close"  # uvicorn will close it
        return response

    async def http(request: Request, error: Exception) -> Response:
        fault = describe(error)
        message = f"{request.method} {request.scope['path']}: {fault.message}"
        response = answer(request, fault._replace(message=message[:300]))
        if fault.status == 405:
            response.headers["allow"] = ", ".join(allowed_methods(request))
        return response

    async def gone(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for kind in (
        *(BadRequest, RequestTimeout, QueueFull, EngineError, RequestValidationError),
        *(LoadFailed, Unauthorized, RateLimited),
    ):
        app.add_exception_handler(kind, expected)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)
