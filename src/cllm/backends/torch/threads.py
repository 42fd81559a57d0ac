"""How many threads PyTorch computes with on CPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from cllm.backends.threads import ThreadLimit, may_adapt
from cllm.environment import count_cpus
from cllm.observe.cpu_time import decoding


class Threads:
    """Computes with the threads that find a free CPU."""

    def __init__(self, n_threads: int | None, device: torch.device) -> None:
        """``n_threads`` is the option; None uses all cores while they are free."""
        self._most = n_threads or count_cpus()
        self._num_engines = 1
        adapts = device.type == "cpu" and may_adapt(n_threads)
        self._limit = ThreadLimit(self._most) if adapts else None

    def share(self, num_engines: int) -> None:
        self._num_engines = num_engines

    def run(self, compute: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Return what ``compute`` returns for ``arguments``."""
        num_threads = max(1, self._most // self._num_engines)
        if self._limit is not None:
            self._limit.look()
            num_threads = min(num_threads, self._limit.count)
        if num_threads != torch.get_num_threads():
            torch.set_num_threads(num_threads)
        begun, used = time.monotonic(), decoding.seconds
        result: torch.Tensor = decoding.timing(compute)(*arguments)
        if self._limit is not None:
            seconds = time.monotonic() - begun
            self._limit.note(num_threads, seconds, decoding.seconds - used)
        return result
