"""Headers of every answer: the request id, which identifies a request for clients and the operator,
and whether the connection is closed.
"""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

KEY = "cllm.request_id"
HEADERS = (b"x-request-id", b"request-id")  # the second is Anthropic's
# in the scope's state: a function that says whether more of the body will come
IS_INCOMPLETE = "cllm.is_incomplete"


def new_request_id() -> str:
    """Return ``req_`` and 24 hex digits."""
    return f"req_{secrets.token_hex(12)}"


def request_id(request: Request) -> str:
    """Return the id that this server gave the request. Ids from clients are ignored."""
    name: str = request.scope.setdefault(KEY, new_request_id())
    return name


def with_answer_headers(app: ASGIApp) -> ASGIApp:
    """Return ``app`` with the headers added to all its answers.

    An answer that has set x-request-id keeps it.

    An answer that begins before the whole request has arrived (always an error) closes the
    connection.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [header for header in message["headers"] if header[0] not in HEADERS]
                given = [value for name, value in message["headers"] if name == HEADERS[0]]
                value = given[0] if given else scope[KEY].encode()
                headers += ((name, value) for name in HEADERS)
                if scope["state"][IS_INCOMPLETE]():
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            await send(message)

        scope = {**scope, KEY: new_request_id()}
        await app(scope, receive, send_named)

    return called
