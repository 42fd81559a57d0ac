"""Finds the request that kills engines, among those that are computed again in the next one."""

from __future__ import annotations

from collections import Counter

MAX_DEATHS_ALONE = 2  # deaths of the engine with a request as the only suspect
# A request is suspected to be the cause if the engine is ended from outside more often than this in
# steps of the request, which has got no token in between: a guard of the memory may have done it.
MAX_ENDS = 10


class Suspects:
    """After a death, the suspects are the requests in the step that died, except those that have
    got a token since that engine was ready, unless there are no others.

    After a first death, all requests continue in the next engine at once. Each further death begins
    a search. First, the other requests of the step that died continue. Then one suspect after the
    other continues; each waits until those before it have got a token or have ended. At last, all
    other requests continue. So it is certain which suspect kills engines, and finding n of them
    takes about 2 n + 2 deaths. Smaller steps cost little compared with a restart.
    """

    def __init__(self, ends: Counter[str] | None = None) -> None:
        """``ends`` counts how often each request was in a step whose engine was ended from outside,
        since the request's last token. Several engines may share it.
        """
        self._has_died = False
        self._deaths: Counter[str] = Counter()
        self._deaths_alone: Counter[str] = Counter()
        self._ends = Counter[str]() if ends is None else ends
        self._computed: set[str] = set()  # have got a token since the engine was ready
        self._waiting: list[str] = []  # suspects
        self._going: set[str] = set()  # may be computed although a search goes on
        self._awaited: set[str] = set()  # of these, those that have not got a token yet

    @property
    def is_searching(self) -> bool:
        """Whether requests wait for others, or these have not got a token yet."""
        return bool(self._awaited or self._waiting)

    def record_death(self, in_step: list[str], *, is_certain: bool = True) -> str | None:
        """Note that the engine has died in a step with these requests. Return the request that must
        not be computed again, if it is known. ``is_certain`` says that nothing else can have been
        the cause.

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
        """Return whether a death may have been because of this request."""
        return self._deaths[name] > 0

    def must_wait(self, name: str) -> bool:
        """Return whether a request is to continue after others."""
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
