"""HTTP/1.1 to one server: connections that are used again, answers that are read as they come.

The bytes of an answer go from the event loop through httptools to whom they are for, in one call: no task wakes and no
future is made for a chunk. Beside a model on the same cores all of the client's code is cold at every chunk, so what
is not run there costs nothing.
"""

from __future__ import annotations

import asyncio
import os
import select
import ssl
import sys
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import quote, urlsplit

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

CONNECT_TIMEOUT = 10.0  # seconds
REFUSAL = 4096  # bytes that are kept of the body of a status other than 200

Feed = Callable[[bytes, float], bool]
"""Takes bytes of a body, cut anywhere, and the time at which they were read; true if no more are wanted."""


class CannotConnect(ConnectionError):
    """To whom, and why not."""


class BrokenHTTP(ConnectionError):
    """The server sent something else."""


class Response:
    """``headers`` by names in lower case. ``body`` is empty where a ``Feed`` has taken it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    def keep(self, data: bytes, now: float) -> bool:
        self.body += data
        return self.status != 200 and len(self.body) >= REFUSAL

    @property
    def has_length(self) -> bool:
        """Else the body lasts until the connection is closed."""
        return b"content-length" in self.headers or b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()


class Connections:
    """Those to one server; each is used by one request at a time.

    ``url`` may have a prefix of the paths; ``headers`` go with every request. Raises ValueError if ``url`` is not one
    of HTTP.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, keep_alive: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.hostname.isprintable():
            raise ValueError("it is no URL of HTTP")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname.encode("idna").decode()
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = quote(parts.path.rstrip("/"), safe="/%!$&'()*+,;=:@")
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._address = f"{host}:{self._port}"
        fields = {"Host": self._address if parts.port else host, "User-Agent": "cllm", "Accept": "*/*", **headers}
        if not keep_alive:
            fields["Connection"] = "close"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._keep_alive = keep_alive
        self._idle: list[Connection] = []

    async def request(self, path: str, body: bytes | None = None, feed: Feed | None = None) -> Response:
        """The answer to a POST of ``body``, or to a GET, when all of it has come or ``feed`` wants no more.

        ``feed`` gets the body of a 200. Nothing is sent twice: a request that was lost is the caller's loss. Raises
        CannotConnect, BrokenHTTP, or another OSError if the connection is lost; TimeoutError if there is none in time.
        """
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        method = "GET" if body is None else "POST"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{length}\r\n".encode()
        connection = self._take() or await self._open()
        try:
            return await connection.exchange(head + (body or b""), feed)
        finally:
            if connection.reusable and self._keep_alive:
                self._idle.append(connection)
            else:
                connection.close()

    def _take(self) -> Connection | None:
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
                _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise TimeoutError(f"no connection to {self._address} in {CONNECT_TIMEOUT:g} s") from None
        except OSError as error:
            raise CannotConnect(f"cannot connect to {self._address}: {reason(error)}") from None
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class Connection(asyncio.Protocol):
    """One request at a time. ``reusable`` if the next one may be sent."""

    def __init__(self) -> None:
        self._parser = HttpResponseParser(self)
        # what servers in use get wrong, and other clients forgive
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        self._transport: asyncio.Transport
        self._response = Response()
        self._ended: asyncio.Future[None] | None = None  # while a request is under way
        self._wanted: Feed | None = None
        self._feed: Feed | None = None  # while a body is under way
        self._now = 0.0
        self.reusable = True

    async def exchange(self, request: bytes, feed: Feed | None) -> Response:
        response = self._response = Response()
        self._ended = ended = asyncio.get_running_loop().create_future()
        self._wanted = feed
        self.reusable = False
        self._transport.write(request)
        await ended
        return response

    def readable(self) -> bool:
        """Whether bytes, or the end, wait to be read; for an idle connection either means that it is of no use.

        The event loop will see it too, but not before it has come to the next turn.
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
        if ended is None or ended.done():  # such as cancelled
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
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError as error:
            self._end(error.__context__)
            self.close()
        except (HttpParserError, HttpParserUpgrade) as error:
            self._end(BrokenHTTP(f"{error}: {data[:100]!r}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        response = self._response
        if response.status and (response.status != 200 or (not response.has_length and error is None)):
            self._end()
        else:
            self._end(ConnectionError(error or "closed by the server before the end of the answer"))

    # --- called by the parser

    def on_message_begin(self) -> None:
        if self._ended is None:
            raise BrokenHTTP("an answer to nothing")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        response = self._response
        response.status = self._parser.get_status_code()
        self._feed = self._wanted if self._wanted and response.status == 200 else response.keep

    def on_body(self, data: bytes) -> None:
        if self._feed and self._feed(data, self._now):
            self._end()

    def on_message_complete(self) -> None:
        if self._response.status >= 200:  # those below announce another
            self.reusable = self._ended is not None and self._parser.should_keep_alive()
            self._end()


def reason(error: OSError) -> str:
    """Why there is no connection, without numbers and addresses."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason.replace('_', ' ').lower()}" if error.reason else "no TLS"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
