"""Finds the prefix of a sequence that costs the least to reuse."""

from __future__ import annotations

from typing import Any, NamedTuple

from cllm.core.sequence import Sequence
from cllm.kv_cache.checkpoints import Checkpoint, Checkpoints
from cllm.kv_cache.holding import Holding
from cllm.kv_cache.layouts import Layout
from cllm.kv_cache.model_state import Prefix
from cllm.kv_cache.radix_tree import RadixTree, Tokens
from cllm.kv_cache.snapshots import Snapshot, Snapshots, StorageTier

MIN_SHARED_TOKENS = 16  # shorter prefixes are not worth a copy or a wait


class Match(NamedTuple):
    """The reusable prefix of a sequence: ``num_tokens`` tokens, available from ``source``, together
    with ``checkpoint`` if there is one.

    ``num_inflight_tokens`` is the length of a longer prefix that ``leader`` will have computed
    soon, or 0.
    """

    num_tokens: int = 0
    source: Prefix | None = None
    num_inflight_tokens: int = 0
    leader: Sequence | None = None
    checkpoint: Checkpoint | None = None

    @property
    def tier(self) -> str:
        """Where the prefix is loaded from: cells or ram."""
        return "ram" if isinstance(self.source, Snapshot) else "cells"

    @property
    def must_wait(self) -> bool:
        """Whether a leader still computes the prefix, or it must be read from disk first."""
        return self.leader is not None or (
            isinstance(self.source, Snapshot) and self.source.tier is not StorageTier.RAM
        )


class Finder:
    """Finds prefixes in the tree of all that are running, idle and saved."""

    def __init__(
        self,
        tree: RadixTree[Any],
        layout: Layout,
        snapshots: Snapshots,
        checkpoints: Checkpoints,
        cells_per_seq: int,
    ) -> None:
        self._tree = tree
        self._layout = layout
        self._snapshots = snapshots
        self._checkpoints = checkpoints
        self._cells_per_seq = cells_per_seq

    def find(self, seq: Sequence) -> Match:
        """Return the longest cached prefix of ``seq`` without tokens whose logits are needed."""
        best, source, least = 0, None, MIN_SHARED_TOKENS
        inflight, leader, checkpoint = 0, None, None
        matches = [*self._tree.match(seq.reusable_tokens, seq.request.cache_salt)]
        for owner, shared in matches:
            if shared < least and shared < max(inflight + 1, best + MIN_SHARED_TOKENS):
                break
            saved = owner if isinstance(owner, Checkpoint) else None
            usable, base = shared, owner
            if saved is None:
                usable = self._count_reusable(owner, shared)
            elif shared < saved.num_computed or (base := self._find_base(saved, matches)) is None:
                continue
            net_tokens = usable - self._estimate_cost(base, usable)
            if net_tokens >= least:
                best, source, least, checkpoint = usable, base, net_tokens + 1, saved
            if isinstance(owner, Holding) and shared > inflight and self._will_have(owner, shared):
                inflight, leader = shared, owner.seq
        if inflight < best + MIN_SHARED_TOKENS:
            inflight, leader = 0, None
        return Match(best, source, inflight, leader, checkpoint)

    def _find_base(
        self, checkpoint: Checkpoint, matches: list[tuple[Any, int]]
    ) -> Holding | Snapshot | None:
        """Return the owner among ``matches`` from which the keys and values of a checkpoint's
        tokens are reused at the lowest cost.
        """
        count = checkpoint.num_computed
        bases = [
            owner
            for owner, shared in matches
            if min(shared, owner.num_computed) >= count and not isinstance(owner, Checkpoint)
        ]
        return min(bases, key=lambda base: self._estimate_cost(base, count), default=None)

    def _count_reusable(self, owner: Holding | Snapshot, shared: int) -> int:
        """Return how many of ``shared`` tokens can be reused from ``owner`` now."""
        # a file of an engine with a longer context is too long
        if isinstance(owner, Snapshot) and len(owner.tokens) > self._cells_per_seq:
            return 0
        return self._layout.state.count_reusable(owner, shared)

    def _will_have(self, holding: Holding, shared: int) -> bool:
        """Return whether ``shared`` tokens of a running sequence will be reusable once it has
        computed them.
        """
        if holding.is_final or holding.num_computed >= shared:
            return False
        return self._layout.state.will_be_reusable(
            shared, holding.chain.length, can_be_saved=self._can_save(shared)
        )

    def _can_save(self, num_tokens: int) -> bool:
        return self._checkpoints.can_hold(num_tokens) or self._snapshots.can_hold(num_tokens)

    def _estimate_cost(self, owner: Holding | Snapshot, usable: int) -> int:
        """Return the rough cost of reusing ``usable`` tokens, in tokens that could be computed in
        that time.
        """
        if isinstance(owner, Snapshot):  # it is loaded as a whole
            return 4 + len(owner.tokens) // (64 if owner.tier is StorageTier.RAM else 16)
        if owner.is_final and (owner.chain.length == usable or self._ends_at(owner, usable)):
            return 0
        return self._layout.estimate_copy_cost(owner.chain.length)

    def is_negligible(self, holding: Holding, count: int) -> bool:
        """Return whether recomputing an idle prefix's tokens after ``count`` costs less than
        keeping them.
        """
        if self._ends_at(holding, count):
            return True
        return holding.chain.length - count <= self._layout.estimate_copy_cost(count)

    def _ends_at(self, holding: Holding, count: int) -> bool:
        """Return whether no other sequence will reuse the tokens of an idle prefix after ``count``:
        those after its last checkpoint, which the next turn has omitted.
        """
        if not self._checkpoints.can_hold(count):
            return False
        return not self._checkpoints.has_later(holding.path, count, holding.salt)

    def is_stored_elsewhere(self, holding: Holding, tokens: Tokens) -> bool:
        """Return whether ``tokens`` can be reused from another owner than ``holding``, with a
        checkpoint if there are no files, which do not have any.
        """
        checkpoint = self._checkpoints.find(tokens, holding.salt)
        is_cut = checkpoint is not None and not self._snapshots.disk_bytes
        for owner, shared in self._tree.match(tokens, holding.salt):
            if shared < len(tokens):
                return False
            if owner is holding or isinstance(owner, Checkpoint):
                continue
            if self._count_reusable(owner, shared) == shared or (is_cut and owner.is_final):
                return True
        return False
