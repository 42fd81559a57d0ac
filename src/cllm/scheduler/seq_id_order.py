"""Orders sequences by their seq_ids, so that a step computes them in few passes."""

from __future__ import annotations

from collections.abc import Iterable

from cllm.core.batch import Operation, Row
from cllm.core.sequence import Sequence
from cllm.kv_cache.cache import KVCache

MAX_SWAPS = 8  # in a step; each takes about 2 ms, and may save a pass of about 30 ms


def arrange(
    rows: list[Row], num_decoding: int, running: Iterable[Sequence], kv_cache: KVCache
) -> list[Operation]:
    """Return operations that give the sequences of ``rows`` consecutive seq_ids, so that few passes
    compute them all: the decoding ones, and then prompts of similar sizes.

    If the step has only prompts, they come after the seq_ids of ``num_decoding`` sequences, which
    will decode in the next steps.
    """
    decoding = [row.seq for row in rows if row.num_tokens == 1]
    prompts = sorted((row for row in rows if row.num_tokens > 1), key=lambda row: row.num_tokens)
    swaps = SeqIdSwaps(running, kv_cache)
    if len(decoding) == 1:
        decoding = []  # a row alone is a pass, whatever its seq_id
    end = len(decoding)
    free = set(range(end)).difference(seq.seq_id for seq in decoding)
    strays = [seq for seq in decoding if seq.seq_id >= end]
    for seq, seq_id in zip(strays, sorted(free), strict=True):
        swaps.move(seq, seq_id)
    if len(prompts) > 1:
        if len(prompts) == len(rows):
            end = num_decoding
        for row in prompts:
            swaps.move(row.seq, end)
            end += 1
    return swaps.operations


class SeqIdSwaps:
    """Exchanges seq_ids of running sequences, at most MAX_SWAPS times."""

    def __init__(self, running: Iterable[Sequence], kv_cache: KVCache) -> None:
        self.operations: list[Operation] = []
        self._owners = {seq.seq_id: seq for seq in running}
        self._kv_cache = kv_cache

    def move(self, seq: Sequence, seq_id: int) -> None:
        if seq.seq_id == seq_id or len(self.operations) == MAX_SWAPS:
            return
        before = seq.seq_id
        self.operations.append(self._kv_cache.swap(before, seq_id))
        del self._owners[before]
        if (other := self._owners.get(seq_id)) is not None:
            other.seq_id = before
            self._owners[before] = other
        seq.seq_id, self._owners[seq_id] = seq_id, seq
