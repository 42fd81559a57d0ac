"""Sequences get seq_ids that few passes can compute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cllm.core.batch import Operation, Row, Swap
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.kv_cache.cache import KVCache
from cllm.kv_cache.layouts import Paged
from cllm.kv_cache.matching import Match
from cllm.scheduler.seq_id_order import MAX_SWAPS, arrange

MAX_NUM_SEQS, CONTEXT = 24, 16_384


class Running:
    """Running sequences of some lengths, under some seq_ids, in a real cache."""

    def __init__(self, seq_ids: list[int], lengths: list[int]) -> None:
        self.cache = KVCache(MAX_NUM_SEQS * CONTEXT, CONTEXT, MAX_NUM_SEQS, Paged())
        everyone = [self.start(length) for length in [1] * MAX_NUM_SEQS]
        for seq in everyone:
            self.cache.release(seq.seq_id, [])
        self.seqs = []
        for seq_id, length in zip(seq_ids, lengths, strict=True):
            self.cache.seq_ids.free = {seq_id}  # so that it gets this one
            self.seqs.append(self.start(length))
        taken = {seq.seq_id for seq in self.seqs}
        self.cache.seq_ids.free = set(range(MAX_NUM_SEQS)) - taken

    def start(self, length: int) -> Sequence:
        seq = Sequence(Request("A", [1] * length, SamplingParams()), 0, 0, CONTEXT)
        leased = self.cache.lease(seq, Match())
        assert leased is not None
        seq.seq_id = leased[0]
        return seq

    def arrange(self, rows: list[Row]) -> list[Operation]:
        """Arrange ``rows``, and check that each sequence has the seq_id that the cache and the
        backend have for it.
        """
        places = {seq.seq_id: seq for seq in self.seqs}
        num_decoding = sum(row.num_tokens == 1 for row in rows)
        operations = arrange(rows, num_decoding, self.seqs, self.cache)
        assert len(operations) <= MAX_SWAPS
        for operation in operations:
            assert isinstance(operation, Swap)
            first, second = operation
            moved = {first: places.pop(second, None), second: places.pop(first, None)}
            places |= {seq_id: seq for seq_id, seq in moved.items() if seq is not None}
        assert {seq_id: seq.seq_id for seq_id, seq in places.items()} == {i: i for i in places}
        assert len(places) == len(self.seqs)
        self.cache.check()
        for seq in self.seqs:
            holding = self.cache._leased[seq.seq_id]
            assert (holding.seq_id, holding.seq) == (seq.seq_id, seq)
        return operations


@given(
    st.permutations(range(MAX_NUM_SEQS)),
    st.lists(
        st.tuples(st.integers(1, 12_000), st.sampled_from([0, 1, 1, 1, 5, 300])),
        min_size=1,
        max_size=MAX_NUM_SEQS,
    ),
)
def test_few_steps_lead_to_consecutive_seq_ids(
    seq_ids: list[int], shapes: list[tuple[int, int]]
) -> None:
    """Decoding sequences first, and then prompts by size. Some running sequences have no row. One
    that decodes alone stays where it is.
    """
    lengths = [length for length, _ in shapes]
    running = Running(seq_ids[: len(shapes)], lengths)
    rows = [
        Row(seq, 0, count, 1) for seq, (_, count) in zip(running.seqs, shapes, strict=True) if count
    ]
    for _ in range(MAX_NUM_SEQS // MAX_SWAPS + 1):
        if not running.arrange(rows):
            break
    assert running.arrange(rows) == []
    decoding = sorted((row.seq for row in rows if row.num_tokens == 1), key=lambda s: s.seq_id)
    if len(decoding) == 1:
        decoding = []
    assert [seq.seq_id for seq in decoding] == list(range(len(decoding)))
    prompts = sorted((row for row in rows if row.num_tokens > 1), key=lambda r: r.seq.seq_id)
    if len(prompts) > 1:
        begin = len(decoding)
        assert [row.seq.seq_id for row in prompts] == list(range(begin, begin + len(prompts)))
        sizes = [row.num_tokens for row in prompts]
        assert sizes == sorted(sizes)


def test_nothing_is_exchanged_without_gain() -> None:
    """The sequences are already together."""
    running = Running([0, 1, 2, 5], [100, 200, 3000, 700])
    decoding = [Row(seq, 0, 1, 1) for seq in running.seqs[:3]]
    assert running.arrange([*decoding, Row(running.seqs[3], 0, 50, 1)]) == []
    assert running.arrange([Row(running.seqs[3], 0, 50, 1)]) == []
    assert running.arrange([Row(running.seqs[3], 0, 1, 1)]) == []
    assert running.arrange([]) == []
