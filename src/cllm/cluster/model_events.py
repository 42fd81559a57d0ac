"""GET /models/sse at a front: the events about the models of all replicas, as one server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import msgspec

from cllm.cluster.following import EventFollower
from cllm.cluster.leases import Replica, Replicas
from cllm.core.account import Account
from cllm.server.cluster.key import ClusterKey
from cllm.server.llama_server.model_events import EVENTS_PATH, Event, write_events

FIRST_SECONDS = 1.0  # for which the first event waits for those of all replicas
BEST_FIRST = ("loaded", "loading", "unloaded")


class Progress(msgspec.Struct):
    """How far a model is loaded."""

    value: float = 0.0


class Status(msgspec.Struct):
    """What matters of a model's status."""

    status: str
    progress: Progress = msgspec.field(default_factory=Progress)


class ModelEvents:
    """Follows the models of all replicas while somebody listens. A model has the status of the
    replica that has loaded most of it.
    """

    def __init__(self, replicas: Replicas, key: ClusterKey, is_ending: Callable[[], bool]) -> None:
        self._replicas = replicas
        self._is_ending = is_ending
        self._follower = EventFollower(replicas, key, EVENTS_PATH, self._take, self._lose)
        self._states: dict[Replica, dict[str, Event]] = {}
        self._num_listeners = 0
        self._arrived = asyncio.Event()

    def _take(self, replica: Replica, data: bytes) -> None:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
            event = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            name = msgspec.json.decode(event["model"], type=str)
            models = self._states.setdefault(replica, {})
            if "data" in event:
                msgspec.json.decode(event["data"], type=Status)  # raises if it is something else
                models[name] = msgspec.json.decode(event["data"])
            else:
                models.pop(name, None)
        self._arrived.set()

    def _lose(self, replica: Replica) -> None:
        self._states.pop(replica, None)

    async def listen(self, account: Account) -> AsyncGenerator[bytes, None]:
        """Yield the events about the models that an account may use, as server-sent events."""

        def list_states() -> dict[str, Event]:
            self._follower.update()
            merged = self._merge()
            return {name: merged[name] for name in merged if account.may_use_model(name)}

        self._num_listeners += 1
        try:
            self._follower.update()
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_SECONDS):
                    while any(one not in self._states for one in self._replicas.listed()):
                        self._arrived.clear()
                        await self._arrived.wait()
            async for data in write_events(list_states, self._is_ending):
                yield data
        finally:
            self._num_listeners -= 1
            if not self._num_listeners:
                self._follower.close()
                self._states.clear()

    def _merge(self) -> dict[str, Event]:
        merged: dict[str, Event] = {}
        for models in self._states.values():
            for name, data in models.items():
                if name not in merged or rank(data) < rank(merged[name]):
                    merged[name] = data
        return merged


def rank(data: Event) -> tuple[int, float]:
    """Return the place of a status among those of the same model on several replicas."""
    status = data["status"]
    place = BEST_FIRST.index(status) if status in BEST_FIRST else len(BEST_FIRST)
    return place, -data.get("progress", {}).get("value", 0.0)
