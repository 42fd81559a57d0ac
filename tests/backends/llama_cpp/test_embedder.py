"""Embeddings pooled by cLLM equal those that llama.cpp pools itself, for a text that fits in one
call.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.backend import LlamaCppBackend
from cllm.backends.llama_cpp.embedder import Embedder
from cllm.backends.llama_cpp.options import Options
from cllm.backends.llama_cpp.threads import Threads
from cllm.backends.params import BackendParams
from cllm.core.batch import Chunk

pytestmark = pytest.mark.llama

TEXT = [5, 9, 33, 7, 20, 21, 40, 3, 90, 12]


def load(path: Path) -> LlamaCppBackend:
    options = Options(n_threads=1, n_gpu_layers=0).model_dump()
    return LlamaCppBackend(
        BackendParams(path=str(path), context_length=256, max_num_seqs=2, options=options)
    )


def pooled_by_llama_cpp(model, pooling: int) -> np.ndarray:
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
    params.embeddings, params.pooling_type = True, pooling
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(len(TEXT), 0, 1)
    batch.n_tokens = len(TEXT)
    for i, token in enumerate(TEXT):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = (
            token,
            i,
            1,
            0,
            1,
        )
    assert lib.llama_decode(context, batch) == 0
    vector = np.ctypeslib.as_array(
        lib.llama_get_embeddings_seq(context, 0), (lib.llama_model_n_embd_out(model),)
    ).copy()
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    return vector


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("kind", ["builtin", "bert"])
def test_pooling_matches_that_of_llama_cpp(
    request, builtin_path, tiny_model, kind, pooling
) -> None:
    path = builtin_path if kind == "builtin" else tiny_model(kind)
    backend = load(path)
    request.addfinalizer(backend.close)
    number = {"mean": 1, "cls": 2, "last": 3}[pooling]
    expected = pooled_by_llama_cpp(backend._model, number)
    facts = backend._embedder._facts._replace(pooling=pooling)
    embedder = Embedder(backend._model, facts, 256, Threads(Options(n_threads=1)), backend._scale)
    request.addfinalizer(embedder.close)
    cuts = [len(TEXT)] if facts.whole else [4, 9, len(TEXT)]
    rows = [
        embedder.embed([Chunk(TEXT[start:end], start, len(TEXT))])[0]
        for start, end in zip([0, *cuts], cuts, strict=False)
    ]
    vector = {"mean": sum(rows) / len(TEXT), "cls": rows[0], "last": rows[-1]}[pooling]
    assert np.allclose(vector, expected, rtol=0.01, atol=0.01 * np.abs(expected).max())


def test_facts_describe_the_model(request, tiny_model, builtin_path) -> None:
    facts = {}
    for kind in ("builtin", "bert", "bert_cls", "reranker", "mamba"):
        path = builtin_path if kind == "builtin" else tiny_model(kind)
        backend = load(path)
        info = backend.info
        facts[kind] = info.generates, info.pooling, info.embeds_whole
        backend.close()
    assert facts == {
        "builtin": (True, "mean", False),
        "bert": (False, "mean", True),
        "bert_cls": (False, "cls", True),
        "reranker": (False, "rank", True),
        "mamba": (True, "mean", False),
    }
