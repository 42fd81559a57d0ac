"""Places sequences under seq_ids, so that a step computes them in few passes."""

from __future__ import annotations

from collections.abc import Iterable

from cllm.core.batch import Operation, Row
from cllm.core.sequence import Sequence
from cllm.kv_cache.base import KVCache

MAX_SWAPS = 4  # in a step; each takes about as long as computing a row
SHORT_TOKENS = 1024  # sequences up to this length, twice, four times ... are computed together


def arrange(rows: list[Row], running: Iterable[Sequence], kv_cache: KVCache) -> list[Operation]:
    """Return operations that give the decoding sequences consecutive seq_ids, the shorter ones
    first, so that few passes compute them all.
    """
    owners = {seq.seq_id: seq for seq in running}
    groups: dict[int, list[Sequence]] = {}
    for row in rows:
        if row.num_tokens == 1:
            length_class = (row.seq.num_tokens // SHORT_TOKENS).bit_length()
            groups.setdefault(length_class, []).append(row.seq)
    operations: list[Operation] = []
    end = 0
    for _, group in sorted(groups.items()):
        begin, end = end, end + len(group)
        places = set(range(begin, end)).difference(seq.seq_id for seq in group)
        strays = [seq for seq in group if not begin <= seq.seq_id < end]
        for seq, place in zip(strays, sorted(places), strict=True):
            if len(operations) == MAX_SWAPS:
                return operations
            operations.append(kv_cache.swap(seq.seq_id, place))
            if (other := owners.pop(place, None)) is not None:
                other.seq_id = seq.seq_id
                owners[seq.seq_id] = other
            else:
                del owners[seq.seq_id]
            owners[place], seq.seq_id = seq, place
    return operations
