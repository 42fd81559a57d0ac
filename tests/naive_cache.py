"""The smallest KV cache that fulfils the contract: the scheduler works with it, too."""

from __future__ import annotations

import numpy as np

from cllm.core.batch import Operation, Trim
from cllm.core.sequence import Sequence
from cllm.kv_cache.base import KVCache, Match
from cllm.kv_cache.cells import Chain
from cllm.kv_cache.radix_tree import Tokens


class NaiveCache(KVCache):
    """Reuses nothing and saves nothing: every sequence is computed from its first token.

    Idle tokens remain only until their cells are needed.
    """

    def _start_empty(self) -> None:
        self._leased: dict[int, Chain] = {}
        self._idle: dict[int, tuple[Chain, Tokens]] = {}

    def find(self, seq: Sequence) -> Match:
        return Match()

    def num_shared(self, match: Match) -> int:
        return 0

    def lease(self, seq: Sequence, match: Match) -> tuple[int, int, list[Operation]] | None:
        if not self.seq_ids.num_free:
            raise IndexError("no sequence id is free")
        seq_id = min(self.seq_ids.free)
        operations = self._empty(seq_id) if seq_id in self._idle else []
        self.seq_ids.lease(seq_id)
        self._leased[seq_id] = Chain()
        return seq_id, 0, operations

    def make_room(self, num_tokens: int) -> list[Operation] | None:
        if num_tokens > self.num_available:
            return None
        operations: list[Operation] = []
        for seq_id in list(self._idle):
            if self.cells.num_free < num_tokens:
                operations += self._empty(seq_id)
        return operations

    def _empty(self, seq_id: int) -> list[Operation]:
        chain, _ = self._idle.pop(seq_id)
        self.cells.cut(chain, 0)
        return [Trim(seq_id, 0)]

    def hold(self, seq_id: int, num_tokens: int) -> None:
        self.cells.grow(self._leased[seq_id], num_tokens)

    def count_cells(self, seq_id: int) -> int:
        return self._leased[seq_id].length

    def count_private_cells(self, seq_id: int) -> int:
        return self.cells.num_private(self._leased[seq_id])

    def rewind(self, seq_id: int, keep: int) -> list[Operation]:
        self.cells.cut(self._leased[seq_id], keep)
        return [Trim(seq_id, keep)]

    def release(self, seq_id: int, tokens: list[int], *, soon: bool = False) -> None:
        chain = self._leased.pop(seq_id)
        self.seq_ids.give_back(seq_id)
        self.cells.cut(chain, len(tokens))
        self.cells.unlease(chain)
        if tokens:
            self._idle[seq_id] = chain, np.array(tokens, np.int32)

    def checkpoint(self, seq: Sequence) -> list[Operation]:
        return []

    def save_one_idle(self) -> list[Operation]:
        return []

    def invalidate_seq_ids(self, seq_ids: set[int]) -> list[Operation]:
        for seq_id in seq_ids & self._idle.keys():
            self._empty(seq_id)
        return [Trim(seq_id, 0) for seq_id in sorted(seq_ids)]

    def idle_prefixes(self) -> dict[int, Tokens]:
        return {seq_id: tokens for seq_id, (_, tokens) in self._idle.items()}

    def check(self) -> None:
        super().check()
        assert self._leased.keys() == {
            i for i in range(self.seq_ids.size) if self.seq_ids.is_leased(i)
        }, str(self)
        assert not self._leased.keys() & self._idle.keys(), str(self)
        assert self.cells.num_held == sum(chain.length for chain in self._leased.values()), str(
            self
        )
        assert self.cells.num_idle == sum(len(tokens) for _, tokens in self._idle.values()), str(
            self
        )
