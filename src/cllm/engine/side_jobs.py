"""The work that an engine does besides generating tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from cllm.backends.base import Backend
from cllm.core.batch import Batch, Operation
from cllm.core.output import TokenOutput
from cllm.scheduler.scheduler import Scheduler

log = logging.getLogger("cllm.engine")

WAIT = 0.02  # seconds that a side job may wait in a step that computes nothing


class Record(Protocol):
    """Shows what is being computed, even after the process has died."""

    def begin(self, request_ids: Iterable[str], expected_seconds: float) -> None:
        """Record that something is being computed for these requests, and how long it should take
        (0 if unknown).
        """
        ...

    def end(self) -> None:
        """Record that the computation has ended."""
        ...


class SideJob(Protocol):
    """A job that shares the engine's thread; its subclasses override what they need.

    A side job calls methods of the scheduler, and never writes to its attributes. After an
    exception in one of these methods, the scheduler frees all cells and rebuilds its records, and
    the engine continues. After three exceptions without a completed step, all sequences end.
    """

    def before(self, now: float) -> list[TokenOutput]:
        """Work before the scheduler makes a step's batch; return outputs to send with the step."""
        return []

    def after(self, now: float) -> list[TokenOutput]:
        """Work after a step, which may have had no batch; return outputs to send with the step."""
        return []

    def idle(self) -> bool:
        """Work while there is nothing to compute; return whether there may be more to do."""
        return False

    def has_work(self) -> bool:
        """Return whether the engine must step although no sequence is waiting or running."""
        return False


def run_operations(backend: Backend, scheduler: Scheduler, operations: list[Operation]) -> bool:
    """Run operations without a step.

    If they fail, forget the cells that they affect and return False.
    """
    batch = Batch([], operations)
    try:
        backend.forward(batch)
    except Exception:
        log.exception("cannot save or copy cells")
        scheduler.sequences.fail(batch)
        return False
    scheduler.sequences.write_saved(operations)
    return True
