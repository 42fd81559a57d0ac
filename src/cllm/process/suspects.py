"""Finds the request that kills engines, among those that are computed again in the next one."""

from __future__ import annotations

from collections import Counter, deque

NUM_GROUPS = 4  # into which suspects are divided
MAX_DEATHS_ALONE = 2  # deaths of the engine with a request as the only suspect
# Times that the engine is ended from outside in steps of a request that has got no token in
# between. After more of them, the request is suspected to be the cause: a guard of the memory may
# have ended the engine.
MAX_ENDS = 10


class Suspects:
    """After a death, the suspects are the requests in the step that died. Those that another engine
    has computed successfully since then are suspects only if there are no others.

    After one death all requests continue in the next engine. Suspects of two deaths continue in
    groups: each waits until the requests before it, and the others of the step that died, have got
    a token or have ended. So a group that kills the engine again is divided further, and n suspects
    take about log(n) / log(NUM_GROUPS) deaths. Requests that were suspects in at least two deaths
    less than another one neither wait nor count beside it.
    """

    def __init__(self, ends: Counter[str] | None = None) -> None:
        """``ends``: how often each request was in a step whose engine was ended from outside, since
        its last token; it may be shared by several engines.
        """
        self._deaths: Counter[str] = Counter()
        self._deaths_alone: Counter[str] = Counter()
        self._ends = Counter[str]() if ends is None else ends
        self._computed: set[str] = set()  # have got a token since the engine was ready
        # those that have not, of the present group and of the others in the step that died
        self._awaited: set[str] = set()
        self._next_groups: deque[list[str]] = deque()

    @property
    def is_searching(self) -> bool:
        """Whether requests wait for others, or these have not got a token yet."""
        return bool(self._awaited or self._next_groups)

    def record_death(self, in_step: list[str], *, is_certain: bool = True) -> str | None:
        """Note that the engine has died in a step with these requests, and form groups. Return the
        request that must not be computed again, if it is known. ``is_certain``: nothing else can
        have been the cause.
        """
        suspects = [name for name in in_step if name not in self._computed] or in_step
        most = max((self._deaths[name] for name in suspects), default=0)
        again = [name for name in suspects if most and self._deaths[name] >= max(1, most - 1)]
        self._computed.clear()
        self._deaths.update(suspects)
        if is_certain and (len(suspects) == 1 or (len(again) == 1 and most > 1)):
            [only] = again or suspects
            self._deaths_alone[only] += 1
            if self._deaths_alone[only] >= MAX_DEATHS_ALONE:
                self.forget(only)
                self._begin_group()
                return only
        size = -(-len(again) // NUM_GROUPS)
        groups = [again[at : at + size] for at in range(0, len(again), size or 1)]
        self._next_groups.extendleft(reversed(groups))
        self._awaited = {*in_step}.difference(again) if again else set()
        self._begin_group()
        return None

    def record_end(self, in_step: list[str]) -> str | None:
        """Note that the engine has been ended from outside in a step with these requests. Return
        the same as ``record_death``.
        """
        self._computed.clear()
        self._ends.update(in_step)
        stuck = [name for name in in_step if self._ends[name] > MAX_ENDS]
        return self.record_death(stuck) if stuck else None

    def is_suspect(self, name: str) -> bool:
        """Return whether a death may have been because of this request."""
        return self._deaths[name] > 0

    def must_wait(self, name: str) -> bool:
        """Return whether a request belongs to a later group."""
        return any(name in group for group in self._next_groups)

    def record_token(self, name: str) -> list[str]:
        """Note that a request has got a token. Return the requests that may continue now."""
        del self._ends[name]
        if not self._deaths:
            return []
        self._computed.add(name)
        return self._continue_after(name)

    def forget(self, name: str) -> list[str]:
        """Forget a request, because it has ended. Return the requests that may continue now."""
        del self._deaths[name], self._deaths_alone[name], self._ends[name]
        self._computed.discard(name)
        for group in self._next_groups:
            if name in group:
                group.remove(name)
        return self._continue_after(name)

    def _continue_after(self, name: str) -> list[str]:
        if name not in self._awaited:
            return []
        self._awaited.remove(name)
        return self._begin_group()

    def _begin_group(self) -> list[str]:
        """Begin the next group if nothing is awaited; return its requests."""
        while self._next_groups and not self._awaited:
            group = self._next_groups.popleft()
            self._awaited = {*group}
            if group:
                return group
        return []
