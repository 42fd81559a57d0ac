"""Runs the HTTP server and its engine, from opening the socket to the shutdown.

The engine process is started first. While it loads, this process imports and opens the rest, so the
start takes only as long as the slower of the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from cllm.config import Settings
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.process.backlog import QueueLimits
from cllm.process.launch import Popen
from cllm.process.pool import Pool
from cllm.process.results import ResultCache
from cllm.server.access import Access

if TYPE_CHECKING:
    from cllm.server.http_server import HttpServer
    from cllm.service import Service

BACKLOG = 2048


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


async def run(
    settings: Settings,
    access: Access,
    params: EngineParams,
    early: list[int],
    model_name: str,
    listener: socket.socket,
    on_loading: Callable[[float], None],
    on_ready: Callable[[Service], None],
    launched: Popen[bytes] | None,
) -> bool:
    """Serve until SIGTERM or SIGINT.

    Return whether the server has served. Raises StartupError if it cannot start.

    early: signals that arrived before the server could handle them. launched: a process that
    becomes the engine.
    """
    engine = Pool(params, on_loading, queue_limits(settings), result_cache(settings), launched)
    starting = asyncio.create_task(engine.start())
    server: HttpServer | None = None
    try:
        server = opened = await asyncio.to_thread(open_server, settings, access, model_name, engine)
        gc.enable()  # __main__ has turned it off for the imports

        def started(task: asyncio.Task[None]) -> None:
            if task.cancelled() or task.exception() is not None:
                opened.should_exit = True
            elif not opened.should_exit:  # else a signal came meanwhile
                gc.collect()
                gc.freeze()  # what is loaded by now stays, so later collections need not scan it
                on_ready(opened.service)
                opened.start_renderer()

        opened.early = early
        starting.add_done_callback(started)
        await opened.serve(sockets=[listener])
        if starting.done() and not starting.cancelled() and (error := starting.exception()):
            raise error
        return engine.info is not None and not early
    finally:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, StartupError):
            await starting
        try:
            await engine.close()
            if server is not None:
                await server.service.close()
        finally:
            await access.close()


def open_server(settings: Settings, access: Access, model_name: str, engine: Pool) -> HttpServer:
    """Import and open the server. Raises StartupError."""
    from cllm.server import http_server

    return http_server.open_server(settings, access, model_name, engine)


def queue_limits(settings: Settings) -> QueueLimits:
    scheduler = settings.scheduler
    return QueueLimits(
        scheduler.max_queue_requests, scheduler.max_queue_tokens, scheduler.max_queue_seconds
    )


def result_cache(settings: Settings) -> ResultCache:
    return ResultCache(settings.cache.max_results, settings.cache.max_memory_mb * 1_000_000)


def run_forever(
    settings: Settings,
    access: Access,
    params: EngineParams,
    model_name: str,
    listener: socket.socket,
    on_loading: Callable[[float], None],
    on_ready: Callable[[Service], None],
    launched: Popen[bytes] | None = None,
) -> None:
    """Call ``run`` in a new event loop, with uvloop if it is installed.

    Raises KeyboardInterrupt if SIGINT arrived before the server could serve.
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
    with asyncio.Runner(loop_factory=factory) as runner:
        served = runner.run(
            run(
                *(settings, access, params, signals, model_name, listener),
                *(on_loading, on_ready, launched),
            )
        )
    if not served and signal.SIGINT in signals:
        raise KeyboardInterrupt
