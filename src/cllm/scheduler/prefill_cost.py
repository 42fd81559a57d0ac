"""The cost of computing prompts on this machine, learned from every step."""

from __future__ import annotations

SHARE = 0.2  # weight of a new tile in the mean cost
SLOW_SHARE = 0.02  # the same in the line through tiles at different positions
SMALL_SPREAD = 256.0  # tokens; tiles whose positions differ less say little about the slope


class PrefillCost:
    """Seconds of a tile of prompt tokens, as a line over the number of tokens before it: each of
    them is one more key that the tile attends to.

    The height of the line is an exponential mean of the latest tiles, so that it follows the
    machine. Its slope comes from exponential means of moments over many more tiles, shrunk towards
    0 as in ridge regression while all tiles have similar positions.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None  # mean of the latest tiles; None before the first
        self._num_before = 0.0  # the same of the tokens before them
        self._mean_seconds = self._mean_before = 0.0  # of many tiles, like the next two
        self._variance = self._covariance = 0.0

    def observe(self, seconds: float, num_before: float, num_tiles: float) -> None:
        """Learn that each of ``num_tiles`` took ``seconds``, after ``num_before`` tokens on
        average.
        """
        expected = self.estimate(num_before)
        if self.seconds is None or expected is None:
            self.seconds = self._mean_seconds = seconds
            self._num_before = self._mean_before = num_before
            return
        # the difference of two measurements may be far too small, and a step far too slow
        seconds = min(max(seconds, expected / 2), 2 * expected)
        share = 1 - (1 - SHARE) ** num_tiles  # as if each tile had been observed on its own
        self.seconds += share * (seconds - self.seconds)
        self._num_before += share * (num_before - self._num_before)
        share = 1 - (1 - SLOW_SHARE) ** num_tiles
        away, above = num_before - self._mean_before, seconds - self._mean_seconds
        self._variance = (1 - share) * (self._variance + share * away * away)
        self._covariance = (1 - share) * (self._covariance + share * away * above)
        self._mean_before += share * away
        self._mean_seconds += share * above

    def estimate(self, num_before: float | None = None) -> float | None:
        """Return the expected seconds of a tile after ``num_before`` tokens, by default after as
        many as the latest ones; None before the first.
        """
        if self.seconds is None or num_before is None:
            return self.seconds
        slope = max(0.0, self._covariance / (self._variance + SMALL_SPREAD**2))
        if self._num_before:  # the first tile of a prompt costs something
            slope = min(slope, 0.9 * self.seconds / self._num_before)
        return self.seconds + slope * (num_before - self._num_before)
