"""What an engine did within a few seconds, step by step and sequence by sequence."""

from __future__ import annotations

import msgspec


class StepTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step: when each of its parts began, in seconds on the monotonic clock, and its contents.

    A side job works before ``scheduling``, from ``begun`` on, and after ``updated``.
    """

    number: int
    begun: float
    scheduling: float
    forwarding: float
    sampling: float
    updating: float
    updated: float
    ended: float
    num_rows: int
    num_prefill_tokens: int
    num_running: int
    num_waiting: int
    num_cells_held: int
    num_cells_idle: int
    blocked: str  # why the head of the queue was not admitted, or a prompt got no row


class SequenceSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A time in which a sequence was queued or parked, computed a chunk of its prompt (prefill), or
    decoded in each step. ``num_tokens`` of it were computed meanwhile.
    """

    sequence: str
    account: str
    phase: str
    begin: float
    end: float
    num_tokens: int = 0
    reason: str = ""


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    """The steps of an engine, and the spans of its sequences, each in the order of their ends.

    Only the last ones are kept; ``num_dropped`` earlier ones are missing.
    """

    steps: list[StepTimes] = []
    spans: list[SequenceSpan] = []
    num_dropped: int = 0
