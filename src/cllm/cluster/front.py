"""What the requests of a front share, and which replicas may answer one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace

from starlette.requests import Request

from cllm.cluster.accounts import Accounts
from cllm.cluster.gather import Gatherer
from cllm.cluster.heirs import Heirs
from cllm.cluster.journey import Journey
from cllm.cluster.leases import MIN_BLOCKS, Choice, Replica, Replicas, make_choice
from cllm.cluster.metrics import FrontMetrics
from cllm.cluster.model_events import ModelEvents
from cllm.cluster.own import OwnRoutes
from cllm.cluster.replay import ReplayMemory
from cllm.cluster.reports import ReportPuller
from cllm.cluster.spans import FrontSpans
from cllm.cluster.stored import StoredName
from cllm.cluster.view import ClusterView
from cllm.config.settings import Settings
from cllm.errors import CLLMError, EngineError
from cllm.routing.router import Router
from cllm.server.access import Access
from cllm.server.cluster.lease import ReplicaIdentity
from cllm.server.http.resumption import KeptStreams
from cllm.server.live.last_minute import LastMinute

# Paths of bodies that are passed on as they arrive
UPLOADS = frozenset({"/v1/files", "/v1/messages/batches"})
# Paths of requests that store something under the account
STORING = UPLOADS | {"/v1/batches"}
FRONT_NAME_FILE = "front_name"  # in the storage folder


class Front:
    """What all requests share: the replicas, the accounts, and the requests in progress."""

    def __init__(self, settings: Settings, access: Access) -> None:
        """Raises StartupError if the settings cannot be used."""
        self.settings = settings
        self.access = access
        self.router = Router(MIN_BLOCKS)
        name = ReplicaIdentity(settings.storage.folder, FRONT_NAME_FILE).name
        self.replicas = Replicas(
            settings.cluster.urls,
            access.cluster_key,
            self.router,
            settings.cluster.lease_seconds,
            name,
        )
        if settings.cluster.hand_over:
            heirs = Heirs(self.replicas, self.router)
            self.replicas.find_heir = heirs.find_url
            self.replicas.on_change = heirs.note_change
        self.metrics = FrontMetrics(self.replicas)
        self.accounts = Accounts(access, name)
        self.reports = ReportPuller(self.replicas, self.accounts)
        self.gatherer = Gatherer(
            self.replicas,
            self.accounts,
            self.metrics,
            settings.server.max_body_mb * 1_000_000,
        )
        self.num_held_bytes = 0
        self.replay_memory = ReplayMemory()
        # the functions that end the requests in progress
        self.running: set[Callable[[CLLMError], None]] = set()
        self.journeys: set[Journey] = set()  # of the requests in progress
        self.is_draining = False
        self.spans: FrontSpans | None = None  # set if requests are traced
        self.last_minute = LastMinute()
        self.live = ClusterView(
            self.replicas,
            access,
            self.journeys,
            self.last_minute,
            lambda: self.is_draining and not self.running,
        )
        self.streams = KeptStreams()
        self.state = SimpleNamespace(
            access=access, settings=settings, routes=(), live=self.live, streams=self.streams
        )
        model_events = ModelEvents(self.replicas, access.cluster_key, lambda: self.is_draining)
        self.own = OwnRoutes(self.state, model_events)

    async def open(self) -> None:
        """Begin to follow the replicas."""
        await self.replicas.open()
        self.reports.open()

    async def close(self) -> None:
        await self.reports.close()
        await self.replicas.close()

    def find_home(
        self, request: Request, stored: StoredName | None, account: str
    ) -> Replica | None:
        """Return the replica that must answer a request, because it stores ``stored``, which the
        request names, or will store what ``account`` uploads; None if any may.

        Raises BadRequest (404) if that replica is gone, and EngineError if it may come back.
        """
        path: str = request.scope["path"]
        if stored is not None:
            replica = self.replicas.get(stored.replica)
            if replica is None and self.replicas.is_expected(stored.replica):
                message = f"The replica {stored.replica!r}, which stores it, does not answer."
                raise EngineError(message)
            if replica is None:
                raise stored.gone()
            return replica
        if request.method == "POST" and path in STORING:
            # the same one on all fronts, as long as the replicas are the same
            listed = [*self.replicas.listed()]
            return max(listed, key=lambda one: rank_home(account, one.name), default=None)
        return None

    def list_choices(self, home: Replica | None, model: str | None) -> list[Choice]:
        """Return the replicas that may answer a request for ``model`` now: only ``home``, if that
        must answer it.
        """
        if home is None:
            return self.replicas.find(model)
        return [make_choice(home, model)] if home.is_listed else []


def rank_home(account: str, replica: str) -> bytes:
    """Return the rank of a replica among those that may store the uploads of an account."""
    return hashlib.blake2b(f"{account}\0{replica}".encode(), digest_size=8).digest()
