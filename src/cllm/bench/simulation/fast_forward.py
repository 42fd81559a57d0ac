"""Joins simulated steps in which the same sequences decode and nothing else happens.

The scheduler computes each step that admits, computes prompts, ends or parks a sequence. Of the
steps between them, which all cost the same, only the sums are kept.
"""

from __future__ import annotations

from cllm.backends.fake.backend import Costs
from cllm.core.sequence import Sequence
from cllm.engine.engine import Engine
from cllm.scheduler.pacing import LONG_TOKENS, is_long

LEAST = 2  # steps that are worth joining


class FastForward:
    """The joined steps of one engine. Each takes ``seconds``.

    An engine that ``saves`` evicted prefixes must do that in steps of its own.
    """

    def __init__(
        self, engine: Engine, costs: Costs, share: float, *, saves: bool, is_possible: bool
    ) -> None:
        self._scheduler = engine.scheduler
        self._share = share
        self._costs = costs
        self._saves = saves
        self._is_possible = is_possible and not costs.context
        self.seconds = 0.0

    def count_steps(self, now: float) -> int:
        """Return how many steps from ``now`` on can be joined; 0 if too few."""
        scheduler = self._scheduler
        sequences, last = scheduler.sequences, scheduler.step
        num = len(sequences.running)
        if (
            not self._is_possible
            or not num
            # the last step must have been like these, so that the scheduler has learned its cost
            or last.num_rows != num
            or last.num_running != num
            or last.num_prefill_tokens
            or sequences.waiting
            or sequences.deferred
        ):
            return 0
        running = [*sequences.running]
        if any(seq.num_lacking_tokens != 1 or seq.expires is not None for seq in running):
            return 0
        kv_cache = sequences.kv_cache
        cells = kv_cache.cells.num_free if self._saves else kv_cache.num_available
        left = min(seq.limit - seq.num_tokens for seq in running) - 1  # the last step ends one
        if scheduler.cost.includes_long != any(is_long(seq.num_tokens) for seq in running):
            return 0
        until_long = min(
            (LONG_TOKENS - seq.num_tokens for seq in running if not is_long(seq.num_tokens)),
            default=left,
        )
        count = min(left, cells // num, until_long - 1)
        self.seconds = self._costs.step + num * self._costs.row
        return count if count >= LEAST else 0

    def advance(self, num_steps: int) -> list[Sequence]:
        """Compute ``num_steps`` joined steps. Return the sequences, each of which got a token in
        each step.
        """
        scheduler = self._scheduler
        sequences = scheduler.sequences
        kv_cache = sequences.kv_cache
        running = [*sequences.running]
        kv_cache.make_room(num_steps * len(running))
        for seq in running:
            kv_cache.hold(seq.seq_id, num_steps)
            last = seq.tokens[-1] + 1
            seq.tokens += [(last + i) % 256 for i in range(num_steps)]
            seq.num_computed_tokens += num_steps
            sequences.waiting.policy.served(seq, 0, num_steps)
        scheduler.statistics.num_steps += num_steps
        pacing = scheduler.pacing
        if self._share < 1:
            for lane in (pacing.short_prompts, pacing.long_prompts):
                earned = self.seconds * lane.share / (1 - lane.share)
                lane.seconds = min(earned, lane.seconds + num_steps * earned)
        return running
