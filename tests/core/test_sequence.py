"""The chunks of a prompt that a sequence notes."""

from __future__ import annotations

from cllm.core.output import PrefillChunk
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import MAX_CHUNKS, Sequence


def test_traced_request_has_the_chunks_of_its_prompt():
    traced = Sequence(Request("a", [1] * 9, SamplingParams(), is_traced=True), 0, 0, 100)
    plain = Sequence(Request("b", [1] * 9, SamplingParams()), 0, 0, 100)
    for seq in (traced, plain):
        seq.admitted = 2.0
        assert seq.note_chunk(2.5, 3.0, 4) == []
        seq.note_chunk(3.0, 3.25, 5)
    assert traced.sum_up_times().chunks == (PrefillChunk(0.5, 1.0, 4), PrefillChunk(1.0, 1.25, 5))
    assert plain.sum_up_times().chunks == ()


def test_many_chunks_of_a_prompt_are_bounded():
    seq = Sequence(Request("a", [1] * 9, SamplingParams(), is_traced=True), 0, 0, 100)
    for i in range(MAX_CHUNKS + 5):
        seq.note_chunk(float(i), i + 1.0, 1)
    assert len(seq.chunks) == MAX_CHUNKS
    assert sum(chunk.num_tokens for chunk in seq.chunks) == MAX_CHUNKS + 5
    assert seq.chunks[-1].end == MAX_CHUNKS + 5
