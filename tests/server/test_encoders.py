"""Checkpoints of encoders behind the API: vectors and scores."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import write_encoder

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
pytestmark = pytest.mark.torch

OPTIONS = ["--backend.name", "torch", "--backend.torch.device", "cpu"]
LONG = "The quick brown fox jumps over the lazy dog. " * 20
# the first numbers of the vectors that sentence-transformers 6.2 computes
VECTORS = {
    "A man is eating food.": [0.0332416, 0.0044061, -0.0062770, 0.0483787, -0.1387023],
    "naïve café, 東京 🦜": [0.0604412, 0.0063631, 0.0546478, -0.0011112, -0.0108904],
    LONG: [0.0584969, -0.0459772, 0.0757851, -0.0035323, -0.0403524],
}


@pytest.mark.real
@pytest.mark.slow
def test_vectors_of_a_trained_model_equal_those_of_sentence_transformers(
    start_server, real_model
) -> None:
    server = start_server(*OPTIONS, "--model.path", str(real_model("all-minilm-l6-v2")))
    answer = server.client.post("/v1/embeddings", json={"input": [*VECTORS]}).json()
    for data, expected in zip(answer["data"], VECTORS.values(), strict=True):
        assert len(data["embedding"]) == 384
        assert np.abs(np.array(data["embedding"][:5]) - expected).max() < 1e-5
    too_long = server.client.post("/v1/embeddings", json={"input": "fox " * 300})
    assert too_long.status_code == 400
    assert "256" in too_long.json()["error"]["message"]
    ranked = server.client.post(
        "/v1/rerank",
        json={
            "query": "What is the capital of France?",
            "documents": ["I like cats.", "Paris is the capital of France."],
        },
    ).json()
    assert [result["index"] for result in ranked["results"]] == [1, 0]


def test_reranker_scores_pairs_and_rejects_other_requests(start_server, tmp_path) -> None:
    pytest.importorskip("transformers", reason="needs it as a reference")
    model = write_encoder(tmp_path / "model", "Bert", "ForSequenceClassification")
    server = start_server(*OPTIONS, "--model.path", str(tmp_path / "model"))
    documents = ["w30 w31", "w100", "w7 w8 w9 w10"]
    answer = server.client.post(
        "/v1/rerank", json={"query": "w20 w21", "documents": documents}
    ).json()
    assert answer["method"] == "reranker"
    for result in answer["results"]:
        words = [int(word[1:]) for word in documents[result["index"]].split()]
        pair, types = [1, 20, 21, 2, *words, 2], [0] * 4 + [1] * (len(words) + 1)
        with torch.inference_mode():
            logits = model(torch.tensor([pair]), token_type_ids=torch.tensor([types])).logits
        assert result["relevance_score"] == pytest.approx(float(logits[0, 0]), abs=1e-5)
    for route, body in (
        ("/v1/embeddings", {"input": "w5"}),
        ("/v1/completions", {"prompt": "w5"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w5"}]}),
    ):
        refused = server.client.post(route, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_model")
