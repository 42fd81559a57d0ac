"""Passes the answer of a replica to the client as it arrives."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.types import Message, Scope, Send

from cllm.cluster.replay import Replay, ReplayMemory
from cllm.http_connection import BrokenHTTP, Connection, Response
from cllm.server.auth import COMPUTED_HEADER
from cllm.server.http.sse import DIRECT_SEND, HEARTBEAT_BYTES, PROBE, begin
from cllm.server.queueing import TICKET
from cllm.store.charges import UsageCounts

# Fields that concern one connection (RFC 9110, 7.6.1), or that this server writes itself.
HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade", b"proxy-authenticate", b"proxy-authorization"),
        *(b"date", b"server"),
    }
)
FRAMED = b"x-cllm-framed"
# What replicas tell their front
INNER_FIELDS = frozenset(
    {b"x-cllm-usage", FRAMED, b"x-cllm-needed-tokens", COMPUTED_HEADER.encode()}
)
TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")  # a valid name of a field
MAX_STATUS = 599
WITHOUT_BODY = (204, 304)
INVALID = re.compile(b"[\x00-\x08\x0a-\x1f\x7f]")  # in values of fields
EVENTS, LINES = b"text/event-stream", b"application/x-ndjson"
# how the parts of a stream end, after which a client skips these bytes
SILENCE = {EVENTS: (b"\n\n", HEARTBEAT_BYTES), LINES: (b"\n", b" ")}
REFUSALS = frozenset({429, 503, 529})  # another replica may answer these requests
# Answers of known length up to this one are passed on when they are complete, so that the request
# can be repeated if the replica dies before that.
MAX_COLLECTED = 1_000_000  # bytes


def drop_hop_by_hop(fields: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return header fields without those that concern one connection."""
    named = {
        name.strip().lower()
        for field, value in fields
        if field == b"connection"
        for name in value.split(b",")
    }
    return [field for field in fields if field[0] not in HOP_BY_HOP and field[0] not in named]


class Relay:
    """The answer of one replica to one request.

    A refusal, or a short answer that is no stream, is collected until it is complete; ``pass_on``
    then sends it. Other answers are passed on as they arrive. While the client does not read,
    nothing is read from the replica.

    A stream in frames begins for the client with its first frame. Before that, the request can be
    repeated; after that, ``replay`` has what another replica needs to continue the stream.
    """

    def __init__(
        self,
        connection: Connection,
        replica: str,
        scope: Scope,
        send: Send,
        memory: ReplayMemory,
        received: UsageCounts,
    ) -> None:
        """``replica`` is the name of the replica. ``memory`` counts what is kept for replays, and
        ``received`` the tokens that the client gets in a stream.
        """
        self._connection: Connection | None = connection
        self._memory = memory
        self._received = received
        self._created = time.monotonic()
        self._replica = replica
        self._send = send
        self._send_body = scope.get(DIRECT_SEND, send)
        self._state: dict[str, Any] = scope.get("state", {})
        self._writing: asyncio.Task[None] | None = None  # waits until the client has read
        self._pending: list[Message] = []  # what has arrived meanwhile
        self._collected: bytearray | None = None  # the body, unless it is passed on
        self._is_at_end = False  # of a part of the stream
        self.response = Response()
        self.kind = b""  # the media type
        self.has_started = False  # the client has got a part of the answer
        self.error: BaseException | None = None
        # called once, when the body or, in frames, the output begins
        self.on_first: Callable[[], None] | None = None
        # called whenever the client gets tokens of a stream in frames
        self.on_tokens: Callable[[], None] = lambda: None
        self.is_complete = False  # the client has got the end of the answer
        self.error_body = b""  # of an answer that is an error
        self.replay: Replay | None = None
        self._is_rest = False
        self.rest: Response | None = None  # from the replica that continues the stream

    # --- called while the replica answers --------------------------------------------------------

    def begin(self, response: Response) -> None:
        """Take the head of the answer, or of its rest."""
        if self._is_rest:
            self.rest = response
            return
        if response.status > MAX_STATUS:
            raise BrokenHTTP(f"an answer with the status {response.status}")
        self.response = response
        self.kind = response.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        length = response.headers.get(b"content-length", b"")
        is_short = length.isdigit() and int(length) <= MAX_COLLECTED
        if self.is_refusal or (self.kind not in SILENCE and is_short):
            self._collected = bytearray()
        elif FRAMED in response.headers:
            self.replay = Replay(self._memory, self._created, self._received)
        else:
            self._start()

    def continue_with(self, connection: Connection) -> None:
        """Take the rest of a stream from another connection."""
        self._connection = connection
        self._is_rest = True
        if self._writing is not None:
            connection.pause_reading()

    def feed(self, data: bytes, _: float) -> bool:
        """Take bytes of the body. Return True if the answer cannot be passed on."""
        if self.replay is not None:
            return self._feed_frames(self.replay, data)
        self._note_first()
        if self._collected is not None:
            self._collected += data
            if len(self._collected) > MAX_COLLECTED:
                raise BrokenHTTP("a refusal that does not end")
            return False
        self._write({"type": "http.response.body", "body": data, "more_body": True})
        ending = SILENCE.get(self.kind)
        self._is_at_end = ending is not None and data.endswith(ending[0])
        return self.error is not None

    def _note_first(self) -> None:
        if self.on_first is not None:
            self.on_first()
            self.on_first = None

    def _feed_frames(self, replay: Replay, data: bytes) -> bool:
        """Raises BrokenHTTP for what is no frame."""
        if self.rest is not None and FRAMED not in self.rest.headers:
            return True  # the replica does not continue
        before = self._received.completion_tokens
        data = replay.feed(data)
        if self._received.completion_tokens > before:
            self.on_tokens()
        if replay.has_outputs:
            self._note_first()
        if (data or replay.has_begun) and not self.has_started:
            self._start()
        if data:
            self._write({"type": "http.response.body", "body": data, "more_body": True})
            self._is_at_end = data.endswith(SILENCE[self.kind][0])
        if replay.is_broken:
            raise BrokenHTTP("a stream without frames")
        return self.error is not None

    def _start(self) -> None:
        fields = self.list_fields()
        self._write(
            {"type": "http.response.start", "status": self.response.status, "headers": fields}
        )
        self.has_started = True
        if self.kind in SILENCE:
            self._state[PROBE] = self.break_silence

    def list_fields(self) -> list[tuple[bytes, bytes]]:
        """Return the header fields for the client. A ticket gets the name of the replica, which has
        reserved a place.
        """
        replica, ticket = self._replica.encode(), TICKET.encode()
        dropped = INNER_FIELDS
        if self.response.status in WITHOUT_BODY or self.kind in SILENCE:
            dropped |= {b"content-length"}
        return [
            (name, b"%s.%s" % (replica, value) if name == ticket else value)
            for name, value in drop_hop_by_hop(self.response.fields)
            if name not in dropped and TOKEN.fullmatch(name) and not INVALID.search(value)
        ]

    @property
    def is_refusal(self) -> bool:
        """Whether another replica may answer the request."""
        return self.response.status in REFUSALS

    def break_silence(self) -> None:
        """Write bytes that the client skips, if it can skip them now."""
        if self._writing is None and self._is_at_end:
            data = SILENCE[self.kind][1]
            self._write({"type": "http.response.body", "body": data, "more_body": True})

    # --- what the client reads -------------------------------------------------------------------

    def _write(self, message: Message) -> bool:
        """Send a message to the client, or keep it until the client has read what was sent before.
        Return whether the client reads.
        """
        if self._writing is not None:
            self._pending.append(message)
            return False
        is_start = message["type"] == "http.response.start"
        self._writing = begin((self._send if is_start else self._send_body)(message))
        if self._writing is not None:
            if self._connection is not None:
                self._connection.pause_reading()
            self._writing.add_done_callback(self._go_on)
        return self._writing is None

    def _go_on(self, task: asyncio.Task[None]) -> None:
        """Write what has arrived while the client did not read."""
        self._writing = None
        if task.cancelled():
            return
        self.error = self.error or task.exception()
        pending, self._pending = self._pending, []
        for number, message in enumerate(pending):
            if not self._write(message):
                self._pending += pending[number + 1 :]
                return
        if self._connection is not None:
            self._connection.resume_reading()

    async def flush(self) -> None:
        """Wait until everything has been written. Raises the error of writing, if there was one."""
        while self._writing is not None:
            await asyncio.wait([self._writing])
        if self.error is not None:
            raise self.error

    async def pass_on(self) -> None:
        """Send what has been collected, or the end of a stream."""
        body = b""
        if self._collected is not None:
            body, self._collected = bytes(self._collected), None
            self._start()
            if self.response.status >= 400:
                self.error_body = body
        self._write({"type": "http.response.body", "body": body, "more_body": False})
        await self.flush()
        self.is_complete = True

    async def end_with(self, data: bytes) -> None:
        """End a stream that the replica did not end, with ``data`` for the client."""
        if not self._is_at_end:  # of the head, or of a whole part
            data = SILENCE[self.kind][0] + data
        self._write({"type": "http.response.body", "body": data, "more_body": False})
        await self.flush()

    def detach(self) -> None:
        """Expect nothing more from the present connection."""
        connection, self._connection, self.rest = self._connection, None, None
        if connection is not None and self._writing is not None:
            connection.resume_reading()

    async def close(self) -> None:
        """Stop writing what the replica sends. A refusal can still be passed on."""
        if self.replay is not None:
            self.replay.close()
        self._state.pop(PROBE, None)
        connection, self._connection = self._connection, None
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            if connection is not None:
                connection.resume_reading()
