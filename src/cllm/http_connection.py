"""HTTP/1.1 client for one server. It reuses connections and reads responses as they arrive.

The event loop passes the bytes of a response through httptools to their consumer in one call: no
task wakes up and no future is created for a chunk. When a model runs on the same cores, all of the
client's code is cold at every chunk, so the client must run little code there.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import cast
from urllib.parse import quote, urlsplit

from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserUpgrade,
    HttpResponseParser,
)

CONNECT_TIMEOUT = 10.0  # seconds
# Options of TCP, with seconds: a peer that has vanished without closing its connection is noticed
# after 30 seconds, also in the middle of an answer.
KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
MAX_HEAD = 1_000_000  # bytes of a response without a part of its body
REFUSAL = 4096  # bytes kept of the body if the status is not 200

Feed = Callable[[bytes, float], bool]
"""Takes bytes of a body, cut anywhere, and the time at which they were read. Returns True if it
wants no more.
"""
Begin = Callable[["Response"], None]
"""Takes a response whose head has arrived. Its ``Feed`` then receives the body of any status."""


class CannotConnect(ConnectionError):
    """The connection failed. The message gives the address and the reason. It ``is_refused`` if the
    server's machine answers, but no program listens there.
    """

    def __init__(self, message: str, *, is_refused: bool) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class BrokenHTTP(ConnectionError):
    """The server sent something that is not valid HTTP."""


class Response:
    """A response.

    The names in ``headers`` and ``fields`` are lower case; ``fields`` has repeated ones too.
    ``body`` is empty if a ``Feed`` received it.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.fields: list[tuple[bytes, bytes]] = []
        self.body = b""

    def keep(self, data: bytes, now: float) -> bool:
        self.body += data
        return self.status != 200 and len(self.body) >= REFUSAL

    @property
    def has_length(self) -> bool:
        """Whether the headers delimit the body.

        Otherwise it lasts until the connection is closed.
        """
        return (
            b"content-length" in self.headers
            or b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()
        )


class HTTPClient:
    """Connections to one server. Each serves one request at a time.

    ``url`` may contain a prefix for all paths. ``headers`` are sent with every request. ``tls``
    says which certificates are accepted, by default those of the system's authorities. Raises
    ValueError if ``url`` is not an HTTP URL.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        keep_alive: bool = True,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not parts.hostname.isprintable()
        ):
            raise ValueError("it is not an HTTP URL")
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host = parts.hostname.encode("idna").decode()
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = quote(parts.path.rstrip("/"), safe="/%!$&'()*+,;=:@")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._address = f"{host}:{self._port}"
        fields = {
            "Host": self._address if parts.port else host,
            "User-Agent": "cllm",
            "Accept": "*/*",
            **headers,
        }
        if not keep_alive:
            fields["Connection"] = "close"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._keep_alive = keep_alive
        self._idle: list[Connection] = []

    async def request(
        self, path: str, body: bytes | None = None, feed: Feed | None = None
    ) -> Response:
        """POST ``body``, or GET, and return the response when it is complete or ``feed`` wants no
        more.

        ``feed`` receives the body of a 200. A lost request is not retried. Raises CannotConnect,
        BrokenHTTP, another OSError if the connection is lost, or TimeoutError if connecting takes
        too long.
        """
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        method = "GET" if body is None else "POST"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode()
        connection = await self.take()
        try:
            return await connection.exchange(head + (body or b""), feed)
        finally:
            self.release(connection)

    def write_head(self, method: str, path: str, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the head of a request with ``fields`` and no others but Host. ``path`` may have a
        query.
        """
        first = f"{method} {self._prefix}{path} HTTP/1.1\r\nHost: {self._address}\r\n".encode()
        lines = [b"%s: %s\r\n" % field for field in fields]
        return b"".join([first, *lines, b"\r\n"])

    async def take(self, *, is_new: bool = False) -> Connection:
        """Return a connection for one exchange; pass it to ``release`` afterwards. The server may
        be about to close one that it has kept open for long, but none that ``is_new``.

        Raises CannotConnect and TimeoutError.
        """
        return (None if is_new else self._take_idle()) or await self._open()

    def release(self, connection: Connection) -> None:
        """Keep a connection for another request. If its exchange has not ended, close it."""
        if connection.reusable and self._keep_alive:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
        else:
            connection.close()

    def close_idle(self, seconds: float) -> None:
        """Close connections that have been idle for some seconds."""
        until = time.monotonic() - seconds
        old = [one for one in self._idle if one.idle_since <= until or not one.reusable]
        self._idle = [one for one in self._idle if one not in old]
        for connection in old:
            connection.close()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and not connection.readable():
                return connection
            connection.close()
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                transport, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise TimeoutError(
                f"no connection to {self._address} in {CONNECT_TIMEOUT:g} s"
            ) from None
        except OSError as error:
            message = f"cannot connect to {self._address}: {reason(error)}"
            # the error for a name with several addresses has only the text of theirs
            is_refused = f"[Errno {errno.ECONNREFUSED}]" in str(error)
            raise CannotConnect(message, is_refused=is_refused) from None
        probe_peer(transport.get_extra_info("socket"))
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class Connection(asyncio.Protocol):
    """A connection with one request at a time. It is ``reusable`` if another one may be sent."""

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        # deviations from HTTP that existing servers make and other clients accept
        self._parser.set_dangerous_leniencies(
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )
        self._transport: asyncio.Transport
        self._response = Response()
        self._ended: asyncio.Future[None] | None = None  # set while a request is in progress
        self._wanted: Feed | None = None
        self._feed: Feed | None = None  # set while a body is being read
        self._begin: Begin | None = None
        self._writable: asyncio.Future[None] | None = None  # set while writing should pause
        self._now = 0.0
        self._num_head_bytes = 0  # received since the latest part of a body
        self.reusable = True
        self.idle_since = 0.0  # on the monotonic clock

    async def exchange(
        self, request: bytes, feed: Feed | None, begin: Begin | None = None
    ) -> Response:
        """Send ``request`` and return the response when it is complete or ``feed`` wants no more.

        ``feed`` receives the body of a 200, or with ``begin`` that of any response. Raises
        BrokenHTTP, or ConnectionError if the connection is lost.
        """
        if self._transport.is_closing():  # the transport of uvloop would raise RuntimeError
            self.reusable = False
            raise ConnectionResetError("the server has closed the connection")
        response = self._response = Response()
        self._ended = ended = asyncio.get_running_loop().create_future()
        self._wanted, self._begin = feed, begin
        self._num_head_bytes = 0
        self.reusable = False
        self._transport.write(request)
        await ended
        return response

    async def write(self, data: bytes) -> None:
        """Send more of the request's body, once the server has read most of what was sent, unless
        the connection is closed.
        """
        if self._writable is not None:
            await self._writable
        if not self._transport.is_closing():  # else the exchange fails
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Stop reading the response, unless the connection is closed. Bytes that have been read are
        still delivered.
        """
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read the response again, unless the connection is closed."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def readable(self) -> bool:
        """Return whether bytes or the end of the stream can be read.

        Either makes an idle connection unusable.

        The event loop would see it too, but only in its next iteration. Always False on Windows.
        """
        if sys.platform == "win32":
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.reusable = False
        self._transport.abort()

    def _end(self, error: BaseException | None = None) -> None:
        ended, self._ended, self._feed = self._ended, None, None
        if ended is None or ended.done():  # for example cancelled
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError as error:
            self._end(error.__context__)
            self.close()
        except (HttpParserError, HttpParserUpgrade) as error:
            self._end(BrokenHTTP(f"{error}: {data[:100]!r}"))
            self.close()
        if self._num_head_bytes > MAX_HEAD:
            self._end(BrokenHTTP("the head of the answer does not end"))
            self.close()

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self.resume_writing()
        response = self._response
        is_refusal = response.status != 200 and self._begin is None
        has_begun = response.status >= (200 if self._begin else 1)
        if has_begun and (is_refusal or (not response.has_length and error is None)):
            self._end()
        else:
            text = "closed by the server before the end of the answer"
            self._end(ConnectionError(reason(error) if isinstance(error, OSError) else text))

    # --- called by the parser

    def on_message_begin(self) -> None:
        if self._ended is None:
            raise BrokenHTTP("an answer without a request")
        self._response.headers.clear()  # those of a 1xx response
        self._response.fields.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._response.headers[name] = value
        self._response.fields.append((name, value))

    def on_headers_complete(self) -> None:
        response = self._response
        response.status = self._parser.get_status_code()
        if self._begin is not None and response.status >= 200:
            self._feed = self._wanted
            self._begin(response)
        else:
            self._feed = self._wanted if self._wanted and response.status == 200 else response.keep

    def on_body(self, data: bytes) -> None:
        self._num_head_bytes = 0
        if self._feed and self._feed(data, self._now):
            self._end()

    def on_message_complete(self) -> None:
        if self._response.status >= 200:  # a 1xx response is followed by another one
            self.reusable = self._ended is not None and self._parser.should_keep_alive()
            self._end()


def probe_peer(connection: socket.socket) -> None:
    """Let the system find out whether the peer of an idle connection has vanished."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in KEEP_ALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)


def reason(error: OSError) -> str:
    """Return why a connection failed, without error numbers and addresses."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason.replace('_', ' ').lower()}" if error.reason else "no TLS"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
