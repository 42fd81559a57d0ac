"""Runs the HTTP server and its engine, from opening the socket to the shutdown.

The engine process is started first. While it loads, this process imports and opens the rest, so the
start takes only as long as the slower of the two.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from cllm.config.settings import Settings
from cllm.engine.params import EngineParams
from cllm.engine.shared_cores import create_cores_file, remove_cores_file
from cllm.errors import EngineError, LoadFailed, StartupError
from cllm.models.memory import measure_available_bytes
from cllm.process.backlog import QueueLimits
from cllm.process.launch import ANYWHERE, Popen
from cllm.process.places import find_places
from cllm.process.pool import Pool
from cllm.process.results import ResultCache
from cllm.server.access import Access
from cllm.serving.sources import Source, is_growing

if TYPE_CHECKING:
    from cllm.server.http.server import HttpServer
    from cllm.serving.registry import Registry

BACKLOG = 2048
ReadAgain = Callable[[], tuple[Settings, Sequence[Source]]]
"""Reads the settings and the models of their files again."""


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
    sources: Sequence[Source],
    params: EngineParams | None,
    early: list[int],
    listener: socket.socket,
    on_loading: Callable[[float], None],
    on_ready: Callable[[Registry], None],
    launched: Popen[bytes] | None,
    read_again: ReadAgain | None = None,
) -> bool:
    """Serve until SIGTERM or SIGINT.

    Return whether the server has served. Raises StartupError if it cannot start.

    params: of the first engine; None if none is started with the server. early: signals that
    arrived before the server could handle them. launched: a process that becomes the first engine.
    read_again: reads the settings and the models of their files again, after SIGHUP.
    """
    free = measure_available_bytes()
    memory = measure_memory(settings, sources, free)
    cores_file = create_cores_file()
    engine, loading = None, None
    if params is not None:
        engine = make_pool(settings, params, cores_file, on_loading, launched)
        # a model that is alone, so far, may use all memory
        loading = asyncio.create_task(engine.start(memory if len(sources) > 1 else 0))
    elif launched is not None:
        end_process(launched)
    begun = time.monotonic()
    server: HttpServer | None = None

    def open_server() -> HttpServer:
        from cllm.server.http import server as http  # it takes long

        made = http.open_server(settings, access, sources, engine, memory, cores_file, again)
        if made.batches is not None:
            made.batches.store.port = listener.getsockname()[1]
        return made

    def again() -> tuple[Settings, Sequence[Source], int]:
        assert read_again is not None
        new, found = read_again()
        return new, found, measure_memory(new, found, free)

    starting: asyncio.Task[None] | None = None
    try:
        server = opened = await asyncio.to_thread(open_server)
        gc.enable()  # __main__ has turned it off for the imports

        async def load() -> None:
            """Load what is to be loaded at the start."""
            for model in opened.registry.models:
                if model.service is not None and model.service.engine is engine:
                    assert loading is not None
                    await opened.registry.adopt(model, loading, begun)
            for model in opened.registry.models:
                if model.preload and not model.num_loads:
                    await opened.registry.load(model)

        def started(task: asyncio.Task[None]) -> None:
            if task.cancelled() or task.exception() is not None:
                opened.should_exit = True
            elif not (early or opened.should_exit):  # else a signal came meanwhile
                opened.has_served = True
                gc.collect()
                gc.freeze()  # what is loaded by now stays, so later collections need not scan it
                on_ready(opened.registry)

        opened.early = early
        if can_reload():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, opened.reload)
        starting = asyncio.create_task(load())
        starting.add_done_callback(started)
        await opened.serve(sockets=[listener])
        error = None if not starting.done() or starting.cancelled() else starting.exception()
        if error is not None and not (early or opened.is_stopped_by_signal):
            raise as_startup_error(error)
        return opened.has_served
    finally:
        tasks = [task for task in (starting, loading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if server is not None:
                await server.registry.close()
            elif engine is not None:
                await engine.close()
        finally:
            remove_cores_file(cores_file)
            await access.close()


def end_process(process: Popen[bytes]) -> None:
    """End an engine process that is not needed."""
    process.kill()
    process.wait()


def can_reload() -> bool:
    """Return whether SIGHUP asks for a reload. At a terminal it means that the terminal is gone."""
    is_terminal = sys.stdin is not None and sys.stdin.isatty()
    return hasattr(signal, "SIGHUP") and not is_terminal


def as_startup_error(error: BaseException) -> BaseException:
    """Return the error that explains to the operator why a model was not loaded at the start."""
    if isinstance(error, LoadFailed) and error.__cause__ is not None:
        return error.__cause__
    return StartupError(str(error)) if isinstance(error, EngineError) else error


def measure_memory(settings: Settings, sources: Sequence[Source], free: int | None) -> int:
    """Return the bytes for all loaded models together; 0 for any, if there is only one model.
    ``free``: what was free at the start.
    """
    if len(sources) < 2 and not is_growing(settings):
        return 0
    if settings.models.max_memory_mb is not None:
        return settings.models.max_memory_mb * 1_000_000
    return free or 0


def make_pool(
    settings: Settings,
    params: EngineParams,
    cores_file: str = "",
    on_loading: Callable[[float], None] | None = None,
    launched: Popen[bytes] | None = None,
) -> Pool:
    """Return the pool for a model's engines. ``cores_file``: for those that share cores with
    others.
    """
    scheduler, cache = settings.scheduler, settings.cache
    limits = QueueLimits(
        scheduler.max_queue_requests, scheduler.max_queue_tokens, scheduler.max_queue_seconds
    )
    results = ResultCache(cache.max_results, cache.max_memory_mb * 1_000_000)
    places = find_places(params, settings.engine.count)
    if places[0] == ANYWHERE and params.options.get("n_threads") is None:
        params = msgspec.structs.replace(params, cores_file=cores_file)
    if launched is not None and places[0] != ANYWHERE:
        end_process(launched)
        launched = None
    return Pool(params, on_loading, limits, results, launched, places=places)


def run_forever(
    settings: Settings,
    access: Access,
    sources: Sequence[Source],
    params: EngineParams | None,
    listener: socket.socket,
    on_loading: Callable[[float], None],
    on_ready: Callable[[Registry], None],
    launched: Popen[bytes] | None = None,
    read_again: ReadAgain | None = None,
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
    if can_reload():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the settings can be read again
    with asyncio.Runner(loop_factory=factory) as runner:
        served = runner.run(
            run(
                *(settings, access, sources, params, signals, listener),
                *(on_loading, on_ready, launched, read_again),
            )
        )
    if not served and signal.SIGINT in signals:
        raise KeyboardInterrupt
