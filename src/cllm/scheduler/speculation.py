"""Draft tokens that are verified in one step, and how many of them are worth their cost.

Each position is sampled with its own random number, as it would be without speculation. A draft
token is accepted if it equals the sampled one. So the text is the same with and without
speculation, at every temperature.
"""

from __future__ import annotations

import logging
from typing import Protocol

from cllm.core.sequence import Sequence
from cllm.errors import EngineError
from cllm.scheduler.step_cost import StepCost

log = logging.getLogger("cllm.scheduler")

START = 0.6  # expected acceptance rate of the first sequences
MEMORY = 0.1  # weight of one verified token in that rate
# weight of the rate of new sequences in each step: a low rate recovers, so drafting is tried again
RECOVERY = 0.002
CARRIED = 0.3  # weight of a finished sequence in the rate of new ones
MIN_START = 0.3  # so that new sequences try at all


class Drafter(Protocol):
    """Predicts the next tokens of sequences."""

    def draft(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """Return at most ``wanted[seq]`` draft tokens for each sequence; omits sequences without
        any.
        """
        ...

    def forget(self, seq: Sequence) -> None: ...


class PromptLookup:
    """Drafts the tokens that followed the previous occurrence of the last n-gram.

    Works well for copies and edits.

    Saxena, "Prompt Lookup Decoding", 2023. Indexing the n-grams of a sequence costs O(1) per token.
    """

    SIZES = (4, 2)  # tokens of an n-gram; the longer one is tried first

    def __init__(self) -> None:
        self._index: dict[Sequence, tuple[list[int], dict[tuple[int, ...], int]]] = {}

    def draft(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        drafts = {seq: self._look_up(seq, count) for seq, count in wanted.items()}
        return {seq: draft for seq, draft in drafts.items() if draft}

    def _look_up(self, seq: Sequence, count: int) -> tuple[int, ...]:
        done, index = self._index.setdefault(seq, ([0], {}))
        tokens = seq.tokens
        # index n-grams that end before ``end`` by where they continue
        for end in range(max(done[0], 1), len(tokens)):
            for size in self.SIZES:
                if end >= size:
                    index[tuple(tokens[end - size : end])] = end
        done[0] = len(tokens)
        for size in self.SIZES:
            at = index.get(tuple(tokens[-size:])) if len(tokens) >= size else None
            if at is not None:
                return tuple(tokens[at : at + count])
        return ()

    def forget(self, seq: Sequence) -> None:
        self._index.pop(seq, None)


class Speculation:
    """Asks a drafter for as many draft tokens as are worth their cost.

    By the learned step costs, a draft token costs as much as one more row, and an accepted one
    saves the cost of a decoded token. So drafting stops by itself when rows are worth more to other
    sequences, or when few drafts are accepted.
    """

    def __init__(self, drafter: Drafter, max_draft_tokens: int, max_samples: int) -> None:
        """``max_samples``: maximum rows of logits in one step."""
        self._drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._max_samples = max_samples
        self._acceptance_rates: dict[Sequence, float] = {}
        self._judged: set[Sequence] = set()  # sequences whose drafts have been verified
        self._start = START
        self._has_failed = False

    def propose(
        self, seqs: list[Sequence], cost: StepCost, max_tokens: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return draft tokens for some of ``seqs``, which all decode, in a step of at most
        ``max_tokens``.
        """
        space = min(self._max_samples, max_tokens) - len(seqs)
        wanted: dict[Sequence, int] = {}
        for seq in seqs:
            rate = self._acceptance_rates.get(seq, self._start)
            self._acceptance_rates[seq] = rate + RECOVERY * (self._start - rate)
            max_count = min(
                self._max_draft_tokens, space // len(seqs), seq.limit - seq.num_tokens - 1
            )
            params = seq.request.params
            if not (params.looks_back or params.is_bound) and (
                count := self._choose_count(len(seqs), rate, cost, max_count)
            ):
                wanted[seq] = count
        if not wanted or self._has_failed:
            return {}
        try:
            return self._drafter.draft(wanted)
        except EngineError as error:
            log.error("disabling speculation because the drafter failed: %s", error)
            self._has_failed = True
            return {}

    def _choose_count(self, num_rows: int, rate: float, cost: StepCost, max_count: int) -> int:
        """Return the number of draft tokens per sequence that maximizes the expected tokens per
        second.
        """
        now = cost.estimate_decode(num_rows)
        best, best_speed = 0, num_rows / now if now else 0.0
        if not now:
            return min(max_count, 1)
        expected = 1.0
        for count in range(1, max_count + 1):
            expected += rate**count
            speed = num_rows * expected / cost.estimate_decode(num_rows * (1 + count))
            if speed > best_speed:
                best, best_speed = count, speed
        # the cost of a number of rows that was never tried is only a guess
        longer = min(2 * best, max_count)
        if rate >= START and longer > best and not cost.is_known(num_rows * (1 + longer)):
            return longer
        return best

    def record_verification(self, seq: Sequence, num_guesses: int, num_right: int) -> None:
        """Learn that the first ``num_right`` of the draft tokens were accepted."""
        rate = self._acceptance_rates.get(seq, self._start)
        self._judged.add(seq)
        num_judged = min(num_guesses, num_right + 1)  # tokens after a rejected one teach nothing
        for i in range(num_judged):
            rate += MEMORY * ((i < num_right) - rate)
        self._acceptance_rates[seq] = rate

    def forget(self, seq: Sequence) -> None:
        rate = self._acceptance_rates.pop(seq, self._start)
        if seq in self._judged:
            self._judged.remove(seq)
            self._start = max(MIN_START, self._start + CARRIED * (rate - self._start))
        self._drafter.forget(seq)
