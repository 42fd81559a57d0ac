"""Copies of prefixes outside the cells: in RAM and, if configured, on disk.

This is only the bookkeeping. The backend keeps the bytes in RAM; the engine's disk thread moves
them to files and back. A file counts once the thread has reported it. A copy that is only in a file
must be read before it can be used.
"""

from __future__ import annotations

import enum
from collections import OrderedDict

from cllm.kv_cache.radix_tree import Tokens


class StorageTier(enum.Enum):
    RAM = "ram"
    DISK = "disk"
    READING = "reading"  # being read from disk to RAM


class Snapshot:
    """A saved prefix: its tokens, its size, where it can be loaded from, and whether it is in a
    file.
    """

    __slots__ = ("in_file", "key", "num_bytes", "salt", "tier", "tokens")

    def __init__(
        self, key: int, tokens: Tokens, num_bytes: int, tier: StorageTier, salt: str = ""
    ) -> None:
        self.key = key
        self.tokens = tokens
        self.num_bytes = num_bytes
        self.tier = tier
        self.salt = salt
        self.in_file = tier is StorageTier.DISK

    @property
    def num_computed(self) -> int:
        return len(self.tokens)

    @property
    def is_final(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Snapshot {self.key} {len(self.tokens)} tokens {self.tier.value}>"


class Tiers:
    """All snapshots in RAM and in files.

    Both have a budget in bytes and evict the least recently used first.

    Invariants: a snapshot is in ``ram`` (RAM, READING) or in ``files`` or in both; num_*_bytes are
    the sums of their sizes.
    """

    def __init__(
        self,
        ram_bytes: int = 0,
        disk_bytes: int = 0,
        bytes_per_token: int = 0,
        bytes_per_snapshot: int = 0,
    ) -> None:
        """A snapshot of n tokens counts as ``bytes_per_snapshot + n * bytes_per_token``."""
        self.ram_bytes = ram_bytes
        self.disk_bytes = disk_bytes
        self._bytes_per_token = bytes_per_token
        self._bytes_per_snapshot = bytes_per_snapshot
        self.ram: OrderedDict[int, Snapshot] = OrderedDict()
        self.files: OrderedDict[int, Snapshot] = OrderedDict()
        self.num_ram_bytes = 0
        self.num_disk_bytes = 0
        self._next_key = 0

    def __len__(self) -> int:
        return len(self.ram.keys() | self.files.keys())

    def find(self, key: int) -> Snapshot | None:
        return self.ram.get(key) or self.files.get(key)

    def compute_size(self, num_tokens: int) -> int:
        return self._bytes_per_snapshot + num_tokens * self._bytes_per_token

    def add(self, tokens: Tokens, tier: StorageTier = StorageTier.RAM, salt: str = "") -> Snapshot:
        """Add and return a new snapshot. Before adding to RAM, call ``make_room``."""
        snapshot = Snapshot(self._next_key, tokens, self.compute_size(len(tokens)), tier, salt)
        self._next_key += 1
        if tier is StorageTier.DISK:
            self.files[snapshot.key] = snapshot
            self.num_disk_bytes += snapshot.num_bytes
        else:
            self._into_ram(snapshot)
        return snapshot

    def _into_ram(self, snapshot: Snapshot) -> None:
        self.ram[snapshot.key] = snapshot
        self.num_ram_bytes += snapshot.num_bytes

    def make_room(self, num_bytes: int, spared: object = None) -> list[Snapshot] | None:
        """Evict snapshots from RAM until ``num_bytes`` fit; return them, or None if that is
        impossible.

        Evicted snapshots that are in no file are lost.
        """
        leaving: list[Snapshot] = []
        missing = self.num_ram_bytes + num_bytes - self.ram_bytes
        for snapshot in self.ram.values():
            if missing <= 0:
                break
            if snapshot.tier is StorageTier.RAM and snapshot is not spared:
                missing -= snapshot.num_bytes
                leaving.append(snapshot)
        if missing > 0:
            return None
        for snapshot in leaving:
            self.leave_ram(snapshot)
        return leaving

    def leave_ram(self, snapshot: Snapshot) -> None:
        del self.ram[snapshot.key]
        self.num_ram_bytes -= snapshot.num_bytes
        snapshot.tier = StorageTier.DISK

    def touch(self, snapshot: Snapshot) -> None:
        for tier in (self.ram, self.files):
            if snapshot.key in tier:
                tier.move_to_end(snapshot.key)

    def read(self, snapshot: Snapshot) -> None:
        """Mark ``snapshot`` as being read from its file. Call ``make_room`` first."""
        snapshot.tier = StorageTier.READING
        self._into_ram(snapshot)

    def record_written(self, snapshot: Snapshot) -> list[Snapshot]:
        """Record that a file contains ``snapshot``, unless it is larger than the budget.

        Returns the snapshots that are in no file any more.
        """
        if snapshot.num_bytes > self.disk_bytes:
            return []
        snapshot.in_file = True
        self.files[snapshot.key] = snapshot
        self.num_disk_bytes += snapshot.num_bytes
        return self.evict_files()

    def evict_files(self) -> list[Snapshot]:
        """Forget the least recently used files until the others are within the budget; return their
        snapshots.
        """
        leaving = []
        for oldest in self.files.values():
            if self.num_disk_bytes <= self.disk_bytes:
                break
            self.num_disk_bytes -= oldest.num_bytes
            leaving.append(oldest)
        for oldest in leaving:
            oldest.in_file = False
            del self.files[oldest.key]
        return leaving

    def forget(self, snapshot: Snapshot) -> None:
        if self.ram.pop(snapshot.key, None) is not None:
            self.num_ram_bytes -= snapshot.num_bytes
        if self.files.pop(snapshot.key, None) is not None:
            self.num_disk_bytes -= snapshot.num_bytes

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert self.num_ram_bytes == sum(s.num_bytes for s in self.ram.values()), (
            "bytes in RAM miscounted"
        )
        assert self.num_disk_bytes == sum(s.num_bytes for s in self.files.values()), (
            "bytes on disk miscounted"
        )
        assert self.num_ram_bytes <= self.ram_bytes, "more in RAM than the budget allows"
        for key, snapshot in [*self.ram.items(), *self.files.items()]:
            assert snapshot.in_file == (key in self.files), repr(snapshot)
            assert (snapshot.tier is StorageTier.DISK) == (key not in self.ram), repr(snapshot)
