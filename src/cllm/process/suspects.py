"""Finds the request that kills engines, among those that are computed again in the next one."""

from __future__ import annotations

from collections import Counter

MAX_DEATHS_ALONE = 2  # deaths of the engine with a request as the only suspect
# A request becomes a suspect if engines are ended from outside more often than this in its steps
# without a new token in between, because a program that guards the memory may have ended them.
MAX_ENDS = 10


class Suspects:
    """Finds the request that kills engines.

    After a death, the suspects are the requests in the step in which the engine died. Requests that
    have got a token since that engine was ready are suspects only if there are no others.

    After a first death, all requests continue in the next engine at once. Each further death begins
    a search. First, the other requests of that step continue. Then one suspect after the other
    continues, once the one before it has got a token or has ended. Finally, all other requests
    continue. So it is certain which suspect kills engines, and finding n of them takes about
    2 n + 2 deaths. Smaller steps cost little compared with a restart.
    """

    def __init__(self, ends: Counter[str] | None = None) -> None:
        """``ends`` counts how often each request was in a step whose engine was ended from outside,
        since the request's last token. Several engines may share it.
        """
        self._has_died = False
        self._deaths: Counter[str] = Counter()
        self._deaths_alone: Counter[str] = Counter()
        self._ends = Counter[str]() if ends is None else ends
        self._computed: set[str] = set()  # requests with a token since the engine was ready
        self._waiting: list[str] = []  # suspects that must wait
        self._going: set[str] = set()  # requests that may be computed during the search
        self._awaited: set[str] = set()  # of these, the ones without a token so far

    @property
    def is_searching(self) -> bool:
        """Whether a search is going on: requests wait for others, or those have no token yet."""
        return bool(self._awaited or self._waiting)

    def record_death(self, in_step: list[str], *, is_certain: bool = True) -> str | None:
        """Note that the engine has died in a step with these requests. Return the request that must
        not be computed again, if it is known. ``is_certain`` says that nothing else can have caused
        the death.

        Suspects of fewer deaths continue first, and suspects of equally many in the order of
        ``in_step``.
        """
        suspects = [name for name in in_step if name not in self._computed] or in_step
        is_first, self._has_died = not self._has_died, True
        self._computed.clear()
        self._deaths.update(suspects)
        if is_certain and len(suspects) == 1:
            [only] = suspects
            self._deaths_alone[only] += 1
            if self._deaths_alone[only] >= MAX_DEATHS_ALONE:
                self._await({*in_step} - {only})
                self.forget(only)
                return only
        if not is_first:
            others = [name for name in self._waiting if name not in suspects]
            self._waiting = sorted(suspects, key=lambda name: self._deaths[name]) + others
            self._await({*in_step}.difference(suspects))
        return None

    def _await(self, names: set[str]) -> None:
        """Begin again, in the next engine, with ``names``."""
        self._awaited, self._going = names, {*names}
        self._begin_next()

    def record_end(self, in_step: list[str]) -> str | None:
        """Note that the engine has been ended from outside in a step with these requests. Return
        the request that must not be computed again, if it is known.
        """
        self._computed.clear()
        self._ends.update(in_step)
        stuck = [name for name in in_step if self._ends[name] > MAX_ENDS]
        return self.record_death(stuck) if stuck else None

    def is_suspect(self, name: str) -> bool:
        """Return whether this request may have caused a death."""
        return self._deaths[name] > 0

    def must_wait(self, name: str) -> bool:
        """Return whether a request must wait until others have continued."""
        return self.is_searching and name not in self._going

    def record_token(self, name: str) -> bool:
        """Note that a request has got a token. Return whether others may continue now."""
        del self._ends[name]
        if not self._has_died:
            return False
        self._computed.add(name)
        return self._continue_after(name)

    def forget(self, name: str) -> bool:
        """Forget a request, because it has ended. Return whether others may continue now."""
        del self._deaths[name], self._deaths_alone[name], self._ends[name]
        self._computed.discard(name)
        self._going.discard(name)
        if name in self._waiting:
            self._waiting.remove(name)
        return self._continue_after(name)

    def _continue_after(self, name: str) -> bool:
        if name not in self._awaited:
            return False
        self._awaited.remove(name)
        self._begin_next()
        return True

    def _begin_next(self) -> None:
        """Let the next suspect continue if nothing is awaited."""
        if self._waiting and not self._awaited:
            self._awaited = {self._waiting.pop(0)}
            self._going |= self._awaited
