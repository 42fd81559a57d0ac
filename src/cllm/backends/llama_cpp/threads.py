"""How many threads llama.cpp computes with."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llama_cpp import llama_cpp as lib

from cllm.environment import count_cpus
from cllm.observe.cpu_time import decoding, read_idle_seconds

if TYPE_CHECKING:
    from cllm.backends.llama_cpp.options import Options

log = logging.getLogger("cllm.llama_cpp")

WINDOW = 0.1  # seconds of computing, after which the lost CPU time is judged
MIN_LOSS = 0.2  # CPUs; a loss below it is noise
FIRST_LOOK, PAUSE, MAX_PAUSE = 0.1, 1.0, 60.0  # seconds between looks at the idle CPUs
MOSTLY_IDLE = 0.5  # an engine that computes for less than this share of the time is mostly idle
ROUNDING = 0.6  # added to the free CPUs before rounding down: 0.4 of a CPU is worth a thread


class ThreadLimit:
    """The number of threads that find a free CPU, ``count``.

    The threads of llama.cpp wait for each other hundreds of times in a step, and spin while they
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


def may_adapt(options: Options) -> bool:
    """Return whether the user leaves the number of threads and their way of waiting to cLLM."""
    chosen = os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}
    return options.n_threads is None and not chosen


class Threads:
    """The threads of all contexts of a model: as many as the options say, or fewer while other
    engines or programs use the same cores.
    """

    def __init__(self, options: Options, *, on_gpu: bool = False) -> None:
        """Begin before the model is loaded: until then, the CPUs show how busy they are."""
        self._most = options.n_threads or count_cpus()
        self._most_in_batch = options.n_threads_batch or self._most
        self._num_engines = 1
        self._contexts: dict[str, Any] = {}
        # threads that wait for a GPU use no CPU time
        self._limit = ThreadLimit(self._most) if may_adapt(options) and not on_gpu else None
        self._applied = self.counts
        self._said = False

    @property
    def counts(self) -> tuple[int, int]:
        """The threads for one token, and for several."""
        limit = self._limit.count if self._limit else max(self._most, self._most_in_batch)
        return (
            max(1, min(limit, self._most // self._num_engines)),
            max(1, min(limit, self._most_in_batch // self._num_engines)),
        )

    def set(self, c_params: Any) -> None:
        """Set the parameters of a context."""
        c_params.n_threads, c_params.n_threads_batch = self.counts

    def keep(self, name: str, context: Any) -> Any:
        """Return ``context``. Until ``forget``, ``share`` and ``decode`` change how many threads it
        has.
        """
        self._contexts[name] = context
        return context

    def forget(self, name: str) -> None:
        """Note that a context is freed."""
        self._contexts.pop(name, None)

    def share(self, num_engines: int) -> None:
        """See Backend.share_cores."""
        self._num_engines = num_engines
        self._apply()

    def decode(self, context: Any, batch: Any) -> int:
        """Return what llama_decode returns; use as many threads as find a free CPU."""
        if self._limit is None:
            return int(lib.llama_decode(context, batch))
        self._limit.look()
        self._apply()
        begun, used = time.monotonic(), decoding.seconds
        code = int(lib.llama_decode(context, batch))
        num_threads = self._applied[batch.n_tokens > 1]
        self._limit.note(num_threads, time.monotonic() - begun, decoding.seconds - used)
        self._apply()
        return code

    def _apply(self) -> None:
        if self._applied == self.counts:
            return
        self._applied = self.counts
        for context in self._contexts.values():
            lib.llama_set_n_threads(context, *self._applied)
        if not self._said and self._limit is not None and self._limit.count < self._most:
            self._said = True
            log.info(
                "other programs use the CPUs: llama.cpp computes with %d of %d threads, and with "
                "more as soon as CPUs are idle (docs/tuning.md)",
                max(self._applied),
                self._most,
            )
