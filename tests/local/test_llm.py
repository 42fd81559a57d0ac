"""``LLM``: the engine in the caller's process."""

import asyncio
import gc
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from conftest import PATIENCE, is_right
from pydantic import BaseModel, Field, field_validator

import cllm
from cllm import LLM, AsyncLLM, Output, SamplingParams
from cllm.backends.registry import choose_backend
from cllm.engine.build import build_backend
from cllm.engine.params import EngineParams
from cllm.errors import BadRequest, StartupError
from cllm.local import model
from cllm.scheduler.report import collect_stats

GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def fake():
    with LLM(backend_name="fake", scheduler_max_num_seqs=3) as llm:
        yield llm


def test_prompts_beyond_max_num_seqs_are_answered_in_order(fake):
    """The fake backend counts up from each prompt's last byte."""
    completions = fake.generate(list("abcdefgh"), GREEDY)
    assert [done.text for done in completions] == [
        "".join(chr(ord(c) + i) for i in range(1, 6)) for c in "abcdefgh"
    ]
    assert {done.finish_reason for done in completions} == {"length"}
    assert {done.prompt_tokens for done in completions} == {1}


def test_prompts_may_be_text_or_token_ids(fake):
    """One prompt or a list of them."""
    assert [done.text for done in fake.generate("a", GREEDY)] == ["bcdef"]
    assert [done.text for done in fake.generate([97], GREEDY)] == ["bcdef"]
    assert [done.text for done in fake.generate([[97], "b"], GREEDY)] == ["bcdef", "cdefg"]


def test_grammars(fake):
    """A grammar that cannot be compiled raises BadRequest."""
    bound = SamplingParams(temperature=0, n=2, grammar='start: "b" /[0-9]/')
    assert [output.text for output in fake.generate("a", bound)[0].outputs] == ["b0", "b0"]
    with pytest.raises(BadRequest):
        fake.generate(["a", "b"], SamplingParams(grammar="start: nothing"))
    assert fake.generate("a", GREEDY)[0].text == "bcdef"


def test_n_outputs_end_before_the_stop_string(fake):
    (done,) = fake.generate("a", SamplingParams(temperature=0, n=2, stop=("ef",)))
    assert [output.text for output in done.outputs] == ["bcd", "bcd"]
    assert done.finish_reason == "stop"


def test_leaving_a_stream_early_aborts_its_sequences(fake):
    for piece in fake.stream(["a", "b"], SamplingParams(temperature=0)):
        assert piece.text in "bc"
        break
    fake.generate("a", GREEDY)
    stats = collect_stats(fake._engine.scheduler)
    assert stats.num_seq_ids_in_use == stats.num_running == stats.num_waiting == 0


def test_prompt_that_can_never_fit_is_rejected(fake):
    """The prompt is too long, empty, or has ids outside the vocabulary. The engine keeps working."""
    for prompt in ([1] * 5000, [], [5, 999]):
        with pytest.raises(BadRequest):
            fake.generate([prompt], GREEDY)
    with pytest.raises(BadRequest):
        fake.generate("a", SamplingParams(logit_bias={999: 1}))
    assert fake.generate("a", GREEDY)[0].text == "bcdef"


def test_logprobs_are_reported_only_on_request(fake):
    """This holds for the output and the prompt, and with max_tokens 0."""
    (told,) = fake.generate(
        "abx", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0)
    )
    assert len(told.outputs[0].logprobs) == len(told.outputs[0].tokens) == 3
    assert told.outputs[0].logprobs[0].top[0][0] == ord("y")
    assert [one.logprob > -1 for one in told.prompt_logprobs] == [True, False]
    (scored,) = fake.generate("abx", SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (scored.outputs[0].tokens, scored.finish_reason, len(scored.prompt_logprobs)) == (
        [],
        "length",
        2,
    )
    assert fake.generate("abx", GREEDY)[0].outputs[0].logprobs == []


def test_options_are_checked_like_settings():
    """An error names the option."""
    with pytest.raises(TypeError, match="kv_layot"):
        LLM(kv_layot="unified")
    with pytest.raises(StartupError, match=r"kv\.layout"):
        LLM(kv_layout="other")
    with pytest.raises(StartupError, match="no file"):
        LLM("missing.gguf")


def test_ctrl_c_aborts_the_load(monkeypatch):
    """KeyboardInterrupt is raised immediately, although C code loads the model and drops exceptions
    from its callbacks.
    """
    told = threading.Event()

    def build(params, progress):
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                progress(0.5)
                time.sleep(0.01)
        except InterruptedError:
            told.set()
            raise

    monkeypatch.setattr(model, "build_backend", build)
    with pytest.raises(KeyboardInterrupt):
        LLM(backend_name="fake")
    assert told.is_set()


@pytest.mark.llama
def test_exception_in_progress_aborts_the_load(builtin_model):
    """The caller gets the exception."""
    shares = []

    def progress(share):
        shares.append(share)
        raise InterruptedError

    params = EngineParams(
        path=builtin_model,
        backend=choose_backend("auto", Path(builtin_model)),
        context_length=64,
        max_num_seqs=1,
    )
    with pytest.raises(InterruptedError):
        build_backend(params, progress)
    assert len(shares) == 1


@pytest.mark.llama
@pytest.mark.parametrize(
    ("builtin_model", "layout"),
    [
        ("llama_cpp", "partitioned"),
        ("llama_cpp", "unified"),
        pytest.param("torch", "unified", marks=pytest.mark.torch),
    ],
    indirect=["builtin_model"],
)
def test_batch_of_all_kinds_of_questions_is_answered_correctly(
    known_questions, builtin_model, layout
):
    """In all layouts, and again from the cache."""
    questions, sizes = known_questions(39, 7), {"model_max_context_length": 768}
    with LLM(builtin_model, scheduler_max_num_seqs=8, kv_layout=layout, **sizes) as llm:
        prompts = [llm.encode_chat(question.messages, question.tools) for question in questions]
        for _ in range(2):
            completions = llm.generate(prompts, SamplingParams(temperature=0))
            assert [done.text for done in completions] == [
                question.answer for question in questions
            ]


@pytest.mark.llama
def test_parked_sequences_keep_their_answers(known_questions, builtin_model):
    """Eight sequences in a pool for about two, admitted as if answers were short, so some are
    parked.
    """
    questions = known_questions(8, 9, ["counting", "stories"])
    with LLM(
        builtin_model,
        model_max_context_length=400,
        scheduler_max_num_seqs=8,
        kv_layout="unified",
        kv_max_memory_mb=1 if builtin_model.endswith(".gguf") else 2,  # float16, float32
    ) as llm:
        assert llm.info.num_cells < 500
        llm._engine.scheduler.sequences.length_estimates.output = 8
        prompts = [llm.encode_chat(question.messages) for question in questions]
        completions = llm.generate(prompts, SamplingParams(temperature=0))
        assert [done.text for done in completions] == [question.answer for question in questions]
        assert llm._engine.scheduler.statistics.num_parked > 0


@pytest.mark.llama
@pytest.mark.parametrize("seed", range(3))
def test_moves_between_streams_keep_answers(known_questions, monkeypatch, seed):
    """Before each step, sequences and idle prefixes are exchanged at random."""
    questions = known_questions(12, 11, ["counting", "stories", "copying"])
    draw = random.Random(seed)
    with LLM(scheduler_max_num_seqs=6) as llm:
        assert llm.info.layout == "paged"

        def exchange(rows, num_decoding, running, kv_cache):
            operations = []
            for _ in range(draw.randrange(4)):
                first, second = draw.sample(range(6), 2)
                operations.append(kv_cache.swap(first, second))
                for seq in running:
                    seq.seq_id = {first: second, second: first}.get(seq.seq_id, seq.seq_id)
            return operations

        monkeypatch.setattr("cllm.scheduler.scheduler.arrange", exchange)
        prompts = [llm.encode_chat(question.messages) for question in questions]
        completions = llm.generate(prompts, SamplingParams(temperature=0))
        assert [done.text for done in completions] == [question.answer for question in questions]


@pytest.mark.llama
@pytest.mark.parametrize(
    "kind", ["mamba", "lfm2", "qwen35", "qwen35_mtp", "nemotron_h", "gemma3", "gpt-oss"]
)
def test_other_architectures_share_and_reuse_prefixes(tiny_model, kind):
    """The common prefix of four prompts is computed once and then found again. The answers are
    those of each prompt alone.
    """
    path, params = (
        str(tiny_model(kind)),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    )
    settings = {"model_max_context_length": 384, "scheduler_max_num_seqs": 4}
    shared = [(7 * i) % 250 for i in range(150)]
    prompts = [[*shared, *range(10 * i, 10 * i + 5 + i)] for i in range(4)]
    with LLM(path, **settings, kv_ram_cache_mb=0) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0].tokens for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) > 1
    with LLM(path, **settings) as llm:
        together = llm.generate(prompts, params)
        assert [done.outputs[0].tokens for done in together] == alone
        assert sorted(done.cached_tokens for done in together) == [0, 150, 150, 150]
        talk = [*prompts[1], *alone[1], 33, 34, 35]
        assert llm.generate([talk], params)[0].cached_tokens >= len(prompts[1]) + 5
        again = llm.generate(prompts, params)
        assert [done.outputs[0].tokens for done in again] == alone
        assert all(done.cached_tokens >= 150 for done in again)


@pytest.mark.llama
def test_copied_texts_are_guessed(known_questions, builtin_model):
    """Most of the guesses from the prompt are right, and the answers are those without guesses."""
    questions = known_questions(6, 5, ["copying"])
    greedy = SamplingParams(temperature=0)
    with LLM(builtin_model, model_max_context_length=768, scheduler_max_num_seqs=4) as llm:
        done = llm.chat([question.messages for question in questions], greedy)
        assert all(map(is_right, done, questions))
        stats = collect_stats(llm._engine.scheduler)
    assert stats.num_accepted > 0.5 * stats.num_guesses > 0


@pytest.mark.llama
def test_each_turn_computes_only_what_is_new(known_questions, builtin_model):
    """Twelve turns."""
    messages = []
    with LLM(builtin_model, model_max_context_length=2048, scheduler_max_num_seqs=2) as llm:
        for question in known_questions(12, 4, ["colours", "capitals", "spelling"]):
            messages += question.messages
            done = llm.chat(messages, SamplingParams(temperature=0))
            assert done.text == question.answer
            messages.append({"role": "assistant", "content": done.text})
            if len(messages) > 2:
                assert done.prompt_tokens - done.cached_tokens < 60


@pytest.mark.llama
def test_readme_example_runs(builtin_path, capsys):
    """It prints what the README promises."""
    page = (Path(__file__).parents[2] / "README.md").read_text()
    (example,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "LLM()" in block
    )
    exec(example, {})
    assert capsys.readouterr().out == "72\ng-a-r-d-e-n\n3 4 5 6 7 8 9\n"


def test_similar_texts_have_similar_embeddings():
    llm = LLM(backend_name="fake")
    vectors = llm.embed(["hello", "hello there", "zzzz"])
    assert vectors.shape == (3, llm.info.embedding_size)
    assert vectors[0] @ vectors[0] == pytest.approx(1, abs=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    assert llm.embed("hello").shape == (1, llm.info.embedding_size)
    assert llm.embed([]).shape == (0, llm.info.embedding_size)
    for wrong in (["a", ""], ["a" * 100_000]):
        with pytest.raises(BadRequest):
            llm.embed(wrong)
    assert llm.generate("a")[0].text


def test_threads_share_one_engine(fake):
    """Four threads get their own texts, batched with those of the others."""
    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(lambda prompt: fake.generate([prompt] * 3, GREEDY), "abcdefgh"))
    for prompt, completions in zip("abcdefgh", done, strict=True):
        assert [one.text for one in completions] == [
            "".join(chr(ord(prompt) + i) for i in range(1, 6))
        ] * 3


def test_concurrent_threads_do_not_change_each_others_texts(fake):
    """Some leave streams early, embed texts, or send grammars that are rejected."""

    def work(i):
        if i % 4 == 0:
            return next(fake.stream("a", SamplingParams(temperature=0))).text
        if i % 4 == 1:
            return fake.embed(["hello", "a"]).shape[0]
        if i % 4 == 2:
            with pytest.raises(BadRequest):
                fake.generate("a", SamplingParams(grammar="start: nothing"))
        return fake.generate("a", GREEDY)[0].text

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(24))) == ["b", 2, "bcdef", "bcdef"] * 6
    stats = collect_stats(fake._engine.scheduler)
    assert stats.num_seq_ids_in_use == stats.num_running == stats.num_waiting == 0


def test_unread_stream_does_not_block_other_threads(fake):
    """It is computed with the others, and its pieces wait for the reader."""
    stream = fake.stream("a", GREEDY)
    assert next(stream).text == "b"
    assert fake.generate("b", GREEDY)[0].text == "cdefg"
    assert "".join(piece.text for piece in stream) == "cdef"


def test_engine_is_usable_after_an_exception_in_a_step(fake, monkeypatch):
    """The exception reaches the thread that ran the step; the next thread can step."""
    with monkeypatch.context() as patch:
        patch.setattr(fake._engine, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fake.generate("a", GREEDY)
    assert fake.generate("a", GREEDY)[0].text == "bcdef"


def test_closed_llm_raises_runtime_error():
    """Every method raises it, and so does an open stream. Closing twice is not an error."""
    llm = LLM(backend_name="fake")
    stream = llm.stream("a", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    message = [{"role": "user", "content": "a"}]
    calls = [
        lambda: next(stream),
        lambda: llm.generate("a"),
        lambda: llm.generate([[1, 2]]),
        lambda: llm.chat(message),
        lambda: llm.embed("a"),
        lambda: llm.encode("a"),
        lambda: llm.encode_chat(message),
        lambda: list(llm.stream([[1]])),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.llama
def test_closed_llm_leaves_its_prefixes_on_disk(builtin_model, tmp_path):
    cached = []
    for _ in range(2):
        with LLM(builtin_model, kv_disk_cache=str(tmp_path)) as llm:
            (done,) = llm.generate([[*range(20, 120)]], GREEDY)
            cached.append(done.cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= 64


def test_close_waits_for_the_step_of_another_thread():
    """The model is freed when no thread uses it, and running generations end."""
    llm, freed = LLM(backend_name="fake"), []
    stepping, go_on = threading.Event(), threading.Event()
    step = llm._engine.step

    def slow_step():
        stepping.set()
        assert go_on.wait(60)
        assert not freed
        return step()

    llm._engine.step, llm._backend.close = slow_step, lambda: freed.append(True)
    with ThreadPoolExecutor(2) as threads:
        generating = threads.submit(llm.generate, "a", SamplingParams(temperature=0))
        assert stepping.wait(60)
        closing = threads.submit(llm.close)
        with pytest.raises(TimeoutError):
            closing.result(0.05)
        go_on.set()
        closing.result(60)
        with pytest.raises(RuntimeError, match="closed"):
            generating.result(60)
    assert freed == [True]


def test_texts_without_a_seed_differ(fake):
    """At this temperature no token is more probable than 1 in 96."""
    params = SamplingParams(temperature=20, max_tokens=10, ignore_eos=True)
    first, second = fake.generate(["a", "a"], params)
    assert first.outputs[0].tokens != second.outputs[0].tokens


def test_stop_may_be_a_string_or_a_sequence(fake):
    """A string is not read as a sequence of characters."""
    for stop in ("ef", ["ef"], ("x", "ef")):
        params = SamplingParams(temperature=0, stop=stop)
        assert fake.generate("a", params)[0].text == "bcd"


def test_each_prompt_may_have_its_own_params(fake):
    """Their number must be that of the prompts."""
    short, stopped = (
        SamplingParams(temperature=0, max_tokens=2),
        SamplingParams(temperature=0, stop="e", n=2),
    )
    first, second = fake.generate(["a", "b"], [short, stopped])
    assert (first.text, [output.text for output in second.outputs]) == ("bc", ["cd", "cd"])
    assert {piece.prompt for piece in fake.stream(["a", "b"], [short, stopped])} == {0, 1}


QUESTION = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("call", "param", "words"),
    [
        (lambda llm: llm.chat("text"), "messages", "must be a list"),
        (lambda llm: llm.chat([]), "messages", "one or more messages"),
        (lambda llm: llm.chat(QUESTION), "messages", "must be a list"),
        (lambda llm: llm.chat(["text"]), "messages[0]", "must be a dictionary, not str"),
        (
            lambda llm: llm.chat([QUESTION, {"role": "robot", "content": "a"}]),
            "messages[1].role",
            "not 'robot'",
        ),
        (
            lambda llm: llm.chat([{"content": "a"}]),
            "messages[0].role",
            "must be one of system, developer, user",
        ),
        (lambda llm: llm.chat([{"role": "user"}]), "messages[0].content", "must be text"),
        (
            lambda llm: llm.chat([{**QUESTION, "content": [{"type": "image"}]}]),
            "messages[0].content",
            "must be text",
        ),
        (lambda llm: llm.chat([QUESTION], tools="a"), "tools", "must be a list such as"),
        (
            lambda llm: llm.chat([QUESTION], tools=["a"]),
            "tools[0].function",
            "must be a dictionary with a name",
        ),
        (
            lambda llm: llm.chat([QUESTION], tools=[{"name": "a"}]),
            "tools[0].function",
            "must be a dictionary with",
        ),
        (
            lambda llm: llm.encode_chat(
                [QUESTION], [{"function": {"name": "a", "parameters": "b"}}]
            ),
            "tools[0].function.parameters",
            "must be a dictionary",
        ),
        (
            lambda llm: llm.chat([QUESTION], [GREEDY] * 2),
            "params",
            "2 params were given for 1 prompts",
        ),
        (
            lambda llm: llm.generate(["a", "b"], [GREEDY]),
            "params",
            "1 params were given for 2 prompts",
        ),
        (lambda llm: llm.generate("a", {"temperature": 0}), "params", "must be SamplingParams"),
        (lambda llm: llm.stream("a", 0.5), "params", "must be SamplingParams"),
        (lambda llm: llm.generate(5), "prompts", "must be text, token ids"),
        (lambda llm: llm.generate(["a", 1.5]), "prompts[1]", "text or a list of token ids"),
        (lambda llm: llm.generate([["a"]]), "prompts[0]", "text or a list of token ids"),
        (lambda llm: llm.generate(["a", []]), "prompts[1]", "empty"),
        (lambda llm: llm.generate("\ud800"), "prompts[0]", "lone surrogate"),
        (lambda llm: llm.chat([{**QUESTION, "content": "\ud800"}]), "messages", "lone surrogate"),
        (lambda llm: llm.embed([1]), "texts[0]", "must be text, not int"),
        (lambda llm: llm.embed(None), "texts", "text or a list of texts"),
        (lambda llm: llm.embed(b"a"), "texts", "text or a list of texts"),
        (lambda _: SamplingParams(grammar=5), "grammar", "must be text, not 5"),
        (lambda _: SamplingParams(top_p=Decimal("0.5")), "top_p", "must be a number"),
        (lambda llm: llm.encode(b"a"), "text", "must be text, not bytes"),
        (lambda _: SamplingParams(stop=5), "stop", "a string or a sequence"),
        (lambda _: SamplingParams(stop=("a", 5)), "stop", "a string or a sequence"),
        (lambda _: SamplingParams(temperature="hot"), "temperature", "must be a number, not 'hot'"),
    ],
)
def test_invalid_arguments_raise_bad_request_that_names_the_field(fake, call, param, words):
    with pytest.raises(BadRequest) as caught:
        call(fake)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_messages_of_openai_are_accepted(fake):
    """Text parts, the role developer, and an assistant message with only tool calls."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    other = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
    ]
    plain = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert fake.encode_chat(other) == fake.encode_chat(plain)


def test_public_names_are_exported_and_annotated():
    assert (cllm.BadRequest, cllm.StartupError) == (BadRequest, StartupError)
    assert all(getattr(cllm, name) is not None for name in cllm.__all__)
    assert (Path(cllm.__file__).parent / "py.typed").exists()


@pytest.mark.llama
def test_threads_get_correct_answers_from_the_builtin_model(known_questions, builtin_model):
    """Eight threads ask one question after another."""
    questions = known_questions(24, 13)
    greedy = SamplingParams(temperature=0)
    with (
        LLM(builtin_model, model_max_context_length=512, scheduler_max_num_seqs=4) as llm,
        ThreadPoolExecutor(8) as threads,
    ):
        done = list(
            threads.map(lambda asked: llm.chat(asked.messages, greedy, asked.tools), questions)
        )
    assert all(map(is_right, done, questions))


@pytest.mark.llama
def test_chat_parses_tool_calls_and_uses_their_results(builtin_model):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get_time", "description": "Get the time in a city"}
    tool = {"type": "function", "function": {**function, "parameters": parameters}}
    messages = [{"role": "user", "content": "What time is it in Oslo?"}]
    with LLM(builtin_model, model_max_context_length=512, scheduler_max_num_seqs=2) as llm:
        done = llm.chat(messages, SamplingParams(temperature=0, n=2), [tool])
        assert (done.text, done.finish_reason) == ("", "tool_calls")
        assert len(done.outputs[0].tokens) > 10
        for output in done.outputs:
            (call,) = output.tool_calls
            assert (call.name, json.loads(call.arguments)) == ("get_time", {"city": "Oslo"})
        (sent,) = done.message["tool_calls"]
        result = {"role": "tool", "tool_call_id": sent["id"], "content": '{"hour": 9}'}
        done = llm.chat([*messages, done.message, result], SamplingParams(temperature=0), [tool])
    assert (done.text, done.finish_reason) == ("It is 9 o'clock in Oslo.", "stop")


@pytest.mark.llama
def test_chat_separates_reasoning_from_text(builtin_model):
    """Unfinished reasoning is separated too. The message keeps it."""
    messages = [{"role": "user", "content": "What is 27 plus 45?"}]
    greedy, cut = SamplingParams(temperature=0), SamplingParams(temperature=0, max_tokens=6)
    with LLM(builtin_model, model_max_context_length=512, scheduler_max_num_seqs=2) as llm:
        done = llm.chat(messages, greedy, enable_thinking=True)
        assert (done.text, done.reasoning) == ("72", "20 + 40 = 60\n7 + 5 = 12\n60 + 12 = 72")
        assert done.message["reasoning_content"] == done.reasoning
        done = llm.chat(messages, cut, enable_thinking=True)
        assert (done.text, done.finish_reason) == ("", "length")
        assert done.reasoning.startswith("20")


def test_conversations_are_answered_in_order(fake):
    """One or many, with params for all or for each; a list of one gives a list."""
    many = [[{"role": "user", "content": text}] for text in ("a", "bb", "ccc")]
    done = fake.chat(many, GREEDY)
    assert [one.text for one in done] == [fake.chat(one, GREEDY).text for one in many]
    assert [one.prompt_tokens for one in done] == [len(fake.encode_chat(one)) for one in many]
    assert [one.text for one in fake.chat(many[:1], GREEDY)] == [done[0].text]
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 2, 3)]
    assert [len(one.outputs[0].tokens) for one in fake.chat(many, params)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("call", "param", "words"),
    [
        (lambda llm: llm.chat([[QUESTION], []]), "messages[1]", "one or more messages"),
        (
            lambda llm: llm.chat([[QUESTION], [{"role": "robot", "content": "a"}]]),
            "messages[1][0].role",
            "messages[1][0].role must be one of",
        ),
        (lambda llm: llm.chat([[QUESTION]] * 2, [GREEDY]), "params", "1 params were given for 2"),
        (
            lambda llm: llm.chat([[QUESTION], [{**QUESTION, "content": "a" * 5000}]]),
            "messages[1]",
            "the prompt has 50",
        ),
        (lambda llm: llm.chat([QUESTION], tool_choice="required"), "tool_choice", "tool_choice"),
        (lambda llm: llm.chat([QUESTION], tool_choice="f"), "tool_choice", "not 'f'"),
        (lambda llm: llm.generate("a", priority="high"), "priority", "interactive, normal, batch"),
        (lambda llm: llm.generate("a", response_format=5), "response_format", "a JSON schema"),
        (lambda llm: llm.generate("a", response_format=[]), "response_format", "1 to 4096"),
        (lambda llm: llm.generate("a", response_format="("), "response_format", "response_format"),
        (lambda llm: llm.generate("a", response_format={"type": "x"}), "response_format", "type"),
        (
            lambda llm: llm.generate("a", response_format={"not": {"type": "string"}}),
            "response_format",
            "not",
        ),
        (
            lambda llm: llm.generate("a", response_format=re.compile("a", re.IGNORECASE)),
            "response_format",
            "(?i)",
        ),
        (
            lambda llm: llm.generate("a", response_format=threading.Lock().__class__),
            "response_format",
            "pydantic",
        ),
        (
            lambda llm: llm.generate("a", SamplingParams(grammar="start: A"), response_format="a"),
            "response_format",
            "cannot be combined",
        ),
        (lambda llm: llm.detokenize([5, 999]), "tokens", "between 0 and"),
        (lambda llm: llm.tokenize(5), "text", "must be text"),
        (lambda llm: llm.score(5, ["a"]), "query", "must be text"),
        (lambda llm: llm.score("a", ["b", ""]), "documents[1]", "0 tokens"),
        (lambda llm: llm.rerank("a", "b"), "documents", "must be a list of texts"),
    ],
)
def test_wrong_values_raise_value_error_that_names_the_field(fake, call, param, words):
    with pytest.raises(ValueError) as caught:
        call(fake)
    assert isinstance(caught.value, BadRequest)
    assert caught.value.param == param
    assert words in str(caught.value)


def test_response_formats_constrain_the_text(fake):
    """On the fake backend, which writes the next character if it is allowed."""
    greedy = SamplingParams(temperature=0)

    def ask(form):
        (done,) = fake.generate("a", greedy, response_format=form)
        return done

    assert ask(["b", "xyz"]).text == "b"
    assert ask("b[0-9]{2}").text[0] == "b"
    assert ask(re.compile("b+c")).text[0] == "b"
    assert ask(["b"]).parsed is None
    number = {"type": "integer", "minimum": 3, "maximum": 5}
    for form in (number, {"type": "json_schema", "json_schema": {"schema": number}}):
        assert ask(form).parsed in (3, 4, 5)
    (cut,) = fake.generate(
        "a", SamplingParams(temperature=0, max_tokens=1), response_format={"const": "long"}
    )
    assert (cut.finish_reason, cut.parsed) == ("length", None)


def test_rule_that_no_grammar_expresses_is_checked_by_pydantic(fake):
    """The text is returned, and ``parsed`` raises."""

    class Even(BaseModel):
        value: Literal[1, 3]

        @field_validator("value")
        @classmethod
        def is_even(cls, value):
            if value % 2:
                raise ValueError("odd")
            return value

    (done,) = fake.generate("a", SamplingParams(temperature=0), response_format=Even)
    assert json.loads(done.text)["value"] in (1, 3)
    with pytest.raises(ValueError, match="odd"):
        _ = done.parsed


@pytest.mark.llama
def test_types_are_parsed_from_the_answers_of_the_builtin_model(builtin_model):
    """A pydantic model, a dataclass and a list; many conversations share the format."""

    class Person(BaseModel):
        name: str
        age: int

    @dataclass
    class Place:
        city: str

    greedy = SamplingParams(temperature=0, max_tokens=100)
    facts = [("Anna", 30), ("Ben", 45), ("Clara", 71)]
    asked = [
        [{"role": "user", "content": f"As JSON: name {name}, age {age}."}] for name, age in facts
    ]
    with LLM(builtin_model, model_max_context_length=512, scheduler_max_num_seqs=4) as llm:
        done = llm.chat(asked, greedy, response_format=Person)
        assert [one.parsed for one in done] == [Person(name=name, age=age) for name, age in facts]
        one = llm.chat(asked[0], greedy, response_format=Person, enable_thinking=True)
        assert isinstance(one.parsed, Person)
        one = llm.chat(asked[1], greedy, response_format={"type": "json_object"})
        assert one.parsed == {"name": "Ben", "age": 45}
        place = [{"role": "user", "content": "As JSON: city Oslo."}]
        assert isinstance(llm.chat(place, greedy, response_format=Place).parsed, Place)
        numbers = llm.chat(
            asked[0], greedy, response_format=Annotated[list[int], Field(max_length=3)]
        )
        assert all(isinstance(number, int) for number in numbers.parsed)


@pytest.mark.llama
def test_tool_choice(builtin_model):
    """A tool can be forced or forbidden, also by name."""

    def declare(name, key):
        parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [declare("get_time", "city"), declare("find_book", "author")]
    greedy = SamplingParams(temperature=0, max_tokens=100)
    asked = [{"role": "user", "content": "What is 27 plus 45?"}]
    with LLM(builtin_model, model_max_context_length=1024, scheduler_max_num_seqs=2) as llm:
        done = llm.chat(asked, greedy, tools, tool_choice="none")
        assert done.text == "72"
        assert done.prompt_tokens == len(llm.encode_chat(asked))  # the tools are not shown
        assert llm.chat(asked, greedy, tools, tool_choice="required").tool_calls
        done = llm.chat(asked, greedy, tools, tool_choice="find_book")
        assert [list(call.parsed) for call in done.tool_calls] == [["author"]]
        assert {call.name for call in done.tool_calls} == {"find_book"}
        assert done.message["tool_calls"][0]["id"] == done.tool_calls[0].id


@pytest.mark.llama
def test_pieces_of_a_streamed_chat_add_up_to_the_answer(known_questions):
    """For all kinds of questions, tools and reasoning included, in one batch."""
    questions = known_questions(26, 23)
    greedy = SamplingParams(temperature=0, logprobs=1)
    with LLM(model_max_context_length=768, scheduler_max_num_seqs=4) as llm:
        for question in questions:
            whole = llm.chat(question.messages, greedy, question.tools)
            streamed = Output()
            for piece in llm.stream_chat(question.messages, greedy, question.tools):
                streamed.add(piece)
            assert is_right(whole, question)
            assert (streamed.text, streamed.tool_calls) == (whole.text, whole.tool_calls)
            assert streamed.tokens == whole.outputs[0].tokens
            assert len(streamed.logprobs) == len(streamed.tokens)
            assert streamed.finish_reason == whole.finish_reason
        asked = [question.messages for question in questions if not question.tools]
        both = [Output() for _ in asked]
        for piece in llm.stream_chat(asked, greedy, enable_thinking=True):
            both[piece.prompt].add(piece)
        assert [(one.text, one.reasoning) for one in both] == [
            (one.text, one.reasoning) for one in llm.chat(asked, greedy, enable_thinking=True)
        ]


def test_documents_are_ranked_by_similarity(fake):
    documents = ["zzzz", "hello there", "hello"]
    scores = fake.score("hello", documents)
    assert scores[2] == pytest.approx(1, abs=1e-5)
    ranked = fake.rerank("hello", documents)
    assert [one.index for one in ranked] == [2, 1, 0]
    assert [one.document for one in ranked] == ["hello", "hello there", "zzzz"]
    assert [one.score for one in ranked] == [scores[one.index] for one in ranked]
    assert fake.rerank("hello", documents, 1) == ranked[:1]
    assert fake.rerank("hello", []) == fake.score("hello", []) == []


def test_tokens_become_text_again(fake):
    assert fake.detokenize(fake.tokenize("héllo")) == "héllo"
    assert fake.detokenize([]) == ""
    assert fake.detokenize(fake.tokenize("é")[:1]) == "\ufffd"


def test_ctrl_c_aborts_a_call_but_not_those_of_other_threads():
    """It comes in the middle of a step, whose outputs another thread needs."""
    with (
        LLM(backend_name="fake", scheduler_max_num_seqs=3) as llm,
        ThreadPoolExecutor(1) as threads,
    ):
        step, wanted = llm._engine.step, threading.Event()

        def interrupted_step():
            outputs = step()
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and wanted.is_set() and len({one.request_id for one in outputs}) == 2:
                wanted.clear()
                os.kill(os.getpid(), signal.SIGINT)
            return outputs

        def read_slowly():  # so that the main thread steps, too
            tokens = []
            for piece in llm.stream(
                "a", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
            ):
                wanted.set()
                time.sleep(0.002)
                tokens += piece.tokens
            return tokens

        llm._engine.step = interrupted_step
        other = threads.submit(read_slowly)
        assert wanted.wait(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("b", SamplingParams(temperature=0, ignore_eos=True))
        assert len(other.result(PATIENCE)) == 200
        llm._engine.step = step
        assert llm.generate("a", GREEDY)[0].text == "bcdef"
        stats = collect_stats(llm._engine.scheduler)
        assert stats.num_running == stats.num_waiting == 0


def test_two_llms_in_one_process():
    with LLM(backend_name="fake") as first, LLM(backend_name="fake") as second:
        with ThreadPoolExecutor(2) as threads:
            done = list(threads.map(lambda llm: llm.generate(["a"] * 3, GREEDY), [first, second]))
        assert [[one.text for one in each] for each in done] == [["bcdef"] * 3] * 2
        first.close()
        assert second.generate("a", GREEDY)[0].text == "bcdef"


def test_llm_works_inside_a_running_event_loop():
    """As in a notebook."""

    async def cell():
        with LLM(backend_name="fake") as llm:
            return llm.generate("a", GREEDY)[0].text

    assert asyncio.run(cell()) == "bcdef"


def test_llm_that_is_not_closed_is_freed():
    """Also one that was used by several threads, and an AsyncLLM."""
    llm = LLM(backend_name="fake")
    llm.generate("a", GREEDY)
    backend = weakref.ref(llm._backend)
    engine = weakref.ref(llm._engine)
    del llm
    gc.collect()
    assert (backend(), engine()) == (None, None)

    async def use():
        llm = AsyncLLM(backend_name="fake")
        await llm.load()
        await llm.generate("a", GREEDY)
        return weakref.ref(llm._loaded._backend)

    backend = asyncio.run(use())
    for _ in range(1000):
        gc.collect()
        if backend() is None:
            return
        time.sleep(0.01)  # until its thread has ended
    raise AssertionError("the model of the AsyncLLM is still there")


ABANDONED = """
import asyncio, threading
from cllm import LLM, AsyncLLM, SamplingParams
long = SamplingParams(temperature=0, ignore_eos=True)
llm = LLM({model})
threading.Thread(target=llm.generate, args=("a", long), daemon=True).start()
stream = llm.stream("a", long)
next(stream)
other = AsyncLLM({model})
loop = asyncio.new_event_loop()
loop.run_until_complete(other.load())
task = loop.create_task(other.generate(["a", "b"], long))
loop.run_until_complete(asyncio.sleep(0.1))
print("end")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["backend_name='fake'", pytest.param("", marks=pytest.mark.llama)]
)
def test_interpreter_exits_without_close(model):
    """Threads, a stream and a task are still waiting for long texts."""
    done = subprocess.run(
        [sys.executable, "-c", ABANDONED.format(model=model)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_stream_ends_at_exit_although_a_thread_holds_the_lock():
    """The interpreter ends threads that it does not wait for, also one that holds a lock."""
    llm = LLM(backend_name="fake")
    stream: Any = llm.stream("a", SamplingParams(temperature=0, ignore_eos=True))
    next(stream)
    llm._shared.end_driver()  # as at the exit
    llm._shared._turn.acquire()
    closing = threading.Thread(target=stream.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    llm._shared._turn.release()
    assert not closing.is_alive()


FORKED = """
import os
import pickle
from cllm import LLM, SamplingParams
llm = LLM(backend_name="fake")
llm.generate("a", SamplingParams(max_tokens=2))
pid = os.fork()
if pid == 0:
    try:
        llm.generate("a")
    except RuntimeError as error:
        print(error, flush=True)
    llm.close()
    with LLM(backend_name="fake") as own:
        print(own.generate("a", SamplingParams(temperature=0, max_tokens=2))[0].text, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(llm.generate("a", SamplingParams(temperature=0, max_tokens=2))[0].text)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_forked_process_gets_an_error_and_can_load_its_own():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "this LLM was loaded before a fork; load it in the process that uses it",
        "bc",
        "bc",
    ]


@pytest.mark.llama
def test_reranker_scores_documents_and_refuses_everything_else(tiny_model):
    documents = ["Paris is in France.", "Snow is white.", "hello"]
    with LLM(str(tiny_model("reranker"))) as llm:
        scores = llm.score("hello", documents)
        assert len(set(scores)) == 3
        assert scores[1:] == pytest.approx(llm.score("hello", documents[1:]), abs=1e-4)
        best = llm.rerank("hello", documents, 1)[0]
        assert (best.score, best.document) == (max(scores), documents[best.index])
        for call in (
            lambda: llm.embed("a"),
            lambda: llm.generate("a"),
            lambda: llm.chat([QUESTION]),
        ):
            with pytest.raises(BadRequest) as caught:
                call()
            assert caught.value.param == "model"


@pytest.mark.slow
def test_daemon_threads_that_generate_do_not_crash_the_exit():
    """The engine computes no step while the interpreter is taken down."""
    program = """
import threading, time
from cllm import LLM, SamplingParams
llm = LLM(backend_name="fake")
params = SamplingParams(ignore_eos=True, max_tokens=300)
def work():
    while True:
        llm.generate(["a"] * 4, params)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=PATIENCE, check=False)
    assert done.returncode == 0


def test_closed_llm_is_not_entered_again():
    llm = LLM(backend_name="fake")
    with llm:
        pass
    with pytest.raises(RuntimeError, match="closed"), llm:
        pass


def test_llm_cannot_be_pickled():
    with LLM(backend_name="fake") as llm, pytest.raises(TypeError, match="cannot be copied"):
        pickle.dumps(llm)


def test_arguments_of_ranking_are_checked_first():
    with LLM(backend_name="fake") as llm:
        assert len(llm.score("a", (text for text in ["b", "c"]))) == 2
        for wrong in (-1, "1", 1.5):
            with pytest.raises(BadRequest, match="top_n"):
                llm.rerank("a", ["b", "c"], wrong)
        with pytest.raises(BadRequest, match="tokens"):
            llm.detokenize(None)
