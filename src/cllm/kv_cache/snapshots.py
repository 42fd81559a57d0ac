"""Prefixes saved outside the cells, in RAM and on disk, and their paths in the prefix tree."""

from __future__ import annotations

from typing import Any

from cllm.core.batch import Drop, Operation
from cllm.kv_cache.model_state import ModelState
from cllm.kv_cache.radix_tree import RadixTree, Tokens
from cllm.kv_cache.tiers import Snapshot, StorageTier, Tiers

MIN_SAVED_TOKENS = 64


class Snapshots:
    """Adds and removes snapshots, in the tiers and in the tree together.

    Invariant: a snapshot is in the tree exactly while it is in a tier.
    """

    def __init__(self, tiers: Tiers, tree: RadixTree[Any]) -> None:
        self.tiers = tiers
        self._tree = tree
        for snapshot in {**tiers.ram, **tiers.files}.values():
            tree.insert(snapshot.tokens, snapshot, snapshot.salt)

    def can_hold(self, num_tokens: int) -> bool:
        """Return whether a prefix is long enough to be saved, and fits into RAM."""
        size = self.tiers.compute_size(num_tokens)
        return num_tokens >= MIN_SAVED_TOKENS and 0 < size <= self.tiers.ram_bytes

    def add(
        self, tokens: Tokens, salt: str, state: ModelState, needed: object
    ) -> tuple[int, list[Operation]] | None:
        """Add a snapshot to RAM; return its key and the operations that make room, or None if there
        is no room.

        The snapshot ``needed`` stays in RAM. The caller must save the tokens after the operations.
        """
        leaving = self.tiers.make_room(self.tiers.compute_size(len(tokens)), needed)
        if leaving is None:
            return None
        shorter = [
            old
            for old, shared in self._tree.match(tokens, salt)
            if isinstance(old, Snapshot) and shared == len(old.tokens)
        ]
        for old in state.select_superseded(shorter):
            if old.tier is StorageTier.RAM and old is not needed:
                self.tiers.leave_ram(old)
                leaving.append(old)
        operations = self._make_drops(leaving)
        snapshot = self.tiers.add(tokens, salt=salt)
        self._tree.insert(tokens, snapshot, salt)
        return snapshot.key, operations

    def drop(self, key: int) -> list[Operation]:
        """Forget a snapshot and free its RAM. Its file, if any, is not deleted."""
        snapshot = self.tiers.find(key)
        if snapshot is None:
            return []
        in_ram = snapshot.tier is StorageTier.RAM
        self._tree.remove(snapshot)
        self.tiers.forget(snapshot)
        return [Drop(snapshot.key)] if in_ram else []

    def _make_drops(self, snapshots: list[Snapshot]) -> list[Operation]:
        for snapshot in snapshots:
            if not snapshot.in_file:
                self._tree.remove(snapshot)
        return [Drop(snapshot.key) for snapshot in snapshots]

    def add_from_file(self, tokens: Tokens, salt: str = "") -> Snapshot:
        """Add a snapshot for ``tokens`` in a file that was found on disk."""
        snapshot = self.tiers.add(tokens, StorageTier.DISK, salt)
        self._tree.insert(tokens, snapshot, salt)
        return snapshot

    def read(self, snapshot: Snapshot) -> list[Operation] | None:
        """Mark ``snapshot`` as being read from its file; return operations that make room in RAM,
        or None if it cannot.

        Install the data only after these operations have run: one of them may drop the old copy
        under the same key.
        """
        leaving = self.tiers.make_room(snapshot.num_bytes)
        if leaving is None:
            return None
        self.tiers.read(snapshot)
        return self._make_drops(leaving)

    def record_written(self, key: int) -> None:
        """Record that a file contains the snapshot ``key``, unless it was evicted meanwhile."""
        if (snapshot := self.tiers.ram.get(key)) is not None:
            self._forget_lost(self.tiers.record_written(snapshot))

    def evict_files(self) -> None:
        """Forget the least recently used files until the others are within the budget."""
        self._forget_lost(self.tiers.evict_files())

    def _forget_lost(self, snapshots: list[Snapshot]) -> None:
        for snapshot in snapshots:
            if snapshot.tier is StorageTier.DISK:
                self._tree.remove(snapshot)
