"""Reads HTTP from connections: uvicorn's protocol, with the timeouts, limits and checks that it
lacks.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, NoReturn

import httptools
from pydantic_core import to_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cllm.server.errors import Fault, openai_error
from cllm.server.http.connections import Connections
from cllm.server.http.request_id import HEADERS, IS_INCOMPLETE, new_request_id
from cllm.server.http.sse import PROBE

HEAD_TIMEOUT = 10.0  # seconds from the first byte of a request to the end of its head
MAX_HEAD = 65_536  # bytes of the request line, the header fields and the trailer fields
MAX_FIELDS = 200  # header and trailer fields of a request
# seconds in which a client must read LEAST_READ of the pending data, or all of it
READ_TIMEOUT = 60.0
LEAST_READ = 65_536  # bytes
LINGER_PAUSE = 5.0  # seconds that a client may pause while it sends data that is discarded
LINGER_TIMEOUT = 30.0  # seconds that it may send in total
LINGER_BYTES = 1 << 30  # bytes that it may send in total
FIRST_PROBE, LONGEST_PROBE = 0.05, 15.0  # seconds between probes of a half-closed connection
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# RFC 9110, 7.2
HOST = re.compile(rb"(\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?")


class Protocol(HttpToolsProtocol):
    """Rejects input that is not HTTP or has too large a head. Closes connections whose clients do
    not send a head or do not read their answer. Lets a client that is still sending read an early
    answer. ``receive_parts`` in body.py limits how slowly a body may arrive. An Upgrade field is
    ignored, which RFC 9110, 7.8 allows.

    A client may shut down its sending side after its request (half-close) and still gets the
    answer. A client that closes the connection looks the same at first, so a half-closed connection
    is probed: data written to a closed connection is answered with a reset, and the next write
    fails.
    """

    server_state: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # bytes of data that the parser has not yet turned into a head or a part of a body
        self._num_unparsed_bytes = 0
        self._num_head_bytes = self._num_fields = 0
        self._has_head = False  # all header fields of the request have arrived
        self._refusal: tuple[HTTPStatus, str] | None = None  # why parsing has stopped
        # the request that is being answered; uvicorn's ``cycle`` is the one that is being read
        self._running: RequestResponseCycle | None = None
        self._is_half_closed = False
        self._is_discarding = False  # all further input
        self._num_discarded_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._closing_timer: asyncio.TimerHandle | None = None  # of the next probe, or of lingering
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self.server_state.mark_idle(self)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._read_timer, self._closing_timer):
            if timer is not None:
                timer.cancel()
        if self._running is not None and not self._running.response_complete:
            self._disconnect(self._running)
        super().connection_lost(exc)
        self.server_state.forget(self)

    # --- what the client reads -------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()

    def _await_reading(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(READ_TIMEOUT, self._check_reading, size)

    def _check_reading(self, before: int) -> None:
        if self.transport.get_write_buffer_size() > before - LEAST_READ:
            self.transport.abort()
        else:
            self._await_reading()

    # --- what the client sends -------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_discarding or self._refusal is not None:
            self._num_discarded_bytes += len(data)
            if self._num_discarded_bytes > LINGER_BYTES:
                self.transport.close()
            return
        self._num_unparsed_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._num_unparsed_bytes > MAX_HEAD:
            self._refuse(*too_large_head())
        elif self._num_unparsed_bytes and not self._is_busy():
            self._time_head()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. It stops after a head that asks for an upgrade and would skip the body.
        A new parser then reads the same head without the Upgrade field, and the rest of the data.
        """
        head, rest = b"", memoryview(data)
        while True:
            try:
                self.parser.feed_data(head)
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                head, rest = self._head_without_upgrade(), rest[stop.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
                return

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += (b"%s: %s" % field for field in self.headers if field[0] != b"upgrade")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _is_busy(self) -> bool:
        """Return whether a request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _time_head(self) -> None:
        if self._head_timer is None:
            message = f"The head of the request took longer than {HEAD_TIMEOUT:g} seconds."
            self._head_timer = self.loop.call_later(
                HEAD_TIMEOUT, self._refuse, HTTPStatus.REQUEST_TIMEOUT, message
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_unparsed_bytes = max(1, self._num_unparsed_bytes)
        self._has_head = False
        self._num_head_bytes = self._num_fields = 0

    def on_url(self, url: bytes) -> None:
        self._check_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        self._check_head(len(name) + len(value) + 4)
        if not self._has_head:  # a trailer field is no header field (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def _check_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD or self._num_fields > MAX_FIELDS:
            self._stop_parser(*too_large_head())

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            self._stop_parser(
                HTTPStatus.NOT_IMPLEMENTED, "This server is not a proxy: CONNECT is not supported."
            )
        if self.parser.should_upgrade():  # the head is parsed again, without the Upgrade field
            return
        self._num_unparsed_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._check_fields()
        self._has_head = True
        super().on_headers_complete()
        self.server_state.mark_busy(self)
        cycle = self.cycle
        cycle.transport = AnswerTransport(self.transport, self)  # type: ignore[assignment]  # has the methods that the cycle uses
        cycle.scope["state"][IS_INCOMPLETE] = lambda: cycle.more_body

    def _check_fields(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop_parser(
                HTTPStatus.BAD_REQUEST, f"HTTP/{version} is not supported; use HTTP/1.1."
            )
        hosts = [value.strip() for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self._stop_parser(
                HTTPStatus.BAD_REQUEST, f"The request has {len(hosts)} Host header fields, not one."
            )
        if hosts and not HOST.fullmatch(hosts[0]):
            self._stop_parser(
                HTTPStatus.BAD_REQUEST,
                "The Host header field is not a host name with an optional port.",
            )
        codings = b", ".join(
            value.strip() for name, value in self.headers if name == b"transfer-encoding"
        )
        if codings.lower() not in (b"", b"chunked"):
            message = (
                f"The Transfer-Encoding {codings[:80].decode('latin-1')!r} is not "
                f"supported; only 'chunked' is."
            )
            self._stop_parser(HTTPStatus.NOT_IMPLEMENTED, message)

    def on_body(self, body: bytes) -> None:
        self._num_unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_unparsed_bytes = 0
        super().on_message_complete()

    def _stop_parser(self, status: HTTPStatus, message: str) -> NoReturn:
        """Abort a callback of the parser. ``_parse`` then calls ``send_400_response``."""
        self._refusal = status, message
        raise ValueError(message)

    def send_400_response(self, msg: str) -> None:  # uvicorn's name; the status may be another one
        self._refuse(*(self._refusal or (HTTPStatus.BAD_REQUEST, msg)))

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer invalid input once the complete requests before it are answered, and close the
        connection.
        """
        if self._is_discarding or self.transport.is_closing():
            return
        if self._is_busy():
            if self.cycle is not self._running or not self.cycle.more_body:
                self._refusal = status, message
                if self.cycle.more_body:  # its body is invalid
                    self.pipeline.popleft()
                    self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]
                return
            if self.cycle.response_started:  # too late for another answer
                self.transport.abort()
                return
            self._disconnect(self.cycle)  # the invalid input is its body
        content = to_json(openai_error(Fault(status, message, code="invalid_http"))[1])
        request_id = new_request_id().encode()
        head: list[tuple[bytes, Any]] = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"connection", b"close"),
            *((name, request_id) for name in HEADERS),
        ]
        lines = [
            b"HTTP/1.1 %d %s" % (status.value, status.phrase.encode()),
            *(b"%s: %s" % field for field in head),
        ]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + content)
        self.linger()

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        """Tell the application that the client of ``cycle`` has disconnected."""
        cycle.disconnected = True
        cycle.message_event.set()

    # --- how an answer ends ----------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(
            cycle, app if cycle.scope["http_version"] == "1.1" else without_chunks(cycle, app)
        )

    def on_response_complete(self) -> None:
        if self._running is not None:
            self._running.scope["state"].clear()  # breaks a reference cycle
        super().on_response_complete()
        if self._is_discarding or self.transport.is_closing() or self._is_busy():
            return
        if self._refusal is not None:
            self._refuse(*self._refusal)
            return
        if self._is_half_closed:
            self.transport.close()
            return
        self.server_state.mark_idle(self)
        if self._num_unparsed_bytes:
            self._time_head()

    def linger(self) -> None:
        """Close the connection once the client has read its answer. Closing it while the client
        still sends would reset it and lose the answer. What the client sends is discarded, within
        limits.
        """
        if self._is_discarding or self.transport.is_closing():
            return
        if self._is_half_closed:
            self.transport.close()
            return
        self._is_discarding = True
        self.server_state.mark_idle(self)
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._closing_timer = self.loop.call_later(
            LINGER_PAUSE, self._check_lingering, 0, LINGER_TIMEOUT
        )

    def _check_lingering(self, num_bytes_before: int, seconds_left: float) -> None:
        """Close the connection if nothing has arrived since the last check, or time is up.

        ``num_bytes_before`` and ``seconds_left`` are as of the last check.
        """
        seconds_left -= LINGER_PAUSE
        if seconds_left <= 0 or self._num_discarded_bytes == num_bytes_before:
            self.transport.close()
            return
        self._closing_timer = self.loop.call_later(
            LINGER_PAUSE, self._check_lingering, self._num_discarded_bytes, seconds_left
        )

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn always closes the connection
        """Note that the client will send nothing more. Return whether the connection stays open.

        It stays open while the client may still wait for an answer.
        """
        if self._is_discarding or not self._is_busy() or self.cycle.more_body:
            return False
        if self.scheme == "https":  # TLS has no half-closed connections
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._probe(FIRST_PROBE)
        return True

    def _probe(self, seconds: float) -> None:
        """Write bytes that the client skips, now and again after ``seconds``."""
        if self.transport.is_closing() or not self._is_busy() or self._running is None:
            return
        scope = self._running.scope
        if (probe := scope["state"].get(PROBE)) is not None:
            probe()
        elif not self._running.response_started and scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
        self._closing_timer = self.loop.call_later(
            seconds, self._probe, min(2 * seconds, LONGEST_PROBE)
        )


class AnswerTransport:
    """The connection that an answer is written to.

    ``close`` lingers while the client still sends its request.
    """

    def __init__(self, transport: asyncio.Transport, protocol: Protocol) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self._close = transport.close
        self._protocol = protocol

    def close(self) -> None:
        if self._protocol.cycle.more_body:
            self._protocol.linger()
        else:
            self._close()


def without_chunks(cycle: RequestResponseCycle, app: ASGIApp) -> Any:
    """Return ``app`` with answers that are not chunked, because HTTP/1.0 clients cannot read chunks
    (RFC 9112, 6.1). An answer without a length ends when the connection is closed.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        def send_plain(message: Message) -> Awaitable[None]:
            cycle.chunked_encoding = False
            cycle.expected_content_length = len(message.get("body", b""))
            return send(message)

        await app(scope, receive, send_plain)

    return called


def too_large_head() -> tuple[HTTPStatus, str]:
    message = (
        f"The head of the request has more than {MAX_HEAD} bytes or {MAX_FIELDS} header fields."
    )
    return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message
