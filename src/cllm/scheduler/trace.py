"""Counters of the computed steps, and a record of the last ones for ``cllm explain``."""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import msgspec

MAX_STEPS = 512
MAX_NAMED = 100  # waiting sequences listed in one answer


class Step(msgspec.Struct):
    """One step: when it began, its duration in seconds, its contents, and why the head of the queue
    was not admitted or a running prompt got no row ("" if neither happened). The duration includes
    ``draft_seconds`` for predicting draft tokens.
    """

    at: float
    blocked: Any = ""  # a value of ``reasons``; its text once it has been sent
    number: int = 0
    seconds: float = 0.0
    num_rows: int = 0
    num_prefill_tokens: int = 0
    prefill_budget: int = 0
    num_guesses: int = 0
    num_accepted: int = 0
    num_operations: int = 0
    num_running: int = 0
    num_waiting: int = 0
    draft_seconds: float = 0.0


class Statistics:
    """Counts since the start, and the last steps."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_parked = 0
        self.num_prefill_tokens = 0
        self.num_guesses = 0
        self.num_accepted = 0
        self.num_disk_failures = 0
        self.num_rows = 0
        self.num_cache_queries = 0
        self.num_thoughts_ended = 0
        self.num_hits = {"cells": 0, "ram": 0, "disk": 0}  # tokens, by where they were
        self.steps: deque[Step] = deque(maxlen=MAX_STEPS)

    def count_hit(self, num_prompt_tokens: int, tier: str, num_cached: int) -> None:
        """Count a prompt of which ``num_cached`` tokens came from ``tier``."""
        self.num_cache_queries += num_prompt_tokens
        self.num_hits[tier] += num_cached

    def add(self, step: Step) -> None:
        """Number and count a step that has ended."""
        self.num_steps += 1
        step.number = self.num_steps
        self.num_rows += step.num_rows
        self.num_prefill_tokens += step.num_prefill_tokens
        self.num_guesses += step.num_guesses
        self.num_accepted += step.num_accepted
        self.steps.append(step)


Phase = Literal["queued", "prefill", "decode", "parked"]


class SequenceState(msgspec.Struct, frozen=True, rename={"account": "key"}):
    """An unfinished sequence.

    It has been in its ``phase`` for ``phase_seconds``, and in the engine for ``age`` seconds. A
    parked sequence has given up its cells and continues later; in the phase prefill it computes its
    prompt, and after it was parked also its output so far. ``tokens_per_second`` is the rate since
    its first token.

    ``reason`` says why it waits or, once it runs, why it waited; "" if it did not. It waited
    ``queued`` seconds for its first admission, and its prompt took ``prefill`` seconds; None means
    that this has not ended. ``num_shared_cells`` of its ``num_cells`` belong to other prefixes too.
    It will begin or continue in about ``expected_wait`` seconds; None if that is unknown.
    """

    name: str
    account: str
    priority: str
    phase: Phase
    phase_seconds: float
    age: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_cells: int = 0
    num_shared_cells: int = 0
    num_parked: int = 0
    tokens_per_second: float | None = None
    queued: float | None = None
    prefill: float | None = None
    reason: str = ""
    expected_wait: float | None = None


class Explanation(msgspec.Struct, frozen=True):
    """The state of the engine: the last steps, the running sequences, the first MAX_NAMED waiting
    ones, and costs.

    ``row_seconds`` are the seconds of a step, by its number of decoding rows. A prefill token takes
    ``token_seconds``.
    """

    steps: list[Step]
    running: list[SequenceState]
    num_waiting: int
    waiting: list[SequenceState]
    row_seconds: dict[int, float]
    token_seconds: float | None
    cells: str
