"""``AsyncLLM``: a model in the caller's process, for event loops."""

import asyncio
import inspect
import json
import time
from contextlib import aclosing

import pytest
from conftest import PATIENCE, is_right

from cllm import LLM, AsyncLLM, BadRequest, EngineError, SamplingParams, StartupError
from cllm.local import async_llm
from cllm.scheduler.report import collect_stats

GREEDY = SamplingParams(temperature=0, max_tokens=5)
LONG = SamplingParams(temperature=0, ignore_eos=True)


def run(work, **settings):
    """Return what ``work`` returns for an AsyncLLM on the fake backend."""

    async def main():
        async with AsyncLLM(
            **{"backend_name": "fake", "scheduler_max_num_seqs": 3, **settings}
        ) as llm:
            return await asyncio.wait_for(work(llm), PATIENCE)

    return asyncio.run(main())


def test_methods_have_the_arguments_of_llm():
    """Both classes write their signatures out, which help() and type checkers show."""
    methods = [name for name, _ in inspect.getmembers(AsyncLLM, inspect.isfunction)]
    shared = {name for name in methods if name[0] != "_" and hasattr(LLM, name)}
    assert {"generate", "chat", "stream_chat", "rerank"} < shared
    for name in shared:
        own, model = (inspect.signature(getattr(kind, name)) for kind in (AsyncLLM, LLM))
        assert own.parameters == model.parameters, name


def slow_down(llm) -> None:
    """Let each step take some milliseconds, so that a long text is not finished early."""
    step = llm._model._engine.step
    llm._model._engine.step = lambda: (time.sleep(0.005), step())[1]


async def until(llm, number: int) -> None:
    """Wait until the engine has this many unfinished sequences."""
    stats = None
    while stats is None or stats.num_running + stats.num_waiting != number:
        await asyncio.sleep(0.001)
        stats = collect_stats(llm._model._engine.scheduler)


def test_concurrent_requests_get_their_own_texts():
    """There are more of them than places in the batch."""

    async def work(llm):
        return await asyncio.gather(*(llm.generate([c] * 2, GREEDY) for c in "abcdefgh"))

    for prompt, done in zip("abcdefgh", run(work), strict=True):
        expected = "".join(chr(ord(prompt) + i) for i in range(1, 6))
        assert [one.text for one in done] == [expected] * 2


def test_concurrent_requests_share_the_batch():
    """Each step computes a token for both."""

    async def work(llm):
        sizes = []
        forward = llm._model._backend.forward
        llm._model._backend.forward = lambda batch: (
            sizes.append(len(batch.rows)),
            forward(batch),
        )[1]
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        await asyncio.gather(llm.generate("a", params), llm.generate("b", params))
        return sizes

    assert run(work).count(2) > 100


def test_results_equal_those_of_llm():
    """All methods, with the same arguments."""
    params = [SamplingParams(temperature=0, max_tokens=2), SamplingParams(temperature=0, n=2)]
    message = [{"role": "user", "content": "a"}]

    async def work(llm):
        return [
            await llm.generate(["x", "b"], params),
            await llm.chat(message, GREEDY),
            await llm.chat([message, message], GREEDY),
            await llm.encode("abc"),
            await llm.encode_chat(message),
            await llm.tokenize("abc"),
            await llm.detokenize([97, 98]),
            (await llm.embed(["a", "bc"])).tolist(),
            await llm.score("a", ["a", "b"]),
            await llm.rerank("a", ["b", "a"], 1),
            llm.info.context_length,
        ]

    with LLM(backend_name="fake", scheduler_max_num_seqs=3) as llm:
        assert run(work) == [
            llm.generate(["x", "b"], params),
            llm.chat(message, GREEDY),
            llm.chat([message, message], GREEDY),
            llm.encode("abc"),
            llm.encode_chat(message),
            llm.tokenize("abc"),
            llm.detokenize([97, 98]),
            llm.embed(["a", "bc"]).tolist(),
            llm.score("a", ["a", "b"]),
            llm.rerank("a", ["b", "a"], 1),
            llm.info.context_length,
        ]


def test_streams_give_what_generate_and_chat_give():
    message = [{"role": "user", "content": "a"}]

    async def work(llm):
        streams = [llm.stream(["a", "b"], GREEDY), llm.stream_chat(message, GREEDY)]
        texts = []
        for stream in streams:
            found = {}
            async for piece in stream:
                found[piece.prompt] = found.get(piece.prompt, "") + piece.text
            texts.append([found[i] for i in sorted(found)])
        generated = [one.text for one in await llm.generate(["a", "b"], GREEDY)]
        return texts, [generated, [(await llm.chat(message, GREEDY)).text]]

    streamed, whole = run(work)
    assert streamed == whole


def test_cancelled_task_frees_its_sequences():
    """Others go on."""

    async def work(llm):
        slow_down(llm)
        other = asyncio.create_task(llm.generate("c", SamplingParams(temperature=0, max_tokens=9)))
        task = asyncio.create_task(llm.generate(["a", "b"], LONG))
        await until(llm, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (done,) = await other
        await until(llm, 0)
        return done.text

    assert run(work) == "defghijkl"


def test_leaving_a_stream_early_frees_its_sequences():
    """With aclosing immediately, else when the iterator is no longer used."""

    async def work(llm):
        slow_down(llm)
        async with aclosing(llm.stream(["a", "b"], LONG)) as pieces:
            async for _ in pieces:
                break
        async for _ in llm.stream(["a", "b"], LONG):
            break
        await until(llm, 0)

    run(work)


def test_timeout_aborts_a_request():
    async def work(llm):
        slow_down(llm)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await llm.generate("a", SamplingParams(temperature=0, ignore_eos=True, n=2))
        await until(llm, 0)
        return (await llm.generate("a", GREEDY))[0].text

    assert run(work) == "bcdef"


def test_wrong_arguments_raise_bad_request_and_others_go_on():
    async def work(llm):
        other = asyncio.create_task(llm.generate("a", GREEDY))
        for call, param in [
            (llm.generate(5), "prompts"),
            (llm.generate(["a", "b"], [GREEDY]), "params"),
            (llm.generate("a", priority="high"), "priority"),
            (llm.generate([[1] * 10_000]), "prompts[0]"),
            (llm.chat([]), "messages"),
            (llm.generate("a", SamplingParams(grammar="start: nothing")), "grammar"),
            (anext(llm.stream("a", 5)), "params"),
            (llm.embed([""]), "texts[0]"),
            (llm.rerank("a", "text"), "documents"),
        ]:
            with pytest.raises(ValueError) as caught:
                await call
            assert isinstance(caught.value, BadRequest)
            assert caught.value.param == param
        return (await other)[0].text

    assert run(work) == "bcdef"


def test_use_before_load_and_after_close_raises_runtime_error():
    """A task that waits for an answer while another one closes gets it, too."""

    async def main():
        llm = AsyncLLM(backend_name="fake")
        with pytest.raises(RuntimeError, match="not loaded"):
            await llm.generate("a")
        with pytest.raises(RuntimeError, match="not loaded"):
            _ = llm.info
        await llm.close()
        await llm.load()
        await llm.load()
        slow_down(llm)
        task = asyncio.create_task(llm.generate("a", LONG))
        await until(llm, 1)
        await llm.close()
        await llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            await task
        for call in (llm.generate("a"), llm.embed("a"), llm.encode("a"), anext(llm.stream([[1]]))):
            with pytest.raises(RuntimeError, match="closed"):
                await call

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_settings_are_checked_when_it_is_made():
    with pytest.raises(TypeError, match="kv_layot"):
        AsyncLLM(kv_layot="unified")
    with pytest.raises(StartupError, match=r"kv\.layout"):
        AsyncLLM(kv_layout="other")


def test_failing_engine_ends_requests_with_an_error_and_is_usable_again(monkeypatch):
    async def work(llm):
        with monkeypatch.context() as patch:
            patch.setattr(llm._model._engine, "step", lambda: 1 / 0)
            with pytest.raises(EngineError, match="division"):
                await llm.generate("a", GREEDY)
        return (await llm.generate("a", GREEDY))[0].text

    assert run(work) == "bcdef"


def test_event_loop_that_ends_early_leaves_no_request_behind():
    """One AsyncLLM in two event loops; the first one is closed while a request runs."""
    llm = AsyncLLM(backend_name="fake")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(llm.load())
    slow_down(llm)
    task = loop.create_task(llm.generate("a", LONG))

    loop.run_until_complete(until(llm, 1))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()

    async def later():
        await until(llm, 0)
        done = await llm.generate("a", GREEDY)
        await llm.close()
        return done[0].text

    assert asyncio.run(asyncio.wait_for(later(), PATIENCE)) == "bcdef"
    task.get_coro().close()


def test_priorities_decide_which_waiting_request_is_next():
    """One place: it is taken when three requests of different classes arrive."""

    async def work(llm):
        order = []

        async def ask(priority):
            await llm.generate("a", GREEDY, priority=priority)
            order.append(priority)

        slow_down(llm)
        first = asyncio.create_task(llm.generate("a", LONG))
        await until(llm, 1)
        tasks = [
            asyncio.create_task(ask(priority)) for priority in ("batch", "normal", "interactive")
        ]
        await until(llm, 4)
        first.cancel()
        await asyncio.gather(*tasks)
        return order

    assert run(work, scheduler_max_num_seqs=1) == ["interactive", "normal", "batch"]


@pytest.mark.llama
def test_concurrent_chats_get_correct_answers_from_the_builtin_model(
    known_questions, builtin_model
):
    questions = known_questions(39, 17)
    greedy = SamplingParams(temperature=0)

    async def main():
        sizes = {"model_max_context_length": 768, "scheduler_max_num_seqs": 8}
        async with AsyncLLM(builtin_model, **sizes) as llm:
            return await asyncio.gather(
                *(llm.chat(asked.messages, greedy, asked.tools) for asked in questions)
            )

    assert all(map(is_right, asyncio.run(main()), questions))


@pytest.mark.llama
def test_stream_chat_gives_reasoning_and_tool_calls(builtin_path):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_time", "parameters": parameters}}
    greedy = SamplingParams(temperature=0)

    async def main():
        async with AsyncLLM(model_max_context_length=512) as llm:
            question = [{"role": "user", "content": "What is 27 plus 45?"}]
            pieces = [
                piece async for piece in llm.stream_chat(question, greedy, enable_thinking=True)
            ]
            assert "".join(piece.reasoning for piece in pieces).startswith("20 + 40 = 60")
            assert "".join(piece.text for piece in pieces) == "72"
            question = [{"role": "user", "content": "What time is it in Oslo?"}]
            pieces = [piece async for piece in llm.stream_chat(question, greedy, [tool])]
        calls = [call for piece in pieces for call in piece.tool_calls]
        assert [call.name for call in calls if call.name] == ["get_time"]
        assert json.loads("".join(call.arguments for call in calls)) == {"city": "Oslo"}
        assert pieces[-1].finish_reason == "tool_calls"

    asyncio.run(main())


def test_loads_at_once_share_one_model(monkeypatch):
    made = []
    load = async_llm.LocalModel
    monkeypatch.setattr(async_llm, "LocalModel", lambda *given: (made.append(1), load(*given))[1])

    async def main():
        llm = AsyncLLM(backend_name="fake")
        await asyncio.gather(*(llm.load() for _ in range(4)))
        await llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            await llm.load()

    asyncio.run(main())
    assert len(made) == 1
