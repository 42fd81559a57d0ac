"""Latencies in four numbers, limits for them, and the fairness of shares in one number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np


class LatencySummary(msgspec.Struct, frozen=True):
    """The distribution of a latency in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def summarize(cls, seconds: Iterable[float]) -> LatencySummary | None:
        """Return the summary, or None if there are no values."""
        values = np.fromiter(seconds, np.float64) * 1e3
        if not len(values):
            return None
        quantiles = (values.mean(), *np.percentile(values, (50, 95, 99)))
        return cls(*(round(float(value), 3) for value in quantiles))


class HasLatencies:
    """What reports with the four latencies of requests have in common."""

    __slots__ = ()

    ttft_ms: LatencySummary | None
    itl_ms: LatencySummary | None
    tpot_ms: LatencySummary | None
    e2e_ms: LatencySummary | None

    @property
    def latencies(self) -> dict[str, LatencySummary]:
        """The latencies that have values, by displayed name."""
        summaries = {
            "TTFT": self.ttft_ms,
            "ITL": self.itl_ms,
            "TPOT": self.tpot_ms,
            "E2E": self.e2e_ms,
        }
        return {name: values for name, values in summaries.items() if values is not None}


class LatencyLimits(msgspec.Struct, frozen=True):
    """The limits within which a request counts as good, in milliseconds. None means no limit."""

    ttft: float | None = None
    tpot: float | None = None

    def allow(self, ttft: float, tpot: float) -> bool:
        """Return whether latencies in seconds are within the limits."""
        return (self.ttft is None or ttft * 1000 <= self.ttft) and (
            self.tpot is None or tpot * 1000 <= self.tpot
        )


def jain_index(amounts: Sequence[float]) -> float | None:
    """Return Jain's index of fairness: 1 if all amounts are equal, and 1 / their number if all but
    one are 0. None if all are 0.
    """
    squares = sum(amount**2 for amount in amounts)
    return sum(amounts) ** 2 / (len(amounts) * squares) if squares else None
