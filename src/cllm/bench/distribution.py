"""The distribution of many times in four numbers, and the fairness of shares in one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np


class Distribution(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution | None:
        """Return the distribution in milliseconds, or None if there are no values."""
        values = np.fromiter(seconds, np.float64) * 1e3
        if not len(values):
            return None
        return cls(
            *(
                round(float(value), 3)
                for value in (values.mean(), *np.percentile(values, (50, 95, 99)))
            )
        )


def jain_index(amounts: Sequence[float]) -> float | None:
    """Return Jain's index of fairness: 1 if all amounts are equal, and 1 / their number if all but
    one are 0. None if all are 0.
    """
    squares = sum(amount**2 for amount in amounts)
    return sum(amounts) ** 2 / (len(amounts) * squares) if squares else None
