"""The memory for past recurrent states: taken when it is used, and given back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cllm.backends.llama_cpp import ggml_memory
from cllm.backends.llama_cpp.backend import LlamaCppBackend
from cllm.backends.llama_cpp.options import Options
from cllm.backends.llama_cpp.past_states import PastStates
from cllm.backends.params import BackendParams
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence

pytestmark = [
    pytest.mark.llama,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is taken when it is used on Linux"),
]
TOLERANCE = 1e-3
PAST_FREE = PastStates.free


@pytest.fixture(params=["lfm2", "qwen35", "nemotron_h"])
def backend(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LlamaCppBackend]:
    monkeypatch.setattr(ggml_memory, "NEW_PAGES_BYTES", 0)
    made = LlamaCppBackend(
        BackendParams(
            path=str(tiny_model(request.param)),
            context_length=256,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_taken_back=4,
            options=Options(n_threads=1, n_gpu_layers=0).model_dump(),
        )
    )
    yield made
    made.close()


def make_sequence(seq_id: int) -> Sequence:
    seq = Sequence(Request("A", [0], SamplingParams()), 0, 0, 256)
    seq.seq_id, seq.tokens = seq_id, [(7 * i + seq_id) % 250 for i in range(30)]
    return seq


def read_past_states(backend: LlamaCppBackend) -> bytes:
    """Return what is stored for past states."""
    states = b""
    for address, row_bytes, num_rows in backend._new_pages.recurrent:
        current = num_rows // 5 * row_bytes
        states += ctypes.string_at(address + current, num_rows * row_bytes - current)
    return states


def decode(backend: LlamaCppBackend) -> np.ndarray:
    """Return the logits of steps that compute two of four sequences in turn, with draft tokens that
    are taken back.
    """
    seqs = [make_sequence(seq_id) for seq_id in range(4)]
    trims = [Trim(seq.seq_id, 0) for seq in seqs]
    backend.forward(Batch([Row(seq, 0, 5, 0) for seq in seqs], trims))
    trims, logits = [], []
    for step in range(12):
        start = 5 + step // 2
        rows = [Row(seq, start, 1, 4, (90, 91, 92)) for seq in seqs[step % 2 * 2 :][:2]]
        logits += [np.array(each) for each in backend.forward(Batch(rows, [*trims]))]
        trims = [Trim(row.seq.seq_id, start + 1) for row in rows]
    return np.array(logits)


def test_no_sequence_needs_memory_that_was_given_back(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that has gone back to a past state and is not computed in that step."""
    expected = decode(backend)
    freed = []

    def free(past_states: PastStates) -> None:
        PAST_FREE(past_states)
        freed.append(not any(read_past_states(backend)))

    monkeypatch.setattr(PastStates, "is_too_large", property(lambda self: True))
    monkeypatch.setattr(PastStates, "free", free)
    logits = decode(backend)
    assert freed == [True] * 13
    assert any(read_past_states(backend))
    assert np.abs(logits - expected).max() < TOLERANCE * expected.std()


def test_memory_is_given_back_when_many_sequences_had_drafts(
    backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four sequences may have four past states each."""
    seqs = [make_sequence(seq_id) for seq_id in range(8)]
    calls: list[PastStates] = []
    monkeypatch.setattr(
        PastStates, "free", lambda states: (calls.append(states), PAST_FREE(states))
    )
    backend.forward(Batch([Row(seq, 0, 5, 0) for seq in seqs], []))
    freed: list[int] = []
    for seq in [*seqs[:4], *seqs[:4], *seqs]:
        start = 5 + seq.num_computed_tokens
        backend.forward(Batch([Row(seq, start, 1, 5, (90, 91, 92, 93))], []))
        backend.forward(Batch([], [Trim(seq.seq_id, start + 1)]))
        seq.num_computed_tokens += 1
        freed.append(len(calls))
    assert freed == [0] * 12 + [1] * 4
