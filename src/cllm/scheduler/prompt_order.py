"""The order in which the prompts of running sequences are computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cllm.core.batch import Row
from cllm.core.sequence import Sequence
from cllm.scheduler.policy import Policy
from cllm.scheduler.step_cost import StepCost
from cllm.scheduler.waiting import AGED_SHARE, PATIENCE

SHORTER_FIRST = 1.0  # seconds


class PromptOrder:
    """Sorts prompts by class, then by the policy, then by arrival plus the time that the prompt
    takes, up to SHORTER_FIRST.

    Within a class, prompts that were promoted to it come first. Of prompts that arrive together,
    shorter ones come first, but no prompt waits for those that arrive much later.

    After AGED_SHARE - 1 steps that compute other prompts, the earliest one comes first if it has
    waited too long.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._num_steps = 0  # steps with prompts since the last one that computed an aged prompt
        self._aged: Sequence | None = None  # the prompt that comes first because of its age
        self._ranks: dict[Sequence, tuple[Any, ...]] = {}

    def sort(self, seqs: list[Sequence], policy: Policy, now: float) -> None:
        """Sort sequences that lack more than one token."""
        self._aged = None
        self._ranks = {}
        if len(seqs) < 2:
            return

        def sort_key(seq: Sequence) -> tuple[Any, ...]:
            priority = seq.effective_priority
            seconds = self._cost.estimate_prefill(seq.num_lacking_tokens, seq.num_computed_tokens)
            rank = (
                (priority, 0, 0)
                if priority < policy.effective_priority(seq)
                else (priority, 1, policy.rank(policy.group(seq)))
            )
            self._ranks[seq] = rank
            return rank, seq.arrived + min(SHORTER_FIRST, seconds), seq.order

        seqs.sort(key=sort_key)
        if self._num_steps >= AGED_SHARE - 1:
            oldest = min(seqs, key=lambda seq: seq.order)
            if now - oldest.arrived > PATIENCE:
                self._aged = oldest
                seqs.remove(oldest)
                seqs.insert(0, oldest)

    def precedes(self, one: Sequence, other: Sequence) -> bool:
        """Return whether class, policy or age puts ``one`` before ``other``, and not only arrival
        and size.
        """
        if self._aged in (one, other):
            return one is self._aged
        return self._ranks[one] < self._ranks[other]

    def advance(self, rows: Iterable[Row]) -> None:
        """Note that a step computes ``rows`` of prompts."""
        is_aged = any(row.seq is self._aged for row in rows)
        self._num_steps = 0 if is_aged else self._num_steps + 1
