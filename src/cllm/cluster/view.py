"""The live view of a cluster: the views of its replicas, and what the front knows itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec

from cllm import __version__
from cllm.cluster.following import EventFollower
from cllm.cluster.journey import Journey
from cllm.cluster.leases import Replica, Replicas
from cllm.scheduler.trace import SequenceState
from cllm.server.access import Access
from cllm.server.live.last_minute import LastMinute
from cllm.server.live.routes import EVENTS_PATH
from cllm.server.live.schema import (
    EngineState,
    ModelState,
    ReplicaState,
    ReplicaStatus,
    Snapshot,
)
from cllm.server.live.watching import SnapshotStream
from cllm.serving.delivered import find_first_name

FIRST_SECONDS = 1.0  # for which the first snapshot waits for those of all replicas
SLOW_SECONDS = 3.0  # without a snapshot, after which a replica is shown as slow
MAX_NAMED = 100  # requests that no replica has, or that were sent more than once

_decoder = msgspec.json.Decoder(Snapshot)


class LastSnapshot:
    """The latest snapshot of a replica, which is decoded when it is needed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._decoded: Snapshot | None = None
        self.arrived = asyncio.get_running_loop().time()

    def read(self) -> Snapshot | None:
        """Return the snapshot, or None if the replica has another version with other fields."""
        if self._decoded is None and self._data:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._decoded = _decoder.decode(self._data)
            self._data = b""
        return self._decoded


class ClusterView(SnapshotStream):
    """Merges the snapshots of all replicas while somebody watches."""

    def __init__(
        self,
        replicas: Replicas,
        access: Access,
        journeys: Collection[Journey],
        last_minute: LastMinute,
        has_ended: Callable[[], bool],
    ) -> None:
        """``has_ended`` says whether the front shuts down and all its requests have ended."""
        super().__init__()
        self._replicas = replicas
        self._journeys = journeys
        self._last_minute = last_minute
        self._has_ended = has_ended
        self._latest: dict[Replica, LastSnapshot] = {}
        self._access = access
        self._follower = EventFollower(
            replicas, access.cluster_key, EVENTS_PATH, self._take, self._lose
        )
        self._opened = 0.0  # when the first watcher came
        self._arrived = asyncio.Event()

    def _take(self, replica: Replica, data: bytes) -> None:
        self._latest[replica] = LastSnapshot(data)
        self._arrived.set()

    def _lose(self, replica: Replica) -> None:
        self._latest.pop(replica, None)

    def open(self) -> None:
        self._opened = asyncio.get_running_loop().time()

    @property
    def is_ending(self) -> bool:
        return self._has_ended()

    async def prepare(self) -> None:
        """Follow the replicas. At first, wait a moment for each one's first snapshot."""
        self._follower.update()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._opened + FIRST_SECONDS):
                while any(one not in self._latest for one in self._replicas.listed()):
                    self._arrived.clear()
                    await self._arrived.wait()

    def close(self) -> None:
        self._follower.close()
        self._latest.clear()

    def make(self) -> Snapshot:
        now = asyncio.get_running_loop().time()
        at_front, journeys = self._show_journeys()
        hidden = {one.name for one in at_front}
        shows_prompts = self._access.may_show_prompts
        states: list[ReplicaState] = []
        models: list[ModelState] = []
        for replica in sorted(self._replicas.all, key=lambda one: one.name):
            last = self._latest.get(replica)
            snapshot = None if last is None else last.read()
            age = None if last is None or snapshot is None else now - last.arrived
            state = self._describe(replica, snapshot, age, now)
            states.append(state)
            if snapshot is not None and state.seconds_old is not None:
                found = [label(one, replica.name, hidden) for one in snapshot.models]
                models += found if shows_prompts else map(without_prompts, found)
        return Snapshot(
            at=round(time.time(), 3),
            version=__version__,
            is_ready=self._replicas.ready,
            models=models,
            last_minute=self._last_minute.sum_up(time.monotonic()),
            replicas=states,
            at_front=at_front,
            journeys=journeys,
        )

    def _describe(
        self, replica: Replica, snapshot: Snapshot | None, age: float | None, now: float
    ) -> ReplicaState:
        """Return the state of a replica whose latest snapshot has an ``age``. That of a replica
        whose requests are given up is not shown, because others continue them.
        """
        lease, trouble = replica.lease, replica.trouble
        is_silent = now > self._opened + SLOW_SECONDS and (age is None or age > SLOW_SECONDS)
        is_draining = (
            replica.is_leaving
            or (snapshot is not None and snapshot.is_draining)
            or (lease is not None and lease.status == "draining")
        )
        if is_silent and not trouble:
            trouble = "it sends nothing" if age is None else f"it has sent nothing for {age:.0f} s"
        status: ReplicaStatus
        if self._replicas.is_given_up(replica):
            status, age = "lost", None
        elif is_draining or (not replica.is_listed and replica.running and not is_silent):
            status, trouble = "draining", trouble if is_silent else ""
        elif not replica.is_listed:
            status = "lost"
        elif is_silent:
            status = "slow"
        else:
            status = "loading" if lease is None or lease.status == "loading" else "ready"
        seconds_old = None if age is None else round(age, 1)
        return ReplicaState(replica.name, status, trouble, seconds_old, len(replica.running))

    def _show_journeys(self) -> tuple[list[SequenceState], dict[str, list[str]]]:
        """Return the requests that no replica has now, and what the front did with those that it
        sent more than once.
        """
        now = time.monotonic()
        at_front: list[SequenceState] = []
        journeys: dict[str, list[str]] = {}
        for journey in self._journeys:
            if journey.record.method != "POST":
                continue
            if journey.is_at_front and len(at_front) < MAX_NAMED:
                at_front.append(journey.show(now))
            if len(journeys) < MAX_NAMED and (sentences := journey.describe(now)):
                journeys[journey.id] = sentences
        return at_front, journeys


def label(model: ModelState, replica: str, hidden: set[str]) -> ModelState:
    """Return a model of a replica, with the names that sequences had before the replica continued
    them, and without those that are shown elsewhere.
    """
    engines = [rename(one, hidden) for one in model.engines]
    return msgspec.structs.replace(model, replica=replica, engines=engines)


def without_prompts(model: ModelState) -> ModelState:
    """Return a model for everyone. Its replica cannot know who watches at the front."""
    engines = [msgspec.structs.replace(one, prompts={}) for one in model.engines]
    return msgspec.structs.replace(model, engines=engines)


def rename(engine: EngineState, hidden: set[str]) -> EngineState:
    sequences = [
        msgspec.structs.replace(one, name=name, reason=find_first_name(one.reason))
        for one in engine.sequences
        if (name := find_first_name(one.name)) not in hidden
    ]
    prompts = {find_first_name(f"{one}.0")[:-2]: text for one, text in engine.prompts.items()}
    return msgspec.structs.replace(engine, sequences=sequences, prompts=prompts)
