"""Runs the HTTP server and its engine, from opening the socket to the shutdown.

The engine process is started first. While it loads, this process imports and opens the rest, so the
start takes only as long as the slower of the two.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from cllm import __version__
from cllm.config.settings import Settings
from cllm.engine.params import EngineParams
from cllm.errors import EngineError, LoadFailed, StartupError
from cllm.process.launch import Popen
from cllm.process.pool import Pool
from cllm.server.access import Access
from cllm.serving.engines import Engines, end_process
from cllm.serving.sources import ReadAgain, Source

if TYPE_CHECKING:
    from cllm.server.http.server import HttpServer
    from cllm.serving.registry import Registry

BACKLOG = 2048

log = logging.getLogger("cllm.server")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises StartupError if the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if hasattr(socket, "SO_REUSEADDR") and not hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} on {host} is in use; choose another with --port"
            ) from None
        raise StartupError(
            f"cannot listen on {host} port {port}: {error.strerror or error}"
        ) from None
    return listener


ALL_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Maps each wildcard address to the loopback address that reaches it from this machine."""


def address(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL for clients on this machine."""
    host, port = listener.getsockname()[:2]
    host = ALL_ADDRESSES.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def address_elsewhere(listener: socket.socket, scheme: str = "http") -> str | None:
    """Return the URL for clients on other machines if the socket listens on all addresses; else
    None.
    """
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{socket.gethostname()}:{port}" if host in ALL_ADDRESSES else None


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """Everything that a server is started with.

    ``params`` are those of the engine that is started with it; None if none is. ``launched`` is a
    process that becomes that engine. ``on_loading`` is called with the share of the engine's model
    that has been loaded, ``on_ready`` once requests are computed, and ``read_again`` after SIGHUP.
    """

    settings: Settings
    access: Access
    sources: Sequence[Source]
    params: EngineParams | None
    listener: socket.socket
    on_loading: Callable[[float], None]
    on_ready: Callable[[Registry], None]
    launched: Popen[bytes] | None = None
    read_again: ReadAgain | None = None


class ServerRun:
    """One run of a server."""

    def __init__(self, setup: ServerSetup, signals: list[int]) -> None:
        """``signals`` gets the signals that arrive before the server can handle them."""
        self._setup = setup
        self._signals = signals
        self._engines = Engines()
        self._first: Pool | None = None  # the engine that is started with the server
        self._loading: asyncio.Task[None] | None = None  # loads the first engine's model
        self._starting: asyncio.Task[None] | None = None  # loads all models of the start
        self._server: HttpServer | None = None

    async def serve(self) -> bool:
        """Serve until SIGTERM or SIGINT. Return whether requests could be computed.

        Raises StartupError if the server cannot start.
        """
        try:
            self._start_first()
            begun = time.monotonic()
            self._server = server = await asyncio.to_thread(self._open_server)
            gc.enable()  # __main__ has turned it off for the imports
            if can_reload():
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
            self._starting = starting = asyncio.create_task(self._load(server.registry, begun))
            starting.add_done_callback(partial(self._end_start, server))
            await server.serve(sockets=[self._setup.listener])
            error = None if not starting.done() or starting.cancelled() else starting.exception()
            if error is not None and not (self._signals or server.is_stopped_by_signal):
                raise as_startup_error(error)
            return server.has_served
        finally:
            await self._close()

    def _start_first(self) -> None:
        """Begin to start the first engine, if the server is started with one."""
        setup = self._setup
        if setup.params is not None:
            self._first = self._engines.make_pool(
                setup.settings, setup.params, setup.on_loading, setup.launched
            )
            # the only model so far may use all memory
            is_alone = len(setup.sources) < 2
            max_bytes = self._engines.limit_memory(setup.settings, setup.sources)
            self._loading = asyncio.create_task(self._first.start(0 if is_alone else max_bytes))
        elif setup.launched is not None:
            end_process(setup.launched)

    def _open_server(self) -> HttpServer:
        from cllm.server.http.server import open_server  # takes long to import
        from cllm.serving.builder import Builder

        setup = self._setup
        builder = Builder(
            setup.settings,
            setup.sources,
            self._engines,
            self._first,
            setup.access.ledger,
            setup.read_again,
            setup.access.use,
        )
        server = open_server(builder.registry, setup.settings, setup.access)
        if server.batches is not None:
            server.batches.store.port = setup.listener.getsockname()[1]
        scheme = "https" if setup.settings.server.tls_certificate else "http"
        server.load_runs.url = address(setup.listener, scheme)
        server.early = self._signals
        return server

    async def _load(self, registry: Registry, begun: float) -> None:
        """Load what is to be loaded at the start. ``_loading`` was begun at the time ``begun``."""
        for model in registry.models:
            if self._loading is not None and model.service and model.service.engine is self._first:
                await registry.loaded.adopt(model, self._loading, begun)
        for model in registry.models:
            if model.preload and not model.num_loads:
                await registry.load(model)

    def _end_start(self, server: HttpServer, starting: asyncio.Task[None]) -> None:
        """End the server if ``starting`` has failed."""
        if starting.cancelled() or starting.exception() is not None:
            server.should_exit = True
        elif not (self._signals or server.should_exit):  # otherwise a signal came meanwhile
            server.has_served = True
            gc.collect()
            gc.freeze()  # objects that exist by now stay, so later collections need not scan them
            host, port = self._setup.listener.getsockname()[:2]
            fields = {"version": __version__, "host": host, "port": port}
            log.info(
                "the server is ready: %s", server.registry.describe(), extra={"fields": fields}
            )
            self._setup.on_ready(server.registry)

    async def _close(self) -> None:
        tasks = [task for task in (self._starting, self._loading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if (server := self._server) is not None:
                leaving = server.hand_over.prepare(server.registry)
                await server.registry.close()
                await server.hand_over.send(leaving)
            elif self._first is not None:
                await self._first.close()
        finally:
            self._engines.close()
            await self._setup.access.close()


def can_reload() -> bool:
    """Return whether SIGHUP asks for a reload. In a terminal, it means that the terminal closed."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    return hasattr(signal, "SIGHUP") and not is_terminal


def as_startup_error(error: BaseException) -> BaseException:
    """Return the error that explains to the operator why a model was not loaded at the start."""
    if isinstance(error, LoadFailed) and error.__cause__ is not None:
        return error.__cause__
    return StartupError(str(error)) if isinstance(error, EngineError) else error


def run_forever(setup: ServerSetup) -> None:
    """Run a server; see ``run_in_loop``."""
    run_in_loop(lambda signals: ServerRun(setup, signals).serve())


def run_in_loop(serve: Callable[[list[int]], Coroutine[None, None, bool]]) -> None:
    """Run a server in a new event loop, with uvloop if it is installed. ``serve`` gets the list of
    the signals that arrive before the server can handle them, and returns whether it has served.

    Raises StartupError if it cannot start, and KeyboardInterrupt if SIGINT arrived before it could
    serve.
    """
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    # uvicorn raises a signal again once it has shut down, which would end this process before the
    # engine has ended
    signals: list[int] = []
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda number, _: signals.append(number))
    if can_reload():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the settings can be read again
    with asyncio.Runner(loop_factory=factory) as runner:
        served = runner.run(serve(signals))
    if not served and signal.SIGINT in signals:
        raise KeyboardInterrupt
