"""The load client with Ollama's API, by the same rules as with OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ollama_server import MODEL, OllamaServer, chunk, last, serving_ollama

from cllm.bench.load.client import Endpoint, find_model, run_stages
from cllm.bench.load.dialects import DIALECTS
from cllm.bench.load.report import Report, results, summarize
from cllm.bench.load.workload import WORKLOADS, Group, RequestSpec, Task, question_tasks

MAX_TOKENS = 4
TEXT = [
    chunk(' done":true'),
    chunk('"error":"<b>'),
    chunk("\n{ü"),
    chunk("", thinking='"content":""'),
]
TEXT_SAID = ' done":true"error":"<b>\n{ü'
GOOD = [*TEXT, last("length", MAX_TOKENS)]


@pytest.fixture
def server() -> Iterator[OllamaServer]:
    with serving_ollama() as server:
        yield server


def measure(
    server: OllamaServer, tasks: list[Task] | None = None, *, workload: str = "words"
) -> Report:
    spec = RequestSpec(
        api="ollama", model=MODEL, prompt_words=5, max_tokens=MAX_TOKENS, temperature=0.5, seed=3
    )
    tasks = WORKLOADS[workload][0](4, spec) if tasks is None else tasks
    target = Endpoint(server.url, api="ollama")
    outcome = run_stages(target, [[Group(tasks=tasks, clients=2)]])
    return summarize(outcome, url=server.url, model=MODEL, settings={})


def test_load_against_ollama_succeeds(server: OllamaServer) -> None:
    """The client finds the model, sends options under Ollama's names, and uses the server's token
    counts.
    """
    assert find_model(Endpoint(server.url, api="ollama")) == MODEL
    report = measure(server)
    assert (report.failures, report.num_succeeded, report.num_short) == ({}, 4, 0)
    assert (report.output_tokens, report.prompt_tokens, report.tokens_per_chunk) == (16, 36, 1.0)
    body = server.bodies[0]
    assert set(body) == {"model", "messages", "stream", "options"}
    assert (body["stream"], body["options"]) == (
        True,
        {"num_predict": MAX_TOKENS, "temperature": 0.5, "seed": 3},
    )
    assert [message["role"] for message in body["messages"]] == ["user"]


@pytest.mark.parametrize("piece", [1, 7, 61, 10_000])
def test_stream_split_anywhere_is_read(server: OllamaServer, piece: int) -> None:
    """Text that looks like an end or an error stays text. Reasoning counts as tokens, but not as
    the answer.
    """
    server.answer, server.piece = GOOD, piece
    body = DIALECTS["ollama"].body(MODEL, [], {"max_tokens": MAX_TOKENS})
    report = measure(
        server, [Task(body, MAX_TOKENS, TEXT_SAID), Task(body, answer=TEXT_SAID + " ")]
    )
    assert report.failures == {"wrong answer": 1}
    assert (report.output_tokens, report.tokens_per_chunk) == (MAX_TOKENS, 1.0)


@pytest.mark.parametrize(
    ("answer", "reason", "detail"),
    [
        ([], "no finish_reason", ""),
        (TEXT, "no finish_reason", ""),
        ([*TEXT, last(None, MAX_TOKENS)], "no finish_reason", ""),
        ([*TEXT, last("load", MAX_TOKENS)], "invalid finish_reason", "load"),
        ([last("stop", 0)], "0 tokens", ""),
        ([*TEXT, last("length", 3)], "wrong number of tokens", "3 instead of 4"),
        ([*TEXT, last("stop", 5)], "wrong number of tokens", "5 instead of 4"),
        (
            [*TEXT, b'{"error":"an error was encountered while running the model: EOF"}\n'],
            "error in the stream",
            "EOF",
        ),
        ([*TEXT, b'{"done":true,]}\n'], "broken event", "malformed"),
        ([*TEXT, b'{"done":true,"eval_count":"4"}\n'], "broken event", "Expected `int`"),
    ],
)
def test_failed_responses_are_counted_by_reason(
    server: OllamaServer, answer: list[bytes], reason: str, detail: str
) -> None:
    server.answer = answer
    report = measure(server)
    assert report.failures == {reason: 4}
    assert detail in report.examples.get(reason, "")
    assert report.output_tokens == 0


def test_early_stop_is_a_success(server: OllamaServer) -> None:
    """Ollama's API cannot forbid the end of a text, so the report states how many tokens arrived."""
    server.answer = [*TEXT[:2], last("stop", 3)]
    report = measure(server)
    assert (report.num_succeeded, report.num_short, report.output_tokens) == (4, 4, 12)
    assert "  4 of them ended before the requested length; 3.0 tokens on average" in results(report)


def test_rejected_requests_are_failures(server: OllamaServer) -> None:
    """Ollama sends no Retry-After, so a rejection is a failure, even under overload."""
    server.status = 503
    report = measure(server)
    assert (report.failures, report.num_refused) == ({"HTTP 503": 4}, 4)
    assert report.examples["HTTP 503"] == '{"error": "server busy, please try again"}'
    assert measure(server, workload="overload").failures == {"HTTP 503 without Retry-After": 4}


def test_unknown_model_is_a_failure(server: OllamaServer) -> None:
    spec = RequestSpec(api="ollama", model="other", prompt_words=5, max_tokens=4)
    report = measure(server, WORKLOADS["words"][0](2, spec))
    assert report.failures == {"HTTP 404": 2}
    assert "model 'other' not found" in report.examples["HTTP 404"]


def test_conversations_repeat_the_answers(server: OllamaServer) -> None:
    report = measure(server, workload="multi-turn")
    assert report.num_succeeded == 4
    said = [
        message["content"]
        for message in server.bodies[-1]["messages"]
        if message["role"] == "assistant"
    ]
    assert said == [" 0 1 2 3"] * 3


def test_answers_are_verified(server: OllamaServer) -> None:
    report = measure(server, question_tasks(2, model=MODEL, max_tokens=9, seed=0, api="ollama"))
    assert report.failures == {"wrong answer": 2}
    assert server.bodies[0]["options"] == {"num_predict": 9, "temperature": 0}
