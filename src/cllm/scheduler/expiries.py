"""The times at which sequences expire."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from cllm.core.sequence import Sequence, Status


class Expiries:
    """A heap of expiry times. Only an entry that equals the sequence's ``expires`` is valid."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def set(self, seq: Sequence, seconds: float | None) -> None:
        """Let ``seq`` expire ``seconds`` after its arrival; None: never."""
        seq.expires = None if seconds is None else seq.arrived + seconds
        if seq.expires is not None:
            heapq.heappush(self._heap, (seq.expires, seq.order, seq))

    def take(self, now: float) -> Iterator[Sequence]:
        """Yield the unfinished sequences that expire at ``now`` or earlier, each once."""
        while self._heap and self._heap[0][0] <= now:
            expires, _, seq = heapq.heappop(self._heap)
            if seq.expires == expires and seq.status is not Status.FINISHED:
                yield seq
