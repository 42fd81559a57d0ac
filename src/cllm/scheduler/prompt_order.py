"""The order in which the prompts of running sequences are computed."""

from __future__ import annotations

from typing import Any

from cllm.core.sequence import Sequence
from cllm.scheduler.policy import Policy
from cllm.scheduler.step_cost import StepCost
from cllm.scheduler.waiting import AGED_SHARE, PATIENCE

SHORTER_FIRST = 1.0  # seconds


class PromptOrder:
    """Sorts by class, those that were promoted to it first, then as the policy sorts them, then by
    arrival plus the time that the prompt takes, up to SHORTER_FIRST. So of prompts that arrive
    together, shorter ones come first, and no prompt waits for those that arrive much later.

    In one of AGED_SHARE steps that compute prompts, the earliest one comes first if it has waited
    too long.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._num_steps = 0

    def sort(self, seqs: list[Sequence], policy: Policy, now: float) -> None:
        """Sort sequences that lack more than one token."""
        if len(seqs) < 2:
            return

        def sort_key(seq: Sequence) -> tuple[Any, ...]:
            priority = seq.effective_priority
            seconds = self._cost.estimate_prefill(seq.num_lacking_tokens, seq.num_computed_tokens)
            seconds = min(SHORTER_FIRST, seconds)
            place = seq.arrived + seconds, seq.order
            if priority < policy.effective_priority(seq):
                return priority, 0, 0, place
            return priority, 1, policy.rank(policy.group(seq)), place

        seqs.sort(key=sort_key)
        if self._num_steps % AGED_SHARE == 0:
            oldest = min(seqs, key=lambda seq: seq.order)
            if now - oldest.arrived > PATIENCE:
                seqs.remove(oldest)
                seqs.insert(0, oldest)

    def advance(self) -> None:
        """Note that a step computes prompts."""
        self._num_steps += 1
