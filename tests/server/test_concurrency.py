"""Batching, prefix reuse and cancelling never change an answer: many concurrent requests with known
answers.
"""

import asyncio
import random

import aiohttp
import openai
import pytest
from conftest import repeat

pytestmark = pytest.mark.llama

NUM_STREAMS = 64
NUM_ROUNDS = repeat(20, 2)


def ask_all(server, questions, ask, num_rounds=NUM_ROUNDS):
    """Call ``ask(client, question, rng)`` for all questions concurrently, ``num_rounds`` times, in
    changing order.
    """
    rng = random.Random(5)

    async def run():
        limits = {"max_retries": 0, "timeout": 120}
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", **limits
        ) as client:
            for i in range(num_rounds):
                if i % 2:
                    rng.shuffle(questions)
                await asyncio.gather(*(ask(client, question, rng) for question in questions))

    asyncio.run(run())


async def stream(client, question):
    return await client.chat.completions.create(
        model="cllm-builtin",
        messages=question.messages,
        tools=question.tools or openai.NOT_GIVEN,
        temperature=0,
        stream=True,
    )


async def read(chunks):
    """Return the streamed message as the model wrote it."""
    text, name, arguments = "", "", ""
    async for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for call in delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments
    return (
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        if name
        else text
    )


def test_many_concurrent_streams_get_right_answers(builtin_server, known_questions):
    """64 streams at a time on 24 sequence ids, in order and out of order."""

    async def ask(client, question, rng):
        assert await read(await stream(client, question)) == question.answer

    ask_all(builtin_server, known_questions(NUM_STREAMS, 11), ask)
    assert builtin_server.wait_until_idle()["num_seq_ids_in_use"] == 0


def test_cancelled_streams_free_their_sequences(builtin_server, known_questions):
    """A third of the clients disconnects at a random moment. The others get right answers, and all
    sequence ids are free afterwards.
    """

    async def ask(client, question, rng):
        if rng.random() < 0.67:
            assert await read(await stream(client, question)) == question.answer
            return
        try:
            async with asyncio.timeout(rng.random() * 0.5):
                chunks = await stream(client, question)
                for _ in range(rng.randrange(8)):
                    await anext(aiter(chunks), None)
                await chunks.close()
        except TimeoutError:
            pass

    ask_all(builtin_server, known_questions(NUM_STREAMS, 11), ask)
    stats = builtin_server.wait_until_idle()
    assert stats["num_seq_ids_in_use"] == stats["num_cells_held"] == 0


@pytest.mark.parametrize("streaming", [True, False])
def test_disconnect_frees_all_sequences_of_a_request(builtin_server, streaming):
    """In the middle of a long answer with several choices, streamed or not."""
    body = {"prompt": "Once", "max_tokens": 900, "n": 4, "ignore_eos": True, "stream": streaming}
    steps = builtin_server.stats()["num_steps"]

    async def go_away():
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(
                session.post(f"{builtin_server.url}/v1/completions", json=body)
            )
            while builtin_server.stats()["num_running"] < 4:  # noqa: ASYNC110  # another process's state
                await asyncio.sleep(0.005)
            request.cancel()
            (answer,) = await asyncio.gather(request, return_exceptions=True)
            if isinstance(answer, aiohttp.ClientResponse):  # its head had come
                answer.close()

    asyncio.run(go_away())
    stats = builtin_server.wait_until_idle()
    assert stats["num_seq_ids_in_use"] == 0
    assert stats["num_steps"] - steps < body["max_tokens"] / 2


def test_seed_gives_same_text_alone_and_with_neighbours(builtin_server):
    """Sixteen concurrent requests with other parameters do not change the text."""
    question = {"role": "user", "content": "Tell a story about a fox named Mia in the garden."}

    async def babble(client, seed, **more):
        answer = await client.chat.completions.create(
            model="cllm-builtin",
            messages=[question],
            seed=seed,
            max_tokens=60,
            temperature=4.0,
            top_p=1.0,
            **more,
        )
        return answer.choices[0].message.content

    async def run():
        async with openai.AsyncOpenAI(
            base_url=f"{builtin_server.url}/v1", api_key="none", max_retries=0
        ) as client:
            wild = {"top_k": 0, "min_p": 0.0}
            alone = await babble(client, 42, extra_body=wild)
            company = [
                babble(
                    client, i, presence_penalty=i / 10, extra_body={"top_k": 5 * i, "min_p": 0.0}
                )
                for i in range(1, 17)
            ]
            together = await asyncio.gather(babble(client, 42, extra_body=wild), *company)
        assert together[0] == alone
        assert len(set(together)) > 8

    asyncio.run(run())


def test_reused_connections_serve_all_streams(builtin_server):
    """A client that reuses its connections gets every stream in full."""
    body = {
        "messages": [{"role": "user", "content": "What is 27 plus 45?"}],
        "temperature": 0,
        "stream": True,
    }

    async def worker(session):
        for _ in range(repeat(25, 5)):
            async with session.post(
                f"{builtin_server.url}/v1/chat/completions", json=body
            ) as answer:
                text = await answer.text()
                assert answer.status == 200
                assert text.endswith("data: [DONE]\n\n")

    async def run():
        connector = aiohttp.TCPConnector(limit=16)
        async with aiohttp.ClientSession(connector=connector) as session:
            await asyncio.gather(*(worker(session) for _ in range(16)))

    asyncio.run(run())
