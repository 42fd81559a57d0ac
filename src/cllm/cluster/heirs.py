"""Names an heir for each replica: when the replica leaves, its saved prefixes and the requests for
them go there.
"""

from __future__ import annotations

import hashlib

from cllm.cluster.leases import Replica, Replicas
from cllm.routing.router import Router


class Heirs:
    """The heirs of a front's replicas. Fronts with the same replicas name the same ones."""

    def __init__(self, replicas: Replicas, router: Router) -> None:
        self._replicas = replicas
        self._router = router
        # of listed replicas: their heirs, and the addresses of these until a replica changes
        self._named: dict[Replica, Replica | None] = {}
        self._urls: dict[Replica, str] = {}

    def find_url(self, replica: Replica) -> str:
        """Return the address of the heir of a replica, "" if it has none."""
        url = self._urls.get(replica)
        if url is None:
            heir = self.find(replica)
            url = "" if heir is None else heir.url
            if replica.is_listed:
                self._named[replica], self._urls[replica] = heir, url
        return url

    def find(self, replica: Replica) -> Replica | None:
        """Return the heir of a replica, None if no other one has a model of it."""
        others = [
            one
            for one in self._replicas.listed()
            if one is not replica and one.lease is not None and share_model(replica, one)
        ]
        return max(others, key=lambda one: rank(replica, one), default=None)

    def note_change(self, replica: Replica) -> None:
        """Send the requests for the prefixes of a replica that gets none any longer to its heir.
        Others may have another heir from now on.
        """
        self._urls.clear()
        if replica.is_listed or (heir := self._named.pop(replica, None)) is None:
            return
        if not heir.is_listed:
            return
        for origin, number in replica.numbers.items():
            if origin in heir.numbers:
                self._router.prefixes.inherit(number, heir.numbers[origin])


def share_model(first: Replica, second: Replica) -> bool:
    """Return whether two replicas have loaded the same file of a model with the same settings."""
    both = (list_models(first), list_models(second))
    return bool(both[0] & both[1])


def list_models(replica: Replica) -> set[tuple[str, str]]:
    models = [] if replica.lease is None else replica.lease.models
    return {(model.name, model.fingerprint) for model in models if model.fingerprint}


def rank(replica: Replica, other: Replica) -> bytes:
    """Return a rank that stays the same when other replicas come and go (rendezvous hashing)."""
    names = f"{replica.name} {other.name}"
    return hashlib.blake2b(names.encode(), digest_size=8).digest()
