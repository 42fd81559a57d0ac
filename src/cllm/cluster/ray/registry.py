"""Knows where the replicas are."""

from __future__ import annotations

import time
from typing import Any

import ray

NAMESPACE = "cllm"
ACTOR = "replicas"
EXPIRY_SECONDS = 10.0  # without a heartbeat, after which the registry forgets a replica
RAY_SECONDS = 5.0  # for an answer of one of Ray's actors


class Registry:
    """An actor that knows the replicas. They tell it each second where they are, so a new registry
    soon knows them too.
    """

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, dict[str, Any]]] = {}
        self._to_drain: set[str] = set()

    def tell(self, entry: dict[str, Any]) -> bool:
        """Take the entry of a replica. Return whether the replica should drain."""
        self._entries[entry["name"]] = time.monotonic(), entry
        return entry["name"] in self._to_drain

    def leave(self, name: str) -> None:
        """Forget a replica."""
        self._entries.pop(name, None)
        self._to_drain.discard(name)

    def drain(self, name: str) -> bool:
        """Ask a replica to drain. Return whether it is known."""
        if name not in self._entries:
            return False
        self._to_drain.add(name)
        return True

    def list(self) -> list[dict[str, Any]]:
        """Return the entries of all replicas."""
        now = time.monotonic()
        for name, (heard, _) in [*self._entries.items()]:
            if now - heard > EXPIRY_SECONDS:
                self.leave(name)
        return [entry for _, entry in self._entries.values()]


def get_registry() -> Any:
    """Return the handle of the registry, which is created if there is none."""
    actor = ray.remote(Registry).options(
        name=ACTOR,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
    )
    return actor.remote()
