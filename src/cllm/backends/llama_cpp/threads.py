"""How many threads llama.cpp computes with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llama_cpp import llama_cpp as lib

from cllm.environment import count_cpus

if TYPE_CHECKING:
    from cllm.backends.llama_cpp.options import Options


class Threads:
    """The threads of all contexts of a model: all that the options say, or a part of them while
    other engines use the same cores.
    """

    def __init__(self, options: Options) -> None:
        self._most = options.n_threads or count_cpus()
        self._most_in_batch = options.n_threads_batch or self._most
        self._num_engines = 1
        self._contexts: dict[str, Any] = {}

    @property
    def counts(self) -> tuple[int, int]:
        """The threads for one token, and for several."""
        share = max(1, self._most // self._num_engines)
        return share, max(1, self._most_in_batch // self._num_engines)

    def set(self, c_params: Any) -> None:
        """Set the parameters of a context."""
        c_params.n_threads, c_params.n_threads_batch = self.counts

    def keep(self, name: str, context: Any) -> Any:
        """Return ``context``, whose threads follow ``share`` until ``forget``."""
        self._contexts[name] = context
        return context

    def forget(self, name: str) -> None:
        """Note that a context is freed."""
        self._contexts.pop(name, None)

    def share(self, num_engines: int) -> None:
        """See Backend.share_cores."""
        self._num_engines = num_engines
        for context in self._contexts.values():
            lib.llama_set_n_threads(context, *self.counts)
