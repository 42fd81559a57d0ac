"""Streams that go on when their client loses the connection, so that it can come back for the rest.

A request with the header ``x-cllm-resumable`` is answered in a task of its own, which writes the
events of the stream to memory. The client, and whoever resumes the stream, reads them from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm.server.http.request_id import HEADERS, KEY
from cllm.server.http.sse import (
    DIRECT_SEND,
    HEARTBEAT,
    HEARTBEAT_BYTES,
    WANTS_FRAMES,
    wait_for_disconnect,
)

ASKING_HEADER = "x-cllm-resumable"  # asks for a stream that can be resumed
ID_HEADER = "x-cllm-stream"  # the id of such a stream
KEEP_SECONDS = 60.0  # for which a stream is kept without a reader
MAX_BYTES = 1_000_000  # of the latest events of one stream, which are kept
MAX_STREAMS = 100
MAX_OF_ACCOUNT = 20
EVENT_END = b"\n\n"
FindOwner = Callable[[Scope], str]

log = logging.getLogger("cllm.server")


class KeptStream:
    """The latest events of one stream of the account ``owner``, numbered from 1.

    ``headers`` are those of its answer. ``abandoned`` is set when nobody has read it for too long.
    """

    def __init__(self, stream_id: str, owner: str, headers: list[tuple[bytes, bytes]]) -> None:
        self.id = stream_id
        self.owner = owner
        self.headers = headers
        self.is_done = False
        self.num_events = 0
        self.num_readers = 0
        self.abandoned = asyncio.Event()
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self.expiry: asyncio.TimerHandle | None = None  # of the stream without readers
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def first(self) -> int:
        """The number of the first event that is kept."""
        return self.num_events - len(self._events) + 1

    def put(self, data: bytes) -> None:
        """Keep the events in ``data``. Drop the oldest ones if there are too many bytes."""
        for text in data.split(EVENT_END):
            if not text or text.startswith(b":"):  # readers get their own heartbeats
                continue
            self.num_events += 1
            event = b"id: %d\n" % self.num_events + text + EVENT_END
            self._events.append(event)
            self._num_bytes += len(event)
            while self._num_bytes > MAX_BYTES and len(self._events) > 1:
                self._num_bytes -= len(self._events.popleft())
        self._wake()

    def finish(self) -> None:
        """Note that no event follows."""
        self.is_done = True
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def read(self, after: int) -> bytes:
        """Return the events after the one with the number ``after``, which must be kept."""
        return b"".join(islice(self._events, after + 1 - self.first, None))

    @contextmanager
    def wait(self) -> Iterator[asyncio.Future[None]]:
        """Yield a future that is done when something has changed."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            yield waiter
        finally:
            self._waiters.discard(waiter)


class KeptStreams:
    """The streams of a server that can be resumed, by id."""

    def __init__(self, keep_seconds: float = KEEP_SECONDS) -> None:
        self._keep_seconds = keep_seconds
        self._streams: dict[str, KeptStream] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def add(
        self, stream_id: str, owner: str, headers: list[tuple[bytes, bytes]]
    ) -> KeptStream | None:
        """Return a new stream, or None if there are too many. Streams that are complete and have no
        reader make room.
        """
        own = [one for one in self._streams.values() if one.owner == owner]
        for streams, limit in ((own, MAX_OF_ACCOUNT), ([*self._streams.values()], MAX_STREAMS)):
            if len(streams) >= limit:
                idle = next((one for one in streams if one.is_done and not one.num_readers), None)
                if idle is None:
                    return None
                self.remove(idle)
        stream = self._streams[stream_id] = KeptStream(stream_id, owner, headers)
        return stream

    def find(self, stream_id: str, owner: str) -> KeptStream | None:
        """Return a stream of this account."""
        stream = self._streams.get(stream_id)
        return None if stream is None or stream.owner != owner else stream

    def remove(self, stream: KeptStream) -> None:
        """Forget a stream, and end it if it is not complete."""
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id]
        stream.abandoned.set()

    @contextmanager
    def attach(self, stream: KeptStream) -> Iterator[None]:
        """Keep a stream while the block runs, and for a while afterwards."""
        stream.num_readers += 1
        if stream.expiry is not None:
            stream.expiry.cancel()
        try:
            yield
        finally:
            stream.num_readers -= 1
            if not stream.num_readers:
                loop = asyncio.get_running_loop()
                stream.expiry = loop.call_later(self._keep_seconds, self.remove, stream)


class EventReader(Response):
    """Sends the events of a kept stream after the one with the number ``after``, until the stream
    is complete or the client has gone. A client that reads too slowly to get all of them gets an
    incomplete answer.
    """

    def __init__(self, streams: KeptStreams, stream: KeptStream, after: int) -> None:
        super().__init__()
        self.raw_headers = [*stream.headers, (ID_HEADER.encode(), stream.id.encode())]
        self._streams = streams
        self._stream = stream
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._streams.attach(self._stream):
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            watching = asyncio.create_task(wait_for_disconnect(receive))
            try:
                await self._send_events(watching, scope.get(DIRECT_SEND, send))
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _send_events(self, watching: asyncio.Task[None], send: Send) -> None:
        stream, at, data = self._stream, self._after, b""
        while not watching.done():
            is_last = stream.is_done or at + 1 < stream.first
            if at + 1 >= stream.first:
                data, at = stream.read(at) or data, stream.num_events
            if data or is_last:
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if is_last:
                return
            data = b""
            if at == stream.num_events and not stream.is_done:
                with stream.wait() as waiter:
                    done, _ = await asyncio.wait(
                        {watching, waiter},
                        timeout=HEARTBEAT,
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                data = b"" if done else HEARTBEAT_BYTES


def resumable(app: ASGIApp, streams: KeptStreams, find_owner: FindOwner) -> ASGIApp:
    """Return ``app`` with streams that can be resumed, if a request asks for that. ``find_owner``
    returns the name of the account of a request. Streams for fronts are left as they are, because
    the fronts keep them.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        is_asked = scope["method"] == "POST" and ASKING_HEADER in Headers(scope=scope)
        if not is_asked or WANTS_FRAMES in scope:
            await app(scope, receive, send)
            return
        run = DetachedRun(streams, find_owner(scope), scope[KEY], receive, send)
        inner = {key: value for key, value in scope.items() if key != DIRECT_SEND}
        inner["state"] = {**scope.get("state", {})}  # a probe is for the client's own connection
        task = asyncio.create_task(run.answer(app, inner))
        try:
            awaited: set[asyncio.Future[Any]] = {task, run.begun}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            stream = run.begun.result() if run.begun.done() else None
            if stream is None:
                await task
                return
        finally:
            if not run.is_kept:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        streams.tasks.add(task)
        task.add_done_callback(streams.tasks.discard)
        task.add_done_callback(run.end)
        await EventReader(streams, stream, 0)(scope, receive, send)
        if stream.is_done:  # so that the request's record is complete
            await asyncio.wait([task])

    return called


class DetachedRun:
    """What an application receives and sends whose answer, if it is a stream, goes on without its
    client. ``begun`` has that stream, or None for another answer, once the answer has begun.
    """

    def __init__(
        self, streams: KeptStreams, owner: str, request_id: str, receive: Receive, send: Send
    ) -> None:
        """The stream has the id of the answer or, without one, ``request_id``."""
        self._streams = streams
        self._owner = owner
        self._request_id = request_id
        self._receive = receive
        self._send = send
        self._stream: KeptStream | None = None
        self.begun: asyncio.Future[KeptStream | None] = asyncio.get_running_loop().create_future()

    @property
    def is_kept(self) -> bool:
        """Whether the answer is a stream that goes on without its client."""
        return self._stream is not None

    async def answer(self, app: ASGIApp, scope: Scope) -> None:
        await app(scope, self.receive, self.send)

    async def receive(self) -> Message:
        message = None if self.is_kept else await self._receive()
        # a stream that has begun meanwhile goes on without its client
        if message is not None and not (self.is_kept and message["type"] == "http.disconnect"):
            return message
        assert self._stream is not None
        await self._stream.abandoned.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            name = headers.get(HEADERS[0], self._request_id.encode()).decode()
            is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            if message["status"] == 200 and is_stream:
                self._stream = self._streams.add(name, self._owner, message["headers"])
            self.begun.set_result(self._stream)
        if self._stream is None:
            await self._send(message)
        elif message["type"] == "http.response.body":
            self._stream.put(message.get("body", b""))
            if not message.get("more_body"):
                self._stream.finish()

    def end(self, task: asyncio.Task[None]) -> None:
        """Complete the stream, also if its task has failed."""
        assert self._stream is not None
        self._stream.finish()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a stream has failed", exc_info=error)
