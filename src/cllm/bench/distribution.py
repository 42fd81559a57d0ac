"""The distribution of many times in four numbers."""

from __future__ import annotations

from collections.abc import Iterable

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
