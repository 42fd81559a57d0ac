"""Rows are divided into passes that lose nothing and change no result."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backends.llama_cpp.passes import (
    MAX_DECODED,
    MAX_PADDING,
    Pass,
    plan_passes,
    plan_with_drafts,
)
from cllm.backends.params import BackendParams
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError
from cllm.models.gguf import read_header
from cllm.models.sequence_memory import compute_kv_bytes_per_token

MAX_TOKENS, CONTEXT = 256, 8192
TOLERANCE = 0.05  # of the standard deviation of the logits, for their mean difference


def make_row(seq_id: int, start: int, num_tokens: int, num_draft: int = 0) -> Row:
    seq = Sequence(Request("A", [0], SamplingParams()), 0, 0, CONTEXT)
    seq.seq_id = seq_id
    return Row(seq, start, num_tokens, 1 + num_draft, (0,) * num_draft)


def plan(*rows: Row, pads: bool = True) -> list[tuple[list[int], int]]:
    """Return the seq_ids and the padded size of each pass."""
    passes = plan_passes([*rows], MAX_TOKENS, CONTEXT, pads=pads)
    return [([row.seq.seq_id for row in each.rows], each.size) for each in passes]


ROWS = st.lists(
    st.tuples(
        st.integers(1, 3),  # from one seq_id to the next
        st.one_of(st.integers(0, 300), st.integers(0, CONTEXT - MAX_TOKENS)),
        st.one_of(st.just(1), st.integers(1, MAX_TOKENS)),
        st.integers(0, MAX_DECODED - 1),
    ),
    min_size=1,
    max_size=40,
)


@given(ROWS, st.booleans())
def test_rows_are_kept_in_order_and_within_limits(
    shapes: list[tuple[int, int, int, int]], pads: bool
) -> None:
    """A pass has consecutive seq_ids, and prompts or decoding rows. Rows are padded to the longest
    one, within the context and the step.
    """
    rows, seq_id = [], -1
    for step, start, num_tokens, num_draft in shapes:
        seq_id += step
        rows.append(make_row(seq_id, start, num_tokens, num_draft if num_tokens == 1 else 0))
    passes = plan_passes(rows, MAX_TOKENS, CONTEXT, pads=pads)
    assert [row for each in passes for row in each.rows] == rows
    for each in passes:
        ids = [row.seq.seq_id for row in each.rows]
        sizes = [row.size for row in each.rows]
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        assert len({size > MAX_DECODED for size in sizes}) == 1
        assert sum(sizes) <= MAX_TOKENS
        if each.size:
            assert pads
            assert each.size == max(sizes)
            assert len(sizes) * each.size - sum(sizes) <= MAX_PADDING
            assert len(ids) * each.size <= MAX_TOKENS
            assert all(row.start + each.size <= CONTEXT for row in each.rows)


def test_short_and_long_sequences_are_computed_together() -> None:
    """Attention does not read cells that a row does not see."""
    short = [make_row(i, 100 + i, 1) for i in range(32)]
    assert plan(*short, make_row(32, 4096, 1)) == [([*range(33)], 0)]


def test_gap_between_seq_ids_ends_a_pass() -> None:
    assert plan(make_row(0, 9, 1), make_row(2, 9, 1), make_row(3, 9, 1)) == [([0], 0), ([2, 3], 0)]


def test_rows_of_similar_sizes_are_padded_to_the_longest() -> None:
    """Unless tokens cannot be freed, or the context ends."""
    rows = [make_row(0, 0, 60), make_row(1, 0, 63), make_row(2, 0, 20)]
    assert plan(*rows) == [([0, 1], 63), ([2], 0)]
    assert plan(*rows, pads=False) == [([0, 1], 0), ([2], 0)]
    drafts = [make_row(0, 50, 1), make_row(1, 50, 1, 3)]
    assert plan(*drafts) == [([0, 1], 4)]
    end = [make_row(0, CONTEXT - 60, 60), make_row(1, CONTEXT - 63, 63)]
    assert plan(*end) == [([0, 1], 0)]


def plan_drafts(*rows: Row, has_streams: bool) -> list[tuple[list[int], int]]:
    passes = plan_with_drafts([*rows], MAX_TOKENS, CONTEXT, 4, has_streams=has_streams)
    return [([row.seq.seq_id for row in each.rows], each.size) for each in passes]


def test_draft_tokens_are_in_the_last_pass() -> None:
    """With streams, its rows are neighbours. Without, others join it if they need little padding."""
    rows = [make_row(i, 50, 1) for i in range(5)]
    rows[1], rows[3] = make_row(1, 50, 1, 2), make_row(3, CONTEXT - 2, 1, 4)
    assert plan_drafts(*rows, has_streams=True) == [([0], 0), ([4], 0), ([1, 2, 3], 5)]
    assert plan_drafts(*rows, has_streams=False) == [([0, 2, 4], 0), ([1, 3], 5)]
    assert plan_drafts(rows[1], rows[3], has_streams=False) == [([1, 3], 5)]
    assert plan_drafts(*rows[:3], has_streams=False) == [([0, 1, 2], 3)]
    assert plan_drafts(*rows[:3], make_row(6, 9, 30), has_streams=False) == [
        ([0, 2], 0),
        ([6], 0),
        ([1], 0),
    ]
    assert plan_drafts(rows[0], rows[2], has_streams=False) == [([0, 2], 0)]
    assert plan_drafts(rows[0], rows[2], has_streams=True) == [([0], 0), ([2], 0)]
    with pytest.raises(EngineError):
        plan_drafts(rows[1], rows[3], has_streams=True)
    with pytest.raises(EngineError):
        plan_drafts(make_row(0, 9, 1, 5), has_streams=False)


@pytest.mark.llama
@pytest.mark.slow
def test_passes_compute_what_one_call_computes(builtin_path: Path, monkeypatch) -> None:
    """Random prompts, drafts and decoding rows, of which some are padded."""
    from cllm.backends.llama_cpp.backend import LlamaCppBackend
    from cllm.backends.llama_cpp.options import Options

    backend = LlamaCppBackend(
        BackendParams(
            path=str(builtin_path),
            context_length=768,
            max_num_seqs=6,
            max_num_batched_tokens=MAX_TOKENS,
            kv_bytes_per_token=compute_kv_bytes_per_token(read_header(builtin_path)) or 0,
            layout="paged",
            options=Options(n_threads=1).model_dump(),
        )
    )
    planned: list[Pass] = []
    decode = backend._decode

    def spy(rows: Pass) -> object:
        planned.append(rows)
        return decode(rows)

    monkeypatch.setattr(backend, "_decode", spy)
    chance = random.Random(0)
    for _ in range(8):
        seqs = []
        for seq_id in sorted(chance.sample(range(6), chance.randint(2, 6))):
            tokens = chance.choices(range(50, 200), k=chance.choice([20, 130, 600, 650]))
            seqs.append(Sequence(Request("A", tokens, SamplingParams()), 0, 0, 768))
            seqs[-1].seq_id = seq_id
        sizes = [chance.choice([1, 1, 4, 18, 50, 60]) for _ in seqs]
        sizes = [min(size, seq.num_tokens - 1) for size, seq in zip(sizes, seqs, strict=True)]
        results = []
        for in_passes in (False, True):
            backend._in_passes = in_passes
            for seq, size in zip(seqs, sizes, strict=True):
                backend.forward(Batch([], [Trim(seq.seq_id, 0)]))
                for start in range(0, seq.num_tokens - size, MAX_TOKENS):
                    count = min(MAX_TOKENS, seq.num_tokens - size - start)
                    backend.forward(Batch([Row(seq, start, count, 0)], []))
            rows = [
                Row(seq, seq.num_tokens - size, size, min(size, 3))
                for seq, size in zip(seqs, sizes, strict=True)
            ]
            results.append(np.array(backend.forward(Batch(rows, []))))
        differences = np.abs(results[0] - results[1]).mean(axis=1)
        assert differences.max() < TOLERANCE * results[0].std()
    assert any(each.size for each in planned)
    assert any(len(each.rows) > 1 and not each.size for each in planned)
    backend.close()
