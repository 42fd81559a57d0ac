"""Injects faults into an engine, for tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from cllm.core.batch import Batch
from cllm.engine.commands import InjectedFault


class Faults:
    """Causes faults just before the backend computes a step."""

    def __init__(self) -> None:
        self._faults: dict[InjectedFault, int] = {}  # fault -> number of steps before it

    def set(self, faults: list[InjectedFault]) -> None:
        """Cause ``faults`` from now on, instead of those that were set before."""
        self._faults = {fault: fault.after_steps for fault in faults}

    def cause_due(self, batch: Batch) -> None:
        """Cause the faults that are due in the step that computes ``batch``."""
        for fault, num_left in [*self._faults.items()]:
            if fault.token is not None and all(
                fault.token not in row.seq.request.prompt for row in batch.rows
            ):
                continue
            self._faults[fault] = num_left - 1
            if num_left > 0:
                continue
            if fault.token is None and num_left <= 1 - fault.num_steps:
                del self._faults[fault]
            ACTIONS[fault.kind](fault.seconds)


def hang(_: float) -> None:
    while True:
        time.sleep(3600)


def fail(_: float) -> None:
    raise RuntimeError("this failure was asked for")


def run_out_of_memory(_: float) -> None:
    raise MemoryError("this failure was asked for")


def kill(_: float) -> None:
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


ACTIONS: dict[str, Callable[[float], None]] = {
    "crash": lambda _: os.abort(),
    "kill": kill,
    "hang": hang,
    "slow": time.sleep,
    "raise": fail,
    "memory": run_out_of_memory,
}
