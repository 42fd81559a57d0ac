"""How many threads find a free CPU while other programs use the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from cllm.observe.cpu_time import read_idle_seconds

WINDOW = 0.1  # seconds of computing, after which the lost CPU time is judged
MIN_LOSS = 0.2  # CPUs; a loss below it is noise
FIRST_LOOK, PAUSE, MAX_PAUSE = 0.1, 1.0, 60.0  # seconds between looks at the idle CPUs
MOSTLY_IDLE = 0.5  # an engine that computes for less than this share of the time is mostly idle
ROUNDING = 0.6  # added to the free CPUs before rounding down: 0.4 of a CPU is worth a thread


class ThreadLimit:
    """The number of threads that find a free CPU, ``count``.

    The threads of OpenMP wait for each other hundreds of times in a step, and spin while they
    wait. One thread that has no CPU, because another program uses it, stops all of them: with six
    busy programs on two cores, a step of two threads takes 5 to 30 times as long as a step of one.

    Threads that spin use all CPU time they get, so the CPU time that is missing in a step shows how
    many of them had no CPU. The count goes up again when the CPUs were idle. If the system does not
    report idle time, a higher count is tried, after pauses that become longer.
    """

    def __init__(
        self,
        most: int,
        clock: Callable[[], float] = time.monotonic,
        read_idle: Callable[[], float | None] = read_idle_seconds,
        read_own: Callable[[], float] = time.process_time,
    ) -> None:
        """``read_idle`` and ``read_own`` return the seconds that the CPUs were idle so far, and the
        CPU time of this process.
        """
        self.count = self._most = most
        self._clock, self._read_idle, self._read_own = clock, read_idle, read_own
        self._seconds = self._lost = 0.0  # of the window
        self._pause = FIRST_LOOK
        self._mark()

    def _mark(self) -> None:
        """Begin to measure the free CPUs."""
        self._marked, self._idle, self._own = self._clock(), self._read_idle(), self._read_own()
        self._computed = 0.0

    def look(self) -> None:
        """Raise the count if CPUs were idle since the last look. If the engine was mostly
        idle, too, set it to the number of CPUs that others left.
        """
        seconds = self._clock() - self._marked
        if seconds < self._pause:
            return
        before, own, computed = self._idle, self._own, self._computed
        if self.count == self._most:  # the last rise was right
            self._pause = PAUSE
        self._mark()
        if before is None or self._idle is None or self._idle < before:
            self.count = self._most
            return
        free = int((self._idle - before + self._own - own) / seconds + ROUNDING)
        least = 1 if computed < MOSTLY_IDLE * seconds else self.count
        self.count = min(self._most, max(least, free))

    def note(self, num_threads: int, seconds: float, cpu_seconds: float) -> None:
        """Lower the count if threads had no CPU while a step was computed."""
        self._computed += seconds
        self._seconds += seconds
        self._lost += num_threads * seconds - cpu_seconds
        if self._seconds < WINDOW:
            return
        lost, self._seconds, self._lost = self._lost / self._seconds, 0.0, 0.0
        if num_threads > 1 and lost > max(MIN_LOSS, 1 / num_threads):
            # a thread and a program that share a CPU get half of it each
            self.count = max(1, min(num_threads - 1, int(num_threads - 2 * lost)))
            self._pause = min(max(PAUSE, 2 * self._pause), MAX_PAUSE)


def may_adapt(n_threads: int | None) -> bool:
    """Return whether the user leaves the number of threads and their way of waiting to cLLM."""
    chosen = os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    return n_threads is None and not chosen
