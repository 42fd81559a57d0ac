"""Every answer has the id of its request, by which a client and the operator speak of the same thing."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEY = "cllm.request_id"
HEADERS = (b"x-request-id", b"request-id")  # the second is Anthropic's


def request_id(request: Request) -> str:
    """Ours, never the client's: ``req_`` and 24 hex digits."""
    name: str = request.scope.setdefault(KEY, f"req_{secrets.token_hex(12)}")
    return name


def with_request_ids(app: ASGIApp) -> ASGIApp:
    """``app``, whose answers all have the headers; one that has set x-request-id keeps it."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0] not in HEADERS]
                given = [value for name, value in message["headers"] if name == HEADERS[0]]
                value = given[0] if given else scope[KEY].encode()
                message = {**message, "headers": [*headers, *((name, value) for name in HEADERS)]}
            await send(message)

        scope = {**scope, KEY: f"req_{secrets.token_hex(12)}"}
        await app(scope, receive, send_named)

    return called
