"""The state that all routes of an application share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi.routing import APIRoute
from starlette.requests import Request

from cllm.config.settings import Settings
from cllm.errors import BadRequest
from cllm.observe.request_log import RequestLog
from cllm.server.access import Access, expand
from cllm.server.bench.runs import LoadRuns
from cllm.server.cluster.hand_over import HandOver
from cllm.server.cluster.lease import ReplicaIdentity
from cllm.server.ended_answers import EndedAnswers
from cllm.server.http.resumption import KeptStreams
from cllm.server.live.last_minute import LastMinute
from cllm.server.live.watching import LiveView
from cllm.server.native.judgements import RecentRequests
from cllm.serving.registry import Registry
from cllm.store.created import CreatedModels
from cllm.store.responses import ResponseStore

if TYPE_CHECKING:
    from cllm.serving.batches import Batches


@dataclass(eq=False)
class ServerState:
    """The state that all routes of an application share; it is ``app.state``.

    ``batches`` is None if the settings have no folder for them. ``skipped`` has the types of
    skipped parts that have been logged. ``identity`` and ``hand_over`` are for clusters. Clients
    can resume ``streams``. ``request_log`` gets the requests that have ended, and ``last_minute``
    notes their latencies; ``recent`` judges them, and ``ended`` has the ids of their answers. An
    administrator can put load on the server with ``load_runs``. ``alone`` has the work in progress
    of which there is one at a time.
    """

    registry: Registry
    settings: Settings
    access: Access
    responses: ResponseStore
    created: CreatedModels
    routes: Sequence[APIRoute]
    batches: Batches | None = None
    skipped: set[str] = field(default_factory=set)
    alone: set[str] = field(default_factory=set)
    identity: ReplicaIdentity = field(init=False)
    hand_over: HandOver = field(init=False)
    request_log: RequestLog = field(init=False)
    streams: KeptStreams = field(default_factory=KeptStreams)
    recent: RecentRequests = field(default_factory=RecentRequests)
    ended: EndedAnswers = field(default_factory=EndedAnswers)
    last_minute: LastMinute = field(default_factory=LastMinute)
    live: LiveView = field(init=False)
    load_runs: LoadRuns = field(init=False)

    def __post_init__(self) -> None:
        self.identity = ReplicaIdentity(self.settings.storage.folder)
        self.hand_over = HandOver(self.settings, self.access.cluster_key)
        self.request_log = RequestLog(self.settings.log, self.registry.metrics)
        self.request_log.listeners += [self.last_minute.note, self.recent.note, self.ended.note]
        self.live = LiveView(self.registry, self.last_minute, self.settings.server)
        certificate = expand(self.settings.server.tls_certificate)
        self.load_runs = LoadRuns(self.settings, self.registry, self.access, certificate)

    @contextmanager
    def only(self, work: str) -> Iterator[None]:
        """Do some work that must not run twice at the same time. Raises BadRequest (409)."""
        if work in self.alone:
            message = f"Another {work} is running; please retry when it has ended."
            raise BadRequest(message, code="conflict", status=409)
        self.alone.add(work)
        try:
            yield
        finally:
            self.alone.discard(work)


def get_state(request: Request) -> ServerState:
    """Return the state of the application that answers ``request``."""
    state: ServerState = request.app.state
    return state
