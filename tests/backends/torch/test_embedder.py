"""Vectors of decoders equal those of sentence-transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoints import write_pooling, write_tokenizer

from cllm import LLM
from cllm.backends.base import Backend
from cllm.backends.params import BackendParams
from cllm.backends.torch.loader import load_vocabulary
from cllm.backends.torch.options import Options
from cllm.config.settings import KVSettings, Settings
from cllm.core.batch import Chunk
from cllm.engine.build import fit_memory
from cllm.engine.settings import make_engine_params
from cllm.errors import EngineError
from cllm.models import memory

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
transformers = pytest.importorskip("transformers", reason="needs it as a reference")
pytestmark = pytest.mark.torch

CONFIG = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
TEXTS = ["a cat", "The quick brown fox jumps over the lazy dog. " * 30, "x", "What is 2 + 3?"]


def write_embedding_model(folder: Path, builtin: Path, pooling: str, **config: Any) -> Path:
    """Write a small Qwen3 with random weights as embedding models are: without an output matrix."""
    torch.manual_seed(1)
    model = transformers.Qwen3Model(transformers.Qwen3Config(**CONFIG | config))
    model.save_pretrained(folder)
    write_tokenizer(folder, builtin)
    write_pooling(folder, pooling, max_tokens=600)
    return folder


def load(folder: Path) -> Backend:
    from cllm.backends.torch.loader import load

    options = Options(device="cpu", n_threads=1, dtype="float32").model_dump()
    return load(BackendParams(path=str(folder), options=options, max_num_seqs=2))


@pytest.fixture(scope="module", params=["mean", "last"])
def folder(request, builtin_path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_embedding_model(folder, builtin_path, request.param, vocab_size=num_tokens())


def write_reranker(folder: Path, builtin: Path) -> Any:
    """Write a small Qwen3 with random weights that scores texts, and return transformers' one."""
    torch.manual_seed(2)
    config = transformers.Qwen3Config(**CONFIG | {"num_labels": 1, "pad_token_id": 0})
    config.vocab_size = num_tokens()
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, builtin)
    return model


def test_reranker_reads_a_query_and_a_document_as_its_template_says(builtin_path, tmp_path) -> None:
    """Control tokens of the template are control tokens; those in a text are plain text."""
    model = write_reranker(tmp_path, builtin_path)
    form = "<|im_start|>query: {}\ndocument: {}<|im_end|>"
    file = tmp_path / "additional_chat_templates" / "rerank.jinja"
    file.parent.mkdir()
    file.write_text(form.format("{query}", "{document}"))
    documents = ["The red fox", "{query}", "a cat <|im_end|>"]
    settings: Any = {"model_max_context_length": 256, "backend_torch_dtype": "float32"}
    with LLM(str(tmp_path), backend_torch_n_threads=1, **settings) as llm:
        scores = llm.score("What is red?", documents)
    vocabulary = load_vocabulary(BackendParams(path=str(tmp_path)))
    differences = []
    for document, score in zip(documents, scores, strict=True):
        text = form.format("What is red?", document)
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
        with torch.inference_mode():
            differences.append(abs(float(model(torch.tensor([tokens])).logits) - score))
    assert max(differences[:2]) < 1e-5
    assert differences[2] > 1e-3


def test_reranker_scores_texts_by_their_last_tokens(builtin_path, tmp_path) -> None:
    model = write_reranker(tmp_path, builtin_path)
    backend = load(tmp_path)
    texts = [[5, 6, 7, 8], [(7 * i) % 200 + 1 for i in range(300)]]
    scores = backend.embed([Chunk(text, 0, len(text)) for text in reversed(texts)])[::-1]
    parts = [backend.embed([Chunk(texts[1][i : i + 100], i, 300)])[0, 0] for i in (0, 100, 200)]
    with torch.inference_mode():
        expected = [float(model(torch.tensor([text])).logits[0, 0]) for text in texts]
    assert np.allclose([*scores[:, 0], parts[-1]], [*expected, expected[1]], atol=1e-5)
    assert (backend.info.pooling, backend.info.generates) == ("rank", False)
    backend.close()


def num_tokens() -> int:
    import gguf

    from cllm.models.catalog import BUILTIN

    return len(gguf.GGUFReader(BUILTIN).fields["tokenizer.ggml.tokens"].contents())


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[Backend]:
    made = load(folder)
    yield made
    made.close()


def embed(backend: Backend, tokens: list[int]) -> np.ndarray:
    """Return the vector of a text that is computed in parts, with length 1."""
    size, parts = backend.info.max_embedding_batch_tokens, []
    for start in range(0, len(tokens), size):
        chunk = Chunk(tokens[start : start + size], start, len(tokens))
        parts.append(backend.embed([chunk])[0])
    vector = np.sum(parts, axis=0) if backend.info.pooling == "mean" else parts[-1]
    return vector / np.linalg.norm(vector)


@pytest.mark.slow
def test_vectors_equal_those_of_sentence_transformers(backend, folder) -> None:
    reference = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(folder), device="cpu", model_kwargs={"dtype": torch.float32}
    )
    expected = reference.encode(TEXTS, normalize_embeddings=True)
    for text, vector in zip(TEXTS, expected, strict=True):
        tokens = backend.vocabulary.tokenize(text, add_special=True, parse_special=False)
        assert np.abs(embed(backend, tokens) - vector).max() < 1e-5


def test_model_without_output_matrix_only_embeds(backend, folder, builtin_checkpoint) -> None:
    assert not backend.info.generates
    assert backend.info.max_embedding_tokens == 600
    other = load(builtin_checkpoint)
    assert other.info.generates
    assert other.info.pooling == "mean"
    other.close()


def test_longest_text_so_far_must_come_first(folder) -> None:
    backend = load(folder)
    short, long = [1, 2], [3] * 512
    with pytest.raises(EngineError, match="the longest so far"):
        backend.embed([Chunk(short, 0, 2), Chunk(long[:500], 0, 600)])
    backend.embed([Chunk(long, 0, 600)])
    backend.embed([Chunk(long[:88], 512, 600), Chunk(short, 0, 2), Chunk(long[:400], 0, 600)])
    backend.embed([Chunk(long[:200], 400, 600)])
    backend.close()


def test_memory_estimate_counts_cells_for_embeddings_but_no_copied_weights(folder) -> None:
    """As many cells as texts of up to 512 tokens need, the usual limit of embedding models."""
    settings = Settings(kv=KVSettings(max_memory_mb=100, ram_cache_mb=0))
    params = msgspec.structs.replace(make_engine_params(settings, folder), max_bytes=1 << 40)
    per_token = 2 * 2 * 32 * 4  # keys and values, layers, numbers, and bytes of a number
    known = params.weight_bytes + 100_000_000 + memory.COMPUTE_BYTES
    assert fit_memory(params).max_bytes == known + memory.EMBEDDING_CELLS * per_token
    backend = load(folder)
    backend.embed([Chunk([1] * 512, 0, 512)])
    embedder: Any = backend
    assert embedder._embedder._cells.num_cells == memory.EMBEDDING_CELLS
    backend.close()
