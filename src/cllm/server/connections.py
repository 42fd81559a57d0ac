"""The open connections: no more than there are file descriptors for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

RESERVED = 48  # file descriptors for everything but connections: pipes of the engine and of text workers, a new engine
PER_CONNECTION = 2  # the socket, and a file that is uploaded or downloaded
WANTED = 65_536  # file descriptors
IDLE = 0.1  # seconds after which a connection is idle; a new one needs some for its first request
PAUSE = 1.0  # seconds until the next try to accept a connection, after the system refused one

log = logging.getLogger("cllm.server")


def raise_descriptor_limit() -> int:
    """Let this process open as many files as it may, up to WANTED; return how many."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit
    except ImportError:  # Windows, where there is no such limit
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
    """The number of connections for which ``num_descriptors`` suffice, at least 1."""
    return max(1, (num_descriptors - RESERVED) // PER_CONNECTION)


class Connections(ServerState):
    """The connections of a server, at most ``limit``; it remembers which have no request, and for how long."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._idle: dict[HttpToolsProtocol, float] = {}  # since when; the one that has been idle for longest first
        self._has_changed = asyncio.Event()
        self._has_warned = False

    def mark_idle(self, connection: HttpToolsProtocol) -> None:
        """``connection`` has no request, and may be closed when another one needs its file descriptor."""
        self._idle[connection] = connection.loop.time()
        self._has_changed.set()

    def mark_busy(self, connection: HttpToolsProtocol) -> None:
        self._idle.pop(connection, None)

    def forget(self, connection: HttpToolsProtocol) -> None:
        """``connection`` is closed."""
        self._idle.pop(connection, None)
        self._has_changed.set()

    async def accept(self, listener: socket.socket, protocol: Callable[[], HttpToolsProtocol]) -> None:
        """Accept connections until it is cancelled; when all have a request, newcomers wait in the backlog.

        One at a time: asyncio and uvloop would accept all that wait before any could be closed.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                connection, _ = await loop.sock_accept(listener)
                await loop.connect_accepted_socket(protocol, connection)
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE)

    async def _make_room(self) -> None:
        """Return when there is room for another connection, which may take one from an idle connection."""
        clock = asyncio.get_running_loop().time
        while len(self.connections) >= self._limit:
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
                message = "all %d connections are busy and new ones wait; the limit of open files allows no more"
                log.warning(message, self._limit)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._has_changed.wait()
