"""Embedding texts and scoring documents, with an engine that answers by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cllm.backends.fake.vocabulary import END, FakeVocabulary
from cllm.core.account import Account
from cllm.core.model_info import ModelInfo
from cllm.core.output import EmbeddingOutput
from cllm.core.request import EmbeddingRequest, Priority
from cllm.core.segments import Segment, tokenize_segments
from cllm.core.vocabulary import VocabularyTable
from cllm.errors import BadRequest, EngineError
from cllm.observe.request_record import RequestRecord
from cllm.process.backlog import QueueLimits
from cllm.process.embeddings import InFlightEmbeddings, Waiter
from cllm.serving.adapter_use import NO_ADAPTERS
from cllm.serving.answer import RequestTimeout, SchedulingOptions
from cllm.serving.embedding import (
    MAX_TOKENS,
    Embedding,
    embed,
    encode_pairs,
    encode_texts,
    rank,
    shorten,
)
from cllm.text.pairs import name_texts

INFO = ModelInfo(
    name="tiny",
    architecture="tiny",
    description="",
    vocabulary_size=260,
    context_length=64,
    trained_context_length=64,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_num_samples=4,
    num_cells=256,
    layout="unified",
    end_tokens=[END],
    embedding_size=2,
    max_embedding_tokens=10,
)


class Template(FakeVocabulary):
    rerank_template: Any = "Q: {query} D: {document}"


class VisibleFences:
    """Fences texts visibly, so that a test sees what was fenced."""

    def enclose(self, text: str) -> str:
        return f"[{text}]"

    def split(self, text: str, *, add_special: bool) -> list[Segment]:
        return [Segment(text, add_special, parse_special=True)]


class Engine:
    """Answers requests with ``answer``, or never."""

    def __init__(self, answer: Callable[[list[int]], list[float]] | None) -> None:
        self.embeddings = InFlightEmbeddings(QueueLimits())
        self.requests: list[EmbeddingRequest] = []
        self.answer = answer
        self.aborted: list[bool] = []
        self.begins = False
        self.error = ""
        self.is_ready = True

    def check_available(self) -> None:
        if not self.is_ready:
            raise EngineError("not ready")

    def embed(self, request: EmbeddingRequest) -> Waiter:
        self.requests.append(request)
        waiter = self.embeddings.begin(request)
        rows = (
            [np.array(self.answer(text), "<f4").tobytes() for text in request.texts]
            if self.answer
            else []
        )
        if rows or self.begins or self.error:
            self.embeddings.put(EmbeddingOutput(request.request_id, rows, self.error))
        return waiter

    def forget(self, waiter: Waiter) -> None:
        self.aborted.append(self.embeddings.forget(waiter))


class Metrics:
    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.outcomes: list[str] = []

    def count_embedding_request(self, num_texts: int, num_tokens: int) -> None:
        self.begun.append((num_texts, num_tokens))

    def observe_request(self, record: RequestRecord) -> None:
        self.outcomes.append(record.outcome)


class FakeService:
    """The part of a service that embedding uses."""

    model_name = "m"
    request_timeout: float | None = None
    texts = SimpleNamespace(fences=VisibleFences())

    def __init__(
        self,
        answer: Callable[[list[int]], list[float]] | None = lambda text: [len(text), 1.0],
        vocabulary: FakeVocabulary | None = None,
        **info: Any,
    ) -> None:
        self.info = msgspec.structs.replace(INFO, **info)
        self.tokenizer = vocabulary or FakeVocabulary()
        self.vocabulary = VocabularyTable.of(self.tokenizer)
        vars(self.vocabulary)["longest_piece"] = 4
        self.engine = Engine(answer)
        self.metrics, self.adapter_use = Metrics(), NO_ADAPTERS
        self.num_admitted = 0

    async def tokenize(
        self, *texts: list[Segment], scheduling: SchedulingOptions | None = None
    ) -> list[list[int]]:
        return [tokenize_segments(self.tokenizer, text) for text in texts]

    @contextlib.contextmanager
    def admission(self) -> Iterator[None]:
        self.num_admitted += 1
        yield


TERMS = SchedulingOptions(Account("me"), Priority.BATCH)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def refused(work: Coroutine[Any, Any, Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        run(work)
    return caught.value


# --- texts --------------------------------------------------------------------------------------


def test_names_of_a_list() -> None:
    assert name_texts("input", 3) == ["input[0]", "input[1]", "input[2]"]


def test_shortened_vectors_have_length_1_again() -> None:
    vectors = np.array([[3, 4, 12], [0, 0, 1]], np.float32)
    assert shorten(vectors, 2).tolist() == pytest.approx(np.array([[0.6, 0.8], [0, 0]]))
    assert shorten(vectors, 2).dtype == np.float32
    assert shorten(vectors, 3) is vectors
    assert shorten(vectors, None) is vectors


def test_texts_become_tokens_and_tokens_stay() -> None:
    service = FakeService()
    assert run(encode_texts(service, ["ab", [1, 2], "<|im_end|>"], ["a", "b", "c"])) == [
        [97, 98],
        [1, 2],
        list(b"<|im_end|>"),
    ]


def test_text_too_long_by_its_characters_is_rejected_and_cut_with_truncate() -> None:
    service, longest = FakeService(), "x" * 40
    assert len(run(encode_texts(service, [longest], ["input"]))[0]) == 40, "checked by its tokens"
    error = refused(encode_texts(service, ["a", longest + "x"], ["input[0]", "input[1]"]))
    assert (error.param, error.code) == ("input[1]", "context_length_exceeded")
    assert "at least 10 tokens" in str(error)
    cut = run(encode_texts(service, [longest + "x", [5] * 12], ["a", "b"], truncate=True))
    assert cut == [[120] * 10, [5] * 10]


# --- embeddings ---------------------------------------------------------------------------------


def test_vectors_come_in_the_order_of_the_texts() -> None:
    service = FakeService()
    found = run(embed(service, [[1] * 3, [2] * 5], ["a", "b"], TERMS))
    assert isinstance(found, Embedding)
    assert found.vectors.tolist() == [[3, 1], [5, 1]]
    assert found.num_tokens == 8
    [request] = service.engine.requests
    assert (request.texts, request.account, request.priority) == (
        [[1] * 3, [2] * 5],
        "me",
        Priority.BATCH,
    )
    assert service.num_admitted == 1
    assert (service.metrics.begun, service.metrics.outcomes) == ([(2, 8)], ["finished"])
    assert service.engine.aborted == [False]


def test_no_texts_need_an_engine_that_is_ready() -> None:
    service = FakeService()
    found = run(embed(service, [], [], TERMS))
    assert (found.vectors.shape, found.num_tokens) == ((0, 2), 0)
    assert service.engine.requests == []
    service.engine.is_ready = False
    with pytest.raises(EngineError):
        run(embed(service, [], [], TERMS))


@pytest.mark.parametrize(
    ("texts", "info", "param", "code"),
    [
        ([[1], []], {}, "b", "invalid_value"),
        ([[1], [-1]], {}, "b", "invalid_value"),
        ([[260], [1]], {}, "a", "invalid_value"),
        ([[1], [1] * 11], {}, "b", "context_length_exceeded"),
        ([[1], [1]], {"embedding_size": 0}, "model", "unsupported_model"),
        ([[1], [1]], {"pooling": "rank"}, "model", "unsupported_model"),
        (
            [[1] * 200_000, [1] * 100_001],
            {"max_embedding_tokens": 10**6},
            "a",
            "max_tokens_per_request",
        ),
    ],
)
def test_texts_that_can_never_be_computed(
    texts: list[list[int]], info: dict[str, Any], param: str, code: str
) -> None:
    service = FakeService(**info)
    error = refused(embed(service, texts, ["a", "b"], TERMS))
    assert (error.param, error.code) == (param, code)
    assert service.engine.requests == []


def test_limits_are_inclusive() -> None:
    service = FakeService(max_embedding_tokens=MAX_TOKENS)
    assert run(embed(service, [[259] * MAX_TOKENS, []][:1], ["a"], TERMS)).num_tokens == MAX_TOKENS
    assert run(embed(FakeService(), [[0] * 10], ["a"], TERMS)).num_tokens == 10


def test_failed_request_raises_the_engines_error() -> None:
    service = FakeService(None)
    service.engine.error = "no memory"
    with pytest.raises(EngineError, match="no memory"):
        run(embed(service, [[1]], ["a"], TERMS))
    assert service.metrics.outcomes == ["error"]


def test_cancelled_request_is_aborted() -> None:
    service = FakeService(None)

    async def cancel() -> None:
        task = asyncio.create_task(embed(service, [[1]], ["a"], TERMS))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        run(cancel())
    assert service.engine.aborted == [True]
    assert service.metrics.outcomes == ["abort"]
    assert len(service.engine.embeddings) == 0


# --- time limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "request_timeout", "begins", "code"),
    [
        ({"queue_timeout": 0.01}, None, False, "queue_timeout"),
        ({"queue_timeout": 0.01, "deadline": 0.03}, None, True, "deadline_exceeded"),
        ({"queue_timeout": 0.01}, 0.03, True, "request_timeout"),
        ({"deadline": 0.01}, 5.0, False, "deadline_exceeded"),
        ({"deadline": 5.0}, 0.01, False, "request_timeout"),
        ({"deadline": 0.01, "queue_timeout": 5.0}, None, False, "deadline_exceeded"),
    ],
)
def test_the_limit_that_expires_first_is_named(
    limits: dict[str, float], request_timeout: float | None, begins: bool, code: str
) -> None:
    """A queue timeout no longer counts once the engine has begun."""
    service = FakeService(None)
    service.request_timeout = request_timeout
    service.engine.begins = begins
    with pytest.raises(RequestTimeout) as caught:
        run(embed(service, [[1]], ["a"], SchedulingOptions(**limits)))
    assert caught.value.code == code
    assert service.metrics.outcomes == ["timeout"]
    assert service.engine.aborted == [True]


# --- documents ----------------------------------------------------------------------------------


def test_documents_are_scored_by_the_cosine_with_the_query() -> None:
    vectors = {b"q": [1.0, 0.0], b"near": [0.8, 0.6], b"far": [-1.0, 0.0]}
    service = FakeService(lambda text: vectors[bytes(text)])
    ranking = run(rank(service, "q", ["far", "near"], TERMS))
    assert ranking.scores == pytest.approx([-1.0, 0.8])
    assert (ranking.by_model, ranking.num_tokens) == (False, 8)


def test_reranker_scores_pairs() -> None:
    service = FakeService(lambda text: [float(text.index(END)), 0.0], pooling="rank")
    ranking = run(rank(service, "qq", ["a", "bcd"], TERMS))
    assert ranking.scores == [2.0, 2.0]
    assert (ranking.by_model, ranking.num_tokens) == (True, 4 + 6)
    assert service.engine.requests[0].texts == [[*b"qq", END, *b"a"], [*b"qq", END, *b"bcd"]]


def test_template_of_a_reranker_fences_query_and_document() -> None:
    """Neither of them can write the marks of the template."""
    service = FakeService(vocabulary=Template())
    pairs = run(encode_pairs(service, "{document}", ["a", "{query}"], ["d[0]", "d[1]"]))
    assert [bytes(pair) for pair in pairs] == [
        b"Q: [{document}] D: [a]",
        b"Q: [{document}] D: [{query}]",
    ]


@pytest.mark.parametrize(
    ("query", "documents", "param", "code"),
    [
        ("", ["a"], "query", "invalid_value"),
        ("x" * 11, ["a"], "query", "context_length_exceeded"),
        ("q", ["a", "x" * 41], "documents[1]", "context_length_exceeded"),
        ("q", ["a", "x" * 20], "documents[1]", "context_length_exceeded"),
        ("x" * 10, ["a"] * 30_001, "documents", "max_tokens_per_request"),
    ],
)
def test_pairs_that_can_never_be_computed(
    query: str, documents: list[str], param: str, code: str
) -> None:
    service = FakeService(pooling="rank")
    error = refused(rank(service, query, documents, TERMS))
    assert (error.param, error.code) == (param, code)


def test_texts_of_other_names_are_named_so() -> None:
    error = refused(rank(FakeService(), "q", ["a", ""], TERMS, "texts"))
    assert error.param == "texts[1]"
