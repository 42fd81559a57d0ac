"""Counts the unanswered requests in the engine, and estimates how long a new request would wait.

This process counts what it submits and what the engine returns, so no race with the engine can
admit more requests than a limit allows. Of the engine's statistics, only the number of slots and
the estimated seconds are used.
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
from cllm.process.queue_load import AccountLoads, QueueLoad
from cllm.process.reservations import (
    LONGEST_WAIT,
    Claim,
    Newcomer,
    Reservations,
    describe_newcomer,
)
from cllm.scheduler.policy import Policy

SHARE = 0.2  # weight of a new observation in a running mean
# sequences over which the rate is measured; ten times the number of slots if that is more
WINDOW = 100
# the latest ones, which count if they differ from those by a factor of CHANGE, because the traffic
# has changed; twice the number of slots if that is more
LATEST_WINDOW = 10
CHANGE = 2.0
MIN_ENDED = 5  # sequences, before which no request is rejected because of an estimated wait
FIRST_GUESS = 1.0  # seconds that a sequence is assumed to run until something is measured
OPEN_SHARE = 0.5  # share of the queue that stays open to newcomers despite reservations


class QueueFull(CLLMError):
    """Too much work is ahead of the request in the queue.

    ``bound`` names the exceeded limit: requests, tokens or seconds. There will be room after
    ``retry_after`` seconds. ``ticket`` claims the place that is reserved for that time; "" means
    that no place is reserved.
    """

    def __init__(self, what: str, bound: str, retry_after: float, ticket: str = "") -> None:
        super().__init__(f"The queue is full: {what}; please retry later.")
        self.bound = bound
        self.retry_after = min(retry_after, LONGEST_WAIT)
        self.ticket = ticket


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue; None means no limit.

    ``seconds`` limits the estimated time to a request's first token, once MIN_ENDED sequences have
    ended.
    """

    requests: int | None = None
    tokens: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A queue position: 0 runs immediately, 1 is the next to run, and so on.

    ``seconds`` is the estimated time to the first token.
    """

    position: int = 0
    seconds: float = 0.0


class Excess(NamedTuple):
    """An exceeded limit of the queue: a description, the limit's name, and the seconds until there
    is room.
    """

    what: str
    bound: str
    seconds: float


NO_CLAIM = Claim()


class ServedTime:
    """The seconds for each sequence that was served, over about the last ones."""

    def __init__(self) -> None:
        self.seconds = self.num_served = 0.0

    def add_seconds(self, seconds: float, window: int) -> None:
        """Add a time, and forget what is older than about ``window`` sequences."""
        share = min(1.0, window / max(1.0, self.num_served))
        self.seconds = share * (self.seconds + seconds)
        self.num_served *= share

    @property
    def seconds_each(self) -> float:
        return self.seconds / self.num_served


class ServiceRate:
    """Measures the seconds from one free slot in the engine to the next, while all slots are taken.

    A sequence counts half at its first token and half at its end. So a sequence that runs only
    partly within the measured time counts one half on average, which is its share of that time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` returns seconds."""
        self._clock = clock
        self._capacity = 1
        self._usual, self._latest = ServedTime(), ServedTime()
        self._full_since: float | None = None  # time before this has been counted
        self._was_full = False  # whether all slots were taken during the last step
        self._is_paused = False

    def set_load(self, num_seqs: int, capacity: int) -> None:
        """Note that ``num_seqs`` submitted sequences have not ended, and that ``capacity`` of them
        can run.
        """
        self._count_time()
        self._capacity = capacity
        if num_seqs < capacity or self._is_paused:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = self._clock()

    def pause(self) -> None:
        """Note that nothing is served until the next step, so that this time does not count."""
        self._count_time()
        self._full_since, self._is_paused = None, True

    def record_step(self) -> None:
        """Note the end of a step. The following calls of ``count_served`` report this step."""
        self._is_paused = False
        self._count_time()
        self._was_full = self._full_since is not None

    def count_served(self, num_seqs: float) -> None:
        if self._was_full:
            self._usual.num_served += num_seqs
            self._latest.num_served += num_seqs

    @property
    def seconds_each(self) -> float:
        """Seconds from one free slot to the next; 0 until as many sequences have been served as
        there are slots.
        """
        if self._usual.num_served < self._capacity:
            return 0.0
        usual, latest = self._usual.seconds_each, self._latest.seconds_each
        return usual if usual / CHANGE <= latest <= CHANGE * usual else latest

    def _count_time(self) -> None:
        if self._full_since is None:
            return
        now, before = self._clock(), self._full_since
        self._usual.add_seconds(now - before, max(WINDOW, 10 * self._capacity))
        self._latest.add_seconds(now - before, max(LATEST_WINDOW, 2 * self._capacity))
        self._full_since = now


class Backlog:
    """Counts requests from their submission to their first token, and sequences to their end.

    Only requests ahead of a newcomer count against it. Lower classes yield. Of the other accounts
    in its class, only the requests that a fair scheduler serves first count. So no client is
    rejected because another one has filled the queue.

    A rejected client gets a reservation, behind all earlier reservations, for the time when there
    will be room.
    """

    def __init__(
        self,
        limits: QueueLimits,
        policy: Policy,
        weights: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``policy`` and ``weights`` are the scheduler's; ``clock`` returns seconds.

        If a policy does not declare how it sorts, everything in the queue counts as ahead of a
        newcomer.
        """
        self.reservations = Reservations(clock)
        self._limits = limits
        self._has_classes = getattr(policy, "has_classes", False)
        self._takes_turns = getattr(policy, "takes_turns", False)
        self._weights = weights
        self._stats = Stats()  # of the engine's last step
        self._rate = ServiceRate(clock)
        self._num_ended = 0  # sequences that had started
        self.clear()

    def clear(self) -> None:
        """Forget all requests, because the engine has none of them any more."""
        self._pending = {priority: AccountLoads(self._weights) for priority in Priority}
        self._num_seqs = dict.fromkeys(Priority, 0)
        self._count_seqs()

    # --- events ----------------------------------------------------------------------------------

    def record_submission(self, request: Request) -> None:
        self._pending[request.priority].add(request)
        self._num_seqs[request.priority] += request.params.n
        self._count_seqs()

    def record_first_token(self, request: Request, *, is_first: bool = True) -> None:
        """Note the first token of a sequence of ``request``. ``is_first`` says that no other
        sequence of it has started.
        """
        self._rate.count_served(1 / 2)
        if is_first:
            self.record_departure(request)

    def record_departure(self, request: Request) -> None:
        """Note that ``request`` has its first token, or has ended without one."""
        self._pending[request.priority].add(request, -1)

    def record_end(self, request: Request, num_running: int = 1, num_waiting: int = 0) -> None:
        """Note the end of ``num_running`` sequences of ``request`` that had started and
        ``num_waiting`` that had not.
        """
        self._num_ended += num_running
        self._rate.count_served(num_running / 2)
        self._num_seqs[request.priority] -= num_running + num_waiting
        self._count_seqs()

    def _count_seqs(self) -> None:
        self._rate.set_load(sum(self._num_seqs.values()), self._capacity)

    def observe(self, stats: Stats) -> None:
        """Note the engine's statistics.

        Call it when the engine is ready, and after each step, before its outputs.
        """
        self._stats = stats
        self._rate.record_step()
        self._count_seqs()

    def pause(self) -> None:
        """Note that there is no engine until the next call of ``observe``."""
        self._rate.pause()

    def list_pending(self) -> list[tuple[Priority, str, QueueLoad]]:
        """Return the requests without a first token, by class and account."""
        return [
            (priority, account, load)
            for priority, loads in self._pending.items()
            for account, load in loads.by_account.items()
        ]

    def note_weights(self) -> None:
        """Note that the weights have changed."""
        for loads in self._pending.values():
            loads.note_weights()

    # --- admission -------------------------------------------------------------------------------

    def estimate_position(self, request: Request) -> QueuePosition:
        """Return the queue position that ``request``, not submitted yet, would get."""
        newcomer = describe_newcomer(request)
        excess = self._count_not_yielding(newcomer) - self._capacity
        if excess < 0:
            return QueuePosition(0, self._seconds_to_compute(newcomer))
        return self._estimate_behind(self._estimate_load_ahead(newcomer, excess), newcomer)

    def admit(self, requests: list[Request], claim: Claim = NO_CLAIM) -> QueuePosition:
        """Return the queue position of the first of ``requests``, which come from one client. Use
        up the client's reservation, if it has one.

        Raises what ``check`` raises.
        """
        newcomer = describe_newcomer(*requests)
        queue_position = self.check(newcomer, claim)
        if reservation := self.reservations.find(newcomer, claim):
            self.reservations.redeem(reservation)
        return queue_position

    def check(self, newcomer: Newcomer, claim: Claim = NO_CLAIM) -> QueuePosition:
        """Return the queue position that the first request of ``newcomer`` would get now.

        Raises QueueFull if a limit would be exceeded, and reserves a place. Requests that can start
        immediately are never rejected, whatever their size.
        """
        excess = self._count_not_yielding(newcomer) - self._capacity
        if excess < 0:
            return QueuePosition(0, self._seconds_to_compute(newcomer))
        ahead = self._estimate_load_ahead(newcomer, excess)
        reservation = self.reservations.find(newcomer, claim)
        is_expected = reservation is not None and self.reservations.is_due(reservation)
        find_excess = self._check_returning if is_expected else self._check_newcomer
        exceeded = find_excess(newcomer, ahead)
        if exceeded is None:
            return self._estimate_behind(ahead, newcomer)
        if reservation is None:
            last = self._find_excess(newcomer, self._add_returning(newcomer, ahead))
            ticket, seconds = self.reservations.add(newcomer, claim, (last or exceeded).seconds)
        else:
            ticket, seconds = self.reservations.postpone(
                reservation, exceeded.seconds if is_expected else 0.0
            )
        raise QueueFull(exceeded.what, exceeded.bound, seconds, ticket)

    def _check_returning(self, newcomer: Newcomer, ahead: QueueLoad) -> Excess | None:
        """Return the limit that a client exceeds that returns on time, if any.

        Such clients may use the whole queue. They may exceed it by the number of sequences that are
        served in one second (at least one), because Retry-After has whole seconds, so several
        clients return together.
        """
        num_served = 1 / min(1.0, self._seconds_each or FIRST_GUESS)
        return self._find_excess(
            newcomer, ahead.scale(max(0.0, 1 - num_served / max(1.0, ahead.num_seqs)))
        )

    def _check_newcomer(self, newcomer: Newcomer, ahead: QueueLoad) -> Excess | None:
        """Return the limit that ``newcomer`` exceeds, if any.

        Clients that will return before the newcomer's turn keep their part of the queue. Newcomers
        may use the rest, but at least OPEN_SHARE, so that no capacity is lost if those clients do
        not return.
        """
        exceeded = self._find_excess(newcomer, ahead)
        if exceeded is None and self._find_excess(newcomer, ahead, OPEN_SHARE):
            seconds = (ahead.num_seqs + 1) * self._seconds_each
            exceeded = self._find_excess(newcomer, self._add_returning(newcomer, ahead, seconds))
        return exceeded

    def _add_returning(
        self, newcomer: Newcomer, ahead: QueueLoad, seconds: float = math.inf
    ) -> QueueLoad:
        """Return ``ahead`` plus the load of clients due within ``seconds`` that will be served
        before ``newcomer``.
        """
        total = ahead.scale(1.0)
        for priority in self._list_classes(newcomer):
            share = 1.0
            if self._takes_turns and priority == newcomer.priority:
                own = self._pending[priority].get(newcomer.account).num_requests
                own += self.reservations.count(priority, newcomer.account) + 1
                num_turns = own / self._weights.get(newcomer.account, 1.0)
                share = self.reservations.compute_share_of_turns(priority, num_turns, self._weights)
            total.add(self.reservations.sum_load_within(priority, seconds), share)
        return total

    def _find_excess(
        self, newcomer: Newcomer, ahead: QueueLoad, share: float = 1.0
    ) -> Excess | None:
        """Return the first limit that ``newcomer`` exceeds behind ``ahead``, or None.

        The newcomer may use ``share`` of the queue.
        """
        limits, seconds = (
            self._limits,
            (ahead.num_seqs + 1) * (self._seconds_each or FIRST_GUESS / self._capacity),
        )
        num_requests = ahead.num_requests + newcomer.load.num_requests
        if limits.requests is not None and num_requests > share * limits.requests:
            wait = seconds * min(1.0, (num_requests - limits.requests) / (ahead.num_requests + 1))
            return Excess(
                f"{num_requests:.0f} requests would wait (limit {limits.requests})",
                "requests",
                wait,
            )
        num_tokens = ahead.num_tokens + newcomer.load.num_tokens
        if limits.tokens is not None and num_tokens > share * limits.tokens:
            wait = seconds * min(1.0, (num_tokens - limits.tokens) / max(1.0, ahead.num_tokens))
            return Excess(
                f"{num_tokens:.0f} prompt tokens would wait (limit {limits.tokens})", "tokens", wait
            )
        first = self._estimate_behind(ahead, newcomer).seconds
        # before some sequences have ended, nobody knows how long answers are
        is_known = self._num_ended >= MIN_ENDED
        if limits.seconds is not None and is_known and first > share * limits.seconds:
            what = f"the first token would take {first:.1f} seconds (limit {limits.seconds:g})"
            return Excess(what, "seconds", first - limits.seconds)
        return None

    def _list_classes(self, newcomer: Newcomer) -> list[Priority]:
        """Return the classes that do not yield to ``newcomer``."""
        return [
            priority
            for priority in Priority
            if priority <= newcomer.priority or not self._has_classes
        ]

    def _count_not_yielding(self, newcomer: Newcomer) -> int:
        return sum(self._num_seqs[priority] for priority in self._list_classes(newcomer))

    def _estimate_load_ahead(self, newcomer: Newcomer, excess: int) -> QueueLoad:
        """Return the waiting load that will probably be served before ``newcomer``.

        ``excess`` is the number of sequences for which there is no slot now.
        """
        classes = [(priority, self._pending[priority]) for priority in self._list_classes(newcomer)]
        num_seqs = sum(loads.total.num_seqs for _, loads in classes)
        # the others have a slot, and their prompts are being computed
        num_waiting = min(num_seqs, excess)
        share = num_waiting / max(1, num_seqs)
        own = self._pending[newcomer.priority].get(newcomer.account).num_requests * share
        num_turns = (own + 1) / self._weights.get(newcomer.account, 1.0)
        # parked sequences, or siblings of started ones
        ahead = QueueLoad(num_seqs=excess - num_waiting)
        for priority, loads in classes:
            if self._takes_turns and priority == newcomer.priority:
                ahead.add(loads.share_turns(newcomer.account, num_turns, share))
            else:
                ahead.add(loads.total, share)
        # sums of shares have rounding errors, but limits must be met exactly
        return QueueLoad(
            round(ahead.num_requests, 6), round(ahead.num_seqs, 6), round(ahead.num_tokens, 6)
        )

    def _estimate_behind(self, ahead: QueueLoad, newcomer: Newcomer) -> QueuePosition:
        seconds = (ahead.num_seqs + 1) * self._seconds_each + self._seconds_to_compute(newcomer)
        return QueuePosition(math.ceil(ahead.num_requests) + 1, seconds)

    @property
    def _capacity(self) -> int:
        """The number of slots: sequences that can run at the same time."""
        return max(1, self._stats.num_seq_ids)

    @property
    def _seconds_each(self) -> float:
        """Seconds from one free slot to the next while all are taken: measured, else the engine's
        estimate, else 0.
        """
        return self._rate.seconds_each or self._stats.slot_seconds

    def _seconds_to_compute(self, newcomer: Newcomer) -> float:
        """Return the seconds from the start of ``newcomer``'s first request to its first token: one
        step, plus the time for prompt tokens that are not cached.
        """
        stats = self._stats
        return stats.step_seconds + newcomer.num_prompt_tokens * stats.prompt_token_seconds
