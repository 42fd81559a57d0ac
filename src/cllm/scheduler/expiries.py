"""The times at which sequences expire."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from cllm.core.sequence import Sequence, Status

MIN_ENTRIES = 64


class Expiries:
    """A heap of expiry times. Only an entry that equals the sequence's ``expires`` is valid. Others
    are dropped when the heap has doubled.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._max_entries = MIN_ENTRIES

    def set(self, seq: Sequence, seconds: float | None) -> None:
        """Let ``seq`` expire ``seconds`` after its arrival; None means never."""
        seq.expires = None if seconds is None else seq.arrived + seconds
        if seq.expires is not None:
            heapq.heappush(self._heap, (seq.expires, seq.order, seq))
        if len(self._heap) > self._max_entries:
            self._heap = [entry for entry in self._heap if is_valid(*entry)]
            heapq.heapify(self._heap)
            self._max_entries = max(MIN_ENTRIES, 2 * len(self._heap))

    def take(self, now: float) -> Iterator[Sequence]:
        """Yield the unfinished sequences that expire at ``now`` or earlier, each once."""
        while self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if is_valid(*entry):
                yield entry[2]


def is_valid(expires: float, _order: int, seq: Sequence) -> bool:
    return seq.expires == expires and seq.status is not Status.FINISHED
