"""The latencies of the requests that have ended within the last minute."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from cllm.observe.request_record import RequestRecord
from cllm.server.live.schema import Latencies

SECONDS = 60.0
MAX_REQUESTS = 1000  # the latest ones are kept
MAX_GAPS = 32  # of a request, evenly chosen
PERCENTILES = (50, 90, 99)


class EndedRequest(NamedTuple):
    at: float  # on the monotonic clock
    ttft: float | None
    gaps: array[float]
    has_failed: bool


class LastMinute:
    """Notes requests when they end. Nothing is computed before ``sum_up`` is called."""

    def __init__(self) -> None:
        self._ended: deque[EndedRequest] = deque(maxlen=MAX_REQUESTS)
        self._latencies = Latencies()
        self._computed_at = 0.0

    def note(self, record: RequestRecord) -> None:
        """Take the record of a request that has ended, if a model has computed something for it."""
        if record.submitted is None or record.ended is None:
            return
        gaps = array("f", record.gaps[:: 1 + len(record.gaps) // MAX_GAPS])
        has_failed = record.status >= 500 or record.outcome in ("error", "timeout")
        self._ended.append(EndedRequest(record.ended, record.ttft, gaps, has_failed))

    def sum_up(self, now: float) -> Latencies:
        """Return the latencies of the last minute, at most a second old."""
        if now - self._computed_at < 1:
            return self._latencies
        self._computed_at = now
        while self._ended and now - self._ended[0].at > SECONDS:
            self._ended.popleft()
        if not self._ended:
            self._latencies = Latencies()
            return self._latencies
        self._latencies = Latencies(
            len(self._ended),
            sum(one.has_failed for one in self._ended),
            list_percentiles(one.ttft for one in self._ended if one.ttft is not None),
            list_percentiles(chain.from_iterable(one.gaps for one in self._ended)),
        )
        return self._latencies


def list_percentiles(values: Iterable[float]) -> list[float]:
    """Return PERCENTILES of values, each of which is one of them."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return [round(ordered[round(last * one / 100)], 5) for one in PERCENTILES if ordered]
