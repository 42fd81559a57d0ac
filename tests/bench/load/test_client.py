"""The load client, against cLLM with the fake backend and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, repeat

import pytest
from aiohttp import web

from cllm.bench.distribution import LatencySummary
from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.client import Endpoint, Outcome, find_model, run_stages
from cllm.bench.load.report import Report, remarks, results, summarize
from cllm.bench.load.workload import (
    QUESTION_KINDS,
    TURNS,
    WORKLOADS,
    Group,
    RequestSpec,
    Task,
    arrival_times,
    num_requests,
    question_tasks,
    word_tasks,
)
from cllm.errors import StartupError

MAX_TOKENS = 4


def make_tasks(count: int, *, model: str = "m", **options: int) -> list[Task]:
    return word_tasks(
        count,
        RequestSpec(**{"model": model, "prompt_words": 5, "max_tokens": MAX_TOKENS, **options}),
    )


def prompt_of(task: Task) -> list[str]:
    return json.loads(task.body)["messages"][-1]["content"].split()


def measure(
    url: str, tasks: list[Task], *, timeout: float = 60.0, concurrency: int = 4, warmup: int = 0
) -> Report:
    seen: list[int] = []
    target = Endpoint(url, timeout=timeout)
    first = Group(tasks=tasks[:warmup], clients=concurrency)
    group = Group(tasks=tasks[warmup:], clients=concurrency)
    outcome = run_stages(target, [[group]], warmup=first, progress=seen.append)
    assert seen == list(range(1, len(tasks) + 1))
    return summarize(outcome, url=url, model="m", settings={})


# Events as a server would send them.


def event(choice: dict | None, **rest: object) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [choice] if choice else [], **rest}).encode() + b"\n\n"
    )


def content(text: str) -> bytes:
    return event({"index": 0, "delta": {"content": text}, "finish_reason": None}, usage=None)


def finish(reason: str) -> bytes:
    return event({"index": 0, "delta": {}, "finish_reason": reason}, usage=None)


def usage(tokens: int) -> bytes:
    return event(None, usage={"prompt_tokens": 7, "completion_tokens": tokens})


OPENING = event({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
DONE = b"data: [DONE]\n\n"
TEXT = [
    content(' finish_reason": "stop"'),
    content('"usage":{'),
    content('"error":{"'),
    content("\n\ndata: ü"),
]
GOOD = [OPENING, *TEXT, finish("length"), usage(MAX_TOKENS), DONE]


async def send(
    request: web.Request, events: list[bytes], *, gap: float = 0.0
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for data in events:
        await response.write(data)
        await asyncio.sleep(gap)
    return response


def sends(*events: bytes) -> Callable:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await send(request, list(events))

    return handler


async def breaks_down(request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "no \x1b[31m memory"}}, status=500)


async def hangs_up(request: web.Request) -> web.StreamResponse:
    response = await send(request, GOOD[:3])
    request.transport.abort()
    return response


async def hangs_up_at_once(request: web.Request) -> web.StreamResponse:
    request.transport.abort()
    return web.Response()


async def never_ends(request: web.Request) -> web.StreamResponse:
    return await send(request, GOOD[:3], gap=30)


@contextmanager
def serving(handler: Callable, models: object = None) -> Iterator[str]:
    """Yield the URL of a server in a thread of its own that answers each chat with ``handler``."""

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]} if models is None else models)

    async def starting() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        app.router.add_get("/v1/models", list_models)
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        runner = asyncio.run_coroutine_threadsafe(starting(), loop).result(30)
        yield "http://{}:{}".format(*runner.addresses[0])
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


# Against cLLM.


def test_load_against_real_server_succeeds(fake_server: str) -> None:
    """Every request gets exactly its number of tokens, and the figures of the report agree."""
    model = find_model(Endpoint(fake_server))
    assert model == "fake"
    report = measure(fake_server, make_tasks(14, model=model, max_tokens=16), warmup=4)
    assert report.failures == {}
    assert (report.num_requests, report.num_succeeded, report.num_failed) == (10, 10, 0)
    assert report.output_tokens == 160
    assert report.prompt_tokens > 10 * 5
    assert report.output_tokens_per_s == pytest.approx(160 / report.wall_s, rel=0.01)
    assert report.requests_per_s == pytest.approx(10 / report.wall_s, rel=0.01)
    assert 0 < report.ttft_ms.p50 < report.e2e_ms.p50 <= report.e2e_ms.p99 <= 1000 * report.wall_s
    assert 0 < report.tpot_ms.mean < report.e2e_ms.mean / 15
    assert report.client_cpu_s > 0
    assert report.client_us_per_chunk > 0


@pytest.mark.slow
def test_client_uses_little_cpu(fake_server: str) -> None:
    """The client takes less than 100 µs of CPU time per chunk, for 64 streams. A busy machine makes
    CPU time longer, so one of ten measurements is enough.
    """
    costs = []
    for _ in range(10):
        report = measure(fake_server, make_tasks(64, model="fake", max_tokens=64), concurrency=64)
        costs.append(report.client_us_per_chunk)
        if costs[-1] < 100:
            break
    assert min(costs) < 100, costs


def test_wrong_answers_are_failures(fake_server: str) -> None:
    """The fake backend answers with counted numbers, never with a capital."""
    report = measure(fake_server, question_tasks(3, model="fake", max_tokens=8, seed=0))
    assert report.failures == {"wrong answer": 3}
    assert " instead of " in report.examples["wrong answer"]


def test_rejected_requests_are_failures(fake_server: str) -> None:
    report = measure(fake_server, make_tasks(2, model="another"))
    assert report.failures == {"HTTP 404": 2}
    assert "'another' does not exist" in report.examples["HTTP 404"]


# Against others.


@pytest.mark.parametrize(
    ("handler", "reason", "detail"),
    [
        (breaks_down, "HTTP 500", '{"error": {"message": "no \\u001b[31m memory"}}'),
        (hangs_up, "connection lost", ""),
        (hangs_up_at_once, "connection lost", ""),
        (never_ends, "timeout", ""),
        (sends(), "no finish_reason", ""),
        (sends(OPENING, *TEXT, usage(MAX_TOKENS), DONE), "no finish_reason", ""),
        (sends(*TEXT, finish("error"), usage(MAX_TOKENS), DONE), "invalid finish_reason", "error"),
        (sends(*TEXT, finish("length"), DONE), "no usage", ""),
        (sends(OPENING, finish("stop"), usage(0), DONE), "0 tokens", ""),
        (sends(*TEXT, finish("stop"), usage(3), DONE), "wrong number of tokens", "3 instead of 4"),
        (
            sends(TEXT[0], event(None, error={"message": "gone"}), *GOOD),
            "error in the stream",
            "gone",
        ),
        (sends(*TEXT, b'data: {"usage": {]}\n', *GOOD), "broken event", "malformed"),
        (
            sends(*TEXT, b'data: {"choices": 5, "usage": {}}\n', *GOOD),
            "broken event",
            "Expected `array`",
        ),
    ],
)
def test_failed_responses_are_counted_by_reason(
    handler: Callable, reason: str, detail: str
) -> None:
    """Each kind of failure has its own name and changes neither other requests nor the latencies."""
    turns = iter(range(100))

    async def every_second(request: web.Request) -> web.StreamResponse:
        return await handler(request) if next(turns) % 2 else await send(request, GOOD)

    with serving(every_second) as url:
        report = measure(url, make_tasks(4), timeout=1.0, concurrency=1)
    assert report.failures == {reason: 2}
    assert detail in report.examples.get(reason, "")
    assert (report.num_requests, report.num_succeeded, report.output_tokens) == (
        4,
        2,
        2 * MAX_TOKENS,
    )
    assert report.e2e_ms.p99 < 1000


def test_load_beside_an_endless_group_ends_if_all_requests_fail() -> None:
    """The endless group stops, and the one that waits for its chunks runs."""
    endless = Group(tasks=repeat(make_tasks(1)[0]), clients=2, background=True)
    waiting = Group(tasks=make_tasks(3), clients=1, start_after=100)
    with serving(breaks_down) as url:
        outcome = run_stages(Endpoint(url), [[endless, waiting]])
    assert len(outcome.answers) == 5


def test_report_without_successes_is_valid() -> None:
    with serving(breaks_down) as url:
        report = measure(url, make_tasks(2))
    assert (report.num_failed, report.output_tokens, report.ttft_ms, report.tokens_per_chunk) == (
        2,
        0,
        None,
        None,
    )
    assert any("2 failed: HTTP 500, such as: " in line for line in results(report))


def test_correct_answers_are_verified() -> None:
    """The text is compared after decoding, however it was split and escaped."""
    answer = ' finish_reason": "stop"' + '"usage":{' + '"error":{"' + "\n\ndata: ü"
    with serving(sends(*GOOD)) as url:
        report = measure(url, [Task(b"{}", answer=answer), Task(b"{}", answer=answer + " ")])
    assert report.failures == {"wrong answer": 1}


def test_concurrency_and_connection_reuse_are_respected() -> None:
    """There are never more open requests or connections than requested, and every request has the
    API key.
    """
    running, most, connections, keys = 0, 0, set(), set()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        connections.add(request.transport.get_extra_info("peername"))
        keys.add(request.headers["authorization"])
        response = await send(request, GOOD, gap=0.002)
        running -= 1
        return response

    with serving(handler) as url:
        warmup, group = (Group(tasks=make_tasks(count), clients=3) for count in (5, 15))
        outcome = run_stages(Endpoint(url, "secret"), [[group]], warmup=warmup)
    assert (most, len(connections), keys) == (3, 3, {"Bearer secret"})
    assert Counter(answer.failure for answer in outcome.answers) == {"": 15}


def test_unreachable_server_raises() -> None:
    with serving(sends()) as url:
        pass
    assert measure(url, make_tasks(2)).failures == {"cannot connect": 2}
    with pytest.raises(
        StartupError, match=r"^http://127.0.0.1:\d+ cannot be measured: .*[Cc]onnect"
    ):
        find_model(Endpoint(url), "m")


@pytest.mark.parametrize("models", [{"data": []}, {}, [1]])
def test_server_without_models_raises(models: object) -> None:
    with serving(sends(), models) as url:
        assert find_model(Endpoint(url), "mine") == "mine"
        with pytest.raises(StartupError, match="name it with --model"):
            find_model(Endpoint(url))


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "ftp://host", "http://", "nonsense"])
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(StartupError, match="cannot be measured"):
        find_model(Endpoint(url))


# Reading and counting.


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("compact", [False, True])
def test_stream_split_anywhere_is_read(size: int, newline: bytes, compact: bool) -> None:
    stream = b": ping\n\n".join(GOOD)
    if compact:
        stream = stream.replace(b'": ', b'":').replace(b"data: ", b"data:", 1)
    stream = stream.replace(b"\n", newline)
    answer = TimedAnswer(Task(b"", MAX_TOKENS, "any"), 0.0)
    for at in range(0, len(stream), size):
        answer.feed(stream[at : at + size], float(at))
    assert (answer.finish_reason, answer.output_tokens, answer.failure) == (
        "length",
        MAX_TOKENS,
        "",
    )
    assert len(answer.content_times) == MAX_TOKENS
    assert answer.text().endswith("data: ü" if not compact else "ü")


def timed(sent: float, content_times: list[float], ended: float, tokens: int) -> TimedAnswer:
    answer = TimedAnswer(Task(b"", tokens), sent)
    for now in content_times:
        answer.feed(content("x"), now)
    answer.feed(finish("length") + usage(tokens) + DONE, ended)
    answer.judge()
    return answer


def test_metrics_follow_their_definitions() -> None:
    """The numbers are small enough to check by hand."""
    answers = [
        timed(0.0, [1.0, 1.5, 3.5], 4.0, 4),
        timed(1.0, [4.0], 5.0, 1),
        timed(0.0, [], 2.0, 1),
    ]
    report = summarize(Outcome(answers, wall=5.0, cpu=1.0), url="u", model="m", settings={})
    assert report.num_failed == 0
    assert report.ttft_ms.mean == 2000.0  # a token without text is seen when the stream ends
    assert (report.itl_ms.mean, report.itl_ms.p50) == (1250.0, 1250.0)
    assert report.tpot_ms == LatencySummary(1000.0, 1000.0, 1000.0, 1000.0)
    assert report.e2e_ms.mean == pytest.approx(3333.333)
    assert (report.output_tokens, report.tokens_per_chunk) == (6, 1.5)
    assert (report.output_tokens_per_s, report.requests_per_s) == (1.2, 0.6)
    assert (report.client_cpu_share, report.client_us_per_chunk) == (0.2, 250_000.0)
    assert len(remarks(report)) == 1


def test_busy_client_gives_warning() -> None:
    report = summarize(
        Outcome([timed(0, [1], 1, 1)], wall=1.0, cpu=0.9), url="u", model="m", settings={}
    )
    assert "its own speed" in remarks(report)[1]


# What is asked for.


def test_word_tasks_have_given_length() -> None:
    first, again, other = make_tasks(20), make_tasks(20), make_tasks(20, seed=1)
    assert first == again != other
    assert {len(prompt_of(task)) for task in first} == {5}
    assert all(word.isalpha() and word.islower() for task in first for word in prompt_of(task))
    assert len({prompt_of(task)[0] for task in first}) > 10, "the prompts share no beginning"
    body = json.loads(first[0].body)
    assert (body["max_tokens"], body["ignore_eos"], body["stream_options"]) == (
        4,
        True,
        {"include_usage": True},
    )


def test_word_tasks_share_prefix() -> None:
    prompts = [prompt_of(task) for task in make_tasks(20, shared_words=3)]
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 1
    assert len({prompt[3] for prompt in prompts}) > 10
    assert {len(prompt) for prompt in prompts} == {5}
    with pytest.raises(StartupError, match="--shared-words 6 is more than --prompt-words 5"):
        make_tasks(1, shared_words=6)


def test_question_tasks_have_answers() -> None:
    tasks = question_tasks(2 * len(QUESTION_KINDS), model="m", max_tokens=9, seed=0)
    assert len({task.body for task in tasks}) == len(tasks)
    assert all(task.answer for task in tasks)
    assert all(first.answer != second.answer for first, second in pairwise(tasks))
    body = json.loads(tasks[0].body)
    assert (body["temperature"], body["max_tokens"], "ignore_eos" in body) == (0, 9, False)


def test_every_workload_makes_given_number_of_requests() -> None:
    """The same seed gives the same requests."""
    for make, _ in WORKLOADS.values():
        for count in (1, 7, 8):
            tasks, again = (
                make(count, RequestSpec(model="m", prompt_words=5, max_tokens=6)) for _ in range(2)
            )
            assert num_requests(tasks) == count
            assert [task.body for task in tasks] == [task.body for task in again]


def test_chat_workload_varies_lengths() -> None:
    tasks = WORKLOADS["chat"][0](200, RequestSpec(model="m", prompt_words=50, max_tokens=30))
    lengths = sorted(len(prompt_of(task)) for task in tasks)
    assert lengths[0] < 20
    assert 35 < lengths[100] < 70
    assert lengths[-1] > 120
    answers = sorted(task.num_tokens for task in tasks)
    assert answers[0] < 12
    assert 20 < answers[100] < 45
    assert answers[-1] > 80


def test_long_prefill_mixes_prompt_lengths() -> None:
    tasks = WORKLOADS["long-prefill"][0](10, RequestSpec(model="m", prompt_words=4, max_tokens=6))
    assert [len(prompt_of(task)) for task in tasks] == [4, 4, 4, 4, 100, 4, 4, 4, 4, 100]


def test_arrivals_follow_the_rate() -> None:
    """The mean rate is the requested one, and bursts arrive together."""
    assert arrival_times(4, 2.0, "even", 0) == [0.0, 0.5, 1.0, 1.5]
    gaps = {}
    for kind in ("poisson", "bursty"):
        times = arrival_times(4000, 10.0, kind, 1)
        assert times == sorted(times) == arrival_times(4000, 10.0, kind, 1)
        assert times[-1] == pytest.approx(400, rel=0.15)
        gaps[kind] = sorted(b - a for a, b in pairwise(times))
    assert gaps["bursty"][2000] < 0.3 * gaps["poisson"][2000]


def test_conversations_repeat_the_answers() -> None:
    """Each turn sends the earlier answers, and each turn counts as a request."""
    bodies: list[dict] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await send(
            request, [OPENING, content("so "), content("it is"), finish("length"), usage(4), DONE]
        )

    tasks = WORKLOADS["multi-turn"][0](
        2 * TURNS, RequestSpec(model="m", prompt_words=3, max_tokens=4)
    )
    with serving(handler) as url:
        outcome = run_stages(Endpoint(url), [[Group(tasks=tasks, clients=2)]])
    assert [answer.failure for answer in outcome.answers] == [""] * 2 * TURNS
    longest = max(bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in longest] == ["user", "assistant"] * (TURNS - 1) + [
        "user"
    ]
    assert {message["content"] for message in longest[1::2]} == {"so it is"}


def test_shared_prefix_has_given_number_of_words() -> None:
    options = RequestSpec(model="m", prompt_words=8, shared_words=6, max_tokens=6)
    prompts = [prompt_of(task) for task in WORKLOADS["shared-prefix"][0](10, options)]
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert len({prompt[6] for prompt in prompts}) > 5


@pytest.mark.parametrize(
    ("retry_after", "failures"),
    [
        ("7", {}),
        ("Sun, 06 Nov 1994 08:49:37 GMT", {}),
        (None, {"HTTP 429 without Retry-After": 2}),
        ("soon", {"HTTP 429 without Retry-After": 2}),
    ],
)
def test_rejections_with_retry_after_are_expected(
    retry_after: str | None, failures: dict[str, int]
) -> None:
    """A rejection is correct if it has Retry-After. Accepted requests must succeed."""
    turns = iter(range(100))
    headers = {} if retry_after is None else {"Retry-After": retry_after}

    async def handler(request: web.Request) -> web.StreamResponse | web.Response:
        if next(turns) % 2:
            return web.json_response({"error": "full"}, status=429, headers=headers)
        return await send(request, GOOD)

    tasks = WORKLOADS["overload"][0](
        4, RequestSpec(model="m", prompt_words=3, max_tokens=MAX_TOKENS)
    )
    with serving(handler) as url:
        report = measure(url, tasks)
    assert (report.num_succeeded, report.num_refused, report.failures) == (2, 2, failures)
    assert any("2 were rejected with Retry-After" in line for line in results(report)) == (
        not failures
    )
    assert report.e2e_ms.p50 > 0
    with serving(breaks_down) as url:
        assert measure(url, tasks).failures == {"HTTP 500": 4}


def test_report_remarks_on_missing_overload() -> None:
    outcome = Outcome([timed(0, [1], 1, 1)], wall=1.0, cpu=0.1)
    report = summarize(outcome, url="u", model="m", settings={"workload": "overload"})
    assert "not overloaded" in remarks(report)[-1]


def test_conversation_ends_after_failure() -> None:
    tasks = WORKLOADS["multi-turn"][0](TURNS, RequestSpec(model="m", prompt_words=3, max_tokens=4))
    with serving(breaks_down) as url:
        outcome = run_stages(Endpoint(url), [[Group(tasks=tasks, clients=1)]])
    assert [answer.failure for answer in outcome.answers] == ["HTTP 500"]


def test_disconnecting_clients_are_counted() -> None:
    """They count neither as successes nor as failures, and the server notices that they disconnect."""
    gone: list[bool] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return await send(
                request,
                [OPENING, *[content("a")] * 40, finish("length"), usage(40), DONE],
                gap=0.01,
            )
        except (ConnectionResetError, asyncio.CancelledError):
            gone.append(True)
            raise

    tasks = WORKLOADS["cancel-storm"][0](6, RequestSpec(model="m", prompt_words=3, max_tokens=40))
    with serving(handler) as url:
        report = measure(url, tasks)
    assert (report.num_succeeded, report.num_cancelled, report.num_failed, len(gone)) == (
        3,
        3,
        0,
        3,
    )
    assert any("3 were cancelled" in line for line in results(report))


def test_open_loop_sends_without_waiting() -> None:
    """Requests are sent on schedule although none is answered yet. Rejections are counted
    separately.
    """
    at: list[float] = []

    async def handler(request: web.Request) -> web.StreamResponse | web.Response:
        at.append(asyncio.get_running_loop().time())
        if len(at) > 4:
            return web.json_response({"error": "full"}, status=429)
        return await send(request, GOOD, gap=0.2)

    with serving(handler) as url:
        group = Group(tasks=make_tasks(6), clients=1, arrivals=[0.0, 0, 0, 0, 0.3, 0.3])
        outcome = run_stages(Endpoint(url), [[group]])
    assert at[3] - at[0] < 0.2 < at[4] - at[0]
    report = summarize(outcome, url=url, model="m", settings={})
    assert (report.num_succeeded, report.num_refused, report.num_failed) == (4, 2, 2)


def test_goodput_counts_requests_within_limits() -> None:
    """Goodput is the number of requests per second that meet both limits."""
    answers = [timed(0, [1, 2], 2, 3), timed(0, [3, 4], 4, 3)]
    for settings, expected in (
        ({}, None),
        ({"ttft": 2000}, 0.5),
        ({"tpot": 400}, 0),
        ({"ttft": 5000, "tpot": 1e4}, 1),
    ):
        report = summarize(
            Outcome(answers, wall=2.0, cpu=0.1), url="u", model="m", settings=settings
        )
        assert report.good_requests_per_s == expected
