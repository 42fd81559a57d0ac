"""Leases seq_ids, the numbers by which a backend identifies sequences."""

from __future__ import annotations


class SeqIdPool:
    """Leases the seq_ids 0 .. size-1.

    Invariant: every seq_id is either free or leased, never both.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = set(range(size))
        self._leased: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def is_leased(self, seq_id: int) -> bool:
        return seq_id in self._leased

    def lease(self, seq_id: int) -> None:
        """Mark ``seq_id`` as leased. Raises KeyError if it is not free."""
        self.free.remove(seq_id)
        self._leased.add(seq_id)

    def give_back(self, seq_id: int) -> None:
        """Mark ``seq_id`` as free. Raises KeyError if it is not leased."""
        self._leased.remove(seq_id)
        self.free.add(seq_id)

    def swap(self, first: int, second: int) -> None:
        """Exchange the states of two seq_ids."""
        if self.is_leased(first) != self.is_leased(second):
            self.free ^= {first, second}
            self._leased ^= {first, second}

    def check(self) -> None:
        """Raise AssertionError if a seq_id is lost or duplicated."""
        if sorted([*self.free, *self._leased]) != list(range(self.size)):
            raise AssertionError(f"sequence ids lost or duplicated: {self}")

    def __str__(self) -> str:
        return f"<SeqIdPool {self.size}: leased {sorted(self._leased)}>"
