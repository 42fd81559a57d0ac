"""The HTTP server. Importing this module takes a second."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm import __version__
from cllm.config.settings import Settings
from cllm.errors import EngineError, StartupError
from cllm.observe.otel import SpanExporter
from cllm.observe.request_log import RequestLog
from cllm.observe.server_metrics import ServerMetrics
from cllm.observe.summary import Summary
from cllm.server.access import Access, expand
from cllm.server.app import PATHS, answer_fault, create_app
from cllm.server.auth import Guard, find_owner
from cllm.server.bench.runs import LoadRuns
from cllm.server.cluster.hand_over import HandOver
from cllm.server.errors import describe
from cllm.server.http.connections import Connections, max_connections, raise_descriptor_limit
from cllm.server.http.paths import with_single_slashes
from cllm.server.http.protocol import Protocol
from cllm.server.http.recording import with_records
from cllm.server.http.request_id import with_answer_headers
from cllm.server.http.resumption import resumable
from cllm.server.http.sse import streaming
from cllm.server.ollama.manage import add_all_created
from cllm.serving.batches import Batches
from cllm.serving.registry import Registry

log = logging.getLogger("cllm.server")

# seconds; longer than the idle time of the usual clients and proxies, so that they close first
KEEP_ALIVE = 75
TICK_SECONDS = 0.1  # between two ticks of uvicorn's clock
TICKS_PER_CHECK = 4  # ticks between two checks of the accounts
ERROR_SECONDS = 2  # time for streams that the shutdown ends to send their error


class GracefulServer(uvicorn.Server):
    """uvicorn with a graceful shutdown: after SIGTERM, running streams get ``drain_timeout``
    seconds to finish, and then end with an error.

    A second signal ends them immediately.
    """

    def __init__(
        self, config: uvicorn.Config, metrics: ServerMetrics, access: Access, settings: Settings
    ) -> None:
        super().__init__(config)
        limit = max_connections(raise_descriptor_limit())
        self.server_state: Connections = Connections(
            limit, settings.server.max_connections_per_address
        )
        self._metrics = metrics
        metrics.limit_accounts(settings.metrics.max_accounts)
        metrics.connections.set_function(lambda: len(self.server_state.connections))
        self.early: list[int] = []
        self.is_stopped_by_signal = False
        self.has_served = False  # set once the log says that requests are computed
        self._drain_timeout = settings.server.drain_timeout
        self._access = access
        self._last_tick = 0.0

        self.on_started: Callable[[], None] = lambda: None

    # --- What differs between servers ------------------------------------------------------------

    async def open_work(self) -> None:
        """Start what runs besides requests."""

    def check(self) -> None:
        """Do what is due every 0.4 seconds."""
        self._access.check([])

    def drain(self) -> None:
        """Accept no further requests."""

    def count_unfinished(self) -> int:
        """Return the number of requests that have not been answered completely."""
        raise NotImplementedError

    def end_requests(self, error: EngineError) -> None:
        """End all requests with an error."""
        raise NotImplementedError

    # --- What they share -------------------------------------------------------------------------

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections.

        Signals that came before ``handle_exit`` was installed are in ``early``.
        """
        self._loop = asyncio.get_running_loop()
        self.should_exit = self.should_exit or bool(self.early)
        await super().startup([])  # without sockets, because ``_accept`` accepts the connections
        self._accepting = [
            self._loop.create_task(self._accept(listener)) for listener in sockets or ()
        ]
        await self._access.open()
        await self.open_work()
        self.on_started()

    async def on_tick(self, counter: int) -> bool:
        """Measure how late uvicorn's clock is. At some ticks, also check the accounts and idle
        models.
        """
        now = self._loop.time()
        if self._last_tick:
            lag = max(0.0, now - self._last_tick - TICK_SECONDS)
            self._metrics.event_loop_lag.observe(lag)
        self._last_tick = now
        if counter % TICKS_PER_CHECK == 0:
            self.check()
        return await super().on_tick(counter)

    async def _accept(self, listener: socket.socket) -> None:
        def protocol() -> Protocol:
            return Protocol(config=self.config, server_state=self.server_state, app_state={})

        listener.setblocking(False)
        await self.server_state.accept(listener, protocol, self.config.ssl)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # a signal handler can interrupt any code, so it must not write to streams itself
        self.is_stopped_by_signal = True
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._end_streams)
        self.drain()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.drain()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        going = self.count_unfinished()
        requests = "1 request" if going == 1 else f"{going} requests"
        waits = f"; it waits up to {self._drain_timeout:g} s, Ctrl-C again ends them now"
        if self.has_served:
            log.info("the server shuts down with %s%s", requests, waits if going else "")
        timer = asyncio.get_running_loop().call_later(self._drain_timeout, self._end_streams)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            if self.has_served:
                log.info("the server has shut down")

    def _end_streams(self) -> None:
        self.end_requests(EngineError("The server is shutting down.", reason="draining"))


class HttpServer(GracefulServer):
    """A server that computes requests with the models of a registry."""

    def __init__(
        self,
        config: uvicorn.Config,
        registry: Registry,
        batches: Batches | None,
        access: Access,
        settings: Settings,
        hand_over: HandOver,
        load_runs: LoadRuns,
    ) -> None:
        super().__init__(config, registry.metrics, access, settings)
        self.registry = registry
        self.batches = batches
        self.hand_over = hand_over
        self.load_runs = load_runs
        self.spans: SpanExporter | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._summary = Summary(settings.log.summary_seconds)

    async def open_work(self) -> None:
        if self.batches is not None:
            await self.batches.start()

    def check(self) -> None:
        self._access.check(self.registry.loaded.services)
        self.registry.loaded.unload_expired()
        if self._summary.is_due(self._loop.time()):
            for service in self.registry.loaded.services:
                stats, generated = service.engine.stats_since_start, service.metrics.num_generated
                self._summary.write(service.model_name, stats, generated)

    def drain(self) -> None:
        self.registry.loaded.drain()

    def count_unfinished(self) -> int:
        return self.registry.loaded.num_unfinished

    def end_requests(self, error: EngineError) -> None:
        for service in self.registry.loaded.services:
            service.engine.end_all(error)

    def reload(self) -> None:
        """Read the settings of the models again, and log the result or the error."""

        async def reload() -> None:
            try:
                faults = await self.registry.reload()
            except StartupError as error:
                log.error("the settings were not reloaded: %s", error)
                return
            but = " with faults" if faults else ""
            log.info("the settings were reloaded%s; models: %s", but, self.registry.describe())

        self._reloading = asyncio.create_task(reload())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.drain()
        if self._reloading is not None:
            self._reloading.cancel()
        await self.load_runs.stop()
        if self.batches is not None:
            await self.batches.stop()
        await super().shutdown(sockets)
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)


def open_server(registry: Registry, settings: Settings, access: Access) -> HttpServer:
    """Return a server that does not listen yet."""
    app = create_app(registry, settings, access)
    registry.on_rescan = partial(add_all_created, registry, app.state.created)
    registry.on_rescan()
    kept = resumable(app, app.state.streams, find_owner)
    config = make_config(kept, access, settings, app.state.request_log)
    state = app.state
    server = HttpServer(
        config, registry, state.batches, access, settings, state.hand_over, state.load_runs
    )
    if settings.trace.endpoint is not None:
        server.spans = SpanExporter(settings.trace, __version__)
        state.request_log.listeners.append(server.spans.export)
        state.request_log.tracer = server.spans.begin
    return server


def make_config(
    app: ASGIApp, access: Access, settings: Settings, request_log: RequestLog
) -> uvicorn.Config:
    """Return the configuration of a server whose requests ``app`` answers, after the checks of
    ``guard``. ``request_log`` gets their records.
    """
    return uvicorn.Config(
        guard(heads_as_gets(app), access, settings, request_log),
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=bool(settings.server.trusted_proxies),
        forwarded_allow_ips=[*settings.server.trusted_proxies],
        ssl_certfile=expand(settings.server.tls_certificate),
        ssl_keyfile=expand(settings.server.tls_key),
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.server.drain_timeout) + ERROR_SECONDS,
    )


def guard(app: ASGIApp, access: Access, settings: Settings, request_log: RequestLog) -> ASGIApp:
    """Return ``app`` wrapped in the middleware for all requests: common headers, records, CORS, and
    the checks of Guard.
    """

    def refuse(request: Request, error: Exception) -> Response:
        return answer_fault(request, describe(error))

    app = with_single_slashes(Guard(app, access, settings, refuse), PATHS)
    if origins := settings.server.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
            max_age=600,
        )
    return streaming(with_answer_headers(with_records(app, request_log, PATHS.describe)))


def heads_as_gets(app: ASGIApp) -> ASGIApp:
    """Return ``app`` with HEAD requests turned into GET.

    uvicorn sends only the headers of the answer.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        await app(
            {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send
        )

    return called
