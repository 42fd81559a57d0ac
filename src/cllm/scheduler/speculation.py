"""Guesses of the next tokens that are verified in one step, and when to stop guessing.

Each position is sampled as if it stood alone, with the seed's own number for that position, and guesses are right as
long as they are what was sampled. So the text is the same with and without speculation, at every temperature.
"""

from __future__ import annotations

import logging
from typing import Protocol

from cllm.core.sequence import Sequence
from cllm.errors import EngineError
from cllm.scheduler.step_cost import StepCost

log = logging.getLogger("cllm.scheduler")

START = 0.6  # share of right guesses that a sequence is trusted with at first
MEMORY = 0.1  # of one verification in that share
RECOVERY = 0.002  # of a step without guesses: trust comes back slowly


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def draft(self, wanted: dict[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """At most so many guesses for each sequence; those without any are left out."""
        ...

    def forget(self, seq: Sequence) -> None: ...


class PromptLookup:
    """What followed the last time the text ended like this; in copies and edits that is what follows now.

    Saxena, "Prompt Lookup Decoding", 2023. The index of a sequence's n-grams grows by O(1) a token.
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
        for end in range(max(done[0], 1), len(tokens)):  # n-grams that end before ``end``, where they went on
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
    """Asks a drafter for as many guesses as pay.

    A guess costs what one row more costs, by the step costs learned; a right one is worth what a token costs now. So
    guessing ends by itself when the rows are better used by other sequences, or when the guesses are wrong.
    """

    def __init__(self, drafter: Drafter, max_draft_tokens: int, max_samples: int) -> None:
        """``max_samples``: rows of logits that a step may ask for in all."""
        self._drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._max_samples = max_samples
        self._trust: dict[Sequence, float] = {}
        self._failed = False

    def propose(self, seqs: list[Sequence], cost: StepCost, max_tokens: int) -> dict[Sequence, tuple[int, ...]]:
        """Guesses for some of ``seqs``, all of which decode; the step may have ``max_tokens``."""
        space = min(self._max_samples, max_tokens) - len(seqs)
        wanted: dict[Sequence, int] = {}
        for seq in seqs:
            trust = self._trust.get(seq, START)
            self._trust[seq] = trust + RECOVERY * (START - trust)
            most = min(self._max_draft_tokens, space // len(seqs), seq.limit - seq.num_tokens - 1)
            params = seq.request.params
            if not (params.looks_back or params.is_bound) and (count := self._best_count(len(seqs), trust, cost, most)):
                wanted[seq] = count
        if not wanted or self._failed:
            return {}
        try:
            return self._drafter.draft(wanted)
        except EngineError as error:
            log.error("no more guesses, because the drafter failed: %s", error)
            self._failed = True
            return {}

    def _best_count(self, num_rows: int, trust: float, cost: StepCost, most: int) -> int:
        """The number of guesses, for every sequence, that makes the expected tokens a second largest."""
        now = cost.decode(num_rows)
        best, best_speed = 0, num_rows / now if now else 0.0
        if not now:
            return min(most, 1)
        expected = 1.0
        for count in range(1, most + 1):
            expected += trust**count
            speed = num_rows * expected / cost.decode(num_rows * (1 + count))
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    def verified(self, seq: Sequence, num_guesses: int, num_right: int) -> None:
        """So many of the guesses were right, from the first one on."""
        trust = self._trust.get(seq, START)
        judged = min(num_guesses, num_right + 1)  # what comes after a wrong one says nothing
        for i in range(judged):
            trust += MEMORY * ((i < num_right) - trust)
        self._trust[seq] = trust

    def forget(self, seq: Sequence) -> None:
        self._trust.pop(seq, None)
        self._drafter.forget(seq)
