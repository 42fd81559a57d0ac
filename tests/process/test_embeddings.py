"""Requests for embeddings: results, queue limits and failures."""

from __future__ import annotations

import asyncio

import pytest

from cllm.core.output import EmbeddingOutput
from cllm.core.request import EmbeddingRequest
from cllm.errors import EngineError
from cllm.process.backlog import QueueFull, QueueLimits
from cllm.process.embeddings import MAX_TOKENS, InFlightEmbeddings


def request(
    name: str, num_tokens: int = 10, num_texts: int = 1, account: str = ""
) -> EmbeddingRequest:
    return EmbeddingRequest(name, [[1] * num_tokens] * num_texts, account)


def run(work) -> None:
    async def go() -> None:
        await work()

    asyncio.run(go())


def test_vectors_arrive_in_order() -> None:
    async def work() -> None:
        embeddings = InFlightEmbeddings(QueueLimits())
        waiter = embeddings.begin(request("a", num_texts=3))
        embeddings.put(EmbeddingOutput("a", []))
        assert waiter.started.done()
        assert not waiter.done.done()
        embeddings.put(EmbeddingOutput("a", [b"1"]))
        embeddings.put(EmbeddingOutput("stranger", [b"x"]))
        embeddings.put(EmbeddingOutput("a", [b"2", b"3"]))
        assert await waiter.done == [b"1", b"2", b"3"]
        assert not embeddings.forget(waiter), "the engine has finished it"

    run(work)


def test_errors_reach_waiting_callers() -> None:
    async def work() -> None:
        embeddings = InFlightEmbeddings(QueueLimits())
        failed, orphan = embeddings.begin(request("a")), embeddings.begin(request("b"))
        embeddings.put(EmbeddingOutput("a", [], "no reason"))
        with pytest.raises(EngineError, match="no reason"):
            await failed.done
        embeddings.fail(EngineError("gone"))
        with pytest.raises(EngineError, match="gone"):
            await orphan.done

    run(work)


def test_forgotten_request_is_aborted_once() -> None:
    async def work() -> None:
        embeddings = InFlightEmbeddings(QueueLimits())
        waiter = embeddings.begin(request("a"))
        assert embeddings.forget(waiter)
        assert not embeddings.forget(waiter)
        embeddings.put(EmbeddingOutput("a", [b"1"]))

    run(work)


@pytest.mark.parametrize(
    ("limits", "bound"),
    [
        (QueueLimits(requests=2), "requests"),
        (QueueLimits(tokens=250), "tokens"),
        (QueueLimits(seconds=0.0), "seconds"),
    ],
)
def test_queue_limits_reject_requests(limits, bound) -> None:
    """The first request is admitted whatever its size, and rejected ones leave nothing behind."""

    async def work() -> None:
        embeddings = InFlightEmbeddings(limits)
        first = embeddings.begin(request("first", 100, 10))
        # 100 tokens are left, and the cost of one is known
        embeddings.put(EmbeddingOutput("first", [b""] * 9))
        admitted = [first]
        admitted += [
            embeddings.begin(request(str(i), 100))
            for i in range({"requests": 2, "tokens": 1, "seconds": 0}[bound])
        ]
        with pytest.raises(QueueFull) as refused:
            embeddings.begin(request("too many", 100))
        assert refused.value.bound == bound
        for waiter in admitted:
            embeddings.forget(waiter)
        embeddings.begin(request("again", 1000))

    run(work)


def test_short_texts_do_not_raise_the_estimate_for_long_ones() -> None:
    """They take as long as a step, whatever their length. Long texts wait for as many steps as they
    need.
    """

    async def work() -> None:
        now = 0.0
        embeddings = InFlightEmbeddings(QueueLimits(seconds=100), clock=lambda: now)
        for i in range(20):
            short = embeddings.begin(request(f"short {i}", 1))
            now += 0.5
            embeddings.put(EmbeddingOutput(f"short {i}", [b""]))
            embeddings.forget(short)
        embeddings.begin(request("long", 100, 50))
        embeddings.begin(request("next", 1))
        for _ in range(50):
            now += 10
            embeddings.put(EmbeddingOutput("long", [b""]))
        embeddings.begin(request("longer", 100, 50))
        with pytest.raises(QueueFull, match=r"would take 5\d\d\.\d seconds"):
            embeddings.begin(request("too late", 1))

    run(work)


def test_full_queue_of_one_account_admits_embeddings_of_another() -> None:
    async def work() -> None:
        embeddings = InFlightEmbeddings(QueueLimits(requests=3, tokens=500))
        for i in range(4):
            embeddings.begin(request(str(i), 100, account="greedy"))
        with pytest.raises(QueueFull):
            embeddings.begin(request("greedy again", 100, account="greedy"))
        embeddings.begin(request("modest", 100, account="modest"))
        embeddings.begin(request("modest again", 100, account="modest"))

    run(work)


def test_tokens_are_limited_without_queue_limits() -> None:
    async def work() -> None:
        embeddings = InFlightEmbeddings(QueueLimits())
        embeddings.begin(request("0", 1000, MAX_TOKENS // 1000))
        with pytest.raises(QueueFull, match="tokens"):
            embeddings.begin(request("1", 1))

    run(work)
