"""Encoders compute what transformers computes, for each family; so do rerankers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import ENCODERS, write_encoder

from cllm.backends.base import Backend
from cllm.backends.params import BackendParams
from cllm.backends.torch.options import Options
from cllm.core.batch import Chunk
from cllm.errors import StartupError

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
pytest.importorskip("transformers", reason="needs it as a reference")
pytestmark = pytest.mark.torch

SEP = 2
TEXTS = [[1, *range(10, 40), SEP], [1, 7, SEP], [1, *range(200, 260), SEP]]
PAIRS = [[1, 20, 21, SEP, 30, 31, 32, SEP], [1, 20, 21, SEP, *range(100, 150), SEP]]


def load(folder: Path, **options: Any) -> Backend:
    from cllm.backends.torch.loader import load

    chosen = Options(device="cpu", n_threads=1, dtype="float32").model_dump()
    return load(BackendParams(path=str(folder), options=chosen, **options))


def embed(backend: Backend, texts: list[list[int]]) -> np.ndarray:
    return backend.embed([Chunk(text, 0, len(text)) for text in texts])


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("is_alone", [True, False])
def test_vectors_equal_those_of_transformers(tmp_path, name, is_alone) -> None:
    """Whether the encoder was saved alone or with an output for words."""
    model = write_encoder(tmp_path, name, "Model" if is_alone else "ForMaskedLM")
    base, backend = model if is_alone else model.base_model, load(tmp_path)
    vectors = embed(backend, TEXTS)
    with torch.inference_mode():
        for text, vector in zip(TEXTS, vectors, strict=True):
            expected = base(torch.tensor([text])).last_hidden_state[0].sum(dim=0).numpy()
            assert np.abs(vector - expected).max() < 1e-5 * np.abs(expected).max()
    assert (backend.info.pooling, backend.info.embeds_whole) == ("mean", True)
    assert not backend.info.generates
    backend.close()


@pytest.mark.parametrize("name", ENCODERS)
def test_scores_equal_those_of_transformers(tmp_path, name) -> None:
    model = write_encoder(tmp_path, name, "ForSequenceClassification")
    backend = load(tmp_path)
    scores = embed(backend, PAIRS)
    assert scores.shape == (2, 1)
    with torch.inference_mode():
        for pair, score in zip(PAIRS, scores[:, 0], strict=True):
            first = pair.index(SEP) + 1
            types = {}
            if getattr(model.config, "type_vocab_size", 1) > 1:
                types["token_type_ids"] = torch.tensor([[0] * first + [1] * (len(pair) - first)])
            expected = model(torch.tensor([pair]), **types).logits[0, 0]
            assert abs(score - float(expected)) < 1e-5
    assert (backend.info.pooling, backend.info.embedding_size) == ("rank", 1)
    backend.close()


def test_positions_of_padding_shorten_texts(tmp_path) -> None:
    """The longest text is computed, and the context length shortens it further."""
    write_encoder(tmp_path, "Roberta", "Model")
    backend = load(tmp_path)
    assert backend.info.max_embedding_tokens == 296
    assert np.isfinite(embed(backend, [[5] * 296])).all()
    backend.close()
    backend = load(tmp_path, context_length=50)
    assert backend.info.max_embedding_tokens == 50
    backend.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_labels": 3}, "a classifier with 3 labels"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, options, words) -> None:
    write_encoder(tmp_path, "Bert", "ForSequenceClassification", **options)
    with pytest.raises(StartupError, match=words):
        load(tmp_path)


def test_encoder_has_no_adapters(tmp_path) -> None:
    write_encoder(tmp_path, "Bert", "Model")
    with pytest.raises(StartupError, match="can have no adapters"):
        load(tmp_path, adapters={"x": "folder"})
