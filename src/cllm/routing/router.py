"""Chooses a replica for each request.

A replica is an engine of a pool, a server of a cluster, or a simulated engine. The caller passes
the replicas that may be chosen: those that are alive and not draining.

A replica's load is the sum of its bookings that have not been released. The prefix table records
which replicas got which prefixes, not what they still have in their caches.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

Routing = Literal["least-loaded", "prefix", "prefix-window", "round-robin"]

CROWDED = 2  # times the least load; above it, a replica gets no requests for its prefixes
# More requests than the least load are not crowded either, in prefix-window; but at most half of
# what a replica can run.
WINDOW = 8
# Replicas with as many requests are equally good for an unknown prefix if their seconds differ by
# at most this factor, or by as little as this.
SIMILAR, SIMILAR_SECONDS = 1.25, 0.05
# Several fronts that choose the least loaded replica for a prefix that one of them knows would
# scatter it, so replicas with so many requests more get it, too, if others send SHARE of the load.
SLACK, SHARE = 4, 0.25
MASK = (1 << 64) - 1
MAX_CLOSED = 256  # marks in the table that no block gets any longer
MAX_READINGS = 10_000  # sets of marks whose replicas are remembered


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
    replicas. Each prefix has marks. A mark means the replica that gives it to its prefixes, until
    that replica ends or has an heir; then the mark is closed, which means the heir too, or nothing.
    So a replica ends without a visit to a million prefixes.
    """

    def __init__(self, routing: Routing, max_blocks: int, seed: int = 0) -> None:
        self._choose = {
            "least-loaded": self._choose_least_loaded,
            "prefix": self._choose_by_prefix,
            "prefix-window": self._choose_in_window,
            "round-robin": self._choose_next,
        }[routing]
        self.max_blocks = max_blocks
        self._rng = random.Random(seed)
        self._turn = -1
        self._booked: defaultdict[int, BookedLoad] = defaultdict(
            BookedLoad
        )  # by number of the replica
        self._num_others = 0  # sum over all replicas
        # Block -> bits of its marks, least recently used first. An entry with the value ~mark comes
        # after all blocks that may still have this mark, which is closed.
        self._table: OrderedDict[object, int] = OrderedDict()
        self._meanings: list[int] = []  # bits of the numbers of replicas, by mark
        self._known: defaultdict[int, int] = defaultdict(int)  # number -> bits of its marks
        self._marks: dict[int, int] = {}  # number -> the mark that its prefixes get
        self._closed = 0  # bits of marks
        self._free: list[int] = []  # marks that no block has
        self._readings: dict[int, int] = {}  # bits of marks -> bits of the replicas that they mean

    @property
    def num_blocks(self) -> int:
        """The number of prefixes in the table."""
        return len(self._table) - self._closed.bit_count()

    def booked(self, number: int) -> BookedLoad:
        """Return the load of a replica."""
        return self._booked[number]

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Booking:
        """Book ``request`` on one of ``candidates``, of which there is at least one.

        The caller must release the booking when the request has ended, however it ended.
        """
        number = self._choose(request, candidates).number
        num_known = self._remember(request.blocks, number)
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
        self.forget_prefixes(number)

    def forget_prefixes(self, number: int) -> None:
        """Forget which prefixes a replica got, because its cache is empty."""
        for mark in list_bits(self._known.pop(number, 0)):
            self._meanings[mark] &= ~(1 << number)
        self._close_mark(number)

    def inherit(self, number: int, heir: int) -> None:
        """Record that the replica ``heir`` gets all prefixes of the replica ``number``, too."""
        marks = self._known[number]
        for mark in list_bits(marks):
            self._meanings[mark] |= 1 << heir
        self._known[heir] |= marks
        self._close_mark(number)  # what it gets from now on is its own

    # --- rules ----------------------------------------------------------------------------------

    def _choose_next(self, _: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate:
        """Return each replica in turn."""
        self._turn = (self._turn + 1) % len(candidates)
        return candidates[self._turn]

    def _choose_least_loaded(self, _: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate:
        """Return a random one of the replicas with the fewest requests."""
        least = self._least(candidates)
        return self._rng.choice([one for one in candidates if self._load(one) == least])

    def _choose_by_prefix(
        self, request: RoutingRequest, candidates: Sequence[Candidate]
    ) -> Candidate:
        """Return the replica that knows the longest prefix, unless it is crowded."""
        offered = sum(1 << one.number for one in candidates)
        longest = next(
            (bits for bits in reversed(self._list_holders(request.blocks)) if bits & offered), 0
        )
        homes = [one for one in candidates if longest >> one.number & 1]
        best = min(homes, key=self._load, default=None)
        if best is None or self._load(best) > CROWDED * max(self._least(candidates), 1):
            return self._choose_least_loaded(request, candidates)
        return best

    def _choose_in_window(
        self, request: RoutingRequest, candidates: Sequence[Candidate]
    ) -> Candidate:
        """Return the replica that knows the longest prefix, among those that are not crowded.

        If none of them knows any, return one of the least loaded ones, which knows the prefix from
        then on; if all are full, one where no other account waits, unless it has more than SLACK
        requests more.
        """
        loads = [self._load(one) for one in candidates]
        least = min(loads)
        by_number: dict[int, tuple[Candidate, int]] = {}
        seen = 0
        for holders in reversed(self._list_holders(request.blocks)):
            if not by_number:
                by_number = {
                    one.number: (one, load) for one, load in zip(candidates, loads, strict=True)
                }
            found = [
                (load, number)
                for number in list_bits(holders & ~seen)
                for one, load in (by_number.get(number, NOBODY),)
                if one is not None and not is_crowded(load, least, one)
            ]
            if found:
                return by_number[min(found)[1]][0]
            seen |= holders
        if least >= min(one.max_num_seqs for one in candidates):
            account, most = request.account, least + SLACK
            calm = [
                at
                for at, one in enumerate(candidates)
                if loads[at] <= most and not self._others_wait(one, account)
            ]
            if calm:
                candidates, loads = [candidates[at] for at in calm], [loads[at] for at in calm]
                least = min(loads)
        has_peers = self._num_others > SHARE * sum(loads)
        most = least + SLACK if has_peers else least
        return self._choose_new(
            request,
            [one for one, load in zip(candidates, loads, strict=True) if load <= most],
        )

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

    def _least(self, candidates: Sequence[Candidate]) -> int:
        return min(map(self._load, candidates))

    def _estimate_seconds(self, replica: Candidate, num_tokens: int) -> float:
        """Return the estimated time until a new prompt of ``num_tokens`` is computed."""
        num_tokens += self._booked[replica.number].num_tokens
        return replica.waiting_seconds + num_tokens * replica.prompt_token_seconds

    def _others_wait(self, replica: Candidate, account: str) -> bool:
        booked = self._booked[replica.number]
        if booked.num_seqs + booked.num_others <= replica.max_num_seqs:
            return False
        return booked.num_others > 0 or bool(booked.accounts.keys() - {account})

    # --- prefixes -------------------------------------------------------------------------------

    def _list_holders(self, blocks: Sequence[int]) -> list[int]:
        """Return the bits of the replicas that know the first blocks: those that know the first
        one, then those that know more, each time fewer.
        """
        holders: list[int] = []
        bits, last = -1, -1
        for block in blocks:
            marks = self._table.get(block, 0)
            if marks == last:
                continue
            last = marks
            known = bits & self._read_marks(marks)
            if known != bits:
                if not known:
                    break
                holders.append(known)
                bits = known
        return holders

    def _remember(self, blocks: Sequence[int], number: int) -> int:
        """Record that a replica gets ``blocks``. Return how many of the first ones it knew.

        The last block becomes the oldest of them, because without a prompt's first block the others
        cannot be found.
        """
        if not blocks:
            return 0
        table, known = self._table, self._known[number]
        knows = [bool(table.get(block, 0) & known) for block in blocks]
        bit = 1 << self._find_mark(number)
        for block in reversed(blocks):
            marks = table.pop(block, 0)
            if marks & self._closed:
                marks = self._renew_marks(marks)
            table[block] = marks | bit
        while len(table) > self.max_blocks:
            self._drop_oldest()
        if self._closed.bit_count() > MAX_CLOSED:
            for _ in range(min(8 * len(blocks), len(table) - len(blocks))):
                self._drop_oldest()
        return knows.index(False) if False in knows else len(knows)

    def _drop_oldest(self) -> None:
        _, marks = self._table.popitem(last=False)
        if marks < 0:  # no block has the mark ~marks any longer
            self._closed &= ~(1 << ~marks)
            for number in list_bits(self._meanings[~marks]):
                self._known[number] &= ~(1 << ~marks)
            self._free.append(~marks)

    # --- marks ----------------------------------------------------------------------------------

    def _find_mark(self, number: int) -> int:
        """Return the mark that the prefixes of a replica get."""
        mark = self._marks.get(number)
        if mark is None:
            if not self._free:
                self._free.append(len(self._meanings))
                self._meanings.append(0)
            mark = self._marks[number] = self._free.pop()
            self._meanings[mark] = 1 << number
            self._known[number] |= 1 << mark
            self._readings.clear()
        return mark

    def _close_mark(self, number: int) -> None:
        """Give no further prefix the mark of a replica."""
        mark = self._marks.pop(number, None)
        if mark is not None:
            self._closed |= 1 << mark
            self._table[object()] = ~mark
        self._readings.clear()

    def _renew_marks(self, marks: int) -> int:
        """Return marks that mean the same replicas and are not closed."""
        numbers = list_bits(self._read_marks(marks))
        return sum(1 << self._find_mark(number) for number in numbers)

    def _read_marks(self, marks: int) -> int:
        """Return the bits of the replicas that ``marks`` mean."""
        numbers = self._readings.get(marks)
        if numbers is None:
            numbers = 0
            for mark in list_bits(marks):
                numbers |= self._meanings[mark]
            if len(self._readings) >= MAX_READINGS:
                self._readings.clear()
            self._readings[marks] = numbers
        return numbers


NOBODY: tuple[Candidate | None, int] = (None, 0)


def list_bits(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are 1, lowest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def identify(replica: Candidate) -> int:
    return replica.number if replica.identity is None else replica.identity


def mix(value: int) -> int:
    """Return a hash of 64 bits: the finalizer of SplitMix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def name_prefixes(salt: bytes, parts: Iterable[bytes], size: int, most: int = 256) -> list[int]:
    """Return names for the prefixes of a prompt, at most ``most``, shortest first.

    Prefixes end after every ``size`` bytes of a part and at its end. A part is all tokens as 32-bit
    numbers, or one message of a conversation. Prompts have a name in common only if they are equal
    up to there and have equal salts.
    """
    names: list[int] = []
    name = hashlib.blake2b(salt, digest_size=8).digest()
    for part in parts:
        for start in range(0, len(part), size):
            if len(names) == most:
                return names
            name = hashlib.blake2b(name + part[start : start + size], digest_size=8).digest()
            names.append(int.from_bytes(name))
    return names
