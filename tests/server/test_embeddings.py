"""POST /v1/embeddings, with the ``openai`` package and with plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import json
import os
import signal
import time

import httpx2
import numpy as np
import openai
import pytest
from conftest import PATIENCE
from pydantic_core import to_json

from cllm.backends.fake.backend import TOKEN_VECTORS
from cllm.server.vectors import encode_vectors


@pytest.fixture(scope="module")
def client(fake_server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0)


def right(text: str) -> np.ndarray:
    """Return the fake backend's embedding of a text."""
    total = TOKEN_VECTORS[list(text.encode())].sum(axis=0)
    return total / np.linalg.norm(total)


def test_openai_package_decodes_embeddings(client) -> None:
    """The package requests base64 by default and decodes it."""
    texts = [f"text number {i}" for i in range(100)]
    answer = client.embeddings.create(model="fake", input=texts)
    assert [item.index for item in answer.data] == list(range(100))
    for text, item in zip(texts, answer.data, strict=True):
        assert np.allclose(item.embedding, right(text), atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, texts))
    assert answer.model == "fake"


@pytest.mark.parametrize("given", ["hello", ["hello"], list(b"hello"), [list(b"hello")]])
def test_four_forms_of_input_are_accepted(fake_server, given) -> None:
    answer = fake_server.client.post("/v1/embeddings", json={"input": given}).json()
    assert len(answer["data"]) == 1
    assert np.allclose(answer["data"][0]["embedding"], right("hello"), atol=1e-5)


def test_null_means_the_default_format(fake_server) -> None:
    """LiteLLM sends it."""
    body = {"input": "hello", "encoding_format": None}
    answer = fake_server.client.post("/v1/embeddings", json=body).json()
    assert np.allclose(answer["data"][0]["embedding"], right("hello"), atol=1e-5)


def test_base64_encodes_float32(fake_server) -> None:
    body = {"input": "hello", "encoding_format": "base64"}
    text = fake_server.client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert np.allclose(np.frombuffer(base64.b64decode(text), "<f4"), right("hello"), atol=1e-5)


def test_dimensions_truncate_and_normalize(client) -> None:
    vector = client.embeddings.create(model="fake", input="hello", dimensions=8).data[0].embedding
    first = right("hello")[:8]
    assert np.allclose(vector, first / np.linalg.norm(first), atol=1e-5)


def test_text_longer_than_an_embedding_batch_is_embedded(client) -> None:
    text = "0123456789abcdef" * 30
    assert np.allclose(
        client.embeddings.create(model="fake", input=text).data[0].embedding, right(text), atol=1e-5
    )


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
    ({"input": [[1] * 500] * 601}, "input", "300500 tokens together, 300000"),
    ({"input": {"a": 1}}, "input", ""),
    ({"input": ["a", 5]}, "input[1]", ""),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
    ({"input": "a", "dimensions": 0}, "dimensions", "1"),
    ({"input": "a", "dimensions": 33}, "dimensions", "32"),
    ({}, "input", "Missing"),
]


@pytest.mark.parametrize(("body", "param", "says"), FAULTS)
def test_invalid_request_names_the_field_and_the_limit(fake_server, body, param, says) -> None:
    answer = fake_server.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


def test_unknown_model_gets_404(client) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="a")


def test_embeddings_are_counted_in_metrics(fake_server, client) -> None:
    before = fake_server.metric("embeddings_total"), fake_server.metric("embedding_tokens_total")
    computed = fake_server.metric("embedding_tokens_computed_total")
    client.embeddings.create(model="fake", input=["abc", "de"])
    assert fake_server.metric("embeddings_total") == before[0] + 2
    assert fake_server.metric("embedding_tokens_total") == before[1] + 5
    assert fake_server.metric("embedding_tokens_computed_total") == computed + 5


def slow_body(num_texts: int = 600) -> dict:
    """Return a request that takes the fake backend seconds: 300,000 tokens at 0.1 ms."""
    return {"input": [[1] * 500] * num_texts}


def test_deadline_ends_the_request(fake_server) -> None:
    answer = fake_server.client.post("/v1/embeddings", json={**slow_body(), "deadline_ms": 200})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_disconnect_cancels_the_computation(fake_server) -> None:
    before = earlier = fake_server.metric("embedding_tokens_computed_total")
    with pytest.raises(httpx2.TimeoutException):
        fake_server.client.post("/v1/embeddings", json=slow_body(), timeout=0.3)
    time.sleep(0.5)
    while (computed := fake_server.metric("embedding_tokens_computed_total")) > earlier:
        earlier = computed
        time.sleep(0.5)
    assert computed - before < 300_000


def test_full_queue_rejects_embeddings(start_server) -> None:
    server = start_server(
        "--backend.name", "fake", "--scheduler.max-queue-requests", "1", "--context", "512"
    )
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda _: server.client.post("/v1/embeddings", json=slow_body(100)), range(6))
        )
    codes = sorted(answer.status_code for answer in answers)
    assert set(codes) == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"


def test_embeddings_survive_a_crash_of_the_engine(start_server) -> None:
    server = start_server("--backend.name", "fake", "--context", "512")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client.post, "/v1/embeddings", json=slow_body(60))
        while not server.metric("embedding_tokens_computed_total"):
            time.sleep(0.01)
        os.kill(server.engine_pid(), signal.SIGKILL)
        survived = answer.result(PATIENCE)
    assert server.metric("engine_restarts_total") == 1
    assert survived.json() == server.client.post("/v1/embeddings", json=slow_body(60)).json()


@pytest.mark.llama
def test_embeddings_and_chats_do_not_change_each_other(builtin_server) -> None:
    """Chats and vectors are the same as when they are computed alone."""
    texts = [f"What is {i} plus {i + 1}?" * (1 + i % 7) for i in range(200)]
    ask = {"messages": [{"role": "user", "content": "What is 27 plus 45?"}], "temperature": 0}

    def embed() -> np.ndarray:
        answer = builtin_server.client.post("/v1/embeddings", json={"input": texts})
        return np.array([item["embedding"] for item in answer.json()["data"]])

    def chat(_) -> str:
        answer = builtin_server.client.post("/v1/chat/completions", json=ask).json()
        return answer["choices"][0]["message"]["content"]

    alone = embed()
    assert np.allclose(np.linalg.norm(alone, axis=1), 1, atol=1e-5)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        beside = pool.submit(embed)
        assert set(pool.map(chat, range(40))) == {"72"}
        assert (alone * beside.result()).sum(axis=1).min() > 0.999


def test_encoding_many_vectors_does_not_block_other_requests():
    """An answer may have megabytes of numbers."""
    turns = []

    async def other():
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async def run():
        running = asyncio.create_task(other())
        data = await encode_vectors(
            np.ones((160, 2), np.float32), lambda i, vector: to_json([i, *vector.tolist()])
        )
        running.cancel()
        return data

    assert json.loads(b"[" + asyncio.run(run()) + b"]") == [[i, 1.0, 1.0] for i in range(160)]
    assert len(turns) >= 10
