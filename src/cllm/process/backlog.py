"""What the engine has been given and has not answered yet: who is ahead of a newcomer, and for how long.

All of it is this process's own count of what it submitted and what came back, so no race with the engine can let one
request more in than a bound allows. Of the engine's statistics only the estimated seconds are used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cllm.core.output import Stats
from cllm.core.request import Priority, Request
from cllm.errors import CLLMError
from cllm.process.reservations import LONGEST_WAIT, Claim, QueueLoad, Reservations, load_of
from cllm.scheduler.policy import Policy

SHARE = 0.2  # of a new observation in a mean
WINDOW = 100  # sequences from which the rate is measured; ten times as many as run at once, if that is more
FIRST_GUESS = 1.0  # seconds that a sequence runs, until anything is known
OPEN_SHARE = 0.5  # of the queue, which reservations never close to newcomers


class QueueFull(CLLMError):
    """Too much is ahead of the request. bound: requests, tokens or seconds. retry_after: seconds until there will be
    room. ticket: claims the place that is reserved for that time; "" if none is.
    """

    def __init__(self, what: str, bound: str, retry_after: float, ticket: str = "") -> None:
        super().__init__(f"The queue is full: {what}; please retry later.")
        self.bound = bound
        self.retry_after = min(retry_after, LONGEST_WAIT)
        self.ticket = ticket


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait, at most; None is without limit. seconds: the estimated time to a request's first token."""

    requests: int | None = None
    tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """position: 0 runs at once, 1 is the next in the queue, and so on. seconds: estimated time to the first token."""

    position: int = 0
    seconds: float = 0.0


class Excess(NamedTuple):
    """A bound of the queue that is exceeded: by what, in words, and the seconds until there is room."""

    what: str
    bound: str
    seconds: float


NOTHING, NO_CLAIM = QueueLoad(), Claim()


class ServiceRate:
    """Measures the seconds from one free place in the engine to the next, while all places are taken.

    A sequence counts half at its first token and half at its end. So one that runs only partly within the measured
    time counts as one half on average, which is what it got of that time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds."""
        self._clock = clock
        self._capacity = 1
        self._seconds_full = self._num_served = 0.0  # for about the last WINDOW sequences
        self._full_since: float | None = None  # the time before has been counted
        self._was_full = False  # during the last step

    def set_load(self, num_seqs: int, capacity: int) -> None:
        """``num_seqs`` have been submitted and have not ended; ``capacity`` run at once."""
        self._count_time()
        self._capacity = capacity
        if num_seqs < capacity:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = self._clock()

    def step_ended(self) -> None:
        """The calls of ``served`` that follow report this step."""
        self._count_time()
        self._was_full = self._full_since is not None

    def served(self, num_seqs: float) -> None:
        if self._was_full:
            self._num_served += num_seqs

    @property
    def seconds_each(self) -> float:
        """0 until as many sequences have been served as run at once."""
        return self._seconds_full / self._num_served if self._num_served >= self._capacity else 0.0

    def _count_time(self) -> None:
        if self._full_since is None:
            return
        now, before = self._clock(), self._full_since
        share = min(1.0, max(WINDOW, 10 * self._capacity) / max(1.0, self._num_served))
        self._seconds_full = share * (self._seconds_full + now - before)
        self._num_served *= share
        self._full_since = now


class Backlog:
    """Counts requests from their submission to their first token, and sequences to their end.

    Only what is ahead of a newcomer counts against it: lower classes yield, and of the other keys of its class as much
    as a fair scheduler serves before it. So nobody is refused because somebody else has filled the queue.

    A rejected client gets a reservation for the time when there will be room, behind all earlier reservations.
    """

    def __init__(
        self,
        limits: QueueLimits,
        policy: Policy,
        weights: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``policy`` and ``weights`` are the scheduler's; of a policy that does not say how it sorts, everything is
        ahead. ``clock`` gives seconds.
        """
        self.reservations = Reservations(clock)
        self._limits = limits
        self._has_classes = getattr(policy, "has_classes", False)
        self._takes_turns = getattr(policy, "takes_turns", False)
        self._weights = weights
        self._stats = Stats()  # of the engine's last step
        self._rate = ServiceRate(clock)
        self.clear()

    def clear(self) -> None:
        """The engine holds nothing any longer."""
        self._pending: dict[Priority, dict[str, QueueLoad]] = {priority: {} for priority in Priority}  # by key
        self._num_seqs = dict.fromkeys(Priority, 0)
        self._count_seqs()

    # --- what happens ------------------------------------------------------------------------------------------------

    def submitted(self, request: Request) -> None:
        self._pending[request.priority].setdefault(request.key, QueueLoad()).add(load_of(request))
        self._num_seqs[request.priority] += request.params.n
        self._count_seqs()

    def begun(self, request: Request, *, is_first: bool = True) -> None:
        """The first token of a sequence of ``request`` has come; ``is_first``: of the first of them."""
        self._rate.served(1 / 2)
        if is_first:
            self.left_queue(request)

    def left_queue(self, request: Request) -> None:
        """The first token of ``request`` has come, or it has ended without one."""
        pending = self._pending[request.priority]
        pending[request.key].add(load_of(request), -1)
        if not pending[request.key].num_requests:
            del pending[request.key]

    def ended(self, request: Request, num_running: int = 1, num_waiting: int = 0) -> None:
        """``num_running`` sequences of ``request`` that had begun and ``num_waiting`` that had not are gone."""
        self._rate.served(num_running / 2)
        self._num_seqs[request.priority] -= num_running + num_waiting
        self._count_seqs()

    def _count_seqs(self) -> None:
        self._rate.set_load(sum(self._num_seqs.values()), self._capacity)

    def observe(self, stats: Stats) -> None:
        """Note the engine's statistics: when it is ready, and after each step, before the step's outputs."""
        self._stats = stats
        self._rate.step_ended()

    # --- what a client may expect ------------------------------------------------------------------------------------

    def place(self, request: Request) -> Place:
        """Where ``request``, not submitted yet, would stand."""
        excess = self._num_not_yielding(request) - self._capacity
        if excess < 0:
            return Place(0, self._seconds_to_compute(request))
        return self._place_behind(self._ahead(request, excess), request)

    def admit(self, requests: list[Request], claim: Claim = NO_CLAIM) -> Place:
        """As ``check``, and use up the client's reservation, if it has one."""
        place = self.check(requests, claim)
        if reservation := self.reservations.find(requests[0], claim):
            self.reservations.redeem(reservation)
        return place

    def check(self, requests: list[Request], claim: Claim = NO_CLAIM) -> Place:
        """The place of the first of ``requests``, which come from one client.

        Raises QueueFull if more would wait than may, and reserves a place for them. What can begin at once is never
        refused, whatever its size.
        """
        request = requests[0]
        excess = self._num_not_yielding(request) - self._capacity
        if excess < 0:
            return self.place(request)
        ahead = self._ahead(request, excess)
        reservation = self.reservations.find(request, claim)
        is_expected = reservation is not None and self.reservations.is_due(reservation)
        find_excess = self._excess_of_expected if is_expected else self._excess_of_newcomer
        exceeded = find_excess(requests, ahead)
        if exceeded is None:
            return self._place_behind(ahead, request)
        if reservation is None:
            last = self._excess(requests, self._with_returning(request, ahead))
            ticket, seconds = self.reservations.add(requests, claim, (last or exceeded).seconds)
        else:
            ticket, seconds = self.reservations.postpone(reservation, exceeded.seconds if is_expected else 0.0)
        raise QueueFull(exceeded.what, exceeded.bound, seconds, ticket)

    def _excess_of_expected(self, requests: list[Request], ahead: QueueLoad) -> Excess | None:
        """Clients that return on time may use the whole queue, and exceed it by what is served in one second (at least
        one sequence), because Retry-After has whole seconds, so that several return together.
        """
        num_served = 1 / min(1.0, self._seconds_each or FIRST_GUESS)
        return self._excess(requests, ahead.times(max(0.0, 1 - num_served / max(1.0, ahead.num_seqs))))

    def _excess_of_newcomer(self, requests: list[Request], ahead: QueueLoad) -> Excess | None:
        """Newcomers may use what is left of the queue by clients that will return before their turn, but at least
        OPEN_SHARE, so that no capacity is lost if those do not return.
        """
        exceeded = self._excess(requests, ahead)
        if exceeded is None and self._excess(requests, ahead, OPEN_SHARE):
            seconds = (ahead.num_seqs + 1) * self._seconds_each
            exceeded = self._excess(requests, self._with_returning(requests[0], ahead, seconds))
        return exceeded

    def _with_returning(self, request: Request, ahead: QueueLoad, seconds: float = math.inf) -> QueueLoad:
        """``ahead``, and the load of clients due within ``seconds`` that will be served before ``request``."""
        total = ahead.times(1.0)
        for priority in self._classes(request):
            share = 1.0
            if self._takes_turns and priority == request.priority:
                own = self._pending[priority].get(request.key, NOTHING).num_requests
                own += self.reservations.count(priority, request.key) + 1
                num_turns = own / self._weights.get(request.key, 1.0)
                share = self.reservations.share_in_turns(priority, num_turns, self._weights)
            total.add(self.reservations.load_within(priority, seconds), share)
        return total

    def _excess(self, requests: list[Request], ahead: QueueLoad, share: float = 1.0) -> Excess | None:
        """The first bound of the queue that ``requests`` behind ``ahead`` exceed, if only ``share`` of it may be used.

        None if there is no such bound.
        """
        limits, seconds = self._limits, (ahead.num_seqs + 1) * (self._seconds_each or FIRST_GUESS / self._capacity)
        num_requests = ahead.num_requests + len(requests)
        if limits.requests is not None and num_requests > share * limits.requests:
            wait = seconds * min(1.0, (num_requests - limits.requests) / (ahead.num_requests + 1))
            return Excess(f"{num_requests:.0f} requests would wait, {limits.requests} may", "requests", wait)
        num_tokens = ahead.num_tokens + sum(len(request.prompt) for request in requests)
        if limits.tokens is not None and num_tokens > share * limits.tokens:
            wait = seconds * min(1.0, (num_tokens - limits.tokens) / max(1.0, ahead.num_tokens))
            return Excess(f"{num_tokens:.0f} prompt tokens would wait, {limits.tokens} may", "tokens", wait)
        first = self._place_behind(ahead, requests[0]).seconds
        if limits.seconds is not None and first > share * limits.seconds:
            what = f"the first token would take {first:.1f} seconds, {limits.seconds:g} it may"
            return Excess(what, "seconds", first - limits.seconds)
        return None

    def _classes(self, request: Request) -> list[Priority]:
        """The classes that do not yield to ``request``."""
        return [priority for priority in Priority if priority <= request.priority or not self._has_classes]

    def _num_not_yielding(self, request: Request) -> int:
        return sum(self._num_seqs[priority] for priority in self._classes(request))

    def _ahead(self, request: Request, excess: int) -> QueueLoad:
        """Who waits and will probably be served before ``request``; ``excess``: sequences that find no place now."""
        classes = [(priority, self._pending[priority]) for priority in self._classes(request)]
        num_seqs = sum(load.num_seqs for _, loads in classes for load in loads.values())
        num_waiting = min(num_seqs, excess)  # the others have a place, and their prompts are being computed
        own = self._pending[request.priority].get(request.key, NOTHING).num_requests * num_waiting / max(1, num_seqs)
        turn = (own + 1) / self._weights.get(request.key, 1.0)
        num_requests = num_tokens = 0.0
        ahead_seqs = excess - num_waiting  # parked, or siblings of such as have begun
        for priority, loads in classes:
            takes_turns = self._takes_turns and priority == request.priority
            for key, load in loads.items():
                count = load.num_requests * num_waiting / num_seqs
                if takes_turns and key != request.key:
                    count = min(count, turn * self._weights.get(key, 1.0))
                num_requests += count
                ahead_seqs += load.num_seqs * count / load.num_requests
                num_tokens += load.num_tokens * count / load.num_requests
        # a sum of shares is a little off where it should be whole, and a bound is to be met exactly
        return QueueLoad(round(num_requests, 6), round(ahead_seqs, 6), round(num_tokens, 6))

    def _place_behind(self, ahead: QueueLoad, request: Request) -> Place:
        seconds = (ahead.num_seqs + 1) * self._seconds_each + self._seconds_to_compute(request)
        return Place(math.ceil(ahead.num_requests) + 1, seconds)

    @property
    def _capacity(self) -> int:
        """The number of sequences that run at once."""
        return max(1, self._stats.num_seq_ids)

    @property
    def _seconds_each(self) -> float:
        """Seconds from one free place to the next while all are taken: measured, or before that the engine's estimate,
        or 0.
        """
        return self._rate.seconds_each or self._stats.place_seconds

    def _seconds_to_compute(self, request: Request) -> float:
        """What the first token takes once the prompt is being computed: a step, and what is probably not cached."""
        return self._stats.step_seconds + len(request.prompt) * self._stats.prompt_token_seconds


def mean(before: float, value: float) -> float:
    return before + SHARE * (value - before) if before else value
