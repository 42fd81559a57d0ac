"""The latencies of the requests that have ended within the last minute."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.observe.request_record import RequestRecord
from cllm.server.live.schema import Latencies

SECONDS = 60.0
MAX_REQUESTS = 1000  # the latest ones are kept
MAX_GAPS = 32  # of a request, evenly chosen
PERCENTILES = (50, 90, 99)


class EndedRequest(NamedTuple):
    at: float  # on the monotonic clock
    ttft: float | None
    gaps: npt.NDArray[np.float32]
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
        gaps = np.array(record.gaps[:: 1 + len(record.gaps) // MAX_GAPS], np.float32)
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
        first = np.array([one.ttft for one in self._ended if one.ttft is not None])
        self._latencies = Latencies(
            len(self._ended),
            sum(one.has_failed for one in self._ended),
            list_percentiles(first),
            list_percentiles(np.concatenate([one.gaps for one in self._ended])),
        )
        return self._latencies


def list_percentiles(values: npt.NDArray[np.floating]) -> list[float]:
    if not len(values):
        return []
    return [round(float(value), 5) for value in np.percentile(values, PERCENTILES)]
