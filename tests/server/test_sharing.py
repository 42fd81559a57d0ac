"""Identical requests, concurrent or later, are computed once; on the fake backend."""

import asyncio
import json
import os
import signal
from typing import Any

import openai
import pytest
from conftest import PATIENCE

QUESTION = {
    "model": "fake",
    "prompt": "the same 0",
    "max_tokens": 60,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
# the seventeenth token has no text
TEXT = "".join(map(chr, [*range(ord("1"), ord("1") + 16), *range(1, 44)]))
LONG = {**QUESTION, "max_tokens": 600}  # so that it goes on until all have asked
NEVER_ENDS: dict[str, Any] = {**QUESTION, "max_tokens": 900}


@pytest.fixture(scope="module")
def caching_server(start_server_once):
    return start_server_once(
        "--backend.name", "fake", "--max-num-seqs", "4", "--cache.max-results", "2"
    )


def run(server, test):
    """Run ``test(create)`` with the function ``create`` of the openai client's completions."""

    async def main():
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            await asyncio.wait_for(test(client.completions.create), PATIENCE)

    asyncio.run(main())
    assert server.wait_until_idle()["num_seq_ids_in_use"] == 0


def stream_of(create, **body):
    return create(**body, stream=True, stream_options={"include_usage": True})


async def read(stream):
    """Return the texts of all choices, and the usage."""
    texts, usage = {}, None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        usage = chunk.usage or usage
    return [texts[index] for index in sorted(texts)], usage


def counts(server):
    """Return the numbers of prompt tokens computed, shared requests and cached results."""
    computed = server.wait_until_idle()["num_prefill_tokens"]
    return computed, server.metric("prompts_shared_total"), server.metric("result_cache_hits_total")


def difference(server, before):
    return tuple(after - old for after, old in zip(counts(server), before, strict=True))


def test_identical_concurrent_requests_are_computed_once(narrow_server):
    """Twenty clients on four sequences, streaming or not, each get the whole answer and their own
    usage.
    """
    before = counts(narrow_server)
    body = {**LONG, "prompt": [*b"the same 0"]}  # the stopped engine cannot tokenize

    async def test(create):
        async def read_stream():
            return await read(await stream_of(create, **body))

        asking = asyncio.gather(
            *(read_stream() for _ in range(10)), *(create(**body) for _ in range(10))
        )
        while narrow_server.metric("prompts_shared_total") < before[1] + 19:  # noqa: ASYNC110  # another process's state
            await asyncio.sleep(0.01)
        os.kill(narrow_server.engine_pid(), signal.SIGCONT)
        answers = await asking
        usages = [usage for (text,), usage in answers[:10] if text.startswith(TEXT)]
        usages += [
            answer.usage for answer in answers[10:] if answer.choices[0].text.startswith(TEXT)
        ]
        assert [(usage.prompt_tokens, usage.completion_tokens) for usage in usages] == [
            (10, LONG["max_tokens"])
        ] * 20
        assert (
            sorted(usage.prompt_tokens_details.cached_tokens for usage in usages) == [0] + [10] * 19
        )

    os.kill(narrow_server.engine_pid(), signal.SIGSTOP)  # until all have asked
    run(narrow_server, test)
    assert difference(narrow_server, before) == (10, 19, 0)


def test_late_subscriber_gets_earlier_tokens_at_once(narrow_server):
    """Afterwards it receives new tokens with the first client. When the first client disconnects,
    nothing changes for the second.
    """

    async def test(create):
        body = {**LONG, "prompt": "late 0"}
        first = await stream_of(create, **body)
        early = [(await anext(first)).choices[0].text for _ in range(40)]
        second = await stream_of(create, **body)
        head = (await anext(second)).choices[0].text
        assert len(head) >= 35
        assert head.startswith("".join(early)[:35])
        await first.close()
        (rest,), usage = await read(second)
        assert (head + rest).startswith(TEXT)
        assert usage.completion_tokens == 600

    run(narrow_server, test)


def test_shared_computation_stops_when_the_last_client_leaves(narrow_server):
    """Long before its end."""
    steps = narrow_server.stats()["num_steps"]

    async def test(create):
        streams = [await stream_of(create, **NEVER_ENDS) for _ in range(3)]
        for stream in streams:
            await anext(stream)
            await stream.close()

    run(narrow_server, test)
    assert narrow_server.wait_until_idle()["num_steps"] - steps < NEVER_ENDS["max_tokens"] / 2


def test_stop_string_ends_the_requests_that_share_it(narrow_server):
    """Requests with other parameters are computed separately."""

    async def test(create):
        stopped = [create(**QUESTION, stop=["78"]) for _ in range(3)]
        *stopped, other = await asyncio.gather(*stopped, create(**QUESTION, stop=["9"]))
        assert [answer.choices[0].text for answer in stopped] == ["123456"] * 3
        assert {answer.usage.completion_tokens for answer in stopped} == {8}
        assert other.choices[0].text == "12345678"

    run(narrow_server, test)


def test_only_seeded_choices_are_shared(narrow_server):
    """Without a seed, every request samples its own choices."""
    before = counts(narrow_server)

    async def test(create):
        chance = {**LONG, "temperature": 1.0}
        seeded = await asyncio.gather(*(create(**chance, seed=7, n=3) for _ in range(4)))
        assert len({tuple(choice.text for choice in answer.choices) for answer in seeded}) == 1
        await asyncio.gather(*(create(**chance) for _ in range(4)))

    run(narrow_server, test)
    assert difference(narrow_server, before)[1] == 3


def test_equal_prompts_in_one_request_are_computed_once(narrow_server):
    """Each prompt has its own choice in the answer."""

    async def test(create):
        answer = await create(**{**QUESTION, "prompt": ["twice 0", "other A", "twice 0"]})
        assert [choice.text[0] for choice in answer.choices] == ["1", "B", "1"]
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert 7 <= cached < 14, "the second prompt, and first tokens of idle sequences"

    run(narrow_server, test)


def test_requests_with_a_deadline_do_not_share_with_requests_without(narrow_server):
    async def test(create):
        forever = await stream_of(create, **NEVER_ENDS)
        await anext(forever)
        body = {**NEVER_ENDS, "extra_body": {"ignore_eos": True, "deadline_ms": 100}}
        with pytest.raises(openai.InternalServerError) as caught:
            await create(**body)
        assert caught.value.code == "deadline_exceeded"
        await forever.close()

    run(narrow_server, test)


# ------------------------------------------------------------------------------------------ results


def test_repeated_request_gets_the_cached_result(caching_server):
    """No engine step is needed; all prompt tokens are reported as cached, and the result can be
    streamed.
    """

    async def ask(create):
        whole = await create(**QUESTION, n=2)
        texts, usage = await read(await stream_of(create, **QUESTION, n=2))
        assert [choice.text for choice in whole.choices] == texts == [TEXT, TEXT]
        assert {choice.finish_reason for choice in whole.choices} == {"length"}
        return [whole.usage, usage]

    async def test(create):
        first, *others = await ask(create) + await ask(create)
        steps = caching_server.wait_until_idle()["num_steps"]
        assert await ask(create) == others[:2]
        assert caching_server.stats()["num_steps"] == steps
        assert first.prompt_tokens_details.cached_tokens == 0
        for usage in others:
            assert (usage.prompt_tokens, usage.completion_tokens) == (10, 120)
            assert usage.prompt_tokens_details.cached_tokens == 10

    before = counts(caching_server)
    run(caching_server, test)
    assert difference(caching_server, before)[1:] == (0, 5)


def test_native_dialect_uses_cached_results(caching_server):
    """The event stream is the same in every byte except the id."""
    body = {"prompt": "native 0", "max_tokens": 5, "temperature": 0}
    answers = [caching_server.client.post("/generate_stream", json=body).text for _ in range(2)]
    texts = []
    for answer in answers:
        events = [
            json.loads(event.removeprefix("data: ")) for event in answer.split("\n\n") if event
        ]
        texts.append("".join(event["token"] for event in events))
        assert (
            events[-1]["done"],
            events[-1]["finish_reason"],
            events[-1]["generated_tokens"],
        ) == (True, "length", 5)
    assert texts == ["12345", "12345"]


def test_result_with_a_stop_string_is_cached(caching_server):
    """Its text ends before the stop string, however often it is returned."""
    before = counts(caching_server)

    async def test(create):
        for _ in range(3):
            answer = await create(**QUESTION, stop=["78"])
            assert (answer.choices[0].text, answer.usage.completion_tokens) == ("123456", 8)
            await asyncio.to_thread(caching_server.wait_until_idle)

    run(caching_server, test)
    assert difference(caching_server, before)[2] == 2


def test_oldest_cached_result_is_forgotten(caching_server):
    """The cache holds two results."""
    before = counts(caching_server)

    async def test(create):
        for name in "ABCCBA":
            await create(**{**QUESTION, "prompt": f"{name} 0"})

    run(caching_server, test)
    assert difference(caching_server, before)[2] == 2
