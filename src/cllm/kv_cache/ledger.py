"""Which tokens lie under which seq_id, and what room is left.

Each seq_id holds a run of tokens from position 0. While it is leased they belong to a running sequence; afterwards
they stay, idle, until another sequence can use them as its prefix or the room is needed.

Invariants: held + idle + free = num_cells; a seq_id has idle tokens only while it is not leased; no seq_id holds more
than cells_per_seq. In the partitioned layout each seq_id owns its cells, in the unified one all draw on one pool; both
are the same bookkeeping, because num_cells = max_num_seqs * cells_per_seq in the first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cllm.core.batch import Trim
from cllm.kv_cache.seq_id_pool import SeqIdPool

MIN_SHARED_TOKENS = 16  # below that a dense seq_id is worth more than the tokens saved

Tokens = npt.NDArray[np.int32]


class Ledger:
    """Counts cells and leases seq_ids; returns the operations that a backend has to carry out."""

    def __init__(self, num_cells: int, cells_per_seq: int, max_num_seqs: int, *, can_trim: bool = True) -> None:
        """``can_trim``: whether some of a sequence's cells can be given back, or only all."""
        self.num_cells = num_cells
        self._can_trim = can_trim
        self.cells_per_seq = cells_per_seq
        self.seq_ids = SeqIdPool(max_num_seqs)
        if num_cells < cells_per_seq:
            raise ValueError(f"{num_cells} cells cannot hold a sequence of {cells_per_seq}")
        self._held: dict[int, int] = {}  # seq_id -> cells of a running sequence
        self._idle: dict[int, Tokens] = {}  # seq_id -> tokens left there, the longest unused first
        self.num_held = 0
        self.num_idle = 0

    @property
    def num_free(self) -> int:
        return self.num_cells - self.num_held - self.num_idle

    @property
    def num_available(self) -> int:
        """Cells a running sequence could get without taking them from another."""
        return self.num_cells - self.num_held

    def lease(self, prompt: list[int]) -> tuple[int, int, list[Trim]]:
        """Lease a seq_id for ``prompt``: (seq_id, number of its tokens already there, operations).

        At least one token of the prompt is left to compute, since its logits are needed. Raises IndexError if no
        seq_id is free.
        """
        if not self.seq_ids.num_free:
            raise IndexError("no sequence id is free")
        seq_id, num_shared = self._longest_idle_prefix(prompt)
        if num_shared == 0:
            seq_id = self._least_useful()
        self.seq_ids.lease(seq_id)
        idle = self._idle.pop(seq_id, None)
        if idle is not None:
            self.num_idle -= len(idle)
        self._held[seq_id] = num_shared
        self.num_held += num_shared
        stale = idle is not None and len(idle) > num_shared
        return seq_id, num_shared, [Trim(seq_id, num_shared)] if stale else []

    def _least_useful(self) -> int:
        """The free seq_id that leaves the fewest holes between leased ones; of these an empty one, or the oldest."""
        age = {seq_id: i for i, seq_id in enumerate(self._idle)}

        def rank(seq_id: int) -> tuple[int, int, int]:
            neighbours = self.seq_ids.is_leased(seq_id - 1) + self.seq_ids.is_leased(seq_id + 1)
            return -neighbours, age.get(seq_id, -1), seq_id

        return min(self.seq_ids.free, key=rank)

    def _longest_idle_prefix(self, prompt: list[int]) -> tuple[int, int]:
        best, longest = -1, MIN_SHARED_TOKENS - 1
        if self._idle:
            wanted = np.array(prompt[:-1], np.int32)
            for seq_id, tokens in self._idle.items():
                shared = common_prefix(wanted, tokens)
                if shared > longest and (self._can_trim or shared == len(tokens)):
                    best, longest = seq_id, shared
        return (best, longest) if best >= 0 else (best, 0)

    def make_room(self, num_tokens: int) -> list[Trim] | None:
        """Operations after which ``num_tokens`` cells are free, or None if running sequences hold too many."""
        if num_tokens > self.num_available:
            return None
        operations = []
        while self.num_free < num_tokens:
            seq_id, tokens = next(iter(self._idle.items()))
            keep = len(tokens) - (num_tokens - self.num_free)
            if keep >= MIN_SHARED_TOKENS and self._can_trim:
                self._idle[seq_id] = tokens[:keep]
            else:
                keep = 0
                del self._idle[seq_id]
            self.num_idle -= len(tokens) - keep
            operations.append(Trim(seq_id, keep))
        return operations

    def hold(self, seq_id: int, num_tokens: int) -> None:
        """Count ``num_tokens`` more cells under ``seq_id``; make_room came first."""
        self._held[seq_id] += num_tokens
        self.num_held += num_tokens

    def release(self, seq_id: int, tokens: list[int]) -> None:
        """Give ``seq_id`` back; ``tokens``, what its cells hold, stay as an idle prefix."""
        self.num_held -= self._held.pop(seq_id)
        self.seq_ids.give_back(seq_id)
        if tokens:
            self._idle[seq_id] = np.array(tokens, np.int32)
            self.num_idle += len(tokens)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self.seq_ids.check()
        assert self.num_held == sum(self._held.values()), f"held cells miscounted: {self}"
        assert self.num_idle == sum(map(len, self._idle.values())), f"idle cells miscounted: {self}"
        assert self.num_free >= 0, f"more cells in use than there are: {self}"
        assert self._held.keys() == {i for i in range(self.seq_ids.size) if self.seq_ids.is_leased(i)}, str(self)
        assert not self._held.keys() & self._idle.keys(), f"idle tokens under a leased seq_id: {self}"
        most = max([*self._held.values(), *map(len, self._idle.values())], default=0)
        assert most <= self.cells_per_seq, f"a sequence outgrew its cells: {self}"

    def __str__(self) -> str:
        return f"<Ledger {self.num_cells}: held {self.num_held} idle {self.num_idle} free {self.num_free}>"


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that two arrays share."""
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length
