"""What a step costs on this machine, learned from every step."""

from __future__ import annotations

import math

SHARE = 0.2  # of a new observation in the mean
ENOUGH = 20  # times as long as a step of one row: reading the weights is a twentieth of such a step
ROW_OFFSET = 3  # until a number of rows has been seen, its cost is taken as proportional to rows + this


class StepCost:
    """Seconds of a step: the cost of its decoding rows, by their number, plus that of its prefill tokens.

    The first is an exponential mean for each number of rows, because kernels make it anything but a line. The second
    is one for each tile: kernels compute prompts in tiles, and one that is not full costs as much as a full one.
    """

    def __init__(self, tile: int) -> None:
        """``tile``: tokens, see ModelInfo."""
        self.tile = tile
        self.per_rows: dict[int, float] = {}
        self.per_tile: float | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds for a token of a long prompt; None if none was ever seen."""
        return self.per_tile and self.per_tile / self.tile

    def observe(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of ``num_rows`` decoding rows and ``num_tokens`` prefill tokens took ``seconds``."""
        expected = self.decode(num_rows)
        if num_tokens == 0:
            self.per_rows[num_rows] = mean(self.per_rows.get(num_rows, expected or None), seconds)
        else:
            num_tiles = -(-num_tokens // self.tile)
            share = 1 - (1 - SHARE) ** (num_tokens / self.tile)  # as if each tile had been seen on its own
            self.per_tile = mean(self.per_tile, max(0.0, seconds - expected) / num_tiles, share)

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

    @property
    def enough(self) -> float:
        """Prefill tokens of a step from which on more would hardly make it more efficient; inf while not known."""
        if not self.per_token or not self.per_rows:
            return math.inf
        return ENOUGH * self.decode(1) / self.per_token

    def num_tiles(self, num_rows: int, seconds: float) -> int | None:
        """How many tiles of prefill tokens fit beside the decoding rows into ``seconds``, at least one.

        None while that is not known.
        """
        if not self.per_tile:
            return None
        return max(1, int((seconds - self.decode(num_rows)) / self.per_tile))

    def prefill_budget(
        self, space: int, num_rows: int, num_tokens: int, target_itl: float | None, *, shares: bool
    ) -> int:
        """Prefill tokens beside the decoding rows: ``space`` of them, or what keeps their latency within the target.

        ``num_tokens`` are those of the rows; ``shares``: whether all sequences draw on one pool of cells.
        """
        if not num_rows or target_itl is None:
            return space
        num_tiles = self.num_tiles(num_rows, target_itl)
        if num_tiles is None:
            return space
        # So that tiles are full: rows of one pool are computed with the prompts; else a prompt's first token is with
        # the rows, and the others are apart.
        budget = num_tiles * self.tile - (num_tokens % self.tile if shares else -1)
        return min(space, budget if budget >= self.tile // 2 else budget + self.tile)


def mean(before: float | None, value: float, share: float = SHARE) -> float:
    """The exponential mean, in which a value that is far too large counts as twice the mean."""
    return before + share * (min(value, 2 * before) - before) if before else value
