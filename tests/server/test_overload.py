"""Overload: queued requests learn their position, and rejected ones get a wait time at once; on the
fake backend.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import time

import aiohttp
import httpx2
import openai
import pytest
from conftest import PATIENCE

from cllm.config.settings import Settings
from cllm.core.account import Account
from cllm.core.output import Stats
from cllm.core.params import SamplingParams
from cllm.engine.params import EngineParams
from cllm.observe.metrics import Metrics
from cllm.process.backlog import QueueFull, QueueLimits
from cllm.process.pool import Pool
from cllm.process.tokenizing import LONG
from cllm.server import off_loop
from cllm.server.app import create_app
from cllm.serving.answer import Generation, SchedulingOptions
from cllm.serving.model_texts import ModelTexts
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.serving.service import MANY_FENCES, Service
from cllm.text.chat import Chat
from cllm.text.templates.fences import Fences

pytestmark = pytest.mark.slow  # each starts processes

CAPACITY, MAX_WAITING = 4, 8  # of narrow_server
ENDLESS = {"max_tokens": 32_000, "ignore_eos": True, "stream": True}  # minutes
MESSAGES = [{"role": "user", "content": "hi"}]
REFUSAL_SECONDS = 0.02  # of the CPU, with all that the API process does meanwhile


class Asker:
    """Sends requests, and closes all answers that were left open."""

    def __init__(self, session):
        self.session = session
        self._answers = []

    async def __call__(self, prompt="a", path="/v1/completions", headers=None, **body):
        """Return the head of the answer; that of a stream comes at once."""
        answer = await self.session.post(
            path, json={"prompt": prompt, "temperature": 0, **body}, headers=headers
        )
        self._answers.append(answer)
        return answer

    async def get(self, path):
        async with self.session.get(path) as answer:
            return await answer.json()

    def close(self):
        for answer in self._answers:
            answer.close()


def run(server, test):
    """Run ``test(ask)``, and check that the server is idle afterwards."""

    async def main():
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(server.url, connector=connector) as session:
            with contextlib.closing(Asker(session)) as ask:
                await asyncio.wait_for(test(ask), PATIENCE)

    asyncio.run(main())
    assert server.wait_until_idle()["num_seq_ids_in_use"] == 0


@contextlib.asynccontextmanager
async def crowd(ask, count, name="crowd", **body):
    """Start ``count`` endless streams with different prompts, and check that all are accepted. They
    have a higher priority than clients of other tests, so reservations of those do not delay them.
    """
    body = {**ENDLESS, "priority": "interactive", **body}
    answers = [await ask(f"{chr(65 + i)} {name}", **body) for i in range(count)]
    try:
        assert [answer.status for answer in answers] == [200] * count
        while (await ask.get("/model/info"))["stats"]["num_running"] < CAPACITY:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield answers
    finally:
        for answer in answers:
            answer.close()


def position(answer):
    return int(answer.headers["x-cllm-queue-position"])


def counted_on(prompt, count):
    """Return what the fake backend writes after the prompt."""
    return "".join(chr(ord(prompt[-1]) + 1 + i) for i in range(count))


def test_burst_is_rejected_exactly_beyond_the_queue_limit(new_narrow_server):
    """Of 300 concurrent requests, as many are accepted as may run and wait. The others are rejected
    and counted.
    """

    async def burst(ask):
        answers = await asyncio.gather(*(ask(f"burst {i}", **ENDLESS) for i in range(300)))
        taken = [answer for answer in answers if answer.status == 200]
        assert sorted(map(position, taken)) == [0] * CAPACITY + list(range(1, MAX_WAITING + 1))
        refused = [answer for answer in answers if answer.status == 429]
        assert len(taken) + len(refused) == 300
        assert min(int(answer.headers["retry-after"]) for answer in refused) >= 1

    run(new_narrow_server, burst)
    assert (
        new_narrow_server.metric("requests_refused_total", 'reason="requests"')
        == 300 - CAPACITY - MAX_WAITING
    )


def test_accepted_requests_of_a_burst_are_answered(new_narrow_server):
    """Each with its own text."""

    async def one(ask, prompt):
        async with await ask(prompt, max_tokens=10) as answer:
            content = await answer.json()
            if answer.status == 200:
                assert content["choices"][0]["text"] == counted_on(prompt, 10)
            else:
                assert (answer.status, content["error"]["code"]) == (429, "queue_full")
            return answer.status

    async def burst(ask):
        statuses = await asyncio.gather(*(one(ask, f"x{i:03}") for i in range(300)))
        assert statuses.count(200) >= CAPACITY + MAX_WAITING

    run(new_narrow_server, burst)


def test_rejections_are_cheap_and_do_not_stop_running_streams(narrow_server):
    """Each of 400 rejections, eight at a time, takes milliseconds of CPU time."""

    async def test(ask):
        async with crowd(ask, CAPACITY + MAX_WAITING) as (stream, *_):
            num_arrivals = 0

            async def read():
                nonlocal num_arrivals
                while await stream.content.readany():
                    num_arrivals += 1

            async def knock(i):
                for j in range(50):
                    async with await ask(f"knock {i} {j}") as answer:
                        await answer.read()
                    assert answer.status == 429

            reading = asyncio.create_task(read())
            before = narrow_server.cpu_seconds()
            await asyncio.gather(*map(knock, range(8)))
            assert narrow_server.cpu_seconds() - before < 400 * REFUSAL_SECONDS
            assert num_arrivals > 20
            reading.cancel()

    run(narrow_server, test)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_rejection_comes_before_the_first_byte_of_a_stream(narrow_server, path, stream):
    """Every dialect has the same error with Retry-After, streaming or not."""

    async def test(ask):
        async with crowd(ask, CAPACITY + MAX_WAITING):
            answer = await ask(path=path, stream=stream, messages=MESSAGES)
            assert answer.status == 429
            assert int(answer.headers["retry-after"]) >= 1
            error = (await answer.json())["error"]
            assert (error["type"], error["param"], error["code"]) == (
                "requests",
                None,
                "queue_full",
            )
            assert "9 requests would wait (limit 8)" in error["message"]

    run(narrow_server, test)


def test_openai_client_retries_and_is_served(narrow_server):
    """Without retries it raises its own error."""

    def num_refused():
        return narrow_server.metric("requests_refused_total")

    async def test(ask):
        async with openai.AsyncOpenAI(
            base_url=f"{narrow_server.url}/v1", api_key="none", max_retries=0
        ) as client:
            question = {"model": "fake", "messages": MESSAGES, "max_tokens": 2}
            async with crowd(ask, CAPACITY + MAX_WAITING, headers={"authorization": "Bearer none"}):
                with pytest.raises(openai.RateLimitError) as caught:
                    await client.chat.completions.create(**question)
                assert (caught.value.code, caught.value.type) == ("queue_full", "requests")
                before = num_refused()
                asked = asyncio.create_task(
                    client.with_options(max_retries=5).chat.completions.create(**question)
                )
                while num_refused() == before:  # noqa: ASYNC110  # another process's state
                    await asyncio.sleep(0.01)
            assert (await asked).usage.completion_tokens == 2

    run(narrow_server, test)


def test_every_answer_has_its_queue_position(narrow_server):
    """Streamed or not, in both dialects, for requests that ran at once and for queued ones."""

    async def test(ask):
        for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/generate_stream"):
            async with await ask(path=path, messages=MESSAGES, max_tokens=2) as answer:
                await answer.read()
                assert (answer.status, position(answer)) == (200, 0)
                assert int(answer.headers["x-cllm-estimated-ttft-ms"]) >= 0
        async with crowd(ask, CAPACITY + 3) as answers:
            assert list(map(position, answers)) == [0] * CAPACITY + [1, 2, 3]
            waiting = asyncio.create_task(ask(max_tokens=2, priority="interactive"))
            while narrow_server.stats()["num_waiting"] < 4:  # noqa: ASYNC110  # another process's state
                await asyncio.sleep(0.01)
        assert position(await waiting) == 4

    run(narrow_server, test)


def test_queue_of_a_lower_class_does_not_reject_higher_ones(new_narrow_server):
    """Batch requests wait for other classes, and only fill their own queue."""

    async def test(ask):
        async with crowd(ask, CAPACITY + MAX_WAITING, priority="batch"):
            refused = await ask(priority="batch")
            assert refused.status == 429
            for priority in (None, "interactive"):
                async with await ask(f"I am {priority}", max_tokens=5, priority=priority) as answer:
                    assert (answer.status, position(answer)) == (200, 0)
                    assert (await answer.json())["usage"]["completion_tokens"] == 5

    run(new_narrow_server, test)


def test_full_queue_of_one_account_does_not_reject_others(new_narrow_server):
    """The account is the bearer token, or else the user. An account with a full queue gets only its
    own requests rejected.
    """

    async def test(ask):
        async with crowd(ask, CAPACITY + MAX_WAITING, user="many"):
            names = (
                {"user": "many"},
                {"user": "few"},
                {"headers": {"authorization": "Bearer x"}, "user": "many"},
                {},
            )
            for name, status in zip(names, (429, 200, 200, 200), strict=True):
                async with await ask(
                    str(name), priority="interactive", **ENDLESS, **name
                ) as answer:
                    assert answer.status == status
                    answer.close()
            explained = await ask.get("/scheduler?steps=1")
            assert {waiter["key"] for waiter in explained["waiting"]} <= {
                "user-many",
                "user-few",
                "address-127.0.0.1",
                KEY_OF_X,
            }
        # otherwise the next crowd may share what this one computes
        while new_narrow_server.stats()["num_seq_ids_in_use"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with crowd(ask, CAPACITY + 2, headers={"authorization": "bearer x"}):
            explained = await ask.get("/scheduler?steps=1")
            assert {waiter["key"] for waiter in explained["waiting"]} == {KEY_OF_X}

    run(new_narrow_server, test)


KEY_OF_X = "key-2d711642b726b044"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ({"queue_timeout_ms": 150}, "queue_timeout"),
        ({"deadline_ms": 150}, "deadline_exceeded"),
        ({"queue_timeout_ms": 150, "deadline_ms": 60_000}, "queue_timeout"),
        ({"queue_timeout_ms": 60_000, "deadline_ms": 150}, "deadline_exceeded"),
    ],
)
def test_queue_timeout_names_the_limit_that_expired(narrow_server, path, limit, code):
    """504, or an error event in a stream."""

    async def test(ask):
        async with crowd(ask, CAPACITY):
            answer, stream = await asyncio.gather(
                *(ask("late", path, stream=s, **limit) for s in (False, True))
            )
            assert answer.status == 504
            error = (await answer.json())["error"]
            assert (error["type"], error["code"]) == ("timeout", code)
            ((field, value),) = [item for item in limit.items() if item[0].startswith(code[:5])]
            assert field in error["message"]
            assert str(value) in error["message"]
            events = [line for line in (await stream.text()).split("\n\n") if "error" in line]
            assert json.loads(events[0].removeprefix("data: "))["error"] == error

    run(narrow_server, test)


def test_deadline_ends_a_running_request(narrow_server):
    """It ends after some tokens. A queue timeout does not end a running request."""

    async def test(ask):
        answer = await ask(deadline_ms=3000, **ENDLESS)
        *events, error, done, _ = (await answer.text()).split("\n\n")
        assert len(events) > 10
        assert (json.loads(error.removeprefix("data: "))["error"]["code"], done) == (
            "deadline_exceeded",
            "data: [DONE]",
        )
        async with await ask(max_tokens=80, ignore_eos=True, queue_timeout_ms=50) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == 80

    run(narrow_server, test)


# ------------------------------------------------------------------------------ within this process


def with_service(test, clock=time.monotonic, context_length=None, **limits):
    """Run ``test(service, client)`` with an engine that computes one sequence at a time."""

    async def main():
        params = EngineParams(backend="fake", max_num_seqs=1, context_length=context_length)
        engine = Pool(params, limits=QueueLimits(**limits), clock=clock)
        service = Service(ModelTexts(engine, Metrics("fake")), "fake")
        app = create_app(Registry([ServedModel(name="fake", service=service)]), Settings())
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://test"
        ) as client:
            await engine.start()
            try:
                await asyncio.wait_for(test(service, client), PATIENCE)
            finally:
                await engine.close()

    asyncio.run(main())


def test_unavailable_service_gets_503_with_retry_after():
    """The answer comes before the first byte of a stream, in every dialect. The metrics count each
    reason.
    """

    async def refuse(client, reason):
        for path in ("/v1/completions", "/generate", "/generate_stream"):
            answer = await client.post(path, json={"prompt": "a", "stream": True})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
        chat = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
        other = [
            await client.post("/v1/messages", json={**chat, "max_tokens": 1}),
            await client.post("/api/chat", json=chat),
        ]
        assert [answer.status_code for answer in other] == [503, 503]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in other)
        assert other[0].json()["error"]["type"] == "api_error"
        assert isinstance(other[1].json()["error"], str)
        page = (await client.get("/metrics")).text
        assert f'cllm:requests_refused_total{{model_name="fake",reason="{reason}"}} 5.0' in page

    async def test(service, client):
        service.engine.draining = True
        await refuse(client, "draining")
        service.engine.draining, service.engine.members[0].supervisor.num_failed = False, 1
        service.engine.members[0].supervisor.ready = False
        await refuse(client, "not_ready")
        service.engine.members[0].supervisor.ready = True

    with_service(test)


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/chat/completions", "server_error"), ("/v1/messages", "api_error"), ("/api/chat", None)],
)
def test_large_requests_beyond_the_bound_get_503_with_retry_after(path, kind, monkeypatch):
    """In the dialect's form, and counted. Small requests are served meanwhile, and large ones
    afterwards.
    """
    monkeypatch.setattr(off_loop, "MAX_WAITING_BYTES", 3 * off_loop.LARGE)
    free = threading.Event()

    async def test(_, client):
        async def send(unknown):
            body = {"model": "fake", "max_tokens": 1, "messages": MESSAGES, "unknown": unknown}
            headers = {"anthropic-version": "2023-06-01"} if path == "/v1/messages" else {}
            return await client.post(path, json={**body, "stream": False}, headers=headers)

        large = "a" * 2 * off_loop.LARGE
        off_loop.thread.submit(free.wait, PATIENCE)
        try:
            first = asyncio.create_task(send(large))
            while not off_loop.waiting:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.01)
            answer = await send(large)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            error = answer.json()["error"]
            assert kind is None or error["type"] == kind
            assert "Too many large requests" in str(error)
            assert 'reason="large"} 1.0' in (await client.get("/metrics")).text
            assert (await send("a")).status_code == 200
        finally:
            free.set()
        assert (await first).status_code == (await send(large)).status_code == 200

    with_service(test)


def test_long_texts_beyond_the_bound_get_503_with_retry_after(monkeypatch):
    """They would wait to be tokenized. Short texts are tokenized meanwhile, and long ones
    afterwards.
    """
    monkeypatch.setattr("cllm.process.pending_tokens.MAX_WAITING_CHARACTERS", 3 * LONG)
    long = "a" * 2 * LONG

    async def test(service, client):
        async def ask(text):
            return await client.post("/tokenize", json={"content": text})

        os.kill(service.engine.pid, signal.SIGSTOP)
        first = asyncio.create_task(ask(long))
        while not service.engine._texts.pending:  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.01)
        answer = await ask(long)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert "Too many long texts" in answer.json()["error"]["message"]
        assert 'reason="large"} 1.0' in (await client.get("/metrics")).text
        short = asyncio.create_task(ask("a"))
        os.kill(service.engine.pid, signal.SIGCONT)
        assert (await first).status_code == (await short).status_code == 200
        assert (await ask(long)).status_code == 200

    with_service(test)


def test_ticket_of_a_rejection_reserves_a_queue_place():
    """The ticket is valid for one retry, when it is due. The metrics count how tickets were used."""
    now = 1000.0

    def generation(i):
        account = Account("address-127.0.0.1")  # that of the client
        options = SchedulingOptions(account)
        return Generation(str(i), [[i]], SamplingParams(ignore_eos=True), options)

    async def test(service, client):
        nonlocal now

        async def ask(prompt, **headers):
            return await client.post(
                "/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers=headers
            )

        async def count(event):
            page = (await client.get("/metrics")).text
            return float(
                re.search(rf'cllm:queue_reservations_total{{event="{event}",.*}} (.*)', page)[1]
            )

        busy = [service.submit(generation(i)) for i in range(3)]
        refused = await ask("first")
        assert refused.status_code == 429
        ticket = {"x-cllm-retry-ticket": refused.headers["x-cllm-retry-ticket"]}
        early = await ask("first", **ticket)
        assert {name: early.headers[name] for name in ticket} == ticket
        assert early.headers["retry-after"] == refused.headers["retry-after"]
        busy.pop().close()
        now += int(refused.headers["retry-after"])
        newcomer = await ask("second")
        assert newcomer.status_code == 429
        assert newcomer.headers["x-cllm-retry-ticket"] not in ticket.values()
        asked = asyncio.create_task(ask("first", **ticket))
        while not await count("honoured"):  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.01)
        assert (await ask("another", **ticket)).status_code == 429
        for answer in busy:
            answer.close()
        assert (await asked).status_code == 200
        now += 1000.0
        assert (await ask("third", **ticket)).status_code == 200, (
            "a ticket that is not known makes no difference"
        )
        assert [await count(event) for event in ("issued", "honoured", "expired")] == [3, 1, 2]

    with_service(test, clock=lambda: now, requests=2)


def test_tokens_are_counted_while_the_queue_is_full():
    """Counting makes no reservation, because no retry would use it. A generation for the same long
    prompt is rejected.
    """
    prompt = "a" * 20_000

    async def test(service, client):
        with service.submit(Generation("busy", [[1]], SamplingParams(ignore_eos=True))):
            answer = await client.post("/v1/responses", json={"input": prompt})
            assert answer.status_code == 429
            issued = service.engine.backlog.reservations.counts["issued"]
            answer = await client.post("/v1/responses/input_tokens", json={"input": prompt})
            assert (answer.status_code, answer.json()["input_tokens"] > len(prompt)) == (200, True)
            assert service.engine.backlog.reservations.counts["issued"] == issued == 1

    with_service(test, context_length=32_768, requests=0)


def test_long_prompt_is_rejected_without_tokenizing():
    """Tokenizing takes longer than a rejection may take. A short prompt is tokenized, because it
    may share a result.
    """

    async def test(service, _):
        busy = service.submit(Generation("busy", [[1]], SamplingParams(ignore_eos=True)))
        with busy:
            service.engine.tokenize = lambda _: pytest.fail("it was")
            vars(service.vocabulary)["longest_piece"] = 1000
            with pytest.raises(QueueFull):
                await service.encode("a" * 20_000, scheduling=SchedulingOptions())
            with pytest.raises(QueueFull):
                await service.encode_chat(
                    Chat([{"role": "user", "content": "a" * 20_000}]), SchedulingOptions()
                )

    with_service(test, requests=0)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"content": "a" * 4_000}, "too_many_tokens"),
        ({"messages": [{"role": "user", "content": "a" * 4_000}]}, "too_many_tokens"),
        (
            {"messages": [{"role": "user", "content": "<|im_end|>" * 200}]},
            "context_length_exceeded",
        ),
    ],
)
def test_tokenize_rejects_too_long_texts_without_tokenizing(body, code, monkeypatch):
    """A text of control tokens would become a segment for each of them."""
    monkeypatch.setattr("cllm.server.llama_server.tokens.MAX_TOKENS", 300)
    monkeypatch.setattr("cllm.serving.service.MAX_FENCES", 200)

    async def test(service, client):
        service.engine.tokenize = lambda _: pytest.fail("it was")
        answer = await client.post("/tokenize", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert "at least" in answer.json()["error"]["message"]

    with_service(test, context_length=128)


@pytest.mark.parametrize("count", [1, MANY_FENCES - 1, MANY_FENCES])
def test_text_with_many_control_tokens_is_split_in_another_thread(count, monkeypatch):
    """Fenced tokens without text between them are one segment, and no segment is without text."""
    threads, split = set(), Fences.split

    def watched(*arguments):
        threads.add(threading.current_thread() is threading.main_thread())
        return split(*arguments)

    monkeypatch.setattr(Fences, "split", watched)

    async def test(service, client):
        sent, tokenize = [], service.engine.tokenize
        service.engine.tokenize = lambda texts: sent.extend(*texts) or tokenize(texts)
        messages = [{"role": "user", "content": "<|im_end|>" * count}]
        answer = await client.post("/tokenize", json={"messages": messages})
        assert answer.json()["tokens"].count(258) == 1
        assert threads == {count < MANY_FENCES}
        assert len(sent) == 3  # what is fenced, and what is before and after it
        assert all(segment.text for segment in sent)

    with_service(test, context_length=32_768)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_several_prompts_are_tokenized_in_one_call(path):
    async def test(service, client):
        sent, tokenize = [], service.engine.tokenize
        service.engine.tokenize = lambda texts: sent.append(len(texts)) or tokenize(texts)
        body = {"prompt": ["a", "bc", "def"], "max_tokens": 1}
        answer = (await client.post(path, json=body)).json()
        assert [one["text"] for one in answer.get("choices") or answer["results"]] == [*"bdg"]
        assert sent == [3]

    with_service(test)


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"deadline_ms": 50}, "deadline_exceeded"),
        ({"queue_timeout_ms": 50}, "queue_timeout"),
        ({"deadline_ms": 50, "queue_timeout_ms": 60_000}, "deadline_exceeded"),
        ({"deadline_ms": 60_000, "queue_timeout_ms": 50}, "queue_timeout"),
    ],
)
def test_time_limits_of_a_request_apply_while_it_is_tokenized(limits, code):
    """The engine is stopped, so nothing is tokenized."""

    async def test(service, client):
        os.kill(service.engine.pid, signal.SIGSTOP)
        for path in ("/v1/completions", "/v1/chat/completions"):
            field = {"messages": MESSAGES} if "chat" in path else {"prompt": "a"}
            answer = await client.post(path, json=field | limits)
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, code)
            assert " 50." in answer.json()["error"]["message"]
        os.kill(service.engine.pid, signal.SIGCONT)

    with_service(test)


PROMPTS = [  # a body for each route that tokenizes
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/responses/input_tokens", {"input": "a"}),
    ("/v1/messages", {"model": "fake", "max_tokens": 1, "messages": MESSAGES}),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": MESSAGES}),
    ("/api/chat", {"model": "fake", "messages": MESSAGES}),
    ("/api/generate", {"model": "fake", "prompt": "a"}),
    ("/api/embed", {"model": "fake", "input": "a"}),
    ("/api/embeddings", {"model": "fake", "prompt": "a"}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/generate", {"prompt": "a"}),
    ("/generate_stream", {"prompt": "a"}),
    ("/encode", {"text": "a"}),
    ("/tokenize", {"content": "a"}),
    ("/tokenize", {"messages": MESSAGES}),
]


def test_prompt_of_a_client_that_disconnects_is_neither_tokenized_nor_submitted():
    """The engine is stopped, so each prompt still waits when its client disconnects."""

    async def disconnect(service, app, path, body):
        """Send a request and disconnect when its prompt waits. Return the messages of the
        answer.
        """
        parts, gone, answer = [json.dumps(body).encode()], asyncio.Event(), []
        headers = {b"content-type": b"application/json"}
        if path.startswith("/v1/messages"):
            headers[b"anthropic-version"] = b"2023-06-01"

        async def receive():
            if parts:
                return {"type": "http.request", "body": parts.pop()}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            answer.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
        asking = asyncio.create_task(app({**scope, "headers": [*headers.items()]}, receive, send))
        while not service.engine._texts.pending:
            assert not asking.done(), (path, answer)
            await asyncio.sleep(0.01)
        gone.set()
        await asyncio.wait([asking], timeout=30)
        assert asking.done(), path
        return answer

    async def test(service, client):
        os.kill(service.engine.pid, signal.SIGSTOP)
        for path, body in PROMPTS:
            answer = await disconnect(service, client._transport.app, path, body)
            assert answer[0]["status"] == 499, path
            assert not service.engine._texts.pending, path
            assert service.engine.num_unfinished == 0, path
        os.kill(service.engine.pid, signal.SIGCONT)

    with_service(test)


@pytest.mark.parametrize(
    ("limits", "kind"), [({"tokens": 10}, "tokens"), ({"seconds": 5.0}, "requests")]
)
def test_queue_limits_of_tokens_and_seconds_reject_too(limits, kind, monkeypatch):
    """The type of OpenAI's error depends on which limit was reached."""
    monkeypatch.setattr("cllm.process.backlog.MIN_ENDED", 0)

    async def test(service, client):
        with contextlib.ExitStack() as stack:
            for i in range(2):
                generation = Generation(str(i), [[i] * 6], SamplingParams(ignore_eos=True))
                stack.enter_context(service.submit(generation))
            backlog = service.engine._in_flight.backlog
            backlog.observe(Stats(num_seq_ids=1, slot_seconds=3.0))
            backlog.observe = lambda _: None  # the next step has its own
            answer = await client.post("/v1/completions", json={"prompt": [7] * 6})
            assert (answer.status_code, answer.json()["error"]["type"]) == (429, kind)

    with_service(test, **limits)
