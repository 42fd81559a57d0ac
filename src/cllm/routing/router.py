"""Chooses a replica for each request.

A replica is an engine of a pool, a server of a cluster, or a simulated engine. The caller passes
the replicas that may be chosen: those that are alive and not draining.

A replica's load is the sum of its bookings that have not been released. The prefix table records
which replicas got which prefixes, not what they still have in their caches.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence

import msgspec

from cllm.routing.prefix_table import PrefixTable, list_bits

CROWDED = 2  # times the least load; above it, a replica gets no requests for its prefixes
# A replica with up to this many more requests than the least load is not crowded either. It is at
# most half of what the replica can run.
WINDOW = 8
# A prefix is copied to a further replica when its requests have paid for it, in tokens. A request
# that goes to a replica with r times the least load, both plus 1, pays r - 1 times COPY_TOKENS, and
# AHEAD times the prompt tokens that are booked there in excess of those at the least loaded ones.
COPY_TOKENS, AHEAD = 64, 0.5
MAX_PAYMENTS = 10_000  # prefixes whose payments are remembered
# Replicas with as many requests are equally good for an unknown prefix if their seconds differ by
# at most this factor, or by as little as this.
SIMILAR, SIMILAR_SECONDS = 1.25, 0.05
# Several fronts that choose the least loaded replica for a prefix that one of them knows would
# scatter it, so replicas with so many requests more get it, too, if others send SHARE of the load.
SLACK, SHARE = 4, 0.25
MASK = (1 << 64) - 1


class RoutingRequest(msgspec.Struct, frozen=True):
    """The properties of a request that matter for routing.

    The prompt has ``num_tokens``. ``blocks`` names each of its prefixes that ends a block, shortest
    first, such as ``name_prefixes`` or the hash_ids of a trace do. ``ends`` has the number of
    tokens up to the end of each block. The request takes ``num_seqs`` slots.
    """

    blocks: Sequence[int]
    ends: Sequence[int]
    num_tokens: int
    account: str = ""
    num_seqs: int = 1


class Candidate(msgspec.Struct, frozen=True):
    """A replica that may be chosen.

    ``number`` counts from 0; another replica may have it after ``Router.forget``. The replica runs
    ``max_num_seqs`` sequences at the same time. A new request would wait there for
    ``waiting_seconds`` because of requests that this router did not book. Computing a token of a
    prompt takes ``prompt_token_seconds``. ``identity`` is a number that all routers know the
    replica by; without it, ``number`` is.
    """

    number: int
    max_num_seqs: int
    waiting_seconds: float = 0.0
    prompt_token_seconds: float = 1.0
    identity: int | None = None


class BookedLoad:
    """The load of one replica.

    This router has booked ``num_seqs`` sequences there, with ``num_tokens`` prompt tokens that
    probably have to be computed, and so many requests of each of ``accounts``. The replica has
    ``num_others`` sequences besides: see ``Router.correct``.
    """

    __slots__ = ("accounts", "num_others", "num_seqs", "num_tokens")

    def __init__(self) -> None:
        self.num_seqs = 0
        self.num_tokens = 0
        self.num_others = 0
        self.accounts: Counter[str] = Counter()


class Booking:
    """The choice for one request: the number of the replica, and the prompt tokens that are booked
    there until ``finish_prompt`` or ``release``.
    """

    __slots__ = ("_account", "_booked", "_num_seqs", "num_tokens", "number")

    def __init__(
        self, number: int, booked: BookedLoad, num_tokens: int, account: str, num_seqs: int
    ) -> None:
        self.number = number
        self._num_seqs = num_seqs
        self.num_tokens = num_tokens
        self._booked: BookedLoad | None = booked
        self._account = account
        booked.num_seqs += num_seqs
        booked.num_tokens += num_tokens
        booked.accounts[account] += 1

    def finish_prompt(self) -> None:
        """Undo the booking of the prompt tokens, because the first token has come. Calling it again
        does nothing.
        """
        if self._booked is not None:
            self._booked.num_tokens -= self.num_tokens
            self.num_tokens = 0

    def release(self) -> None:
        """Undo the booking. Raises RuntimeError the second time."""
        if self._booked is None:
            raise RuntimeError("the booking has already been released")
        self.finish_prompt()
        booked, self._booked = self._booked, None
        booked.num_seqs -= self._num_seqs
        booked.accounts[self._account] -= 1
        if not booked.accounts[self._account]:
            del booked.accounts[self._account]


def is_crowded(load: int, least: int, replica: Candidate) -> bool:
    """Return whether a replica with ``load`` requests has many more than another one with
    ``least``, so that even requests for its prefixes go elsewhere.
    """
    window = max(1, min(WINDOW, replica.max_num_seqs // 2))
    return load > max(least + window, CROWDED * least)


class Router:
    """Books each request on a replica.

    The table has at most ``max_blocks`` prefixes; choose as many as fit into the caches of all
    replicas.
    """

    def __init__(self, max_blocks: int, seed: int = 0) -> None:
        self.prefixes = PrefixTable(max_blocks)
        self._rng = random.Random(seed)
        self._booked: defaultdict[int, BookedLoad] = defaultdict(
            BookedLoad
        )  # by number of the replica
        self._num_others = 0  # sum over all replicas
        # tokens that requests have paid for another copy of a prefix, by its last block
        self._paid: OrderedDict[int, float] = OrderedDict()

    def booked(self, number: int) -> BookedLoad:
        """Return the load of a replica."""
        return self._booked[number]

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Booking:
        """Book ``request`` on one of ``candidates``, of which there is at least one.

        The caller must release the booking when the request has ended, however it ended.
        """
        number = self._choose(request, candidates).number
        num_known = self.prefixes.add(request.blocks, number)
        num_tokens = request.num_tokens - (request.ends[num_known - 1] if num_known else 0)
        booked = self._booked[number]
        return Booking(number, booked, max(0, num_tokens), request.account, request.num_seqs)

    def correct(self, number: int, num_seqs: int) -> None:
        """Note that a replica has ``num_seqs`` sequences now, those of other routers among them."""
        booked = self._booked[number]
        self._num_others -= booked.num_others
        booked.num_others = max(0, num_seqs - booked.num_seqs)
        self._num_others += booked.num_others

    def forget(self, number: int) -> None:
        """Remove a replica that has ended. Its bookings can still be released."""
        if (booked := self._booked.pop(number, None)) is not None:
            self._num_others -= booked.num_others
        self.prefixes.forget(number)

    # --- choice ---------------------------------------------------------------------------------

    def _choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate:
        """Return the replica that has the longest prefix, among those that are not crowded.

        If none of them has any, or if another copy of it is due, return one of the least loaded
        ones. If all are full, return one with the fewest requests of the account, which comes first
        there, unless it has more than SLACK requests more than the least loaded one.
        """
        loads = [self._load(one) for one in candidates]
        least = min(loads)
        by_number: dict[int, tuple[Candidate, int]] = {}
        for holders, last in self.prefixes.list_holders(request.blocks):
            if not by_number:
                by_number = {
                    one.number: (one, load) for one, load in zip(candidates, loads, strict=True)
                }
            found = [
                (load, number)
                for number in list_bits(holders)
                for one, load in (by_number.get(number, NOBODY),)
                if one is not None and not is_crowded(load, least, one)
            ]
            if found:
                load = min(found)[0]
                homes = [by_number[number][0] for each, number in found if each == load]
                home = min(homes, key=lambda one: self._booked[one.number].num_tokens)
                if load > least and self._pay(request, last, home, candidates, loads):
                    break
                return home
        if least >= min(one.max_num_seqs for one in candidates):
            fair = [
                (self._booked[one.number].accounts[request.account], at)
                for at, one in enumerate(candidates)
                if loads[at] <= least + SLACK
            ]
            fewest = min(fair)[0]
            kept = [at for own, at in fair if own == fewest]
            candidates, loads = [candidates[at] for at in kept], [loads[at] for at in kept]
            least = min(loads)
        has_peers = self._num_others > SHARE * sum(loads)
        most = least + SLACK if has_peers else least
        return self._choose_new(
            request,
            [one for one, load in zip(candidates, loads, strict=True) if load <= most],
        )

    def _pay(
        self,
        request: RoutingRequest,
        last: int,
        home: Candidate,
        candidates: Sequence[Candidate],
        loads: list[int],
    ) -> bool:
        """Note that a request goes to ``home`` although others have fewer requests, because of the
        prefix that ends with its block ``last``. Return whether that prefix must be copied instead,
        because such requests have waited as long as computing it again takes.

        This is the rule of ski rental (Karlin et al., 1988): it costs at most twice as much as the
        best choice in hindsight. The fuller the replicas, the less is paid: when all are full,
        computing anything twice makes all requests wait.
        """
        least, total = min(loads), sum(loads)
        places = min(one.max_num_seqs for one in candidates)
        if least >= places:
            return False
        fewest = min(
            self._booked[one.number].num_tokens
            for one, load in zip(candidates, loads, strict=True)
            if load == least
        )
        ahead = max(0, self._booked[home.number].num_tokens - fewest)
        tokens = COPY_TOKENS * (self._load(home) - least) / (1 + least) + AHEAD * ahead
        # other fronts get as many such requests for each of their own
        tokens *= (1 - least / places) * total / max(1, total - self._num_others)
        block = request.blocks[last]
        paid = self._paid.pop(block, 0.0) + tokens
        if paid >= request.ends[last]:
            return True
        self._paid[block] = paid
        if len(self._paid) > MAX_PAYMENTS:
            self._paid.popitem(last=False)
        return False

    def _choose_new(self, request: RoutingRequest, candidates: list[Candidate]) -> Candidate:
        """Return the replica that gets an unknown prefix, of similarly loaded ``candidates``.

        Of those where its prompt would be computed soonest, all routers choose the same one, by the
        prefix's first block (rendezvous hashing: Thaler and Ravishankar, 1998).
        """
        seconds = [self._estimate_seconds(one, request.num_tokens) for one in candidates]
        most = max(SIMILAR * min(seconds), min(seconds) + SIMILAR_SECONDS)
        best = [one for one, each in zip(candidates, seconds, strict=True) if each <= most]
        if len(best) == 1:
            return best[0]
        if not request.blocks:
            return self._rng.choice(best)
        block = request.blocks[0] * 0x9E3779B97F4A7C15 & MASK
        return max(best, key=lambda one: mix(block ^ identify(one)))

    # --- load -----------------------------------------------------------------------------------

    def _load(self, replica: Candidate) -> int:
        booked = self._booked[replica.number]
        return booked.num_seqs + booked.num_others

    def _estimate_seconds(self, replica: Candidate, num_tokens: int) -> float:
        """Return the estimated time until a new prompt of ``num_tokens`` is computed."""
        num_tokens += self._booked[replica.number].num_tokens
        return replica.waiting_seconds + num_tokens * replica.prompt_token_seconds


NOBODY: tuple[Candidate | None, int] = (None, 0)


def identify(replica: Candidate) -> int:
    return replica.number if replica.identity is None else replica.identity


def mix(value: int) -> int:
    """Return a hash of 64 bits: the finalizer of SplitMix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31
