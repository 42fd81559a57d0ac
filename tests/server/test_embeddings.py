"""POST /v1/embeddings, as the ``openai`` package and others ask for them."""

from __future__ import annotations

import base64

import numpy as np
import openai
import pytest

from cllm.backends.fake import TOKEN_VECTORS


@pytest.fixture(scope="module")
def client(fake_server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)


def right(text: str) -> np.ndarray:
    """What the fake backend says to a text."""
    total = TOKEN_VECTORS[list(text.encode())].sum(axis=0)
    return total / np.linalg.norm(total)


def test_the_package_gets_vectors(client) -> None:
    """By default it asks for base64 and decodes it."""
    texts = [f"text number {i}" for i in range(100)]
    answer = client.embeddings.create(model="fake", input=texts)
    assert [item.index for item in answer.data] == list(range(100))
    for text, item in zip(texts, answer.data, strict=True):
        assert np.allclose(item.embedding, right(text), atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, texts))
    assert answer.model == "fake"


@pytest.mark.parametrize("given", ["hello", ["hello"], list(b"hello"), [list(b"hello")]])
def test_the_four_forms_of_input(fake_server, given) -> None:
    answer = fake_server.client.post("/v1/embeddings", json={"input": given}).json()
    assert len(answer["data"]) == 1
    assert np.allclose(answer["data"][0]["embedding"], right("hello"), atol=1e-5)


def test_base64_is_float32(fake_server) -> None:
    body = {"input": "hello", "encoding_format": "base64"}
    text = fake_server.client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(text), "<f4"), right("hello"), atol=1e-5)


def test_fewer_dimensions(client) -> None:
    vector = client.embeddings.create(model="fake", input="hello", dimensions=8).data[0].embedding
    first = right("hello")[:8]
    assert np.allclose(vector, first / np.linalg.norm(first), atol=1e-5)


def test_a_text_longer_than_a_bite(client) -> None:
    text = "0123456789abcdef" * 30
    assert np.allclose(client.embeddings.create(model="fake", input=text).data[0].embedding, right(text), atol=1e-5)


FAULTS = [
    ({"input": []}, "input", "1 to 2048"),
    ({"input": ["x"] * 2049}, "input", "2049"),
    ({"input": ""}, "input", "empty"),
    ({"input": ["a", "b", "c", ""]}, "input[3]", "empty"),
    ({"input": ["a", "x" * 600]}, "input[1]", "512 tokens, but this one has 600"),
    ({"input": ["a", "x" * 90_000]}, "input[1]", "512 tokens, but this one has at least"),
    ({"input": [[1] * 513]}, "input[0]", "512 tokens, but this one has 513"),
    ({"input": [[1], [260]]}, "input[1]", "between 0 and 259"),
    ({"input": [[1], []]}, "input[1]", "empty"),
    ({"input": {"a": 1}}, "input", ""),
    ({"input": ["a", 5]}, "input[1]", ""),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
    ({"input": "a", "dimensions": 0}, "dimensions", "1"),
    ({"input": "a", "dimensions": 33}, "dimensions", "32"),
    ({}, "input", "Missing"),
]


@pytest.mark.parametrize(("body", "param", "says"), FAULTS)
def test_faults_name_the_field_and_the_limit(fake_server, body, param, says) -> None:
    answer = fake_server.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


def test_another_model(client) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="a")


def test_metrics(fake_server, client) -> None:
    before = fake_server.metric("embeddings_total"), fake_server.metric("embedding_tokens_total")
    computed = fake_server.metric("embedding_tokens_computed")
    client.embeddings.create(model="fake", input=["abc", "de"])
    assert fake_server.metric("embeddings_total") == before[0] + 2
    assert fake_server.metric("embedding_tokens_total") == before[1] + 5
    assert fake_server.metric("embedding_tokens_computed") == computed + 5
