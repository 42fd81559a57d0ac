"""Limits the open connections to what the file descriptors allow."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from cllm.server.addresses import is_loopback

# file descriptors kept for other purposes: pipes of the engine and of text workers, a new engine
RESERVED = 48
PER_CONNECTION = 2  # the socket, and a file that is uploaded or downloaded
WANTED = 65_536  # file descriptors
# seconds without a request before a connection may be closed; a new one needs time to send its
# first
IDLE = 0.1
# bytes that the system keeps for a client that does not read; without a limit they can be
# megabytes, and the server would notice late that the client does not read
MAX_UNSENT = 16_384
HANDSHAKE_TIMEOUT = 10.0  # seconds
MAX_WARNINGS = 100  # about addresses with too many connections
PAUSE = 1.0  # seconds before the next attempt to accept a connection, after an error

log = logging.getLogger("cllm.server")


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as possible, up to WANTED, and return it."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit
    except ImportError:  # Windows has no such limit
        return WANTED
    soft, hard = (WANTED if limit == RLIM_INFINITY else limit for limit in getrlimit(RLIMIT_NOFILE))
    wanted = min(hard, WANTED)
    if soft < wanted:
        try:
            setrlimit(RLIMIT_NOFILE, (wanted, getrlimit(RLIMIT_NOFILE)[1]))
        except (OSError, ValueError) as error:
            log.warning("the limit of open files stays at %d: %s", soft, error)
            return soft
    return max(soft, wanted)


def max_connections(num_descriptors: int) -> int:
    """Return the number of connections for which ``num_descriptors`` suffice, at least 1."""
    return max(1, (num_descriptors - RESERVED) // PER_CONNECTION)


class Connections(ServerState):
    """The connections of a server, at most ``limit``.

    It records which ones are idle (without a request).
    """

    def __init__(self, limit: int, limit_per_address: int | None = None) -> None:
        """``limit_per_address`` applies to each address. If it is None, addresses of other machines
        get half of ``limit``, and loopback addresses have no limit of their own.
        """
        super().__init__()
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._addresses: dict[HttpToolsProtocol, str] = {}
        self._num_of_address: Counter[str] = Counter()  # connections
        self._handshakes: set[asyncio.Task[None]] = set()  # of connections with TLS
        self._warned_of: set[str] = set()
        self._idle: dict[HttpToolsProtocol, float] = {}  # since when; the longest idle one first
        self._has_changed = asyncio.Event()
        self._has_warned = False

    def mark_idle(self, connection: HttpToolsProtocol) -> None:
        """Note that ``connection`` has no request.

        It may be closed when another one needs its file descriptor.
        """
        self._idle[connection] = connection.loop.time()
        self._has_changed.set()

    def mark_busy(self, connection: HttpToolsProtocol) -> None:
        self._idle.pop(connection, None)

    def forget(self, connection: HttpToolsProtocol) -> None:
        """Note that ``connection`` is closed."""
        self._idle.pop(connection, None)
        self._has_changed.set()
        if (address := self._addresses.pop(connection, None)) is not None:
            self._num_of_address[address] -= 1
            if not self._num_of_address[address]:
                del self._num_of_address[address]

    def _may_connect(self, address: str) -> bool:
        """Return whether ``address`` may have another connection."""
        limit = self._limit_per_address
        if limit is None:
            if is_loopback(address):
                return True
            limit = max(1, self._limit // 2)
        if self._num_of_address[address] < limit:
            return True
        if address not in self._warned_of and len(self._warned_of) < MAX_WARNINGS:
            self._warned_of.add(address)
            log.warning("%s has %d connections; further ones are closed", address, limit)
        return False

    async def accept(
        self,
        listener: socket.socket,
        protocol: Callable[[], HttpToolsProtocol],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Accept connections until cancelled.

        While all connections have a request, new ones wait in the backlog.

        Connections are accepted one at a time. asyncio and uvloop would accept all waiting ones
        before any could be closed.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                connection, (address, *_) = await loop.sock_accept(listener)
                if not self._may_connect(address):
                    connection.close()
                    continue
                self._num_of_address[address] += 1
                opening = asyncio.create_task(self._open(connection, address, protocol, tls))
                if tls is None:
                    await opening
                else:  # a client may take its time
                    self._handshakes.add(opening)
                    opening.add_done_callback(self._end_handshake)
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE)

    def _end_handshake(self, opening: asyncio.Task[None]) -> None:
        self._handshakes.discard(opening)
        self._has_changed.set()

    async def _open(
        self,
        connection: socket.socket,
        address: str,
        protocol: Callable[[], HttpToolsProtocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        """Serve a connection, and count it as one of ``address`` until it is closed."""
        loop = asyncio.get_running_loop()
        if (option := getattr(socket, "TCP_NOTSENT_LOWAT", None)) is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, MAX_UNSENT)
        timeout = None if tls is None else HANDSHAKE_TIMEOUT
        opened = protocol()
        self._addresses[opened] = address
        try:
            await loop.connect_accepted_socket(
                lambda: opened, connection, ssl=tls, ssl_handshake_timeout=timeout
            )
        except BaseException as error:
            self.forget(opened)
            if tls is None or not isinstance(error, OSError):
                raise
            log.debug("%s: the TLS handshake failed: %s", address, error)

    async def _make_room(self) -> None:
        """Wait until there is room for another connection.

        If there is none, close the longest idle one.
        """
        clock = asyncio.get_running_loop().time
        while len(self.connections) + len(self._handshakes) >= self._limit:
            self._has_changed.clear()
            timeout = None
            if self._idle:
                oldest, since = next(iter(self._idle.items()))
                timeout = since + IDLE - clock()
                if timeout <= 0:
                    del self._idle[oldest]
                    oldest.transport.abort()
                    timeout = None
            elif not self._has_warned:
                self._has_warned = True
                message = (
                    "all %d connections are busy and new ones wait; the limit of open "
                    "files allows no more"
                )
                log.warning(message, self._limit)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._has_changed.wait()
