"""How much waits in the queue, and how much of it is ahead of a newcomer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cllm.core.request import Request


@dataclass(slots=True)
class QueueLoad:
    """The size of several requests, or of a share of them."""

    num_requests: float = 0
    num_seqs: float = 0
    num_tokens: float = 0

    def add(self, other: QueueLoad, times: float = 1) -> None:
        self.num_requests += times * other.num_requests
        self.num_seqs += times * other.num_seqs
        self.num_tokens += times * other.num_tokens

    def scale(self, factor: float) -> QueueLoad:
        """Return this load times ``factor``."""
        return QueueLoad(
            factor * self.num_requests, factor * self.num_seqs, factor * self.num_tokens
        )


def measure_load(*requests: Request) -> QueueLoad:
    num_seqs = sum(request.params.n for request in requests)
    return QueueLoad(len(requests), num_seqs, sum(len(request.prompt) for request in requests))


NOTHING = QueueLoad()


class AccountLoads:
    """The load of the requests of a class, of each account (``by_account``) and in ``total``.

    Accounts of the same weight with equally many requests get the same share of any number of
    turns. So they are also summed by weight and number, and sharing turns among 10,000 accounts
    takes as many steps as there are such sums.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """``weights`` has those that are not 1. Call ``note_weights`` when they have changed."""
        self.by_account: dict[str, QueueLoad] = {}
        self.total = QueueLoad()
        self._weights = weights
        self._alike: dict[tuple[float, float], QueueLoad] = {}

    def get(self, account: str) -> QueueLoad:
        return self.by_account.get(account, NOTHING)

    def add(self, request: Request, times: int = 1) -> None:
        """Add a request, or take it away with ``times=-1``."""
        account, load = request.account, measure_load(request)
        own = self.by_account.setdefault(account, QueueLoad())
        self._sum_alike(account, own, -1)
        own.add(load, times)
        self._sum_alike(account, own, 1)
        self.total.add(load, times)
        if not own.num_requests:
            del self.by_account[account]

    def note_weights(self) -> None:
        self._alike = {}
        for account, load in self.by_account.items():
            self._sum_alike(account, load, 1)

    def _sum_alike(self, account: str, load: QueueLoad, times: int) -> None:
        if not load.num_requests:
            return
        key = self._weights.get(account, 1.0), load.num_requests
        alike = self._alike.setdefault(key, QueueLoad())
        alike.add(load, times)
        if not alike.num_requests:
            del self._alike[key]

    def share_turns(self, account: str, num_turns: float, share: float) -> QueueLoad:
        """Return the load of ``share`` of all requests, but of each account except ``account`` at
        most as many requests as its weight in each of ``num_turns`` turns.
        """
        load = QueueLoad()
        for (weight, num_requests), alike in self._alike.items():
            load.add(alike, min(share, num_turns * weight / num_requests))
        if (own := self.by_account.get(account)) is not None:
            limited = num_turns * self._weights.get(account, 1.0) / own.num_requests
            load.add(own, share - min(share, limited))
        return load
