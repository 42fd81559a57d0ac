"""How many threads llama.cpp computes with."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from llama_cpp import llama_cpp as lib

from cllm.backends.threads import ThreadLimit, may_adapt
from cllm.environment import count_cpus
from cllm.observe.cpu_time import decoding

if TYPE_CHECKING:
    from cllm.backends.llama_cpp.options import Options

log = logging.getLogger("cllm.llama_cpp")


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
        self._limit = (
            ThreadLimit(self._most) if may_adapt(options.n_threads) and not on_gpu else None
        )
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
