"""Records where tokens are: under which seq_id, shared or not, idle or leased, in RAM or on disk.

Bookkeeping in plain Python. It never calls a backend; it returns the operations to perform on the
cells.

A seq_id has the tokens of one sequence from position 0 on. While it is leased, they belong to a
running sequence. After that they stay, idle, until another sequence with that prefix reuses them or
the cells are needed. Then they are saved to RAM if that is worth it. All prefixes (running, idle
and saved) are paths of one radix tree.

Invariants: held + idle + free = num_cells; a seq_id has idle tokens only while it is not leased; no
seq_id has more than cells_per_seq tokens; the tree's owners are exactly the running, idle and saved
prefixes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cllm.core.batch import Copy, Drop, Load, Operation, Save, Trim
from cllm.core.sequence import Sequence
from cllm.kv_cache.cells import Cells, Chain
from cllm.kv_cache.layouts import Layout, Sharing
from cllm.kv_cache.radix_tree import RadixTree, Tokens, common_prefix
from cllm.kv_cache.seq_id_pool import SeqIdPool
from cllm.kv_cache.tiers import Place, Snapshot, Tiers

MIN_SHARED_TOKENS = 16  # shorter prefixes are not worth a copy or a wait
MIN_SAVED_TOKENS = 64
MIN_EVICTED_TOKENS = 32  # evicting single cells would cost an operation in each step


class Holding:
    """Tokens in the cells of a seq_id.

    ``seq``: the running sequence they belong to, or None while they are idle.

    ``path``: the tokens in the tree. These are all tokens if idle, else the tokens that the
    sequence had when it was admitted, some of which may not be computed yet.
    """

    __slots__ = ("chain", "path", "salt", "saved", "seq", "seq_id")

    def __init__(self, seq_id: int, chain: Chain, path: Tokens, seq: Sequence) -> None:
        self.seq_id = seq_id
        self.chain = chain
        self.path = path
        self.seq: Sequence | None = seq
        self.salt = seq.request.cache_salt
        # by save_one_idle, which does not save it again after the copy was evicted
        self.saved = False

    @property
    def num_computed(self) -> int:
        return self.chain.length if self.seq is None else self.seq.num_computed_tokens

    def __repr__(self) -> str:
        return f"<Holding {self.seq_id} {self.chain.length}{'' if self.seq is None else ' leased'}>"


class Match(NamedTuple):
    """The reusable prefix of a sequence: ``num_tokens`` tokens, available from ``source``.

    ``num_inflight_tokens``: length of a longer prefix that ``leader`` will have computed soon, or
    0.
    """

    num_tokens: int = 0
    source: Holding | Snapshot | None = None
    num_inflight_tokens: int = 0
    leader: Sequence | None = None

    @property
    def is_on_its_way(self) -> bool:
        """True if it is better to wait for the prefix than to start now."""
        return self.leader is not None or (
            isinstance(self.source, Snapshot) and self.source.place is not Place.RAM
        )


class Ledger:
    """Counts cells, leases seq_ids and finds prefixes."""

    def __init__(
        self,
        num_cells: int,
        cells_per_seq: int,
        max_num_seqs: int,
        layout: Layout = Layout(),  # noqa: B008  # immutable
        tiers: Tiers | None = None,
    ) -> None:
        if num_cells < cells_per_seq:
            raise ValueError(f"{num_cells} cells cannot hold a sequence of {cells_per_seq}")
        self.cells = Cells(num_cells)
        self.cells_per_seq = cells_per_seq
        self.layout = layout
        self.seq_ids = SeqIdPool(max_num_seqs)
        self.tiers = Tiers() if tiers is None else tiers
        self._tree: RadixTree[Holding | Snapshot] = RadixTree()
        self._leased: dict[int, Holding] = {}
        # by seq_id, least recently used first
        self._idle: OrderedDict[int, Holding] = OrderedDict()
        # must not be evicted while it is being copied from
        self._needed: Holding | Snapshot | None = None
        self._spare = list(range(max_num_seqs + layout.num_spare_ids - 1, max_num_seqs - 1, -1))

    @property
    def num_available(self) -> int:
        """Cells that are free or idle: a running sequence can get them without parking another."""
        return self.cells.size - self.cells.num_held

    # --- finding ---------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> Match:
        """Match the tokens of ``seq`` whose logits are not needed."""
        return self._match(seq.reusable_tokens, seq.request.cache_salt)

    def match(self, tokens: list[int] | Tokens, salt: str = "") -> Match:
        """Match ``tokens`` except the last one, which must be computed in any case because its
        logits are needed.
        """
        return self._match(np.asarray(tokens, np.int32)[:-1], salt)

    def _match(self, tokens: Tokens, salt: str) -> Match:
        best, source, least = 0, None, MIN_SHARED_TOKENS
        promised, leader = 0, None
        for owner, shared in self._tree.match(tokens, salt):
            if shared < least and shared < max(promised + 1, best + MIN_SHARED_TOKENS):
                break
            usable = self._usable(owner, shared)
            worth = usable - self._cost(owner, usable)
            if worth >= least:
                best, source, least = usable, owner, worth + 1
            if isinstance(owner, Holding) and shared > promised and self._will_have(owner, shared):
                promised, leader = shared, owner.seq
        if promised < best + MIN_SHARED_TOKENS:
            promised, leader = 0, None
        return Match(best, source, promised, leader)

    def _usable(self, owner: Holding | Snapshot, shared: int) -> int:
        """Return how many of ``shared`` tokens can be reused from ``owner`` now."""
        if isinstance(owner, Snapshot):
            if len(owner.tokens) > self.cells_per_seq:  # a file of an engine with a longer context
                return 0
            return shared if self.layout.trims or shared == len(owner.tokens) else 0
        if self.layout.trims:
            return min(shared, owner.num_computed)
        return shared if owner.seq is None and shared == owner.chain.length else 0

    def _will_have(self, holding: Holding, shared: int) -> bool:
        """Return whether ``shared`` tokens of a running sequence will be reusable once it has
        computed them.
        """
        if holding.seq is None or holding.num_computed >= shared:
            return False
        if self.layout.trims:
            return True
        return holding.chain.length < shared and self._can_be_saved(shared)

    def _can_be_saved(self, num_tokens: int) -> bool:
        return (
            num_tokens >= MIN_SAVED_TOKENS
            and 0 < self.tiers.size_of(num_tokens) <= self.tiers.ram_bytes
        )

    def _cost(self, owner: Holding | Snapshot, usable: int) -> int:
        """Return the rough cost of reusing ``usable`` tokens, in tokens that could be computed in
        that time.
        """
        if isinstance(owner, Snapshot):  # it is loaded as a whole
            return 4 + len(owner.tokens) // (64 if owner.place is Place.RAM else 16)
        if self.layout.shares or (owner.seq is None and owner.chain.length == usable):
            return 0
        return self._copy_cost(owner.chain.length)

    def _copy_cost(self, num_tokens: int) -> int:
        """Return the cost of a copy between seq_ids that cannot share cells, in the same unit."""
        return num_tokens // 32

    def num_shared(self, match: Match) -> int:
        """Return the number of cells that a sequence with this match would share with a running
        one.
        """
        source = match.source
        return (
            match.num_tokens
            if self.layout.shares and isinstance(source, Holding) and source.seq is not None
            else 0
        )

    # --- leasing ---------------------------------------------------------------------------------

    def lease(self, seq: Sequence, match: Match) -> tuple[int, int, list[Operation]] | None:
        """Lease a seq_id for ``seq``; return (seq_id, number of its tokens already there,
        operations).

        Returns None, with nothing changed, if the prefix to copy or load does not fit. Raises
        IndexError if no seq_id is free.
        """
        if not self.seq_ids.num_free:
            raise IndexError("no sequence id is free")
        source, count = match.source, match.num_tokens
        seq_id = self._choose_seq_id(source, count)
        if source is None and (idle := self._idle.get(seq_id)) is not None and self._trims_in_place:
            if idle.salt == seq.request.cache_salt:
                # maybe of a template, too few for a match
                count = common_prefix(idle.path, seq.reusable_tokens)
            source = idle if count else None
        operations: list[Operation] = []
        if (
            isinstance(source, Holding)
            and source.seq_id == seq_id
            and not self._worth_moving(source, count)
        ):
            operations += self._shrink(source, count, save=not self._is_trifle(source, count))
            chain = source.chain
            self._tree.remove(source)
            del self._idle[seq_id]
            self.cells.lease(chain)
        else:
            shares = isinstance(source, Holding) and self.layout.shares
            new = 0 if shares else count
            # it is loaded as a whole, then trimmed
            room = len(source.tokens) if isinstance(source, Snapshot) else new
            if room > self.num_available:
                return None
            self._needed = source
            if seq_id in self._idle:
                operations += self._move_away(self._idle[seq_id])
            operations += self._evict(room)
            self._needed = None
            if isinstance(source, Snapshot):
                operations.append(Load(source.key, seq_id, count))
                self.tiers.touch(source)
            elif source is not None:
                operations.append(Copy(source.seq_id, seq_id, count))
                if source.seq is None:
                    self._idle.move_to_end(source.seq_id)
            chain = self.cells.fork(source.chain, count) if shares and source else Chain()  # type: ignore[union-attr]
            if new:
                self.cells.grow(chain, new)
        self.seq_ids.lease(seq_id)
        holding = Holding(seq_id, chain, seq.array, seq)
        self._leased[seq_id] = holding
        self._tree.insert(holding.path, holding, holding.salt)
        return seq_id, count, operations

    def _choose_seq_id(self, source: Holding | Snapshot | None, count: int) -> int:
        """Return the seq_id that has the prefix, if hardly any other tokens are lost with it, else
        the least useful.
        """
        free = self.seq_ids.free
        if isinstance(source, Holding) and source.seq_id in free and self._is_trifle(source, count):
            return source.seq_id
        age = {seq_id: i for i, seq_id in enumerate(self._idle)}

        def rank(seq_id: int) -> tuple[int, int, int]:
            neighbours = self.seq_ids.is_leased(seq_id - 1) + self.seq_ids.is_leased(seq_id + 1)
            return -neighbours if self.layout.dense else 0, age.get(seq_id, -1), seq_id

        return min(free, key=rank)

    def _is_trifle(self, holding: Holding, count: int) -> bool:
        """Return whether an idle prefix's tokens after ``count`` cost less to recompute than to
        keep.
        """
        return holding.chain.length - count <= (0 if self.layout.shares else self._copy_cost(count))

    @property
    def _trims_in_place(self) -> bool:
        """True if a seq_id can keep the start of its idle tokens, without an expensive copy."""
        return self.layout.trims and (self.layout.shares or not self.layout.num_spare_ids)

    def _worth_moving(self, holding: Holding, count: int) -> bool:
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
        """Shrink idle prefixes from their ends, least recently used first, until ``num_tokens``
        cells are free.
        """
        operations: list[Operation] = []
        for holding in list(self._idle.values()) if self.cells.num_free < num_tokens else ():
            missing = num_tokens - self.cells.num_free
            if missing <= 0:
                break
            if holding is self._needed:
                continue
            keep = holding.chain.length - max(missing, MIN_EVICTED_TOKENS)
            if (
                keep < MIN_SHARED_TOKENS
                or self.cells.num_private(holding.chain) < missing
                or not self.layout.trims
            ):
                keep = 0
            operations += self._shrink(holding, keep)
        return operations

    def _shrink(self, holding: Holding, keep: int, *, save: bool = True) -> list[Operation]:
        """Keep only the first ``keep`` cells of an idle prefix; save the prefix first if that is
        worth it.
        """
        if keep == holding.chain.length:
            return []
        operations = self._save(holding.seq_id, holding, holding.path) if save else []
        self._tree.remove(holding)
        self.cells.cut(holding.chain, keep)
        if keep:
            holding.path = holding.path[:keep]
            self._tree.insert(holding.path, holding, holding.salt)
        else:
            self._forget_idle(holding)
        return [*operations, Trim(holding.seq_id, keep)]

    def _forget_idle(self, holding: Holding) -> None:
        del self._idle[holding.seq_id]
        if holding.seq_id >= self.seq_ids.size:
            self._spare.append(holding.seq_id)

    # --- releasing -------------------------------------------------------------------------------

    def num_cells_of(self, seq_id: int) -> int:
        """Return the number of cells of a leased seq_id."""
        return self._leased[seq_id].chain.length

    def hold(self, seq_id: int, num_tokens: int) -> None:
        """Count ``num_tokens`` more cells for ``seq_id``. Call ``make_room`` first."""
        self.cells.grow(self._leased[seq_id].chain, num_tokens)

    def rewind(self, seq_id: int, keep: int) -> list[Operation]:
        """Free the cells of a leased seq_id after the first ``keep``: rejected draft tokens."""
        self.cells.cut(self._leased[seq_id].chain, keep)
        return [Trim(seq_id, keep)]

    def release(self, seq_id: int, tokens: list[int], *, soon: bool = False) -> None:
        """End the lease of ``seq_id``; ``tokens``, the contents of its cells, stay as an idle
        prefix.

        ``soon``: evict this prefix first, because it was released to free its cells.
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

    # --- copies outside the cells ----------------------------------------------------------------

    def checkpoint(self, seq: Sequence) -> list[Operation]:
        """Save the computed tokens of ``seq``: the only way to share state that cannot be
        trimmed.
        """
        return self._save(
            seq.seq_id,
            self._leased[seq.seq_id],
            np.array(seq.tokens[: seq.num_computed_tokens], np.int32),
        )

    def save_one_idle(self) -> list[Operation]:
        """Save one idle prefix that is stored nowhere else, most recently used first; returns [] if
        there is none.
        """
        for seq_id, holding in reversed(self._idle.items()):
            if not holding.saved and (operations := self._save(seq_id, holding, holding.path)):
                holding.saved = True
                return operations
        return []

    def _save(self, seq_id: int, holding: Holding, tokens: Tokens) -> list[Operation]:
        """Save the ``tokens`` of ``seq_id``, unless they are too few, also stored elsewhere, or too
        large for RAM.
        """
        if not self._can_be_saved(len(tokens)) or self._lie_elsewhere(holding, tokens):
            return []
        leaving = self.tiers.make_room(self.tiers.size_of(len(tokens)), self._needed)
        if leaving is None:
            return []
        if self.layout.trims:  # a shorter snapshot is part of the longer one
            matches = self._tree.match(tokens, holding.salt)
            shorter = [
                old
                for old, shared in matches
                if isinstance(old, Snapshot) and shared == len(old.tokens)
            ]
            for old in shorter:
                if old.place is Place.RAM and old is not self._needed:
                    self.tiers.leave_ram(old)
                    leaving.append(old)
        operations = self._leave_ram(leaving)
        snapshot = self.tiers.add(tokens, salt=holding.salt)
        self._tree.insert(tokens, snapshot, snapshot.salt)
        return [*operations, Save(seq_id, snapshot.key)]

    def _lie_elsewhere(self, holding: Holding, tokens: Tokens) -> bool:
        for owner, shared in self._tree.match(tokens, holding.salt):
            if shared < len(tokens):
                return False
            if owner is not holding and self._usable(owner, shared) == shared:
                return True
        return False

    def invalidate_operations(
        self, operations: Iterable[Operation]
    ) -> tuple[set[int], list[Operation]]:
        """Return the seq_ids changed by operations that may not have run, and Drops for the
        snapshots they concern.
        """
        seq_ids: set[int] = set()
        dropped: list[Operation] = []
        for operation in operations:
            match operation:
                case Trim(seq_id) | Copy(_, seq_id):
                    seq_ids.add(seq_id)
                case Load(key, seq_id):
                    seq_ids.add(seq_id)
                    dropped += self.drop(key)
                case Save(_, key):
                    dropped += self.drop(key)
                case Drop(key):
                    snapshot = self.tiers.find(key)
                    # else it is being read again
                    if snapshot is None or snapshot.place is Place.DISK:
                        dropped.append(operation)
        return seq_ids, dropped

    def invalidate_seq_ids(self, seq_ids: set[int]) -> list[Operation]:
        """Forget the contents of these free seq_ids, which are unknown; return operations that
        empty them.
        """
        for holding in [holding for seq_id, holding in self._idle.items() if seq_id in seq_ids]:
            self._tree.remove(holding)
            self.cells.cut(holding.chain, 0)
            self._forget_idle(holding)
        return [Trim(seq_id, 0) for seq_id in sorted(seq_ids)]

    def drop(self, key: int) -> list[Operation]:
        """Forget a snapshot and free its RAM; its file, if any, stays."""
        snapshot = self.tiers.find(key)
        if snapshot is None:
            return []
        in_ram = snapshot.place is Place.RAM
        self._tree.remove(snapshot)
        self.tiers.forget(snapshot)
        return [Drop(snapshot.key)] if in_ram else []

    def _leave_ram(self, snapshots: list[Snapshot]) -> list[Operation]:
        for snapshot in snapshots:
            if not snapshot.in_file:
                self._tree.remove(snapshot)
        return [Drop(snapshot.key) for snapshot in snapshots]

    def found_on_disk(self, tokens: Tokens, salt: str = "") -> Snapshot:
        """Add a snapshot for ``tokens`` in a file that was found on disk."""
        snapshot = self.tiers.add(tokens, Place.DISK, salt)
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
        return self._leave_ram(leaving)

    def written(self, key: int) -> list[int]:
        """Record that a file contains the snapshot ``key``; return the keys whose files must be
        deleted.
        """
        snapshot = self.tiers.ram.get(key)
        if snapshot is None:  # it was evicted while it was being written
            return [key]
        leaving = self.tiers.written(snapshot)
        for old in leaving:
            if old.place is Place.DISK:
                self._tree.remove(old)
        return [old.key for old in leaving]

    # --- layouts ---------------------------------------------------------------------------------

    def sharing(self) -> Sharing:
        """Return how many cells the running sequences use and share."""
        leased = list(self._leased.values())
        total = sum(holding.chain.length for holding in leased)
        # not in the tree yet
        own = sum(max(0, holding.chain.length - len(holding.path)) for holding in leased)
        distinct = own + self._tree.num_distinct(
            {holding: holding.chain.length for holding in leased}
        )
        return Sharing(len(leased), total, distinct, self.cells.num_idle)

    def with_layout(self, num_cells: int, layout: Layout) -> Ledger:
        """Return a ledger for new cells with the same snapshots.

        This one must have no leased or idle cells.
        """
        assert not self._leased, "a running sequence would lose its cells"
        assert not self._idle, "idle cells would be forgotten"
        return self._anew(num_cells, layout)

    def without_cells(self) -> Ledger:
        """Return a ledger with the same snapshots that regards all cells as free."""
        return self._anew(self.cells.size, self.layout)

    def _anew(self, num_cells: int, layout: Layout) -> Ledger:
        ledger = Ledger(num_cells, self.cells_per_seq, self.seq_ids.size, layout, self.tiers)
        for snapshot in {**self.tiers.ram, **self.tiers.files}.values():
            ledger._tree.insert(snapshot.tokens, snapshot, snapshot.salt)
        return ledger

    # --- invariants ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self.seq_ids.check()
        self.tiers.check()
        self._tree.check()
        assert self.cells.num_free >= 0, f"more cells in use than there are: {self}"
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
        assert len(self._tree) == len(holdings) + len(self.tiers), (
            f"the tree is not what is there: {self}"
        )

    def __str__(self) -> str:
        cells = self.cells
        return (
            f"<Ledger {cells.size}: held {cells.num_held} idle {cells.num_idle} free "
            f"{cells.num_free}>"
        )
