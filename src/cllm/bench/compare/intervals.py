"""Confidence intervals of medians."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95


class Median(NamedTuple):
    """The median of some values, and the interval that contains the median of all possible values.

    The bounds are order statistics, so no distribution is assumed. With fewer than six values they
    are the least and the greatest one, which is less than CONFIDENCE.
    """

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Median:
        """Raises statistics.StatisticsError if there are no values."""
        ranked, left_out = sorted(values), num_left_out(len(values))
        return cls(statistics.median(ranked), ranked[left_out], ranked[-1 - left_out])


def num_left_out(count: int) -> int:
    """Return how many of ``count`` values the interval leaves out on each side.

    The true median is below the value of rank k (from 0) with the probability that ``count`` tosses
    of a coin give at most k heads.
    """
    below, left_out = 0.0, 0
    for k in range(count):
        below += math.comb(count, k) / 2**count
        if 2 * below > 1 - CONFIDENCE:
            break
        left_out = k
    return left_out
