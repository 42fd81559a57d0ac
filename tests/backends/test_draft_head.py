"""Draft tokens of a model's own heads, whatever has happened to its sequences."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cllm.backends.base import Backend
from cllm.backends.params import BackendParams
from cllm.core.batch import Batch, Copy, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.models.gguf import UINT32

pytestmark = pytest.mark.llama

CONTEXT = 1536
NUM_SEQS = 20  # more than a head has cells for
NUM_DRAFTED = 5
TEXT = [(7 * i * i + i) % 400 + 5 for i in range(1200)]


def test_models_with_several_heads_do_not_use_them(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """llama.cpp would abort the process."""
    from cllm.backends.llama_cpp.draft_head import has_head

    path, key = tiny_model("qwen35_mtp"), b"qwen35.nextn_predict_layers"
    one, two = (key + struct.pack("<II", UINT32, count) for count in (1, 2))
    changed = tmp_path / "two.gguf"
    changed.write_bytes(path.read_bytes().replace(one, two))
    assert has_head(path)
    assert not has_head(changed)


def test_warns_without_memory_for_past_states(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    from cllm.backends.llama_cpp.backend import LlamaCppBackend

    made = LlamaCppBackend(
        BackendParams(
            path=str(tiny_model("qwen35_mtp")),
            context_length=64,
            max_num_seqs=1,
            max_num_batched_tokens=64,
            layout="unified",
            kv_memory=40_000,
            max_taken_back=4,
            draft_head=True,
        )
    )
    assert made.info.max_taken_back == 0
    assert made.drafter is None
    assert "kv.max_memory_mb leaves no memory for past" in caplog.text
    made.close()


@pytest.fixture(scope="module", params=["qwen35_mtp", "qwen35moe_mtp", "glm4moe_mtp"])
def backend(request, tiny_model: Callable[[str], Path]) -> Iterator[Backend]:
    from cllm.backends.llama_cpp.backend import LlamaCppBackend

    made = LlamaCppBackend(
        BackendParams(
            path=str(tiny_model(request.param)),
            context_length=CONTEXT,
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=256,
            layout="unified",
            kv_memory=1 << 28,
            max_taken_back=4,
            draft_head=True,
        )
    )
    yield made
    made.close()


@pytest.fixture
def make(backend) -> Iterator[Callable[..., Sequence]]:
    """Return ``make(tokens, seq_id)``: a sequence whose cells are empty. All end with the test."""
    seqs: list[Sequence] = []

    def make_sequence(tokens: list[int], seq_id: int = 0) -> Sequence:
        seq = Sequence(Request("A", tokens, SamplingParams()), 0, 0, CONTEXT)
        seq.seq_id = seq_id
        seqs.append(seq)
        return seq

    yield make_sequence
    for seq in seqs:
        backend.drafter.forget(seq)
        backend.forward(Batch([], [Trim(seq.seq_id, 0)]))


def compute(backend, seq: Sequence, end: int, size: int = 200) -> None:
    """Compute the tokens up to ``end``, ``size`` at a time, with logits of the last ones."""
    while seq.num_computed_tokens < end:
        count = min(size, end - seq.num_computed_tokens)
        num_samples = int(seq.num_computed_tokens + count == end)
        backend.forward(Batch([Row(seq, seq.num_computed_tokens, count, num_samples)], []))
        seq.num_computed_tokens += count


def draft(backend, *seqs: Sequence, count: int = NUM_DRAFTED) -> list[tuple[int, ...]]:
    drafts = backend.drafter.draft(dict.fromkeys(seqs, count))
    return [drafts.get(seq, ()) for seq in seqs]


def expect(backend, make, tokens: list[int], start: int = 0) -> tuple[int, ...]:
    """Return the draft for ``tokens`` if the head knows those from ``start`` on, computed alone."""
    seq = make(tokens, NUM_SEQS - 1)
    backend.forward(Batch([], [Trim(seq.seq_id, 0)]))
    compute(backend, seq, len(tokens) - 1)
    if start:  # computed again from there, as if the cells before it were another sequence's
        backend.drafter.forget(seq)
        seq.num_computed_tokens = 0
        backend.forward(Batch([], [Trim(seq.seq_id, 0)]))
        compute(backend, seq, start)
        backend.drafter.forget(seq)
        compute(backend, seq, len(tokens) - 1)
    [drafted] = draft(backend, seq)
    backend.drafter.forget(seq)
    backend.forward(Batch([], [Trim(seq.seq_id, 0)]))
    assert len(drafted) == NUM_DRAFTED
    return drafted


@pytest.mark.parametrize("length", [3, 40, 300, 700, 1100])
@pytest.mark.parametrize("size", [1, 7, 200])
def test_prompt_in_parts_gets_the_same_draft(backend, make, length: int, size: int) -> None:
    """Also a prompt longer than a call of the head, and than what it attends to."""
    expected = expect(backend, make, TEXT[:length])
    seq = make(TEXT[:length])
    compute(backend, seq, length - 1, size)
    assert draft(backend, seq) == [expected]
    assert draft(backend, seq) == [expected], "nothing has been computed since"
    assert draft(backend, seq, count=2) == [expected[:2]]


def test_head_follows_sequence(backend, make) -> None:
    """With a draft at each token, at some, or after many without."""
    seq = make(TEXT[:900])
    for end in [*range(5, 12), 15, 23, 24, 200, 201, 420, 850]:
        compute(backend, seq, end)
        seq.tokens = TEXT[: end + 1]
        assert draft(backend, seq) == [expect(backend, make, TEXT[: end + 1])]
        seq.tokens = TEXT[:900]


def test_rejected_tokens_leave_no_trace(backend, make) -> None:
    """Their hidden states are replaced, whether the drafts were the head's or not."""
    seq = make(TEXT[:20])
    compute(backend, seq, 19)
    for i in range(20, 40):
        drafted = draft(backend, seq)[0][:4] if i % 2 else (1, 2, 3, 4)
        backend.forward(Batch([Row(seq, i - 1, 1, 1 + len(drafted), drafted)], []))
        backend.forward(Batch([], [Trim(0, i)]))
        seq.num_computed_tokens = i
        seq.append(TEXT[i])
        assert draft(backend, seq) == [expect(backend, make, TEXT[: i + 1])]


def test_sequences_share_calls_and_seq_ids(backend, make) -> None:
    """More than the head has cells for: the last ones that were computed get drafts."""
    lengths = [30 + 17 * i for i in range(NUM_SEQS - 1)]
    seqs = [make(TEXT[i : i + length], i) for i, length in enumerate(lengths)]
    expected = [expect(backend, make, seq.tokens) for seq in seqs]
    for seq in seqs:
        compute(backend, seq, seq.num_tokens - 1)
    assert draft(backend, *seqs) == [(), (), (), *expected[3:]]
    for seq, other in zip(seqs[:3], expected, strict=False):
        seq.num_computed_tokens = 0
        backend.forward(Batch([], [Trim(seq.seq_id, 0)]))
        compute(backend, seq, seq.num_tokens - 1)
        assert draft(backend, seq) == [other]


def test_many_rows_at_once_are_not_recorded(backend, make) -> None:
    seqs = [make(TEXT[i : i + 8], i) for i in range(NUM_SEQS - 1)]
    backend.forward(Batch([Row(seq, 0, 7, 0) for seq in seqs], []))
    assert draft(backend, *seqs) == [()] * len(seqs)


def test_reused_prefix_is_unknown_to_head(backend, make) -> None:
    """It predicts from the tokens after the prefix: the first draft needs two of them."""
    first, second = make(TEXT[:100]), make([*TEXT[:100], *TEXT[300:310]], 1)
    compute(backend, first, 100)
    backend.forward(Batch([], [Copy(0, 1, 100)]))
    second.num_computed_tokens = 100
    assert draft(backend, second) == [()]
    compute(backend, second, 109)
    assert draft(backend, second) == [expect(backend, make, second.tokens, start=100)]
