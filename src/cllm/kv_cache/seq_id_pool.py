"""The numbers under which a backend keeps sequences."""

from __future__ import annotations

import heapq


class SeqIdPool:
    """Leases 0 .. size-1, the lowest free number first, because holes between active ids cost llama.cpp extra passes.

    Invariant: every number is either free or leased, never both.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = list(range(size))
        self._leased: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def is_leased(self, seq_id: int) -> bool:
        return seq_id in self._leased

    def lease(self, wanted: int | None = None) -> int:
        """Take ``wanted``, or the lowest free number. Raises IndexError if none is free, ValueError if it is not."""
        if wanted is None:
            seq_id = heapq.heappop(self._free)
        else:
            self._free.remove(wanted)
            heapq.heapify(self._free)
            seq_id = wanted
        self._leased.add(seq_id)
        return seq_id

    def give_back(self, seq_id: int) -> None:
        """Raises KeyError if the number was not leased."""
        self._leased.remove(seq_id)
        heapq.heappush(self._free, seq_id)

    def check(self) -> None:
        """Raise AssertionError if a number is lost or doubled."""
        if sorted([*self._free, *self._leased]) != list(range(self.size)):
            raise AssertionError(f"sequence ids lost or doubled: {self}")

    def __str__(self) -> str:
        return f"<SeqIdPool {self.size}: leased {sorted(self._leased)}>"
