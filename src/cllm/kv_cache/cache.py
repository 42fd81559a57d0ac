"""Records where tokens are: under which seq_id, shared or not, idle or leased, in RAM or on disk.

This is bookkeeping in plain Python. It never calls a backend, but returns the operations that the
backend must carry out on its cells, in that order, before the rows of the next batch.

A seq_id has the tokens of one sequence from position 0 on. While it is leased, they belong to a
running sequence. After that they stay, idle, until another sequence with that prefix reuses them or
the cells are needed. Then they are saved to RAM if that is worth it. All prefixes (running, idle
and saved) are paths of one radix tree.

Invariants: held + idle + free = num_cells; a seq_id is leased to at most one sequence, and has idle
tokens only while it is not leased; no seq_id has more than cells_per_seq tokens; the tree's owners
are exactly the running, idle and saved prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Self, cast

import numpy as np

from cllm.core.batch import Copy, Load, Operation, Save, Swap, Trim
from cllm.core.sequence import Sequence
from cllm.kv_cache.cell_counts import CellCounts, Chain
from cllm.kv_cache.checkpoints import Checkpoint, Checkpoints
from cllm.kv_cache.holding import Holding
from cllm.kv_cache.layouts import Layout, Partitioned
from cllm.kv_cache.matching import MIN_SHARED_TOKENS, Finder, Match
from cllm.kv_cache.radix_tree import RadixTree, Tokens, common_prefix
from cllm.kv_cache.seq_id_pool import SeqIdPool
from cllm.kv_cache.snapshots import Snapshot, Snapshots

MIN_EVICTED_TOKENS = 32  # evicting single cells would cost an operation in each step


class KVCache:
    """Counts cells, leases seq_ids, and keeps, finds and shares prefixes."""

    def __init__(
        self,
        num_cells: int,
        cells_per_seq: int,
        max_num_seqs: int,
        layout: Layout | None = None,
        snapshots: Snapshots | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """The layout is Partitioned by default. ``snapshots`` and ``checkpoints`` may contain some
        already.

        Raises ValueError if a sequence would not fit.
        """
        if num_cells < cells_per_seq:
            raise ValueError(
                f"num_cells ({num_cells}) must be at least cells_per_seq ({cells_per_seq})"
            )
        self.cells = CellCounts(num_cells)
        self.cells_per_seq = cells_per_seq
        self.layout = Partitioned() if layout is None else layout
        self.seq_ids = SeqIdPool(max_num_seqs)
        self.snapshots = Snapshots() if snapshots is None else snapshots
        self.checkpoints = Checkpoints() if checkpoints is None else checkpoints
        self._tree: RadixTree[Any] = self.snapshots.start_tree()
        self.checkpoints.enter(self._tree)
        self._finder = Finder(
            self._tree, self.layout, self.snapshots, self.checkpoints, cells_per_seq
        )
        self._leased: dict[int, Holding] = {}
        # by seq_id, least recently used first
        self._idle: OrderedDict[int, Holding] = OrderedDict()
        # the source of a copy, which must not be evicted meanwhile
        self._needed: Holding | Snapshot | None = None
        last = self.seq_ids.size + self.layout.num_spare_ids - 1
        self._spare = list(range(last, self.seq_ids.size - 1, -1))

    @property
    def num_available(self) -> int:
        """Cells that are free or idle: a running sequence can get them without parking another."""
        return self.cells.size - self.cells.num_held

    # --- finding ---------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> Match:
        """Return the longest cached prefix of ``seq`` without tokens whose logits are needed."""
        return self._finder.find(seq)

    def count_shared_cells(self, match: Match) -> int:
        """Return the number of cells that a sequence with this match would share with a running
        one.
        """
        source, count = match.source, match.num_tokens
        if isinstance(source, Holding) and not source.is_final:
            return count - self.layout.count_copied_cells(count)
        return 0

    # --- leasing ---------------------------------------------------------------------------------

    def lease(self, seq: Sequence, match: Match) -> tuple[int, int, list[Operation]] | None:
        """Lease a seq_id for ``seq``; return (seq_id, number of its tokens already there,
        operations).

        Returns None, with nothing changed, if the prefix to copy or load does not fit. A lease
        without a match always fits. Raises IndexError if no seq_id is free.
        """
        if not self.seq_ids.num_free:
            raise IndexError("no sequence id is free")
        source, count = cast("Holding | Snapshot | None", match.source), match.num_tokens
        seq_id = self._choose_seq_id(source, count)
        if source is None and (idle := self._idle.get(seq_id)) is not None:
            if idle.salt == seq.request.cache_salt:
                # too few tokens for a match, but keeping them is free, e.g. a template's start
                shared = common_prefix(idle.path, seq.reusable_tokens)
                count = self.layout.state.count_reusable(idle, shared)
            source = idle if count else None
        last_path = source.last_path if isinstance(source, Holding) else None
        if (
            isinstance(source, Holding)
            and source.seq_id == seq_id
            and not self._is_worth_moving(source, count)
        ):
            chain = source.chain
            operations = self._reuse_in_place(source, count, match.checkpoint)
        else:
            prepared = self._prepare_copy(source, count, seq_id)
            if prepared is None:
                return None
            chain, operations = prepared
            if match.checkpoint is not None:
                operations.append(match.checkpoint.load(seq_id))
        if match.checkpoint is not None:
            self.checkpoints.note_use(match.checkpoint)
        self.seq_ids.lease(seq_id)
        holding = Holding(seq_id, chain, seq.shareable_tokens, seq)
        self._leased[seq_id] = holding
        self._tree.insert(holding.path, holding, holding.salt)
        if last_path is not None:
            self.checkpoints.note_prompt(seq.array, count, last_path, holding.salt)
        operations += self._save_shared(holding, match, seq)
        return seq_id, count, operations

    def _save_shared(self, holding: Holding, match: Match, seq: Sequence) -> list[Operation]:
        """Save the state of a hybrid with which a sequence begins, if others may continue there.

        A prefix in a file has no checkpoints, so the shorter ones that are shared get files too. At
        a boundary, the state of a snapshot becomes a checkpoint again, so that others share cells.
        """
        source, count = match.source, match.num_tokens
        if match.checkpoint is not None:
            is_shared = not isinstance(source, Holding) or source.seq_id != holding.seq_id
            if is_shared and self.snapshots.disk_bytes:
                return self._save(holding.seq_id, holding, match.checkpoint.tokens)
        elif (
            isinstance(source, Snapshot)
            and self.checkpoints.can_hold(count)
            and count in seq.list_boundaries()
        ):
            key = self.snapshots.new_key()
            return self.checkpoints.add(key, source.tokens, source.salt, holding.seq_id)
        return []

    def _reuse_in_place(
        self, holding: Holding, count: int, checkpoint: Checkpoint | None
    ) -> list[Operation]:
        """Lease the cells of an idle prefix again, after cutting it to ``count`` tokens."""
        save = not self._finder.is_negligible(holding, count)
        operations = self._shrink(holding, count, save=save, checkpoint=checkpoint)
        self._tree.remove(holding)
        del self._idle[holding.seq_id]
        self.cells.lease(holding.chain)
        return operations

    def _prepare_copy(
        self, source: Holding | Snapshot | None, count: int, seq_id: int
    ) -> tuple[Chain, list[Operation]] | None:
        """Return a leased chain with ``count`` tokens of ``source``, and the operations that empty
        ``seq_id`` and copy or load them; None if they do not fit.
        """
        if isinstance(source, Snapshot):
            room = self.layout.count_loaded_cells(len(source.tokens), count)
        else:
            room = self.layout.count_copied_cells(count)
        if room > self.num_available:
            return None
        operations: list[Operation] = []
        self._needed = source
        if seq_id in self._idle:
            operations += self._move_away(self._idle[seq_id])
        operations += self._evict(room)
        self._needed = None
        if isinstance(source, Holding):
            operations.append(Copy(source.seq_id, seq_id, count))
            if source.is_final:
                self._idle.move_to_end(source.seq_id)
            return self.layout.copy(self.cells, source.chain, count), operations
        chain = Chain()
        if source is not None:
            operations.append(Load(source.key, seq_id, count))
            self.snapshots.touch(source)
            self.cells.grow(chain, count)
        return chain, operations

    def _choose_seq_id(self, source: Holding | Snapshot | None, count: int) -> int:
        """Return the source's own seq_id if that loses few other tokens, else the least useful free
        one.
        """
        free = self.seq_ids.free
        if (
            isinstance(source, Holding)
            and source.seq_id in free
            and self._finder.is_negligible(source, count)
        ):
            return source.seq_id
        age = {seq_id: i for i, seq_id in enumerate(self._idle)}

        def rank(seq_id: int) -> tuple[int, int, int]:
            neighbours = self.layout.count_neighbours(self.seq_ids, seq_id)
            return -neighbours, age.get(seq_id, -1), seq_id

        return min(free, key=rank)

    def _is_worth_moving(self, holding: Holding, count: int) -> bool:
        """Return whether an idle prefix is longer than ``count`` and can be kept whole under a
        spare seq_id.
        """
        return holding.chain.length > count and self.layout.num_spare_ids > 0

    def _move_away(self, holding: Holding) -> list[Operation]:
        """Empty a free seq_id: move its idle tokens to a spare seq_id if the layout has any, else
        evict them.
        """
        operations: list[Operation] = []
        if not self._spare and self.layout.num_spare_ids:
            oldest = next(idle for idle in self._idle.values() if idle.seq_id >= self.seq_ids.size)
            if oldest is not self._needed:
                operations += self._shrink(oldest, 0)
        if not self._spare:
            return operations + self._shrink(holding, 0)
        here, there = holding.seq_id, self._spare.pop()
        self._idle = OrderedDict(
            (there if key == here else key, idle) for key, idle in self._idle.items()
        )
        holding.seq_id = there
        return [*operations, Copy(here, there, holding.chain.length), Trim(here, 0)]

    # --- room ------------------------------------------------------------------------------------

    def make_room(self, num_tokens: int) -> list[Operation] | None:
        """Return operations that free ``num_tokens`` cells, or None if running sequences use too
        many.
        """
        return None if num_tokens > self.num_available else self._evict(num_tokens)

    def _evict(self, num_tokens: int) -> list[Operation]:
        """Shrink idle prefixes from their ends, those of hybrids to a checkpoint, least recently
        used first, until ``num_tokens`` cells are free.
        """
        operations: list[Operation] = []
        for holding in list(self._idle.values()) if self.cells.num_free < num_tokens else ():
            missing = num_tokens - self.cells.num_free
            if missing <= 0:
                break
            if holding is self._needed:
                continue
            keep = holding.chain.length - max(missing, MIN_EVICTED_TOKENS)
            if keep < MIN_SHARED_TOKENS or self.cells.count_private(holding.chain) < missing:
                keep = 0
            last = self.checkpoints.find_last(holding.path[:keep], holding.salt)
            keep = self.layout.state.count_remaining(keep) if last is None else last.num_computed
            operations += self._shrink(holding, keep, checkpoint=last)
        return operations

    def _shrink(
        self,
        holding: Holding,
        keep: int,
        *,
        save: bool = True,
        checkpoint: Checkpoint | None = None,
    ) -> list[Operation]:
        """Keep only the first ``keep`` cells of an idle prefix, whose state the ``checkpoint`` has
        if it cannot be trimmed; save the prefix first if that is worth it, as ``save_one_idle``.
        """
        if keep == holding.chain.length:
            return []
        operations: list[Operation] = []
        if save:
            operations += self._go_back(holding) if self.snapshots.disk_bytes else ()
            if keep == holding.chain.length:
                return operations
            operations += self._save(holding.seq_id, holding, holding.path)
        self._tree.remove(holding)
        self.cells.cut(holding.chain, keep)
        if keep:
            holding.path = holding.path[:keep]
            self._tree.insert(holding.path, holding, holding.salt)
        else:
            self._forget_idle(holding)
        seq_id = holding.seq_id
        return [*operations, Trim(seq_id, keep) if checkpoint is None else checkpoint.load(seq_id)]

    def _forget_idle(self, holding: Holding) -> None:
        del self._idle[holding.seq_id]
        if holding.seq_id >= self.seq_ids.size:
            self._spare.append(holding.seq_id)

    # --- leased cells ----------------------------------------------------------------------------

    def count_cells(self, seq_id: int) -> int:
        """Return the number of cells of a leased seq_id."""
        return self._leased[seq_id].chain.length

    def count_private_cells(self, seq_id: int) -> int:
        """Return the number of cells that a leased seq_id shares with no other prefix."""
        return self.cells.count_private(self._leased[seq_id].chain)

    def hold(self, seq_id: int, num_tokens: int) -> None:
        """Count ``num_tokens`` more cells for ``seq_id``. Call ``make_room`` first."""
        self.cells.grow(self._leased[seq_id].chain, num_tokens)

    def rewind(self, seq_id: int, keep: int) -> list[Operation]:
        """Free the cells of a leased seq_id after the first ``keep``, such as rejected draft
        tokens.
        """
        self.cells.cut(self._leased[seq_id].chain, keep)
        return [Trim(seq_id, keep)]

    def release(self, seq_id: int, tokens: list[int], *, soon: bool = False) -> None:
        """End the lease of ``seq_id``; ``tokens``, the contents of its cells, stay as an idle
        prefix.

        With ``soon``, this prefix is evicted first, because it was released to free its cells.
        """
        holding = self._leased.pop(seq_id)
        self._tree.remove(holding)
        self.seq_ids.give_back(seq_id)
        self.cells.cut(holding.chain, len(tokens))
        self.cells.unlease(holding.chain)
        if tokens:
            holding.seq = None
            holding.path = np.array(tokens, np.int32)
            self._idle[seq_id] = holding
            if soon:
                self._idle.move_to_end(seq_id, last=False)
            self._tree.insert(holding.path, holding, holding.salt)

    def swap(self, first: int, second: int) -> Operation:
        """Exchange all tokens of two seq_ids, leased or not.

        Requires ``layout.can_swap``.
        """
        moved = {first: second, second: first}
        self._leased = {moved.get(i, i): holding for i, holding in self._leased.items()}
        self._idle = OrderedDict((moved.get(i, i), idle) for i, idle in self._idle.items())
        for seq_id in (first, second):
            if (holding := self._leased.get(seq_id) or self._idle.get(seq_id)) is not None:
                holding.seq_id = seq_id
        self.seq_ids.swap(first, second)
        return Swap(first, second)

    # --- saving and forgetting -------------------------------------------------------------------

    def checkpoint(self, seq: Sequence) -> list[Operation]:
        """Save the state of ``seq`` for others that need it at this position."""
        tokens = np.array(seq.tokens[: seq.num_computed_tokens], np.int32)
        salt = self._leased[seq.seq_id].salt
        if self.checkpoints.can_hold(len(tokens)):
            return self.checkpoints.add(self.snapshots.new_key(), tokens, salt, seq.seq_id)
        return self._save(seq.seq_id, self._leased[seq.seq_id], tokens)

    def save_one_idle(self) -> list[Operation]:
        """Save one idle prefix that is stored nowhere else, most recently used first; return [] if
        there is none.
        """
        for seq_id, holding in reversed(self._idle.items()):
            if holding.saved:
                continue
            operations = self._go_back(holding)
            operations += self._save(seq_id, holding, holding.path)
            if operations:
                holding.saved = True
                return operations
        return []

    def _go_back(self, holding: Holding) -> list[Operation]:
        """Cut an idle prefix of a hybrid at its last checkpoint, if that is where most prompts
        continue; return operations for that.
        """
        last = self.checkpoints.find_return(holding.path, holding.salt)
        if last is None or last.num_computed == holding.chain.length:
            return []
        holding.whole_path = holding.path
        return self._shrink(holding, last.num_computed, save=False, checkpoint=last)

    def _save(self, seq_id: int, holding: Holding, tokens: Tokens) -> list[Operation]:
        """Save the ``tokens`` of ``seq_id``, unless they are too few, also stored elsewhere, or too
        large for RAM.
        """
        if not self.snapshots.can_hold(len(tokens)) or self._finder.is_stored_elsewhere(
            holding, tokens
        ):
            return []
        added = self.snapshots.add(tokens, holding.salt, self.layout.state, self._needed)
        if added is None:
            return []
        key, operations = added
        return [*operations, Save(seq_id, key)]

    def invalidate(self, operations: Iterable[Operation]) -> list[Operation]:
        """Forget what ``operations``, which may not have run, save or load; return operations that
        free its memory.
        """
        return [*self.snapshots.invalidate(operations), *self.checkpoints.invalidate(operations)]

    def invalidate_seq_ids(self, seq_ids: set[int]) -> list[Operation]:
        """Forget the contents of these free seq_ids, which are unknown; return operations that
        empty them.
        """
        for holding in [holding for seq_id, holding in self._idle.items() if seq_id in seq_ids]:
            self._tree.remove(holding)
            self.cells.cut(holding.chain, 0)
            self._forget_idle(holding)
        return [Trim(seq_id, 0) for seq_id in sorted(seq_ids)]

    def without_cells(self) -> Self:
        """Return a cache with the same snapshots that regards all cells as free."""
        return type(self)(
            self.cells.size,
            self.cells_per_seq,
            self.seq_ids.size,
            self.layout,
            self.snapshots,
            self.checkpoints,
        )

    def list_idle(self) -> dict[int, tuple[Tokens, str]]:
        """Return the tokens and salt of each idle prefix by seq_id, least recently used first."""
        return {seq_id: (holding.path, holding.salt) for seq_id, holding in self._idle.items()}

    # --- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self.seq_ids.check()
        self.snapshots.check()
        self.checkpoints.check()
        self._tree.check()
        assert self.cells.num_free >= 0, f"more cells in use than exist: {self}"
        assert self._leased.keys() == {
            i for i in range(self.seq_ids.size) if self.seq_ids.is_leased(i)
        }, str(self)
        assert not self._leased.keys() & self._idle.keys(), (
            f"idle tokens under a leased seq_id: {self}"
        )
        holdings = [*self._leased.values(), *self._idle.values()]
        extents = {id(e): e for holding in holdings for e in holding.chain.extents()}
        held = {id(e): e for holding in self._leased.values() for e in holding.chain.extents()}
        assert self.cells.num_used == sum(e.length for e in extents.values()), (
            f"cells miscounted: {self}"
        )
        assert self.cells.num_held == sum(e.length for e in held.values()), (
            f"held cells miscounted: {self}"
        )
        for holding in holdings:
            assert holding.chain.length == sum(e.length for e in holding.chain.extents()), repr(
                holding
            )
            assert holding.chain.length <= self.cells_per_seq, (
                f"a sequence outgrew its cells: {holding}"
            )
            assert holding.chain.leased == (holding.seq is not None), repr(holding)
        for seq_id, holding in self._idle.items():
            assert holding.seq_id == seq_id, repr(holding)
            assert holding.chain.length == len(holding.path) > 0, repr(holding)
        spare = set(self._spare) | {i for i in self._idle if i >= self.seq_ids.size}
        assert len(spare) == self.layout.num_spare_ids, f"spare seq_ids lost: {self}"
        assert len(self._tree) == len(holdings) + len(self.snapshots) + len(self.checkpoints), (
            f"the tree differs from the stored prefixes: {self}"
        )

    def __str__(self) -> str:
        cells = self.cells
        return (
            f"<{type(self).__name__} {cells.size}: held {cells.num_held} idle {cells.num_idle} "
            f"free {cells.num_free}>"
        )
