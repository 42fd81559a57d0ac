"""POST /v1/rerank, with the embeddings of any model and with a reranker."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cllm.backends.fake.backend import TOKEN_VECTORS

DOCUMENTS = ["zzzz", "hello there", "hello", "9999"]


def cosine(one: str, other: str) -> float:
    a, b = (TOKEN_VECTORS[list(text.encode())].sum(axis=0) for text in (one, other))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_documents_are_ranked_by_cosine_similarity(fake_server) -> None:
    answer = fake_server.client.post(
        "/v1/rerank", json={"query": "hello", "documents": DOCUMENTS}
    ).json()
    assert answer["method"] == "cosine_similarity"
    scores = [cosine("hello", document) for document in DOCUMENTS]
    assert [result["index"] for result in answer["results"]] == sorted(
        range(4), key=lambda i: -scores[i]
    )
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-5)
    assert answer["results"][0]["index"] == 2
    assert answer["usage"]["total_tokens"] == len("hello") + sum(map(len, DOCUMENTS))


def test_top_n_limits_results_and_documents_are_returned_on_request(fake_server) -> None:
    body = {
        "query": "hello",
        "documents": [{"text": text} for text in DOCUMENTS],
        "top_n": 2,
        "return_documents": True,
    }
    for route in ("/v1/rerank", "/rerank"):
        results = fake_server.client.post(route, json=body).json()["results"]
        assert [result["document"]["text"] for result in results] == ["hello", "hello there"]


def test_texts_are_ranked_in_the_form_of_text_embeddings_inference(fake_server) -> None:
    """The answer is a list, best first, with the fields that its clients read."""
    body = {
        "query": "hello",
        "texts": DOCUMENTS,
        "raw_scores": False,
        "truncate": True,
        "return_text": True,
    }
    ranked = fake_server.client.post("/rerank", json=body).json()
    same = fake_server.client.post(
        "/rerank", json={"query": "hello", "documents": DOCUMENTS}
    ).json()["results"]
    assert ranked == [
        {"index": one["index"], "score": one["relevance_score"], "text": DOCUMENTS[one["index"]]}
        for one in same
    ]
    short = fake_server.client.post("/rerank", json={"query": "hello", "texts": DOCUMENTS}).json()
    assert short[0].keys() == {"index", "score"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"documents": None}, "documents"),
        ({"texts": ["a"]}, "texts"),
        ({"documents": None, "texts": ["a", ""]}, "texts[1]"),
        ({"documents": None, "texts": ["a", "b" * 513]}, "texts[1]"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents[1]"),
        ({"documents": ["a", {"text": ""}]}, "documents[1].text"),
        ({"documents": ["a", {}]}, "documents[1].text"),
        ({"documents": ["a", "b" * 513]}, "documents[1]"),
        ({"query": ""}, "query"),
        ({"query": "x" * 513}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"documents": ["a"] * 2001}, "documents"),
    ],
)
def test_invalid_rerank_request_names_the_field(fake_server, change, param) -> None:
    answer = fake_server.client.post(
        "/v1/rerank", json={"query": "a", "documents": ["a"], **change}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.llama
def test_reranker_ranks_and_rejects_other_requests(start_server, tiny_model) -> None:
    """It uses the model's own scores. Embeddings and generation are rejected with a clear message."""
    server = start_server("--model.path", str(tiny_model("reranker")))
    answer = server.client.post(
        "/v1/rerank", json={"query": "hello", "documents": DOCUMENTS}
    ).json()
    assert answer["method"] == "reranker"
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(DOCUMENTS)
    for i, document in enumerate(DOCUMENTS):
        alone = server.client.post(
            "/v1/rerank", json={"query": "hello", "documents": [document]}
        ).json()
        together = next(result for result in answer["results"] if result["index"] == i)
        assert alone["results"][0]["relevance_score"] == pytest.approx(
            together["relevance_score"], abs=0.01
        )
    for query, documents, param in (
        ("x" * 5000, ["a"], "query"),
        ("x " * 200, ["a"] * 2000, "documents"),
        ("a", ["a", "x " * 1500], "documents[1]"),
        ("x " * 200, ["a", "x " * 450], "documents[1]"),
    ):
        wrong = server.client.post("/v1/rerank", json={"query": query, "documents": documents})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
    for route, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/generate", {"prompt": "a"}),
    ):
        refused = server.client.post(route, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_model")


@pytest.mark.llama
def test_one_server_answers_embeds_and_ranks_with_three_models(
    start_server, tiny_model, tmp_path, builtin_path
) -> None:
    paths = {
        "answers": builtin_path,
        "vectors": tiny_model("bert"),
        "ranks": tiny_model("reranker"),
    }
    settings = {"default": "answers", **{name: {"path": str(path)} for name, path in paths.items()}}
    config = tmp_path / "cllm.yaml"
    config.write_text(json.dumps({"models": settings}))
    client = start_server("--config", str(config)).client
    vectors = client.post("/v1/embeddings", json={"model": "vectors", "input": "a"}).json()
    assert len(vectors["data"][0]["embedding"]) == 64
    ranking = {"model": "ranks", "query": "hello", "documents": DOCUMENTS}
    assert client.post("/v1/rerank", json=ranking).json()["method"] == "reranker"
    completion = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1})
    assert completion.json()["model"] == "answers"


@pytest.mark.llama
def test_encoder_model_embeds_texts_up_to_its_context(start_server, tiny_model) -> None:
    """The server has no generating model."""
    server = start_server("--model.path", str(tiny_model("bert")))
    answer = server.client.post("/v1/embeddings", json={"input": [[7], [7] * 512]}).json()
    assert [len(item["embedding"]) for item in answer["data"]] == [64, 64]
    too_long = server.client.post("/v1/embeddings", json={"input": [[7], [7] * 513]})
    assert too_long.json()["error"]["param"] == "input[1]"
