"""Features of the llama.cpp backend only: padding of rows, and other types of cells."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cllm import LLM
from cllm.backends.llama_cpp.backend import LlamaCppBackend
from cllm.backends.llama_cpp.library import log_lines
from cllm.backends.llama_cpp.options import Options
from cllm.backends.params import BackendParams
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import StartupError
from cllm.models.gguf import read_header
from cllm.models.sequence_memory import compute_kv_bytes_per_token

pytestmark = pytest.mark.llama

CONTEXT = 640
START = 520
TOLERANCE = 0.1  # of the standard deviation of the logits
ONE_THREAD = Options(n_threads=1).model_dump()


def kv_bytes(path: Path, kv_type: str = "f16") -> int:
    return compute_kv_bytes_per_token(read_header(path), kv_type) or 0


@pytest.fixture(scope="module", params=["partitioned", "paged"])
def backend(request, builtin_path: Path):
    params = BackendParams(
        kv_bytes_per_token=kv_bytes(builtin_path),
        path=str(builtin_path),
        context_length=CONTEXT,
        max_num_seqs=3,
        max_num_batched_tokens=256,
        layout=request.param,
        options=ONE_THREAD,
    )
    made = LlamaCppBackend(params)
    yield made
    made.close()


def sequence(seq_id: int, num_tokens: int) -> Sequence:
    tokens = random.Random(seq_id).choices(range(50, 200), k=num_tokens)
    seq = Sequence(Request("A", tokens, SamplingParams()), 0, 0, CONTEXT)
    seq.seq_id = seq_id
    return seq


def decoded_sizes(backend: LlamaCppBackend, monkeypatch) -> list[int]:
    """The number of tokens of each following batch, as libllama gets it."""
    from cllm.backends.llama_cpp import backend as module

    sizes, decode = [], module.lib.llama_decode

    def spy(context, batch):
        sizes.append(batch.n_tokens)
        return decode(context, batch)

    monkeypatch.setattr(module.lib, "llama_decode", spy)
    return sizes


def logits_of(backend: LlamaCppBackend, size: int, other_size: int) -> np.ndarray:
    """Return the logits after ``size`` tokens of a long sequence next to ``other_size`` of another
    one, and after one more token of each.
    """
    long, short = sequence(0, CONTEXT), sequence(1, 100)
    backend.forward(Batch([Row(short, 0, 20, 0)], [Trim(i, 0) for i in range(3)]))
    for start in range(0, START, 256):
        backend.forward(Batch([Row(long, start, min(256, START - start), 0)], []))
    rows = [Row(long, START, size, 1), Row(short, 20, other_size, 1)]
    first = np.array(backend.forward(Batch(rows, [])))
    rows = [Row(long, START + size, 1, 1), Row(short, 20 + other_size, 1, 1)]
    return np.concatenate([first, backend.forward(Batch(rows, []))])


@pytest.mark.parametrize(
    ("size", "other_size", "calls"), [(40, 36, [80, 2]), (40, 1, [40, 1, 2]), (40, 20, [40, 20, 2])]
)
def test_padding_does_not_change_logits(backend, monkeypatch, size, other_size, calls):
    """Rows of similar sizes are computed in one pass, others in one each."""
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_in_passes", False)
        expected = logits_of(backend, size, other_size)
    sizes = decoded_sizes(backend, monkeypatch)
    logits = logits_of(backend, size, other_size)
    assert np.abs(logits - expected).max() < TOLERANCE * expected.std()
    assert sorted(sizes[-len(calls) :]) == sorted(calls)


def test_rows_are_not_padded_beyond_the_context(backend, monkeypatch):
    long, short = sequence(0, CONTEXT), sequence(1, 100)
    backend.forward(Batch([Row(short, 0, 20, 0)], [Trim(i, 0) for i in range(3)]))
    for start in range(0, CONTEXT - 48, 256):
        backend.forward(Batch([Row(long, start, min(256, CONTEXT - 48 - start), 0)], []))
    sizes = decoded_sizes(backend, monkeypatch)
    rows = [Row(long, CONTEXT - 48, 48, 1), Row(short, 20, 50, 1)]
    assert np.isfinite(np.array(backend.forward(Batch(rows, [])))).all()
    assert sizes == [98]


def test_q8_0_cells_are_smaller_and_keep_answers(builtin_path: Path, tiny_model, known_questions):
    """They change logits a little, and their states cannot be loaded into f16 cells."""
    questions = known_questions(30, seed=11)
    prints, sizes = set(), []
    for kv_type in ("f16", "q8_0"):
        llm = LLM(kv_type=kv_type, model_max_context_length=1024, scheduler_max_num_seqs=8)
        prints.add(llm.info.fingerprint)
        sizes.append(llm.info.kv_bytes_per_token)
        prompts = [llm.encode_chat(question.messages, question.tools) for question in questions]
        answers = llm.generate(prompts, SamplingParams(temperature=0))
        assert [answer.text for answer in answers] == [question.answer for question in questions]
    assert len(prints) == 2
    assert sizes[1] * 32 == sizes[0] * 17
    with pytest.raises(
        StartupError, match=r"kv\.type q8_0 stores numbers in blocks of 32, but a key .* has 16"
    ):
        LLM(str(tiny_model("gemma3")), kv_type="q8_0")
    # as of a draft model
    with pytest.raises(StartupError, match=r"with q4_0 cells .* n_embd_head_k=16"):
        LlamaCppBackend(BackendParams(path=str(tiny_model("gemma3")), kv_type="q4_0"))


def test_thread_and_batch_options_reach_llama_cpp(builtin_path: Path, monkeypatch):
    """Options that are not set follow from each other."""
    from cllm.backends.llama_cpp import backend as module

    seen, init = [], module.lib.llama_init_from_model

    def spy(model, params):
        seen.append((params.n_threads, params.n_threads_batch, params.n_ubatch))
        return init(model, params)

    monkeypatch.setattr(module.lib, "llama_init_from_model", spy)
    params = BackendParams(
        path=str(builtin_path),
        context_length=256,
        max_num_seqs=1,
        kv_bytes_per_token=kv_bytes(builtin_path),
    )
    for options in (Options(n_threads=1), Options(n_threads=1, n_threads_batch=2, n_ubatch=64)):
        LlamaCppBackend(msgspec.structs.replace(params, options=options.model_dump())).close()
    assert seen == [(1, 1, 512), (1, 2, 64)]


def test_progress_is_0_before_weights_are_read(builtin_path: Path):
    """The vocabulary has been read by then, so another process may read it too."""
    lines, before, shares = [], [], []

    def progress(share: float) -> None:
        before.append(len(lines))
        shares.append(share)

    with log_lines(lines.append):
        params = BackendParams(
            path=str(builtin_path), context_length=64, max_num_seqs=1, options=ONE_THREAD
        )
        LlamaCppBackend(params, progress).close()
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    already = b"".join(lines[: before[0]])
    assert b"n_vocab" in already
    assert b"buffer size" not in already
