"""What sequences will probably need, by what others needed."""

from __future__ import annotations

from cllm.core.sequence import Sequence
from cllm.scheduler.step_cost import SHARE, mean

MIN_GROWTH = 8  # tokens that a sequence is expected to get still, however many it got
FIRST_GUESS_OF_OUTPUT = 64.0  # tokens, until a request has finished


class Expectations:
    """``output``: tokens of an answer. ``computed``: tokens of a prompt that were not cached."""

    def __init__(self) -> None:
        self.output = FIRST_GUESS_OF_OUTPUT
        self._num_finished = 0
        self.computed = 0.0
        self._mean_prompt = 0.0  # tokens

    def begun(self, seq: Sequence) -> None:
        """``seq`` has been admitted, with what there was of its prompt."""
        self._mean_prompt += SHARE * (seq.num_prompt_tokens - self._mean_prompt)
        self.computed += SHARE * (seq.num_lacking_tokens - self.computed)

    def finished(self, seq: Sequence) -> None:
        self._num_finished += 1
        self.output = mean(self.output, seq.num_output_tokens, max(SHARE, 1 / self._num_finished))

    @property
    def computed_share(self) -> float:
        """Of the tokens of prompts, those that had to be computed lately."""
        return self.computed / self._mean_prompt if self._mean_prompt else 1.0

    def size(self, seq: Sequence) -> int:
        """Tokens ``seq`` will probably end with: as many of output as others got, unless it is bound to get fewer."""
        growth = max(MIN_GROWTH, int(self.output) - seq.num_output_tokens)
        return min(seq.limit, seq.num_tokens + growth)
