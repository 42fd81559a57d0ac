"""Answers that end when the client disconnects: streams, such as server-sent events, and plain
ones.
"""

from __future__ import annotations

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm.observe.request_steps import Work
from cllm.serving.answer import Answer
from cllm.serving.delivered import LENGTH, ProgressRecorder
from cllm.text.output_reader import Delta

T = TypeVar("T")

# seconds of silence after which a heartbeat is sent, so that proxies and clients keep waiting
HEARTBEAT = 15.0
HEARTBEAT_BYTES = b": ping\n\n"
# seconds for which a client may not read before its request yields its place to others
YIELD_AFTER = 1.0
DIRECT_SEND = "cllm.send"
# key in the scope's state of a function that writes bytes that readers of the stream skip
PROBE = "cllm.probe"
# in the scope of a request whose answer, if it is a stream, consists of frames
WANTS_FRAMES = "cllm.wants_frames"
FRAMED = (b"x-cllm-framed", b"1")
# groups of deltas that are formatted before others get their turn
MANY_DELTAS = 1000
# Characters at which str.splitlines ends a line (and so do httpx and clients that use it), with
# their escaped form. JSON escapes the other line ends anyway.
LINE_ENDS = tuple((end.encode(), rb"\u%04x" % ord(end)) for end in "\u2028\u2029\x85")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


class AnswerEvents(Protocol):
    """Formats an answer as bytes in a dialect's format. The last call is ``end`` or ``fault``."""

    def begin(self) -> bytes: ...
    def deltas(self, deltas: list[Delta]) -> bytes: ...
    def end(self) -> bytes: ...
    def fault(self, error: Exception) -> bytes: ...


def escape_line_ends(data: bytes) -> bytes:
    """Return ``data``, JSON texts in UTF-8, with the LINE_ENDS within its strings escaped."""
    if not data.isascii():
        for end, escaped in LINE_ENDS:
            if end[0] in data:  # one byte is found much faster than all bytes of the character
                data = data.replace(end, escaped)
    return data


def streaming(app: ASGIApp) -> ASGIApp:
    """Return ``app`` with streams that bypass the middleware, which only looks at the beginning of
    an answer.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, DIRECT_SEND: send}, receive, send)

    return called


class EventStream(Response):
    """Sends an answer as it is generated.

    Tokens are written in the call that delivers them, because waking a task for each token would
    cost more than everything else. Tokens that arrive while a client does not read are collected
    and sent together.

    A task watches for a disconnect, so that the stream ends and releases its resources as soon as
    the client has gone, even if there is nothing to write.

    A front gets frames: the length of the progress (see Progress), the length of the data, the
    progress, and the data. Each frame has what was read together.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        events: AnswerEvents,
        headers: dict[str, str],
        media_type: str | None = None,
        heartbeat: bytes = HEARTBEAT_BYTES,
    ) -> None:
        """After silence, ``heartbeat`` is sent, bytes that readers skip, such as a space before a
        line of JSON.
        """
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._answer = answer
        self._events = events
        self._heartbeat = heartbeat
        self._writing: asyncio.Task[None] | None = None  # waits until the client has read
        self._is_yielding = False
        self._num_sent = 0
        self._is_last = False  # nothing follows the latest data
        self._progress: ProgressRecorder | None = None  # if there are frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = self.raw_headers
            if WANTS_FRAMES in scope:
                self._progress = self._answer.record_progress()
                headers = [*headers, FRAMED]
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": headers,
                }
            )
            scope.get("state", {})[PROBE] = self._break_silence
            await self._run(receive, scope.get(DIRECT_SEND, send))
        finally:
            self._answer.close()

    async def _run(self, receive: Receive, send: Send) -> None:
        self._send = send
        if (steps := self._answer.record.steps) is not None:
            self._send = steps.sending.timed_async(send)
            self._events = TimedEvents(self._events, steps.formatting)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(wait_for_disconnect(receive))
        error: BaseException | None = None
        try:
            self._write(await self._begin())
            self._answer.listen(self._pump)
            self._pump()
            await self._beat(watching)
        finally:
            self._answer.listen(None)
            tasks = [task for task in (watching, self._writing) if task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._ended.cancel():
                error = self._ended.exception()
        if error:
            raise error

    async def _begin(self) -> bytes:
        """Return the bytes before the first delta. If another server has sent them, and what
        followed, bring the events to the same state and return what is missing.
        """
        data, delivered = self._events.begin(), self._answer.delivered
        if delivered is None:
            return data
        for count, deltas in enumerate(delivered):
            self._events.deltas(deltas)
            if count % MANY_DELTAS == MANY_DELTAS - 1:
                await asyncio.sleep(0)
        self._is_last = self._answer.finished
        return self._events.end() if self._is_last else b""

    async def _beat(self, watching: asyncio.Task[None]) -> None:
        """Send heartbeats during silence, until everything has been sent or the client has gone."""
        while True:
            sent = self._num_sent
            if (
                await asyncio.wait(
                    {self._ended, watching}, timeout=HEARTBEAT, return_when=FIRST_COMPLETED
                )
            )[0]:
                return
            if self._num_sent == sent:
                self._break_silence()

    def _break_silence(self) -> None:
        if self._writing is None and not self._is_last:
            self._write(self._heartbeat)

    def _pump(self) -> None:
        """Write all deltas that have arrived."""
        try:
            while (
                self._writing is None and not self._is_last and (data := self._take()) is not None
            ):
                self._write(data)
        except Exception as error:  # noqa: BLE001  # ends only this stream; others are in the same call
            self._end(error)

    def _take(self) -> bytes | None:
        try:
            deltas = self._answer.take()
            if deltas is None:
                return None
            data = self._events.deltas(deltas) if deltas else b""
            if self._answer.finished:
                self._is_last = True
                data += self._events.end()
        except Exception as error:  # noqa: BLE001  # the status line has been sent: it goes into the stream
            self._is_last = True
            data = self._events.fault(error)
            if self._progress is not None:
                self._progress.error = error
        return data

    def _write(self, data: bytes) -> None:
        if not data and not self._is_last and self._progress is None:
            return
        self._num_sent += 1
        data = escape_line_ends(data)
        if self._progress is not None:
            progress = self._progress.take(is_last=self._is_last)
            data = LENGTH.pack(len(progress)) + LENGTH.pack(len(data)) + progress + data
        message = {"type": "http.response.body", "body": data, "more_body": not self._is_last}
        self._writing = begin(self._send(message))
        if self._writing is not None:
            self._writing.add_done_callback(self._written)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(YIELD_AFTER, self._yield)
        elif self._is_last:
            self._end()

    def _yield(self) -> None:
        """Let other requests go first, because the client does not read what has been sent."""
        self._is_yielding = True
        self._answer.set_yielding(yields=True)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing = None
        self._timer.cancel()
        if self._is_yielding:
            self._is_yielding = False
            self._answer.set_yielding(yields=False)
        if task.cancelled():
            return
        if self._is_last or task.exception():
            self._end(task.exception())
        else:
            self._num_sent += 1
            self._pump()

    def _end(self, error: BaseException | None = None) -> None:
        if self._ended.done():
            return
        if error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


class TimedEvents:
    """Formats an answer as ``events`` does, and adds the time that this takes to ``work``."""

    def __init__(self, events: AnswerEvents, work: Work) -> None:
        self.begin, self.fault = events.begin, events.fault
        self.deltas, self.end = work.timed(events.deltas), work.timed(events.end)


def begin(work: Awaitable[None]) -> asyncio.Task[None] | None:
    """Run ``work`` until it has to wait. Return a task that finishes it, or None if it is done."""
    steps = work.__await__()
    try:
        future = next(steps)
    except StopIteration:
        return None
    return asyncio.create_task(end(steps, future))


async def end(steps: Generator[Any, Any, None], future: asyncio.Future[Any]) -> None:
    """Finish work that waits for ``future``."""
    try:
        while True:
            await asyncio.wait([future])
            future = next(steps)
    except StopIteration:
        pass
    finally:
        steps.close()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``.

    If the client disconnects first, cancel ``work`` and raise ClientGone.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({working, watching}, return_when=FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
