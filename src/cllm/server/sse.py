"""Answers that end when the client goes away: server-sent events, and plain ones."""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")

HEARTBEAT = 15.0  # seconds of silence after which proxies and clients are told that we are alive
WRITE_TIMEOUT = 60.0  # seconds in which a client that has unread data must read some of it
HEARTBEAT_BYTES = b": ping\n\n"
DIRECT_SEND = "cllm.send"


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def streaming(app: ASGIApp) -> ASGIApp:
    """``app``, whose streams send past the layers between: these look at the beginning of an answer only."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, DIRECT_SEND: send}, receive, send)

    return called


class EventStream(Response):
    """Sends events that are ready bytes.

    A disconnect is watched for beside the writing, so that the end comes, and what was held for the stream is given
    back, as soon as the client has gone, whether or not there is something to write.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None], headers: dict[str, str] | None = None
    ) -> None:
        """``on_end`` is called when nothing more will be sent, whatever ended it."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._sending = False
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send(receive, scope.get(DIRECT_SEND, send))
        finally:
            self._on_end()

    async def _send(self, receive: Receive, send: Send) -> None:
        writing = asyncio.create_task(self._write(send))
        watching = asyncio.create_task(disconnected(receive))
        stalled = 0
        try:
            while True:
                sent = self._num_sent
                done, _ = await asyncio.wait({writing, watching}, timeout=HEARTBEAT, return_when=FIRST_COMPLETED)
                if done:
                    break
                if self._num_sent != sent:
                    stalled = 0
                    continue
                if self._sending:
                    stalled += 1
                    if stalled * HEARTBEAT >= WRITE_TIMEOUT:
                        break
                else:
                    await send({"type": "http.response.body", "body": HEARTBEAT_BYTES, "more_body": True})
        finally:
            watching.cancel()
            writing.cancel()
            await asyncio.gather(writing, watching, return_exceptions=True)
        if not writing.cancelled() and (error := writing.exception()):
            raise error

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for data in events:
                self._sending = True
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._sending = False
                self._num_sent += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; it is cancelled, and ClientGone raised, if the client goes away before."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
