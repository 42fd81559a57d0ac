"""What a step costs on this machine, learned from every step."""

from __future__ import annotations

SHARE = 0.2  # of a new observation in the mean
ROW_OFFSET = 3  # until a number of rows has been seen, its cost is taken as proportional to rows + this


class StepCost:
    """Seconds of a step as the cost of its decoding rows, by their number, plus so much for each prefill token.

    Both are exponential means. The first is kept for each number of rows, because kernels make it anything but a
    line; the second is what a step took beyond its decoding rows, so it covers the additional pass that a chunk costs
    in the partitioned layout, and it follows the length of the contexts.
    """

    def __init__(self) -> None:
        self.per_rows: dict[int, float] = {}
        self.per_token: float | None = None

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of ``num_rows`` decoding rows and ``num_tokens`` prefill tokens took ``seconds``."""
        expected = self.decode(num_rows)
        if num_tokens == 0:
            self.per_rows[num_rows] = mean(self.per_rows.get(num_rows, expected or None), seconds)
        elif num_tokens >= 4:  # the cost of fewer is lost in the noise of the rows
            self.per_token = mean(self.per_token, max(0.0, seconds - expected) / num_tokens)

    def decode(self, num_rows: int) -> float:
        """Expected seconds of a step with nothing but decoding rows; 0 if none was ever seen."""
        known = self.per_rows.get(num_rows)
        if known is not None or not self.per_rows or num_rows == 0:
            return known or 0.0
        nearest = min(self.per_rows, key=lambda n: abs(n - num_rows))
        return self.per_rows[nearest] * (num_rows + ROW_OFFSET) / (nearest + ROW_OFFSET)

    def prefill(self, num_tokens: int) -> float:
        """Expected seconds for so many prefill tokens; 0 if none was ever seen."""
        return num_tokens * (self.per_token or 0.0)

    def num_prefill_tokens(self, num_rows: int, seconds: float) -> int | None:
        """How many prefill tokens fit beside the decoding rows into ``seconds``; None while that is not known."""
        if not self.per_token:
            return None
        return int((seconds - self.decode(num_rows)) / self.per_token)


def mean(before: float | None, value: float) -> float:
    """The exponential mean, in which a value that is far too large counts as twice the mean."""
    return value if before is None else before + SHARE * (min(value, 2 * before) - before)
