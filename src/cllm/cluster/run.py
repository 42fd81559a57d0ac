"""Runs a front."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping

import uvicorn

from cllm import __version__
from cllm.cluster.app import FrontApp
from cllm.cluster.front import Front
from cllm.cluster.leases import make_client
from cllm.cluster.spans import FrontSpans
from cllm.config.settings import Settings
from cllm.errors import EngineError, StartupError
from cllm.observe.request_log import RequestLog
from cllm.server.access import Access
from cllm.server.auth import find_owner
from cllm.server.http.resumption import resumable
from cllm.server.http.server import GracefulServer, make_config
from cllm.server.run import run_in_loop

FOLLOW_SECONDS = 0.5  # between two questions where the replicas are

log = logging.getLogger("cllm.cluster")


class FrontServer(GracefulServer):
    """The HTTP server of a front."""

    def __init__(
        self, config: uvicorn.Config, front: Front, access: Access, settings: Settings
    ) -> None:
        super().__init__(config, front.metrics.server, access, settings)
        self._front = front

    async def open_work(self) -> None:
        await self._front.open()

    def drain(self) -> None:
        self._front.is_draining = True

    def count_unfinished(self) -> int:
        return len(self._front.running)

    def end_requests(self, error: EngineError) -> None:
        for end in [*self._front.running]:
            end(error)


def check_front(settings: Settings, access: Access) -> None:
    """Raise StartupError if a front cannot start with the settings. Create the cluster key if there
    is none.
    """
    if not settings.cluster.urls:
        raise StartupError("name the replicas with --urls http://HOST:PORT,...")
    for url in settings.cluster.urls:
        make_client(url)
    access.cluster_key.find_or_create()


async def follow(front: Front, find_urls: Callable[[], Mapping[str, bool]]) -> None:
    """Keep the addresses of replicas up to date. Those known stay while they cannot be found."""
    trouble = ""
    while True:
        try:
            front.replicas.set_urls(await asyncio.to_thread(find_urls))
            trouble = ""
        except StartupError as error:
            if str(error) != trouble:
                log.warning("replicas that are new or gone cannot be found: %s", error)
            trouble = str(error)
        except Exception:  # it must not end the look for replicas
            log.exception("replicas that are new or gone cannot be found")
        await asyncio.sleep(FOLLOW_SECONDS)


def run_front(
    settings: Settings,
    access: Access,
    listener: socket.socket,
    on_ready: Callable[[Front], None],
    find_urls: Callable[[], Mapping[str, bool]] | None = None,
) -> None:
    """Run a front until SIGTERM or SIGINT, with settings that ``check_front`` accepts. ``on_ready``
    is called once it accepts requests. ``find_urls`` is called twice a second, in a thread, for the
    addresses of the replicas, with False for those that will drain; it may raise StartupError.

    Raises StartupError if it cannot start.
    """

    async def serve(signals: list[int]) -> bool:
        front = Front(settings, access)
        request_log = RequestLog(settings.log, front.metrics.server)
        request_log.listeners.append(front.last_minute.note)
        if settings.trace.endpoint is not None:
            front.spans = FrontSpans(settings.trace, __version__)
            request_log.listeners.append(front.spans.export)
            request_log.tracer = front.spans.begin
        app = resumable(FrontApp(front), front.streams, find_owner)
        server = FrontServer(
            make_config(app, access, settings, request_log),
            front,
            access,
            settings,
        )
        server.early = signals

        def report() -> None:
            server.has_served = True
            log.info("the front is ready")
            on_ready(front)

        server.on_started = report
        following = find_urls and asyncio.create_task(follow(front, find_urls))
        try:
            await server.serve(sockets=[listener])
        finally:
            if following:
                following.cancel()
            await front.close()
            if front.spans is not None:
                await asyncio.to_thread(front.spans.close)
            await access.close()
        return server.has_served

    run_in_loop(serve)
