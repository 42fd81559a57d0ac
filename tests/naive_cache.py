"""The smallest KV cache with which the scheduler works."""

from __future__ import annotations

from typing import Any

import numpy as np

from cllm.core.batch import Operation, Trim
from cllm.core.sequence import Sequence
from cllm.kv_cache.cache import KVCache
from cllm.kv_cache.cell_counts import Chain
from cllm.kv_cache.matching import Match
from cllm.kv_cache.radix_tree import Tokens


class NaiveCache(KVCache):
    """Reuses nothing and saves nothing: every sequence is computed from its first token.

    Idle tokens remain only until their cells are needed. It overrides every method of KVCache that
    the scheduler calls with this layout.
    """

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self._chains: dict[int, Chain] = {}  # by leased seq_id
        self._rests: dict[int, tuple[Chain, Tokens]] = {}  # by idle seq_id

    def find(self, seq: Sequence) -> Match:
        return Match()

    def count_shared_cells(self, match: Match) -> int:
        return 0

    def lease(self, seq: Sequence, match: Match) -> tuple[int, int, list[Operation]] | None:
        if not self.seq_ids.num_free:
            raise IndexError("no sequence id is free")
        seq_id = min(self.seq_ids.free)
        operations = self._empty(seq_id) if seq_id in self._rests else []
        self.seq_ids.lease(seq_id)
        self._chains[seq_id] = Chain()
        return seq_id, 0, operations

    def make_room(self, num_tokens: int) -> list[Operation] | None:
        if num_tokens > self.num_available:
            return None
        operations: list[Operation] = []
        for seq_id in list(self._rests):
            if self.cells.num_free < num_tokens:
                operations += self._empty(seq_id)
        return operations

    def _empty(self, seq_id: int) -> list[Operation]:
        chain, _ = self._rests.pop(seq_id)
        self.cells.cut(chain, 0)
        return [Trim(seq_id, 0)]

    def hold(self, seq_id: int, num_tokens: int) -> None:
        self.cells.grow(self._chains[seq_id], num_tokens)

    def count_cells(self, seq_id: int) -> int:
        return self._chains[seq_id].length

    def count_private_cells(self, seq_id: int) -> int:
        return self.cells.count_private(self._chains[seq_id])

    def rewind(self, seq_id: int, keep: int) -> list[Operation]:
        self.cells.cut(self._chains[seq_id], keep)
        return [Trim(seq_id, keep)]

    def release(self, seq_id: int, tokens: list[int], *, soon: bool = False) -> None:
        chain = self._chains.pop(seq_id)
        self.seq_ids.give_back(seq_id)
        self.cells.cut(chain, len(tokens))
        self.cells.unlease(chain)
        if tokens:
            self._rests[seq_id] = chain, np.array(tokens, np.int32)

    def checkpoint(self, seq: Sequence) -> list[Operation]:
        return []

    def save_one_idle(self) -> list[Operation]:
        return []

    def invalidate_seq_ids(self, seq_ids: set[int]) -> list[Operation]:
        for seq_id in seq_ids & self._rests.keys():
            self._empty(seq_id)
        return [Trim(seq_id, 0) for seq_id in sorted(seq_ids)]

    def list_idle(self) -> dict[int, tuple[Tokens, str]]:
        return {seq_id: (tokens, "") for seq_id, (_, tokens) in self._rests.items()}

    def check(self) -> None:
        self.seq_ids.check()
        assert self.cells.num_free >= 0, str(self)
        assert self._chains.keys() == {
            i for i in range(self.seq_ids.size) if self.seq_ids.is_leased(i)
        }, str(self)
        assert not self._chains.keys() & self._rests.keys(), str(self)
        assert self.cells.num_held == sum(chain.length for chain in self._chains.values()), str(
            self
        )
        assert self.cells.num_idle == sum(len(tokens) for _, tokens in self._rests.values()), str(
            self
        )
