"""The cost of a step on this machine, learned from every step."""

from __future__ import annotations

import math

SHARE = 0.2  # weight of a new observation in the mean
SLOW_SHARE = 0.02  # the same for a chunk, in the line through chunks at different positions
CHUNK = 64  # prompt tokens that count as one observation
LEAST = 16  # prompt tokens to compute beside decoding rows, if any; fewer take hardly less time
SMALL_SPREAD = 256.0  # tokens; chunks whose positions differ less say little about the slope
# Once a step takes as long as this many steps of one row, reading the weights is only a tenth.
EFFICIENT_STEPS = 10
# the cost of a number of rows not seen yet is taken as proportional to rows + ROW_OFFSET
ROW_OFFSET = 3
KNOWN = 5  # observations after which the cost of a number of rows is known
STALE = 1000  # decoding steps after which a cost that was not observed again is forgotten
SHORTEST = 1e-6  # least seconds of a step, because the clock may not have moved


class StepCost:
    """Seconds of a step: the cost of its decoding rows, plus that of attention to long sequences,
    plus that of its prefill tokens.

    The first is an exponential mean for each number of rows, because with real kernels it is far
    from linear. Those that have not been observed for a long time, except for one row, are
    forgotten, because the machine may have other work now. The second is an exponential mean per
    token of the long sequences. While only long sequences have been observed, it is part of the
    first. The third is a cost per token.

    The cost of a prefill token is a line over the number of tokens before it, to which it attends.
    The height of the line is an exponential mean of the latest tokens, so that it follows the
    machine. Its slope comes from exponential means of moments over many more tokens, shrunk towards
    0 as in ridge regression while all tokens have similar positions.
    """

    def __init__(self, row_seconds: float = 0.0) -> None:
        """ModelInfo explains ``row_seconds``; 0 if unknown."""
        self._measured_row = row_seconds
        self.per_rows: dict[int, float] = {}  # the least recently observed one first
        self._observed: dict[int, tuple[int, int]] = {}  # rows -> number, and step of the last one
        self._num_steps = 0  # observed ones with only decoding rows
        # seconds of a prefill token, mean of the latest ones; None before the first
        self.per_token: float | None = None
        self._num_before = 0.0  # mean of the tokens before the latest ones
        self._mean_seconds = self._mean_before = 0.0  # of many tokens, like the next two
        self._variance = self._covariance = 0.0
        self.per_long_token: float | None = None
        # whether the first includes the second, because each step had long sequences
        self.includes_long = False

    def observe(
        self,
        num_rows: int,
        num_tokens: int,
        seconds: float,
        num_long_tokens: int = 0,
        num_before: float = 0.0,
    ) -> None:
        """Learn that a step took ``seconds``.

        It had ``num_rows`` decoding rows, which attend to ``num_long_tokens`` tokens of long
        sequences, and ``num_tokens`` prefill tokens, which followed ``num_before`` tokens of their
        sequences on average.
        """
        seconds = max(seconds, SHORTEST)
        rows, long = self.estimate_decode(num_rows), self.estimate_long_row(num_long_tokens)
        if num_tokens:
            if num_rows and seconds <= rows + long:  # without its prompt, it would be even shorter
                self.per_rows[num_rows] = seconds
                self._observed.setdefault(num_rows, (0, self._num_steps))
            rows = self._find_least(num_rows)
            left = seconds - rows - long
            if left > 0 or self.per_token:
                each = max(left, SHORTEST) / max(num_tokens, LEAST)
                self._observe_prefill(each, num_before, num_tokens / CHUNK, exact=left == seconds)
        elif num_long_tokens and rows and not self.includes_long:
            self._observed.setdefault(num_rows, (0, self._num_steps))
            each = max(0.0, seconds - rows) / num_long_tokens
            self.per_long_token = update_mean(self.per_long_token, each)
        else:
            if self.includes_long and not num_long_tokens:
                self.forget()
                rows = 0.0
            self.includes_long = num_long_tokens > 0
            self._num_steps += 1
            count, _ = self._observed.get(num_rows, (0, 0))
            self._observed[num_rows] = count + 1, self._num_steps
            before = self.per_rows.pop(num_rows, rows or None)
            if not count and before is not None:  # only a guess, which may be far too high
                before = min(before, seconds)
            self.per_rows[num_rows] = update_mean(before, seconds)
            oldest = next((n for n in self.per_rows if n != 1), 1)
            if oldest != 1 and self._num_steps - self._observed[oldest][1] > STALE:
                del self.per_rows[oldest], self._observed[oldest]

    def _observe_prefill(
        self, seconds: float, num_before: float, num_chunks: float, *, exact: bool
    ) -> None:
        """Learn that each token of ``num_chunks`` took ``seconds``, after ``num_before`` tokens on
        average. Unless it is ``exact``, it is the difference of two times.
        """
        if self.per_token is None:
            self.per_token = self._mean_seconds = seconds
            self._num_before = self._mean_before = num_before
            return
        expected = self._estimate_token(num_before)
        # the difference of two times may be far too small, and a step far too slow
        seconds = min(seconds if exact else max(seconds, expected / 2), 2 * expected)
        share = 1 - (1 - SHARE) ** num_chunks  # as if each chunk had been observed on its own
        self.per_token += share * (seconds - self.per_token)
        self._num_before += share * (num_before - self._num_before)
        share = 1 - (1 - SLOW_SHARE) ** num_chunks
        away, above = num_before - self._mean_before, seconds - self._mean_seconds
        self._variance = (1 - share) * (self._variance + share * away * away)
        self._covariance = (1 - share) * (self._covariance + share * away * above)
        self._mean_before += share * away
        self._mean_seconds += share * above

    def _find_least(self, num_rows: int) -> float:
        """Return a lower bound for the seconds of a step with ``num_rows`` decoding rows: the time
        observed for as many rows, or else for fewer.
        """
        known = [n for n, (count, _) in self._observed.items() if count and n <= num_rows]
        return self.per_rows[max(known)] if known else 0.0

    def forget(self) -> None:
        """Forget the costs of rows, because the machine may have other work now."""
        self.per_rows, self._observed = {}, {}

    def has_seen(self, num_rows: int) -> bool:
        """Return whether a step with this number of decoding rows has been observed."""
        return num_rows in self._observed

    def is_known(self, num_rows: int) -> bool:
        """Return whether a similar number of decoding rows has been observed several times."""
        return any(
            abs(known - num_rows) <= num_rows // 4 and count >= KNOWN
            for known, (count, _) in self._observed.items()
        )

    @property
    def row_seconds(self) -> float:
        """Seconds of a step of one row; 0 if unknown. More rows take at least as long."""
        if 1 in self.per_rows or not self._measured_row:
            return self.estimate_decode(1)
        return min(self._measured_row, *self.per_rows.values(), math.inf)

    def estimate_decode(self, num_rows: int, num_long_tokens: int = 0) -> float:
        """Return the expected seconds of a step with only decoding rows; 0 if none has been
        observed.
        """
        if not self.per_rows or num_rows == 0:
            return 0.0
        seconds = self.per_rows.get(num_rows)
        if seconds is None:
            nearest = min(self.per_rows, key=lambda n: abs(n - num_rows))
            seconds = self.per_rows[nearest] * (num_rows + ROW_OFFSET) / (nearest + ROW_OFFSET)
        return seconds + self.estimate_long_row(num_long_tokens)

    def estimate_long_row(self, num_tokens: int) -> float:
        """Return the expected seconds of attention to ``num_tokens`` tokens of long sequences; 0 if
        none has been observed.
        """
        return num_tokens * (self.per_long_token or 0.0)

    @property
    def _slope(self) -> float:
        """Seconds by which a prefill token takes longer for each token before it."""
        slope = max(0.0, self._covariance / (self._variance + SMALL_SPREAD**2))
        if self._num_before:  # the first token of a prompt costs something
            slope = min(slope, 0.9 * (self.per_token or 0.0) / self._num_before)
        return slope

    def _estimate_token(self, num_before: float) -> float:
        return (self.per_token or 0.0) + self._slope * (num_before - self._num_before)

    def estimate_prefill(self, num_tokens: int, num_before: float | None = None) -> float:
        """Return the expected seconds for ``num_tokens`` prefill tokens, which follow
        ``num_before`` tokens on average, by default as many as the latest ones; 0 if none has been
        observed.
        """
        num_tokens = max(num_tokens, LEAST) if num_tokens else 0
        if not self.per_token or num_before is None:
            return num_tokens * (self.per_token or 0.0)
        return num_tokens * self._estimate_token(num_before)

    @property
    def efficient_prefill_tokens(self) -> float:
        """The number of prefill tokens beyond which a step hardly gets more efficient; inf while
        unknown.
        """
        if not self.per_token or not self.row_seconds:
            return math.inf
        return EFFICIENT_STEPS * self.row_seconds / self.per_token

    def compute_prefill_budget(
        self, space: int, num_rows: int, seconds: float, num_before: int = 0
    ) -> int:
        """Return how many prefill tokens to compute with the decoding rows: at most ``space``,
        within ``seconds``, but at least LEAST.

        ``num_before`` tokens of the first prompt have been computed.
        """
        if not num_rows or math.isinf(seconds) or not self.per_token:
            return space
        seconds = max(0.0, seconds - self.estimate_decode(num_rows))
        # n tokens take n * first + n * n / 2 * slope seconds
        first = self._estimate_token(num_before)
        num_tokens = 2 * seconds / (first + math.sqrt(first * first + 2 * self._slope * seconds))
        return min(space, max(LEAST, int(num_tokens + 1e-9)))


def update_mean(before: float | None, value: float, share: float = SHARE) -> float:
    """Return the new exponential mean. A value above twice the mean counts as twice the mean."""
    return before + share * (min(value, 2 * before) - before) if before else value
