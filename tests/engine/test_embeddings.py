"""Bites between steps: who gets them, how large they are, and what a failure costs."""

from __future__ import annotations

import numpy as np
import pytest

from cllm.backends.fake.backend import TOKEN_VECTORS, Costs, Faults
from cllm.core.request import EmbeddingRequest, Priority
from cllm.engine.commands import Abort, Embed

COSTS = Costs(step=0.01, row=0.001, token=0.001)


def embed(
    fake, name: str, texts: list[list[int]], priority: Priority = Priority.NORMAL, key: str = ""
) -> None:
    fake.engine.handle(Embed(EmbeddingRequest(name, texts, key, priority)))


def right(text: list[int]) -> np.ndarray:
    total = TOKEN_VECTORS[text].sum(axis=0)
    return total / np.linalg.norm(total)


def finish(fake, max_steps: int = 500) -> dict[str, list[np.ndarray]]:
    """Step until nothing is left; the vectors of each request. An error is raised."""
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
    raise AssertionError("no end in sight")


def test_vectors_in_the_order_of_the_texts(fake_engine) -> None:
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
            np.allclose(vector, right(text), atol=1e-5)
            for vector, text in zip(vectors[name], asked, strict=True)
        )


def test_a_small_request_does_not_wait_for_a_large_one(fake_engine) -> None:
    fake = fake_engine()
    embed(fake, "large", [[1] * 60] * 100)
    embed(fake, "small", [[2] * 60])
    order = []
    while fake.engine.has_work():
        fake.step()
        order += [e.request_id for e in fake.engine.embeddings.take() if e.vectors]
    assert order.index("small") <= 2


def test_a_key_does_not_wait_for_all_requests_of_another(fake_engine) -> None:
    fake = fake_engine()
    for i in range(50):
        embed(fake, f"many{i}", [[1] * 60] * 2, key="greedy")
    embed(fake, "one", [[2] * 60] * 4, key="modest")
    order = []
    while fake.engine.has_work():
        fake.step()
        order += [e.request_id for e in fake.engine.embeddings.take() if e.vectors]
    assert [i for i, name in enumerate(order) if name == "one"] == [1, 3, 5, 7]
    assert len(order) == 104


def test_a_higher_class_goes_first(fake_engine) -> None:
    fake = fake_engine()
    embed(fake, "batch", [[1] * 60] * 10, Priority.BATCH)
    embed(fake, "urgent", [[2] * 60] * 10, Priority.INTERACTIVE)
    order = []
    while fake.engine.has_work():
        fake.step()
        order += [e.request_id for e in fake.engine.embeddings.take() if e.vectors]
    assert order == ["urgent"] * 10 + ["batch"] * 10


@pytest.mark.parametrize("prompts", [0, 6])
def test_who_decodes_keeps_the_target_and_texts_do_not_starve(fake_engine, prompts) -> None:
    """Also while prompts want all that is left of a step."""
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
        if step > 10:  # what a bite costs has been learned
            slowest = max(slowest, fake.now - before)
        before, num_steps = fake.now, step
    assert slowest <= target * 1.01
    assert num_steps <= 2000 / fake.backend.info.tile + 1  # a tile at least in each step
    # and prompts do not starve either
    assert fake.scheduler.num_prefill_tokens > (3 + num_steps * 8 if prompts else 0)
    fake.finish()
    assert fake.tokens("talker") == fake.right_tokens(request)


def test_an_aborted_request_leaves_nothing(fake_engine) -> None:
    fake = fake_engine()
    embed(fake, "a", [[1] * 500, [2] * 10])
    embed(fake, "b", [[3] * 100])
    fake.step()
    fake.engine.handle(Abort("a"))
    fake.engine.embeddings.take()
    vectors = finish(fake)
    assert [*vectors] == ["b"]
    assert np.allclose(vectors["b"][0], right([3] * 100), atol=1e-5)


def test_a_fault_that_passes_costs_nobody_anything(fake_engine) -> None:
    fake = fake_engine(faults=Faults(raise_at_step=2))
    texts = [[i] * 10 for i in range(20)]
    embed(fake, "a", texts)
    embed(fake, "b", texts)
    vectors = finish(fake)
    assert all(
        np.allclose(vectors[n][i], right(text), atol=1e-5)
        for n in "ab"
        for i, text in enumerate(texts)
    )


def test_a_text_that_fails_alone_fails_its_request_alone(fake_engine) -> None:
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


def test_begun_is_told_once(fake_engine) -> None:
    fake = fake_engine()
    embed(fake, "a", [[1] * 500])
    fake.step()
    assert [(e.request_id, e.vectors) for e in fake.engine.embeddings.take()] == [("a", [])]
    fake.step()
    assert fake.engine.embeddings.take() == []


@pytest.mark.parametrize("number", [np.nan, np.inf, 0.0])
def test_what_is_no_vector_is_an_error(fake_engine, monkeypatch, number) -> None:
    """JSON has no NaN, and nothing can be compared with a vector of zeros."""
    fake = fake_engine()
    vectors = TOKEN_VECTORS.copy()
    vectors[7] = number
    monkeypatch.setattr("cllm.backends.fake.backend.TOKEN_VECTORS", vectors)
    embed(fake, "bad", [[7, 7]])
    embed(fake, "good", [[1, 2]])
    told = []
    while fake.engine.has_work():
        fake.step()
        told += fake.engine.embeddings.take()
    assert [e.request_id for e in told if e.error] == ["bad"]
    assert [e.request_id for e in told if e.vectors] == ["good"]


def test_an_exception_ends_the_requests_for_vectors_and_the_engine_goes_on(
    fake_engine, monkeypatch
) -> None:
    """Those that wait too: nobody knows which of them caused it. Sequences are not touched."""
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
