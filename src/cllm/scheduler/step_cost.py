"""What a step costs on this machine, learned from every step."""

from __future__ import annotations

SHARE = 0.2  # of a new observation in the mean
ROW_OFFSET = 3  # until a number of rows has been seen, its cost is taken as proportional to rows + this
MIN_CHUNK, MAX_MIN_CHUNK = 16, 128  # tokens; bounds of the smallest chunk that is worth a pass


class StepCost:
    """Seconds of a step: the cost of its decoding rows, by their number, plus that of its prefill tokens.

    The first is an exponential mean for each number of rows, because kernels make it anything but a line. The second,
    what a step took beyond its decoding rows, is a line through exponential means: so much for the pass that a chunk
    costs in addition, and so much for each token.
    """

    def __init__(self) -> None:
        self.per_rows: dict[int, float] = {}
        self.per_token: float | None = None
        self.per_chunk = 0.0
        self._tokens = self._seconds = self._squares = self._products = 0.0

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of ``num_rows`` decoding rows and ``num_tokens`` prefill tokens took ``seconds``."""
        expected = self.decode(num_rows)
        if num_tokens == 0:
            self.per_rows[num_rows] = mean(self.per_rows.get(num_rows, expected or None), seconds)
        elif num_tokens >= 4:  # the cost of fewer is lost in the noise of the rows
            self._observe_chunk(num_tokens, max(0.0, seconds - expected))

    def _observe_chunk(self, tokens: int, seconds: float) -> None:
        if self.per_token is not None and self.prefill(tokens) > 0:
            seconds = min(seconds, 2 * self.prefill(tokens))
        share = SHARE if self.per_token is not None else 1.0
        self._tokens += share * (tokens - self._tokens)
        self._seconds += share * (seconds - self._seconds)
        self._squares += share * (tokens * tokens - self._squares)
        self._products += share * (tokens * seconds - self._products)
        variance = self._squares - self._tokens**2
        slope = self._seconds / self._tokens
        if variance > (0.1 * self._tokens) ** 2:  # chunks of one size say nothing about a line
            slope = min(slope, max(0.0, (self._products - self._tokens * self._seconds) / variance))
        self.per_token = slope
        self.per_chunk = self._seconds - slope * self._tokens

    def decode(self, num_rows: int) -> float:
        """Expected seconds of a step with nothing but decoding rows; 0 if none was ever seen."""
        known = self.per_rows.get(num_rows)
        if known is not None or not self.per_rows or num_rows == 0:
            return known or 0.0
        nearest = min(self.per_rows, key=lambda n: abs(n - num_rows))
        return self.per_rows[nearest] * (num_rows + ROW_OFFSET) / (nearest + ROW_OFFSET)

    def prefill(self, num_tokens: int) -> float:
        """Expected seconds for so many prefill tokens; 0 if none was ever seen."""
        return self.per_chunk + num_tokens * (self.per_token or 0.0) if num_tokens else 0.0

    def num_prefill_tokens(self, num_rows: int, seconds: float) -> int | None:
        """How many prefill tokens fit beside the decoding rows into ``seconds``; None while that is not known.

        Never less than a chunk that is worth its pass: one that takes longer than what every chunk costs.
        """
        if not self.per_token:
            return None
        least = max(MIN_CHUNK, min(MAX_MIN_CHUNK, int(self.per_chunk / self.per_token)))
        return max(least, int((seconds - self.decode(num_rows) - self.per_chunk) / self.per_token))


def mean(before: float | None, value: float) -> float:
    """The exponential mean, in which a value that is far too large counts as twice the mean."""
    return value if before is None else before + SHARE * (min(value, 2 * before) - before)
