"""The HTTP server and the service behind it.

Importing this module and opening both takes a second.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cllm.batches import Batches
from cllm.config import Settings
from cllm.errors import EngineError
from cllm.observe.metrics import Metrics
from cllm.observe.trace_file import Recorder
from cllm.process.pool import Pool
from cllm.registry import Registry
from cllm.server.access import Access, expand
from cllm.server.app import DIALECTS, create_app
from cllm.server.auth import Guard
from cllm.server.connections import Connections, max_connections, raise_descriptor_limit
from cllm.server.errors import describe, make_answer
from cllm.server.http_protocol import Protocol
from cllm.server.request_id import with_answer_headers
from cllm.server.sse import streaming
from cllm.service import Service

log = logging.getLogger("cllm.server")

# seconds; longer than the idle time of the usual clients and proxies, so that they close first
KEEP_ALIVE = 75
TICK_SECONDS = 0.1  # between two ticks of uvicorn's clock
TICKS_PER_CHECK = 4  # of the accounts
LAST_WORDS = 2  # seconds in which streams that were ended send their error


class HttpServer(uvicorn.Server):
    """uvicorn, but after SIGTERM running streams get ``drain_timeout`` seconds to finish, and then
    end with an error.

    A second signal ends them immediately.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        batches: Batches | None,
        access: Access,
        settings: Settings,
    ) -> None:
        super().__init__(config)
        limit = max_connections(raise_descriptor_limit())
        self.server_state: Connections = Connections(
            limit, settings.server.max_connections_per_address
        )
        self.service = service
        service.metrics.connections.set_function(lambda: len(self.server_state.connections))
        self._batches = batches
        self.early: list[int] = []
        self._drain_timeout = settings.server.drain_timeout
        self._access = access
        self._last_tick = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections.

        Signals now reach ``handle_exit``; earlier ones are in ``early``.
        """
        self._loop = asyncio.get_running_loop()
        self.should_exit = self.should_exit or bool(self.early)
        await super().startup([])  # without sockets, because ``_accept`` accepts the connections
        self._accepting = [
            self._loop.create_task(self._accept(listener)) for listener in sockets or ()
        ]
        await self._access.open()
        if self._batches is not None:
            await self._batches.start()

    async def on_tick(self, counter: int) -> bool:
        """Measure how late uvicorn's clock is, and look after the accounts now and then."""
        now = self._loop.time()
        if self._last_tick:
            lag = max(0.0, now - self._last_tick - TICK_SECONDS)
            self.service.metrics.event_loop_lag.observe(lag)
        self._last_tick = now
        if counter % TICKS_PER_CHECK == 0:
            self._access.check(self.service)
        return await super().on_tick(counter)

    def start_renderer(self) -> None:
        """Start a process that renders chat templates, once the model has been loaded."""
        if self.service.vocabulary.chat_template:
            self._starting = self._loop.create_task(self.service.renderer.start())

    async def _accept(self, listener: socket.socket) -> None:
        def protocol() -> Protocol:
            return Protocol(config=self.config, server_state=self.server_state, app_state={})

        listener.setblocking(False)
        await self.server_state.accept(listener, protocol, self.config.ssl)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # a signal handler can interrupt any code, so it must not write to streams itself
        if self.should_exit:
            self._loop.call_soon_threadsafe(self._end_streams)
        self.service.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.draining = True
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        if self._batches is not None:
            await self._batches.stop()
        going = self.service.engine.num_unfinished
        requests = "1 request" if going == 1 else f"{going} requests"
        waits = f"; it waits up to {self._drain_timeout:g} s, Ctrl-C again ends them now"
        has_served = self.service.engine.info is not None
        if has_served:
            log.info("the server shuts down with %s%s", requests, waits if going else "")
        timer = asyncio.get_running_loop().call_later(self._drain_timeout, self._end_streams)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            if has_served:
                log.info("the server has shut down")

    def _end_streams(self) -> None:
        self.service.engine.end_all(EngineError("The server is shutting down."))


def open_server(settings: Settings, access: Access, model_name: str, engine: Pool) -> HttpServer:
    """Return a server that does not listen yet. Raises StartupError."""
    recorder = make_recorder(settings)
    timeout = settings.scheduler.request_timeout
    service = Service(engine, Metrics(model_name), model_name, timeout, recorder, access.ledger)
    app = create_app(Registry(service, settings.model.aliases), settings, access)
    config = uvicorn.Config(
        guard(heads_as_gets(app), access, settings),
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
        timeout_graceful_shutdown=int(settings.server.drain_timeout) + LAST_WORDS,
    )
    return HttpServer(config, service, app.state.batches, access, settings)


def guard(app: ASGIApp, access: Access, settings: Settings) -> ASGIApp:
    """Return ``app`` with what is done before and after it: headers of all answers, CORS, and the
    checks of Guard.
    """
    answer = make_answer(DIALECTS)

    def refuse(request: Request, error: Exception) -> Response:
        return answer(request, describe(error))

    app = Guard(app, access, settings, refuse)
    if origins := settings.server.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
            max_age=600,
        )
    return streaming(with_answer_headers(app))


def heads_as_gets(app: ASGIApp) -> ASGIApp:
    """Return ``app`` with HEAD requests turned into GET.

    uvicorn sends only the headers of the answer.
    """

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        await app(
            {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send
        )

    return called


def make_recorder(settings: Settings) -> Recorder | None:
    """Return the recorder of the trace file, or None if no file is set. Raises StartupError."""
    path = settings.scheduler.trace_file
    return None if path is None else Recorder(Path(path).expanduser())
