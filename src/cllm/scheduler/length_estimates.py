"""Estimates of the lengths of sequences, learned from earlier ones."""

from __future__ import annotations

from cllm.core.sequence import Sequence
from cllm.scheduler.step_cost import SHARE, update_mean

MIN_GROWTH = 8  # every sequence is expected to get at least this many further tokens
FIRST_GUESS_OF_OUTPUT = 64.0  # tokens, until the first sequence has finished


class LengthEstimates:
    """Running means: ``output`` is the number of tokens of an output, and ``computed`` the number
    of prompt tokens of a sequence that were not cached.
    """

    def __init__(self) -> None:
        self.output = FIRST_GUESS_OF_OUTPUT
        self.computed = 0.0
        self._mean_prompt = self._mean_limit = 0.0  # tokens of a prompt, limit of an output
        self._num_admitted = self._num_finished = 0

    def record_admission(self, seq: Sequence) -> None:
        """Learn from the prompt of ``seq``, which has been admitted with its cached prefix."""
        self._num_admitted += 1
        share = max(SHARE, 1 / self._num_admitted)
        self._mean_prompt += share * (seq.num_prompt_tokens - self._mean_prompt)
        self.computed += share * (seq.num_lacking_tokens - self.computed)
        self._mean_limit += share * (seq.limit - seq.num_prompt_tokens - self._mean_limit)

    def record_finish(self, seq: Sequence) -> None:
        self._num_finished += 1
        self.output = update_mean(
            self.output, seq.num_output_tokens, max(SHARE, 1 / self._num_finished)
        )

    @property
    def likely_output(self) -> float:
        """The mean output length; until a sequence has finished, at most the mean limit."""
        if self._num_finished or not self._num_admitted:
            return self.output
        return min(self.output, self._mean_limit)

    @property
    def computed_share(self) -> float:
        """Recent fraction of the prompt tokens that had to be computed."""
        return self.computed / self._mean_prompt if self._mean_prompt else 1.0

    def estimate_length(self, seq: Sequence) -> int:
        """Return the expected final number of tokens of ``seq``, from the mean output length and
        its own limit.
        """
        growth = max(MIN_GROWTH, int(self.output) - seq.num_output_tokens)
        return min(seq.limit, seq.num_tokens + growth)
