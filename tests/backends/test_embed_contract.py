"""The contract of ``embed`` in backends/base.py: each test runs for every backend and kind of
pooling.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_encoder, write_pooling

from cllm.backends.base import Backend
from cllm.backends.fake.backend import FakeBackend
from cllm.backends.params import BackendParams
from cllm.core.batch import MAX_CHUNKS, Batch, Chunk, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError
from cllm.models.checkpoint import POOLINGS

CONTEXT = 256
LLAMA = pytest.mark.llama
DECODERS = [
    "fake",
    *(
        pytest.param(kind, marks=LLAMA)
        for kind in ("builtin", "mamba", "lfm2", "qwen35_mtp", "nemotron_h", "gemma3", "gpt-oss")
    ),
]
TORCH = [pytest.param(f"torch {pooling}", marks=pytest.mark.torch) for pooling in ("mean", "last")]
ENCODERS = [
    *(pytest.param(kind, marks=LLAMA) for kind in ("bert", "bert_cls", "reranker")),
    *(
        pytest.param(f"torch {kind}", marks=pytest.mark.torch)
        for kind in ("bert", "cls", "reranker")
    ),
]
TEXTS = [
    [5, 9, 33, 7, 20, 21, 40, 3, 90, 12],
    [64, 64, 2, 77, 30, 8],
    [101, 7, 5],
    [5, 9, 33, 7, 1, 2, 3, 4],
]
LONG = [(7 * i) % 200 for i in range(150)]


@pytest.fixture(scope="module")
def make_backend(request: pytest.FixtureRequest) -> Callable[[str], Backend]:
    def make(kind: str) -> Backend:
        sizes = {"context_length": CONTEXT, "max_num_seqs": 2, "max_num_batched_tokens": 32}
        if kind == "fake":
            return FakeBackend(**sizes)
        if kind.startswith("torch"):
            return make_torch_backend(request.getfixturevalue("torch_folder")(kind), sizes)
        path = request.getfixturevalue("builtin_path")
        from cllm.backends.llama_cpp.backend import LlamaCppBackend
        from cllm.backends.llama_cpp.options import Options

        if kind != "builtin":
            path = request.getfixturevalue("tiny_model")(kind)
        options = Options(n_threads=1, n_gpu_layers=0).model_dump()
        return LlamaCppBackend(BackendParams(path=str(path), options=options, **sizes))

    return make


def make_torch_backend(folder: Path, sizes: dict[str, int]) -> Backend:
    from cllm.backends.torch.loader import load
    from cllm.backends.torch.options import Options

    options = Options(device="cpu", n_threads=1, dtype="float32").model_dump()
    return load(BackendParams(path=str(folder), options=options, **sizes))


@pytest.fixture(scope="module")
def torch_folder(
    builtin_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return the function that writes a checkpoint of a kind."""

    def write(kind: str) -> Path:
        folder, kind = tmp_path_factory.mktemp("torch") / "checkpoint", kind.removeprefix("torch ")
        if kind in ("mean", "last"):
            shutil.copytree(builtin_checkpoint, folder)
        else:
            pytest.importorskip("transformers", reason="writes the model")
            head = "ForSequenceClassification" if kind == "reranker" else "Model"
            write_encoder(folder, "Bert", head)
        if kind in POOLINGS.values():
            write_pooling(folder, kind)
        return folder

    return write


@pytest.fixture(scope="module", params=[*DECODERS, *TORCH, *ENCODERS])
def backend(
    request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]
) -> Iterator[Backend]:
    made = make_backend(request.param)
    yield made
    made.close()


def whole(tokens: list[int]) -> Chunk:
    return Chunk(tokens, 0, len(tokens))


def alone(backend: Backend, tokens: list[int]) -> np.ndarray:
    return backend.embed([whole(tokens)])[0]


def close(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.linalg.norm(one - other) <= 0.02 * np.linalg.norm(one) + 1e-6)


def test_embed_returns_one_row_per_chunk(backend) -> None:
    vectors = backend.embed([whole(text) for text in TEXTS])
    assert vectors.shape == (len(TEXTS), backend.info.embedding_size)
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()


def test_caller_may_change_the_result(backend) -> None:
    first = backend.embed([whole(TEXTS[0])])
    kept = first.copy()
    backend.embed([whole(TEXTS[1])])
    assert (first == kept).all()


def test_different_texts_have_different_embeddings(backend) -> None:
    vectors = [alone(backend, text) for text in TEXTS]
    assert not any(close(vectors[i], vectors[j]) for i in range(len(TEXTS)) for j in range(i))


def test_embedding_does_not_depend_on_other_texts(backend) -> None:
    together = backend.embed([whole(text) for text in TEXTS])
    assert all(
        close(alone(backend, text), vector) for text, vector in zip(TEXTS, together, strict=True)
    )


def test_max_chunks_fit_in_one_call(backend) -> None:
    texts = [[1 + i % 50, 2 + i] for i in range(MAX_CHUNKS)]
    together = backend.embed([whole(text) for text in texts])
    assert all(
        close(alone(backend, text), vector) for text, vector in zip(texts, together, strict=True)
    )


def pooled(backend: Backend, parts: list[np.ndarray]) -> np.ndarray:
    return {"mean": np.sum(parts, axis=0), "cls": parts[0]}.get(backend.info.pooling, parts[-1])


@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunked_text_has_the_embedding_of_the_whole(backend, size) -> None:
    """This holds with other texts after the last chunk, in the same call and in the next."""
    if backend.info.embeds_whole:
        pytest.skip("texts are not cut")
    parts = []
    for start in range(0, len(LONG), size):
        chunk = Chunk(LONG[start : start + size], start, len(LONG))
        behind = [whole(TEXTS[2])] if start + size >= len(LONG) and size < 60 else []
        rows = backend.embed([chunk, *behind])
        parts.append(rows[0])
        for row in rows[1:]:
            assert close(row, alone(backend, TEXTS[2]))
    size = backend.info.max_embedding_batch_tokens
    expected = [
        backend.embed([Chunk(LONG[start : start + size], start, len(LONG))])[0]
        for start in range(0, len(LONG), size)
    ]
    assert close(pooled(backend, expected), pooled(backend, parts))


def test_unfinished_text_does_not_affect_the_next_one(backend) -> None:
    if backend.info.embeds_whole:
        pytest.skip("texts are not cut")
    expected = alone(backend, TEXTS[0])
    backend.embed([Chunk(LONG[:20], 0, len(LONG))])
    assert close(alone(backend, TEXTS[0]), expected)


def test_longest_text_is_embedded(backend) -> None:
    longest = (LONG * 2)[: backend.info.max_embedding_tokens]
    size = len(longest) if backend.info.embeds_whole else backend.info.max_embedding_batch_tokens
    for start in range(0, len(longest), size):
        row = backend.embed([Chunk(longest[start : start + size], start, len(longest))])[0]
        assert np.isfinite(row).all()


def test_embedding_does_not_change_generation(backend) -> None:
    if not backend.info.generates:
        pytest.skip("it does not generate")

    def decode(*, embeds: bool) -> np.ndarray:
        seq = Sequence(Request("A", [0], SamplingParams()), 0, 0, CONTEXT)
        seq.seq_id, seq.tokens = 0, TEXTS[0]
        backend.forward(Batch([Row(seq, 0, 5, 0)], []))
        if embeds:
            backend.embed([whole(text) for text in TEXTS])
        logits = backend.forward(Batch([Row(seq, 5, 5, 1)], [])).copy()
        backend.forward(Batch([], [Trim(0, 0)]))
        return logits

    assert np.allclose(decode(embeds=False), decode(embeds=True), atol=1e-3)


def test_encoder_rejects_forward(backend) -> None:
    if backend.info.generates:
        pytest.skip("it generates")
    seq = Sequence(Request("A", [0], SamplingParams()), 0, 0, CONTEXT)
    seq.seq_id, seq.tokens = 0, TEXTS[0]
    with pytest.raises(EngineError):
        backend.forward(Batch([Row(seq, 0, 5, 1)], []))


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [Chunk([], 0, 0)],
        [Chunk([-1], 0, 1)],
        [Chunk([100_000_000], 0, 1)],
        [Chunk([1, 2], 0, 1)],
        [Chunk([1], 3, 4)],
        [Chunk([1], 0, 2), whole([1])],
        [whole([1]), Chunk([1], 1, 2)],
        [whole([1]) for _ in range(MAX_CHUNKS + 1)],
        [whole([1] * (CONTEXT + 1))],
        [whole([1] * 100) for _ in range(8)],
    ],
    ids=str,
)
def test_invalid_chunks_raise_engine_error(backend, chunks) -> None:
    with pytest.raises(EngineError):
        backend.embed(chunks)
    assert np.isfinite(alone(backend, TEXTS[0])).all()
