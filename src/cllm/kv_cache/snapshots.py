"""Copies of prefixes outside the cells: in RAM and, if configured, on disk.

This is only the bookkeeping. The backend keeps the bytes in RAM; the engine's disk thread moves
them to files and back. A file counts once the thread has reported it. A copy that is only in a file
must be read before it can be used.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from itertools import count
from typing import Any

from cllm.core.batch import Drop, Load, Operation, Save
from cllm.kv_cache.model_state import ModelState
from cllm.kv_cache.radix_tree import RadixTree, Tokens

MIN_SAVED_TOKENS = 64


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


class Snapshots:
    """All snapshots in RAM and in files, and their paths in the prefix tree.

    RAM and files have a budget in bytes each and evict the least recently used snapshots first.

    Invariants: a snapshot is in ``ram`` (RAM, READING) or in ``files`` or in both, and exactly then
    in the tree; num_*_bytes are the sums of their sizes.
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
        self._keys = count()
        self._tree: RadixTree[Any] = RadixTree()

    def new_key(self) -> int:
        """Return a key that was never used."""
        return next(self._keys)

    def start_tree(self) -> RadixTree[Any]:
        """Return a new tree that contains only the snapshots. From now on, snapshots are added to
        and removed from this tree.
        """
        self._tree = RadixTree()
        for snapshot in (self.ram | self.files).values():
            self._tree.insert(snapshot.tokens, snapshot, snapshot.salt)
        return self._tree

    def __len__(self) -> int:
        return len(self.ram.keys() | self.files.keys())

    def find(self, key: int) -> Snapshot | None:
        return self.ram.get(key) or self.files.get(key)

    def compute_size(self, num_tokens: int) -> int:
        return self._bytes_per_snapshot + num_tokens * self._bytes_per_token

    def count_tokens(self, num_bytes: int, num_snapshots: int) -> int:
        """Return the number of tokens of snapshots with ``num_bytes`` together."""
        if not self._bytes_per_token:
            return 0
        return (num_bytes - num_snapshots * self._bytes_per_snapshot) // self._bytes_per_token

    def can_hold(self, num_tokens: int) -> bool:
        """Return whether a prefix is long enough to be saved, and fits into RAM."""
        return (
            num_tokens >= MIN_SAVED_TOKENS and 0 < self.compute_size(num_tokens) <= self.ram_bytes
        )

    # --- RAM -------------------------------------------------------------------------------------

    def add(
        self, tokens: Tokens, salt: str, state: ModelState, needed: object = None
    ) -> tuple[int, list[Operation]] | None:
        """Add a snapshot to RAM; return its key and the operations that make room, or None if there
        is no room.

        The snapshot ``needed`` stays in RAM. The caller must save the tokens after the operations.
        """
        operations = self.make_room(self.compute_size(len(tokens)), needed)
        if operations is None:
            return None
        shorter = [
            old
            for old, shared in self._tree.match(tokens, salt)
            if isinstance(old, Snapshot) and shared == len(old.tokens)
        ]
        operations += [
            self._leave_ram(old)
            for old in state.select_superseded(shorter)
            if old.tier is StorageTier.RAM and old is not needed
        ]
        snapshot = self._make(tokens, salt, StorageTier.RAM)
        self.ram[snapshot.key] = snapshot
        self.num_ram_bytes += snapshot.num_bytes
        return snapshot.key, operations

    def _make(self, tokens: Tokens, salt: str, tier: StorageTier) -> Snapshot:
        snapshot = Snapshot(self.new_key(), tokens, self.compute_size(len(tokens)), tier, salt)
        self._tree.insert(tokens, snapshot, salt)
        return snapshot

    def make_room(self, num_bytes: int, needed: object = None) -> list[Operation] | None:
        """Evict snapshots other than ``needed`` from RAM until ``num_bytes`` fit; return the
        operations for that, or None if it is impossible.
        """
        leaving: list[Snapshot] = []
        missing = self.num_ram_bytes + num_bytes - self.ram_bytes
        for snapshot in self.ram.values():
            if missing <= 0:
                break
            if snapshot.tier is StorageTier.RAM and snapshot is not needed:
                missing -= snapshot.num_bytes
                leaving.append(snapshot)
        if missing > 0:
            return None
        return [self._leave_ram(snapshot) for snapshot in leaving]

    def _leave_ram(self, snapshot: Snapshot) -> Operation:
        """Evict a snapshot from RAM. If it is in no file, it is lost."""
        del self.ram[snapshot.key]
        self.num_ram_bytes -= snapshot.num_bytes
        snapshot.tier = StorageTier.DISK
        if not snapshot.in_file:
            self._tree.remove(snapshot)
        return Drop(snapshot.key)

    def touch(self, snapshot: Snapshot) -> None:
        for tier in (self.ram, self.files):
            if snapshot.key in tier:
                tier.move_to_end(snapshot.key)

    def drop(self, key: int) -> list[Operation]:
        """Forget a snapshot and free its RAM. Its file, if any, is not deleted."""
        snapshot = self.find(key)
        if snapshot is None:
            return []
        self._tree.remove(snapshot)
        if self.files.pop(key, None) is not None:
            self.num_disk_bytes -= snapshot.num_bytes
        if self.ram.pop(key, None) is not None:
            self.num_ram_bytes -= snapshot.num_bytes
        return [Drop(key)] if snapshot.tier is StorageTier.RAM else []

    def invalidate(self, operations: Iterable[Operation]) -> list[Operation]:
        """Forget the snapshots that ``operations``, which may not have run, save or load; return
        operations that free their RAM.
        """
        dropped: list[Operation] = []
        for operation in operations:
            match operation:
                case Load(key) | Save(_, key):
                    dropped += self.drop(key)
                case Drop(key):
                    snapshot = self.find(key)
                    # otherwise it is being read again
                    if snapshot is None or snapshot.tier is StorageTier.DISK:
                        dropped.append(operation)
        return dropped

    # --- files -----------------------------------------------------------------------------------

    def add_from_file(self, tokens: Tokens, salt: str = "") -> Snapshot:
        """Add a snapshot for ``tokens`` in a file that was found on disk."""
        snapshot = self._make(tokens, salt, StorageTier.DISK)
        self.files[snapshot.key] = snapshot
        self.num_disk_bytes += snapshot.num_bytes
        return snapshot

    def read(self, snapshot: Snapshot) -> list[Operation] | None:
        """Mark ``snapshot`` as being read from its file; return operations that make room in RAM,
        or None if it cannot be read now. A snapshot that is larger than all RAM is forgotten.

        Install the data only after these operations have run: one of them may drop the old copy
        under the same key.
        """
        if snapshot.num_bytes > self.ram_bytes:
            self.drop(snapshot.key)
            return None
        operations = self.make_room(snapshot.num_bytes)
        if operations is not None:
            snapshot.tier = StorageTier.READING
            self.ram[snapshot.key] = snapshot
            self.num_ram_bytes += snapshot.num_bytes
        return operations

    def finish_read(self, key: int, *, succeeded: bool) -> None:
        """Record that a snapshot is in RAM, or forget it because it could not be read."""
        if not succeeded:
            self.drop(key)
        elif (snapshot := self.ram.get(key)) is not None:
            snapshot.tier = StorageTier.RAM

    def record_written(self, key: int) -> None:
        """Record that a file contains the snapshot ``key``, unless it was evicted meanwhile or is
        larger than the budget.
        """
        snapshot = self.ram.get(key)
        if snapshot is not None and snapshot.num_bytes <= self.disk_bytes:
            snapshot.in_file = True
            self.files[key] = snapshot
            self.num_disk_bytes += snapshot.num_bytes
            self.evict_files()

    def evict_files(self) -> None:
        """Forget the least recently used files until the others are within the budget."""
        while self.num_disk_bytes > self.disk_bytes:
            _, oldest = self.files.popitem(last=False)
            self.num_disk_bytes -= oldest.num_bytes
            oldest.in_file = False
            if oldest.tier is StorageTier.DISK:
                self._tree.remove(oldest)

    # --- invariants ------------------------------------------------------------------------------

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
