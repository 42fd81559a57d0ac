"""Embeddings between steps: their order, the size of their batches, and what a failure costs."""

from __future__ import annotations

import numpy as np
import pytest

from cllm.backends.fake.backend import TOKEN_VECTORS, Costs, FailingSteps
from cllm.core.request import EmbeddingRequest, Priority
from cllm.engine.commands import Abort, Embed
from cllm.scheduler.step_cost import LEAST

COSTS = Costs(step=0.01, row=0.001, token=0.001)


def embed(
    fake, name: str, texts: list[list[int]], priority: Priority = Priority.NORMAL, account: str = ""
) -> None:
    fake.engine.handle(Embed(EmbeddingRequest(name, texts, account, priority)))


def expected_vector(text: list[int]) -> np.ndarray:
    total = TOKEN_VECTORS[text].sum(axis=0)
    return total / np.linalg.norm(total)


def finish(fake, max_steps: int = 500) -> dict[str, list[np.ndarray]]:
    """Step until there is no work; return the vectors of each request. Fails on an error."""
    vectors: dict[str, list[np.ndarray]] = {}
    for _ in range(max_steps):
        if not fake.engine.has_work():
            return vectors
        fake.step()
        for embedded in fake.engine.embeddings.take():
            assert not embedded.error, embedded
            vectors.setdefault(embedded.request_id, []).extend(
                np.frombuffer(v, "<f4") for v in embedded.vectors
            )
    raise AssertionError("the engine does not finish")


def test_vectors_arrive_in_order_of_texts(fake_engine) -> None:
    fake = fake_engine()
    texts = [
        [(i + j) % 250 for j in range(length)]
        for i, length in enumerate([3, 100, 1, 64, 63, 65, 200, 2] * 10)
    ]
    embed(fake, "a", texts)
    embed(fake, "b", texts[::-1])
    vectors = finish(fake)
    for name, asked in (("a", texts), ("b", texts[::-1])):
        assert len(vectors[name]) == len(asked)
        assert all(
            np.allclose(vector, expected_vector(text), atol=1e-5)
            for vector, text in zip(vectors[name], asked, strict=True)
        )


def test_small_request_does_not_wait_for_large_one(fake_engine) -> None:
    fake = fake_engine()
    embed(fake, "large", [[1] * 60] * 100)
    embed(fake, "small", [[2] * 60])
    order = []
    while fake.engine.has_work():
        fake.step()
        order += [e.request_id for e in fake.engine.embeddings.take() if e.vectors]
    assert order.index("small") <= 2


def test_accounts_take_turns(fake_engine) -> None:
    fake = fake_engine()
    for i in range(50):
        embed(fake, f"many{i}", [[1] * 60] * 2, account="greedy")
    embed(fake, "one", [[2] * 60] * 4, account="modest")
    order = []
    while fake.engine.has_work():
        fake.step()
        order += [e.request_id for e in fake.engine.embeddings.take() if e.vectors]
    assert [i for i, name in enumerate(order) if name == "one"] == [1, 3, 5, 7]
    assert len(order) == 104


def test_higher_class_is_embedded_first(fake_engine) -> None:
    fake = fake_engine()
    embed(fake, "batch", [[1] * 60] * 10, Priority.BATCH)
    embed(fake, "urgent", [[2] * 60] * 10, Priority.INTERACTIVE)
    order = []
    while fake.engine.has_work():
        fake.step()
        order += [e.request_id for e in fake.engine.embeddings.take() if e.vectors]
    assert order == ["urgent"] * 10 + ["batch"] * 10


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [0, 6])
def test_decoding_keeps_its_target_and_embeddings_progress(fake_engine, prompts) -> None:
    """Prompts that could use the rest of each step do not stop the embeddings."""
    target = 0.1
    fake = fake_engine(
        costs=COSTS,
        engine_target_itl=target,
        context_length=1024,
        max_num_batched_tokens=256,
        length=400,
    )
    request = fake.add("talker", [1, 2, 3])
    for _ in range(30):
        fake.step()
    for i in range(prompts):
        fake.add(f"prompt{i}", [i] * 900, max_tokens=1)
    embed(fake, "texts", [[i % 200] * 100 for i in range(20)])
    slowest, num_steps, before = 0.0, 0, fake.now
    for step in range(400):
        if not fake.engine.embeddings.has_work():
            break
        fake.step()
        if step > 10:  # the engine has learned what a batch costs
            slowest = max(slowest, fake.now - before)
        before, num_steps = fake.now, step
    assert slowest <= target * 1.01
    assert num_steps <= 2000 / LEAST + 1
    # prompts make progress, too
    assert fake.scheduler.statistics.num_prefill_tokens > (3 + num_steps * 8 if prompts else 0)
    fake.finish()
    assert fake.tokens("talker") == fake.right_tokens(request)


def test_streams_keep_their_share_of_the_time_beside_embeddings(fake_engine) -> None:
    """Texts to embed get no more time than prompts would."""
    fake = fake_engine(costs=COSTS, context_length=2048, length=2000, engine_prefill_share=0.7)
    fake.add("talker", [1, 2, 3], max_tokens=1500)
    for _ in range(30):
        fake.step()
    embed(fake, "texts", [[i % 200] * 100 for i in range(200)])
    begun, tokens = fake.now, len(fake.tokens("talker"))
    while fake.engine.embeddings.has_work():
        fake.step()
    num_tokens = len(fake.tokens("talker")) - tokens
    assert num_tokens * (COSTS.step + COSTS.row) / (fake.now - begun) >= 0.25


def test_texts_are_embedded_beside_a_long_prompt_without_streams(fake_engine) -> None:
    fake = fake_engine(
        costs=COSTS, context_length=8192, layout="paged", num_cells=8192, engine_prefill_share=0.7
    )
    fake.add("long", [5] * 6000, max_tokens=1)
    fake.step()
    embed(fake, "text", [[7] * 20])
    for _ in range(3):
        fake.step()
    assert not fake.engine.embeddings.has_work()
    assert not fake.tokens("long")


def test_streams_wait_no_longer_than_the_target_beside_embeddings_and_a_prompt(fake_engine) -> None:
    """Of a higher class, in steps of its own."""
    fake = fake_engine(
        costs=COSTS,
        context_length=8192,
        layout="paged",
        num_cells=20_000,
        length=8000,
        engine_prefill_share=0.7,
        engine_target_itl=0.2,
    )
    fake.add("talker", [1, 2, 3], max_tokens=4000)
    for _ in range(30):
        fake.step()
    fake.add("high", [5] * 6000, max_tokens=1, priority=Priority.INTERACTIVE)
    embed(fake, "texts", [[i % 200] * 100 for i in range(400)])
    waits, before = [], fake.now
    while not fake.tokens("high"):
        tokens = len(fake.tokens("talker"))
        fake.step()
        if len(fake.tokens("talker")) > tokens:
            waits.append(fake.now - before)
            before = fake.now
    assert max(waits[10:]) <= 0.2 * 1.3


def test_aborted_embedding_request_leaves_nothing(fake_engine) -> None:
    fake = fake_engine()
    embed(fake, "a", [[1] * 500, [2] * 10])
    embed(fake, "b", [[3] * 100])
    fake.step()
    fake.engine.handle(Abort("a"))
    fake.engine.embeddings.take()
    vectors = finish(fake)
    assert [*vectors] == ["b"]
    assert np.allclose(vectors["b"][0], expected_vector([3] * 100), atol=1e-5)


def test_transient_fault_loses_no_embeddings(fake_engine) -> None:
    fake = fake_engine(failing=FailingSteps(raise_at_step=2))
    texts = [[i] * 10 for i in range(20)]
    embed(fake, "a", texts)
    embed(fake, "b", texts)
    vectors = finish(fake)
    assert all(
        np.allclose(vectors[n][i], expected_vector(text), atol=1e-5)
        for n in "ab"
        for i, text in enumerate(texts)
    )


def test_failing_text_fails_only_its_request(fake_engine) -> None:
    fake = fake_engine()
    embed(fake, "good", [[1] * 10] * 5)
    embed(fake, "bad", [[1] * 10, [9999], [1] * 10])
    errors, vectors = [], []
    while fake.engine.has_work():
        fake.step()
        for embedded in fake.engine.embeddings.take():
            if embedded.error:
                errors.append(embedded.request_id)
            if embedded.request_id == "good":
                vectors += embedded.vectors
    assert errors == ["bad"]
    assert len(vectors) == 5


def test_start_of_request_is_reported_once(fake_engine) -> None:
    fake = fake_engine()
    embed(fake, "a", [[1] * 500])
    fake.step()
    assert [(e.request_id, e.vectors) for e in fake.engine.embeddings.take()] == [("a", [])]
    fake.step()
    assert fake.engine.embeddings.take() == []


@pytest.mark.parametrize("number", [np.nan, np.inf, 0.0])
def test_non_finite_and_zero_vectors_are_errors(fake_engine, monkeypatch, number) -> None:
    """JSON has no NaN, and a vector of zeros cannot be compared with others."""
    fake = fake_engine()
    vectors = TOKEN_VECTORS.copy()
    vectors[7] = number
    monkeypatch.setattr("cllm.backends.fake.backend.TOKEN_VECTORS", vectors)
    embed(fake, "bad", [[7, 7]])
    embed(fake, "good", [[1, 2]])
    results = []
    while fake.engine.has_work():
        fake.step()
        results += fake.engine.embeddings.take()
    assert [e.request_id for e in results if e.error] == ["bad"]
    assert [e.request_id for e in results if e.vectors] == ["good"]


def test_exception_ends_embedding_requests_but_no_sequence(fake_engine, monkeypatch) -> None:
    """Waiting requests end too, because any of them may have caused it."""
    fake = fake_engine(length=4)
    request = fake.add("A", [1])
    embed(fake, "a", [[1] * 500])
    embed(fake, "b", [[3] * 100])
    fake.step()
    fake.engine.embeddings.take()
    with monkeypatch.context() as patch:
        patch.setattr(fake.engine.embeddings, "_choose", lambda room: 1 / 0)
        fake.step()
    assert {e.request_id: e.error for e in fake.engine.embeddings.take()} == {
        "a": "division by zero",
        "b": "division by zero",
    }
    embed(fake, "c", [[5] * 10])
    assert [*finish(fake)] == ["c"]
    assert fake.tokens("A") == fake.right_tokens(request)
