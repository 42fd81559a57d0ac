"""The contract of a KV cache: where tokens are, for which sequence, and what can be reused.

A KV cache is bookkeeping in plain Python. It never calls a backend; it returns the operations that
the backend must carry out on its cells, in that order, before the rows of the next batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

from cllm.core.batch import Copy, Drop, Load, Operation, Save, Swap, Trim
from cllm.core.sequence import Sequence
from cllm.kv_cache.cells import CellCounts
from cllm.kv_cache.layouts import Layout, Partitioned
from cllm.kv_cache.model_state import Prefix
from cllm.kv_cache.radix_tree import RadixTree, Tokens
from cllm.kv_cache.seq_id_pool import SeqIdPool
from cllm.kv_cache.snapshots import Snapshots
from cllm.kv_cache.tiers import Snapshot, StorageTier, Tiers


class Match(NamedTuple):
    """The reusable prefix of a sequence: ``num_tokens`` tokens, available from ``source``.

    ``num_inflight_tokens``: length of a longer prefix that ``leader`` will have computed soon, or
    0.
    """

    num_tokens: int = 0
    source: Prefix | None = None
    num_inflight_tokens: int = 0
    leader: Sequence | None = None

    @property
    def must_wait(self) -> bool:
        """Whether a leader still computes the prefix, or it must be read from disk first."""
        return self.leader is not None or (
            isinstance(self.source, Snapshot) and self.source.tier is not StorageTier.RAM
        )


class KVCache(ABC):
    """Counts cells, leases seq_ids and finds prefixes.

    A seq_id has the tokens of one sequence from position 0 on. While it is leased, they belong to a
    running sequence. After that the cache may keep them, idle, until their cells are needed.

    Invariants: held + idle + free = all cells; a seq_id is leased to at most one sequence; no
    seq_id has more than ``cells_per_seq`` tokens.
    """

    def __init__(
        self,
        num_cells: int,
        cells_per_seq: int,
        max_num_seqs: int,
        layout: Layout | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """``layout``: Partitioned by default. ``tiers``: may contain snapshots already.

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
        self._tree: RadixTree[Any] = RadixTree()
        self.snapshots = Snapshots(Tiers() if tiers is None else tiers, self._tree)
        self._start_empty()

    @abstractmethod
    def _start_empty(self) -> None:
        """Create what the implementation keeps of leased and idle cells: nothing yet."""

    @property
    def num_available(self) -> int:
        """Cells that are free or idle: a running sequence can get them without parking another."""
        return self.cells.size - self.cells.num_held

    # --- the life of a sequence ------------------------------------------------------------------

    @abstractmethod
    def find(self, seq: Sequence) -> Match:
        """Return the longest cached prefix of ``seq`` without tokens whose logits are needed."""

    @abstractmethod
    def num_shared(self, match: Match) -> int:
        """Return the number of cells that a sequence with this match would share with a running
        one.
        """

    @abstractmethod
    def lease(self, seq: Sequence, match: Match) -> tuple[int, int, list[Operation]] | None:
        """Lease a seq_id for ``seq``; return (seq_id, number of its tokens already there,
        operations).

        Returns None, with nothing changed, if the prefix to copy or load does not fit. A lease
        without a match always fits. Raises IndexError if no seq_id is free.
        """

    @abstractmethod
    def make_room(self, num_tokens: int) -> list[Operation] | None:
        """Return operations that free ``num_tokens`` cells, or None if running sequences use too
        many.
        """

    @abstractmethod
    def hold(self, seq_id: int, num_tokens: int) -> None:
        """Count ``num_tokens`` more cells for ``seq_id``. Call ``make_room`` first."""

    @abstractmethod
    def count_cells(self, seq_id: int) -> int:
        """Return the number of cells of a leased seq_id."""

    @abstractmethod
    def count_private_cells(self, seq_id: int) -> int:
        """Return the number of cells that a leased seq_id shares with no other prefix."""

    @abstractmethod
    def rewind(self, seq_id: int, keep: int) -> list[Operation]:
        """Free the cells of a leased seq_id after the first ``keep``, such as rejected draft
        tokens.
        """

    @abstractmethod
    def release(self, seq_id: int, tokens: list[int], *, soon: bool = False) -> None:
        """End the lease of ``seq_id``; ``tokens``, the contents of its cells, stay as an idle
        prefix.

        ``soon``: evict this prefix first, because it was released to free its cells.
        """

    def swap(self, first: int, second: int) -> Operation:
        """Exchange all tokens of two seq_ids, leased or not.

        Requires ``layout.can_swap``.
        """
        raise NotImplementedError

    # --- saving and forgetting -------------------------------------------------------------------

    @abstractmethod
    def checkpoint(self, seq: Sequence) -> list[Operation]:
        """Save the computed tokens of ``seq``, for others that need its state at this position."""

    @abstractmethod
    def save_one_idle(self) -> list[Operation]:
        """Save one idle prefix that is stored nowhere else, most recently used first; returns [] if
        there is none.
        """

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
                case Swap(first, second):
                    seq_ids |= {first, second}
                case Load(key, seq_id):
                    seq_ids.add(seq_id)
                    dropped += self.snapshots.drop(key)
                case Save(_, key):
                    dropped += self.snapshots.drop(key)
                case Drop(key):
                    snapshot = self.snapshots.tiers.find(key)
                    # otherwise it is being read again
                    if snapshot is None or snapshot.tier is StorageTier.DISK:
                        dropped.append(operation)
        return seq_ids, dropped

    @abstractmethod
    def invalidate_seq_ids(self, seq_ids: set[int]) -> list[Operation]:
        """Forget the contents of these free seq_ids, which are unknown; return operations that
        empty them.
        """

    # --- checks ----------------------------------------------------------------------------------

    @abstractmethod
    def idle_prefixes(self) -> dict[int, Tokens]:
        """Return the tokens that free seq_ids keep, least recently used first."""

    def without_cells(self) -> KVCache:
        """Return a cache with the same snapshots that regards all cells as free."""
        tiers = self.snapshots.tiers
        return type(self)(
            self.cells.size, self.cells_per_seq, self.seq_ids.size, self.layout, tiers
        )

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self.seq_ids.check()
        self.snapshots.tiers.check()
        self._tree.check()
        assert self.cells.num_free >= 0, f"more cells in use than exist: {self}"

    def __str__(self) -> str:
        cells = self.cells
        return (
            f"<{type(self).__name__} {cells.size}: held {cells.num_held} idle {cells.num_idle} "
            f"free {cells.num_free}>"
        )
