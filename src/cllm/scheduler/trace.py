"""Counters of the computed steps, and a record of the last ones for ``cllm explain``."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

MAX_STEPS = 512
MAX_NAMED = 100  # waiting sequences listed in one answer


class Step(msgspec.Struct):
    """One step: when it began, its duration in seconds, its contents, and why the head of the queue
    was not admitted or a running prompt got no row ("" if neither happened).
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


class WaitingSequence(msgspec.Struct, frozen=True, rename={"account": "key"}):
    """A waiting sequence: how long it has waited (seconds), its state, and what it waits for."""

    name: str
    account: str
    priority: str
    num_tokens: int
    waited: float
    status: str
    reason: str


class Explanation(msgspec.Struct, frozen=True):
    """The state of the engine: the last steps, the running sequences, the first MAX_NAMED waiting
    ones, and costs.

    ``row_seconds`` are the seconds of a step, by its number of decoding rows. A prefill token takes
    ``token_seconds``.
    """

    steps: list[Step]
    running: list[str]
    num_waiting: int
    waiting: list[WaitingSequence]
    row_seconds: dict[int, float]
    token_seconds: float | None
    cells: str
