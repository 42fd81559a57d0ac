"""What the engine has been given and has not answered yet: who is ahead of a newcomer, and for how long.

All of it is this process's own count of what it submitted and what came back, so no race with the engine can let one
request more in than a bound allows. Of the engine's statistics only the estimated seconds are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cllm.core.output import Stats
from cllm.core.request import Priority, Request
from cllm.errors import CLLMError
from cllm.scheduler.policy import Policy

SHARE = 0.2  # of a new observation in a mean


class QueueFull(CLLMError):
    """Too much is ahead of the request. bound: requests, tokens or seconds. retry_after: seconds until there may be
    room, by what serving has taken lately.
    """

    def __init__(self, what: str, bound: str, retry_after: float) -> None:
        super().__init__(f"The queue is full: {what}; please retry later.")
        self.bound = bound
        self.retry_after = retry_after


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


@dataclass(slots=True)
class Load:
    """Some requests, or the part of them that counts."""

    num_requests: float = 0
    num_seqs: float = 0
    num_tokens: float = 0

    def add(self, request: Request, times: int) -> None:
        self.num_requests += times
        self.num_seqs += times * request.params.n
        self.num_tokens += times * len(request.prompt)


NOTHING = Load()


class Backlog:
    """Counts requests from their submission to their first token, and sequences to their end.

    Only what is ahead of a newcomer counts against it: lower classes yield, and of the other keys of its class as much
    as a fair scheduler serves before it. So nobody is refused because somebody else has filled the queue.
    """

    def __init__(self, limits: QueueLimits, policy: Policy, weights: Mapping[str, float]) -> None:
        """``policy`` and ``weights`` are the scheduler's; of a policy that does not say how it sorts, everything is
        ahead.
        """
        self._limits = limits
        self._has_classes = getattr(policy, "has_classes", False)
        self._takes_turns = getattr(policy, "takes_turns", False)
        self._weights = weights
        self._stats = Stats()  # of the engine's last step
        self._seconds_held = 0.0  # that a sequence keeps its place in the engine
        self._seconds_each = 0.0  # for one of those who wait, as the engine says
        self.clear()

    def clear(self) -> None:
        """The engine holds nothing any longer."""
        self._pending: dict[Priority, dict[str, Load]] = {priority: {} for priority in Priority}  # by key
        self._num_seqs = dict.fromkeys(Priority, 0)

    # --- what happens ------------------------------------------------------------------------------------------------

    def submitted(self, request: Request) -> None:
        self._pending[request.priority].setdefault(request.key, Load()).add(request, 1)
        self._num_seqs[request.priority] += request.params.n

    def begun(self, request: Request) -> None:
        """The first token of ``request`` has come, or it has ended without one."""
        pending = self._pending[request.priority]
        pending[request.key].add(request, -1)
        if not pending[request.key].num_requests:
            del pending[request.key]

    def ended(self, request: Request, num_seqs: int = 1) -> None:
        self._num_seqs[request.priority] -= num_seqs

    def ran(self, seconds: float) -> None:
        """A sequence has kept its place in the engine for ``seconds``."""
        self._seconds_held = mean(self._seconds_held, seconds)

    def observe(self, stats: Stats) -> None:
        self._stats = stats
        if stats.num_waiting:
            self._seconds_each = stats.waiting_seconds / stats.num_waiting

    # --- what a newcomer may expect ----------------------------------------------------------------------------------

    def place(self, request: Request, capacity: int) -> Place:
        """Where ``request``, not submitted yet, would stand if ``capacity`` sequences run at once."""
        excess = self._num_not_yielding(request) - capacity
        if excess < 0:
            return Place(0, self._seconds_to_compute(request))
        return self._place_behind(self._ahead(request, excess), request, capacity)

    def admit(self, requests: list[Request], capacity: int) -> Place:
        """The place of the first of ``requests``, of one client. Raises QueueFull if they are more than may wait.

        What can begin at once is never refused, whatever its size.
        """
        request, limits = requests[0], self._limits
        excess = self._num_not_yielding(request) - capacity
        if excess < 0:
            return self.place(request, capacity)
        ahead = self._ahead(request, excess)
        place = self._place_behind(ahead, request, capacity)
        num_requests = ahead.num_requests + len(requests)
        if limits.requests is not None and num_requests > limits.requests:
            share = (num_requests - limits.requests) / (ahead.num_requests + 1)
            what = f"{num_requests:.0f} requests would wait, {limits.requests} may"
            raise QueueFull(what, "requests", min(1.0, share) * place.seconds)
        num_tokens = ahead.num_tokens + sum(len(request.prompt) for request in requests)
        if limits.tokens is not None and num_tokens > limits.tokens:
            share = (num_tokens - limits.tokens) / max(1.0, ahead.num_tokens)
            what = f"{num_tokens:.0f} prompt tokens would wait, {limits.tokens} may"
            raise QueueFull(what, "tokens", min(1.0, share) * place.seconds)
        if limits.seconds is not None and place.seconds > limits.seconds:
            what = f"the first token would take {place.seconds:.1f} seconds, {limits.seconds:g} it may"
            raise QueueFull(what, "seconds", place.seconds - limits.seconds)
        return place

    def _classes(self, request: Request) -> list[Priority]:
        """Those that do not make way for ``request``."""
        return [priority for priority in Priority if priority <= request.priority or not self._has_classes]

    def _num_not_yielding(self, request: Request) -> int:
        return sum(self._num_seqs[priority] for priority in self._classes(request))

    def _ahead(self, request: Request, excess: int) -> Load:
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
        return Load(round(num_requests, 6), round(ahead_seqs, 6), round(num_tokens, 6))

    def _place_behind(self, ahead: Load, request: Request, capacity: int) -> Place:
        seconds = (ahead.num_seqs + 1) * self._seconds_per_seq(capacity) + self._seconds_to_compute(request)
        return Place(math.ceil(ahead.num_requests) + 1, seconds)

    def _seconds_per_seq(self, capacity: int) -> float:
        """From one free place to the next while all are taken: the engine's word, if it ever had a queue; else, by
        Little's law, what was measured here.
        """
        return self._seconds_each or self._seconds_held / max(1, capacity)

    def _seconds_to_compute(self, request: Request) -> float:
        """What the first token takes once the prompt is being computed: a step, and what is probably not cached."""
        return self._stats.step_seconds + len(request.prompt) * self._stats.prompt_token_seconds


def mean(before: float, value: float) -> float:
    return before + SHARE * (value - before) if before else value
