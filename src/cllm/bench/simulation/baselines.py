"""Rules that the product's choice of a replica is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cllm.routing.router import CROWDED, Candidate, Router, RoutingRequest

Routing = Literal["least-loaded", "prefix", "prefix-window", "round-robin"]


class RoundRobin(Router):
    """Each replica in turn."""

    _turn = -1

    def _choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate:
        self._turn = (self._turn + 1) % len(candidates)
        return candidates[self._turn]


class LeastLoaded(Router):
    """A random one of the replicas with the fewest requests."""

    def _choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate:
        loads = [self._load(one) for one in candidates]
        least = min(loads)
        return self._rng.choice(
            [one for one, load in zip(candidates, loads, strict=True) if load == least]
        )


class Prefix(LeastLoaded):
    """The replica that has the longest prefix, unless it has CROWDED times the least load."""

    def _choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate:
        for holders, _ in self.prefixes.list_holders(request.blocks):
            homes = [one for one in candidates if holders >> one.number & 1]
            best = min(homes, key=self._load, default=None)
            if best is not None:
                least = min(map(self._load, candidates))
                if self._load(best) <= CROWDED * max(least, 1):
                    return best
                break
        return super()._choose(request, candidates)


ROUTERS: dict[Routing, type[Router]] = {
    "least-loaded": LeastLoaded,
    "prefix": Prefix,
    "prefix-window": Router,
    "round-robin": RoundRobin,
}
