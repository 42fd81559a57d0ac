"""Continues a stream that another replica has begun: the same request is made again, by its own
route, with what its client has received.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cllm.errors import BadRequest
from cllm.server.auth import ACCOUNT, CARRIED
from cllm.server.body import read_bytes
from cllm.server.call import DELIVERED
from cllm.server.cluster.key import INTERNAL
from cllm.server.http.recording import RECORD
from cllm.server.http.request_id import KEY
from cllm.server.http.sse import DIRECT_SEND, WANTS_FRAMES
from cllm.server.off_loop import LARGE, in_thread
from cllm.server.state import get_state
from cllm.serving.delivered import MAX_PROGRESS_BYTES, Delivered

CONTINUE_PATH = "/internal/continue"
# The keys of a scope that describe the connection, and what the front has said. The others belong
# to the route that has matched.
KEPT = frozenset(
    {
        *("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "state"),
        *("extensions", DIRECT_SEND, KEY, ACCOUNT, CARRIED, RECORD),
    }
)
OF_BODY = frozenset({b"content-length", b"content-type", b"transfer-encoding"})


class Continue(msgspec.Struct, frozen=True):
    """The body of CONTINUE_PATH, in msgpack. The header fields are those of the request, except
    those of its body.

    The stream was asked for at ``path`` with ``query`` and ``body``, ``elapsed`` seconds ago.
    ``progress`` has the progress of all frames that its client has received, each after its length.
    """

    path: str
    query: bytes
    content_type: str
    body: bytes
    progress: Annotated[bytes, msgspec.Meta(max_length=MAX_PROGRESS_BYTES)]
    elapsed: Annotated[float, msgspec.Meta(ge=0)]


_decoder = msgspec.msgpack.Decoder(Continue)


async def read_continue(request: Request) -> Continuation:
    """Return the continuation that a front asks for. Raises BadRequest."""
    limit_mb = get_state(request).settings.server.max_body_mb + MAX_PROGRESS_BYTES // 1_000_000 + 1
    data = await read_bytes(request, limit_mb)
    try:
        asked = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRequest(f"The body is not valid: {str(error)[:200]}") from None
    if asked.path.startswith(INTERNAL):
        raise BadRequest("Only streams of clients can be continued.", code="invalid_value")

    def read() -> Delivered:
        return Delivered(asked.progress, asked.elapsed)

    return Continuation(asked, await in_thread(read) if len(data) > LARGE else read())


class Continuation(Response):
    """The rest of a stream, in frames, or the error of its route."""

    def __init__(self, asked: Continue, delivered: Delivered) -> None:
        super().__init__()
        self._asked = asked
        self._delivered = delivered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._asked
        headers = [field for field in scope["headers"] if field[0] not in OF_BODY]
        headers.append((b"content-length", b"%d" % len(asked.body)))
        headers.append((b"content-type", asked.content_type.encode("latin-1")))
        own: dict[str, Any] = {key: value for key, value in scope.items() if key in KEPT}
        own |= {
            "method": "POST",
            "path": asked.path,
            "raw_path": asked.path.encode(),
            "query_string": asked.query,
            "headers": headers,
            DELIVERED: self._delivered,
            WANTS_FRAMES: True,
        }
        pending: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive_body() -> Message:
            return pending.pop() if pending else await receive()

        await scope["app"](own, receive_body, send)
