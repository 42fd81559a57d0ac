"""Runs the HTTP server and its engine, from the socket to the last goodbye."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from cllm.backends.base import Vocabulary
from cllm.config import Settings
from cllm.engine.build import EngineParams, build_vocabulary
from cllm.errors import EngineError, StartupError
from cllm.observe.metrics import Metrics
from cllm.observe.trace_file import Recorder
from cllm.process.backlog import QueueLimits
from cllm.process.client import EngineClient
from cllm.process.results import ResultCache
from cllm.server.app import create_app
from cllm.server.defaults import SamplingDefaults
from cllm.server.sse import streaming
from cllm.service import Service

log = logging.getLogger("cllm.server")

BACKLOG = 2048
KEEP_ALIVE = 75  # seconds; longer than the idle time of the usual clients and proxies, so that they close first
LAST_WORDS = 2  # seconds for streams that were ended to say so


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises StartupError if the address cannot be had."""
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
            raise StartupError(f"port {port} on {host} is in use; choose another with --port") from None
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn, but at SIGTERM running streams get ``drain_timeout`` seconds and then an error of their own.

    The second signal ends them at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_timeout: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_timeout = drain_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._end_streams()
        self._service.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining = True
        if (going := len(self.server_state.tasks)) and self._drain_timeout:
            streams = "1 stream" if going == 1 else f"{going} streams"
            log.warning("waiting up to %g s for %s; Ctrl-C again ends them now", self._drain_timeout, streams)
        timer = asyncio.get_running_loop().call_later(self._drain_timeout, self._end_streams)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def _end_streams(self) -> None:
        self._service.engine.end_all(EngineError("The server is shutting down."))


async def run(
    settings: Settings,
    params: EngineParams,
    vocabulary: Vocabulary,
    early: list[int],
    model_name: str,
    listener: socket.socket,
    on_loading: Callable[[float], None],
    on_ready: Callable[[Service], None],
) -> bool:
    """Serve until SIGTERM or SIGINT; ``early`` are those that came before the server could take them.

    False if the model had not been loaded until then. Raises StartupError if it cannot be.
    """
    engine = EngineClient(params, on_loading, queue_limits(settings), result_cache(settings))
    metrics = Metrics(model_name)
    recorder = make_recorder(settings)
    service = Service(engine, vocabulary, metrics, model_name, settings.scheduler.request_timeout, recorder)
    sampling = SamplingDefaults(**settings.sampling.model_dump())
    max_body = settings.server.max_body_mb * 1_000_000
    app = create_app(service, sampling, max_body, settings.scheduler.priorities)
    config = uvicorn.Config(
        streaming(app),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.server.drain_timeout) + LAST_WORDS,
    )
    server = HttpServer(config, service, settings.server.drain_timeout)
    server.should_exit = bool(early)
    starting = asyncio.create_task(engine.start())

    def started(task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            server.should_exit = True
        else:
            gc.collect()
            gc.freeze()  # what is loaded by now stays: nobody has to look through it again
            on_ready(service)

    starting.add_done_callback(started)
    try:
        await server.serve(sockets=[listener])
        if starting.done() and not starting.cancelled() and (error := starting.exception()):
            raise error
        return engine.info is not None
    finally:
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, StartupError):
            await starting
        await engine.close()
        if recorder is not None:
            recorder.close()


def queue_limits(settings: Settings) -> QueueLimits:
    scheduler = settings.scheduler
    return QueueLimits(scheduler.max_queue_requests, scheduler.max_queue_tokens, scheduler.max_queue_seconds)


def make_recorder(settings: Settings) -> Recorder | None:
    """Raises StartupError."""
    path = settings.scheduler.trace_file
    return None if path is None else Recorder(Path(path).expanduser())


def result_cache(settings: Settings) -> ResultCache:
    return ResultCache(settings.cache.max_results, settings.cache.max_memory_mb * 1_000_000)


def run_forever(
    settings: Settings,
    params: EngineParams,
    model_name: str,
    listener: socket.socket,
    on_loading: Callable[[float], None],
    on_ready: Callable[[Service], None],
) -> None:
    """``run`` in an event loop of its own: uvloop where there is one. Raises KeyboardInterrupt if it came too early."""
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    # uvicorn raises a signal again once it has shut down, which would end us before the engine has ended
    signals: list[int] = []
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda number, _: signals.append(number))
    vocabulary = build_vocabulary(params)
    with asyncio.Runner(loop_factory=factory) as runner:
        loaded = runner.run(run(settings, params, vocabulary, signals, model_name, listener, on_loading, on_ready))
    if not loaded and signal.SIGINT in signals:
        raise KeyboardInterrupt
