"""The engine in the caller's own process."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from cllm import LLM, SamplingParams
from cllm import llm as llm_module
from cllm.engine.build import build_backend
from cllm.engine.params import EngineParams
from cllm.errors import BadRequest, StartupError

GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def fake():
    with LLM(backend_name="fake", scheduler_max_num_seqs=3) as llm:
        yield llm


def test_a_batch_larger_than_the_engine_comes_back_in_order(fake):
    """More prompts than sequence ids; the fake backend counts on from each prompt's last byte."""
    completions = fake.generate(list("abcdefgh"), GREEDY)
    assert [done.text for done in completions] == ["".join(chr(ord(c) + i) for i in range(1, 6)) for c in "abcdefgh"]
    assert {done.finish_reason for done in completions} == {"length"}
    assert {done.prompt_tokens for done in completions} == {1}


def test_one_prompt_as_text_or_as_tokens(fake):
    """A string, a list of ids, and lists of either."""
    assert [done.text for done in fake.generate("a", GREEDY)] == ["bcdef"]
    assert [done.text for done in fake.generate([97], GREEDY)] == ["bcdef"]
    assert [done.text for done in fake.generate([[97], "b"], GREEDY)] == ["bcdef", "cdefg"]


def test_grammars(fake):
    """Beside prompts that follow none; one that cannot be compiled is the caller's mistake."""
    bound = SamplingParams(temperature=0, n=2, grammar='start: "b" /[0-9]/')
    assert [output.text for output in fake.generate("a", bound)[0].outputs] == ["b0", "b0"]
    with pytest.raises(BadRequest):
        fake.generate(["a", "b"], SamplingParams(grammar="start: nothing"))
    assert fake.generate("a", GREEDY)[0].text == "bcdef"


def test_several_outputs_and_stop_strings(fake):
    """n outputs each, ended before the stop string."""
    (done,) = fake.generate("a", SamplingParams(temperature=0, n=2, stop=("ef",)))
    assert [output.text for output in done.outputs] == ["bcd", "bcd"]
    assert done.finish_reason == "stop"


def test_a_stream_left_early_gives_everything_back(fake):
    """Leaving the loop aborts what is still running."""
    for piece in fake.stream(["a", "b"], SamplingParams(temperature=0)):
        assert piece.text in "bc"
        break
    fake.generate("a", GREEDY)
    stats = fake._engine.scheduler.stats()
    assert stats.num_seq_ids_in_use == stats.num_running == stats.num_waiting == 0


def test_what_cannot_be_computed_is_refused(fake):
    """Too long, empty, outside of the vocabulary; then the engine still works."""
    for prompt in ([1] * 5000, [], [5, 999]):
        with pytest.raises(BadRequest):
            fake.generate([prompt], GREEDY)
    with pytest.raises(BadRequest):
        fake.generate("a", SamplingParams(logit_bias={999: 1}))
    assert fake.generate("a", GREEDY)[0].text == "bcdef"


def test_logprobs(fake):
    """Of what was written, and of the prompt, also if nothing is to be written; nothing unless asked for."""
    (told,) = fake.generate("abx", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=0))
    assert len(told.outputs[0].logprobs) == len(told.outputs[0].tokens) == 3
    assert told.outputs[0].logprobs[0].top[0][0] == ord("y")
    assert [one.logprob > -1 for one in told.prompt_logprobs] == [True, False]
    (scored,) = fake.generate("abx", SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert (scored.outputs[0].tokens, scored.finish_reason, len(scored.prompt_logprobs)) == ([], "length", 2)
    assert fake.generate("abx", GREEDY)[0].outputs[0].logprobs == []


def test_options_are_those_of_the_settings():
    """A wrong one is named."""
    with pytest.raises(TypeError, match="kv_layot"):
        LLM(kv_layot="unified")
    with pytest.raises(StartupError, match=r"kv\.layout"):
        LLM(kv_layout="other")
    with pytest.raises(StartupError, match="no file"):
        LLM("missing.gguf")


def test_ctrl_c_during_the_load(monkeypatch):
    """It is raised at once, though the load is C code whose callbacks lose what they raise, and the load is told."""
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

    monkeypatch.setattr(llm_module, "build_backend", build)
    with pytest.raises(KeyboardInterrupt):
        LLM(backend_name="fake")
    assert told.is_set()


@pytest.mark.llama
def test_what_progress_raises_ends_the_load(builtin_path):
    """And comes out of it."""
    shares = []

    def progress(share):
        shares.append(share)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        build_backend(EngineParams(path=str(builtin_path), context_length=64, max_num_seqs=1), progress)
    assert len(shares) == 1


@pytest.mark.llama
@pytest.mark.parametrize("layout", ["partitioned", "unified"])
def test_questions_of_every_kind_in_one_batch(known_questions, layout):
    """Held-out questions, answered right together, in both layouts, and again from the cache."""
    questions = known_questions(39, 7)
    with LLM(model_max_context_length=768, scheduler_max_num_seqs=8, kv_layout=layout) as llm:
        prompts = [llm.encode_chat(question.messages, question.tools) for question in questions]
        for _ in range(2):
            completions = llm.generate(prompts, SamplingParams(temperature=0))
            assert [done.text for done in completions] == [question.answer for question in questions]


@pytest.mark.llama
def test_a_pool_too_small_for_all_changes_no_answer(known_questions):
    """Eight sequences in a pool for about two, admitted as if answers were short: some are parked, all are right."""
    questions = known_questions(8, 9, ["counting", "stories"])
    with LLM(model_max_context_length=400, scheduler_max_num_seqs=8, kv_layout="unified", kv_max_memory_mb=1) as llm:
        assert llm.info.num_cells < 500
        llm._engine.scheduler.expected.output = 8
        prompts = [llm.encode_chat(question.messages) for question in questions]
        completions = llm.generate(prompts, SamplingParams(temperature=0))
        assert [done.text for done in completions] == [question.answer for question in questions]
        assert llm._engine.scheduler.num_parked > 0


@pytest.mark.llama
def test_a_change_of_layout_changes_no_answer(known_questions):
    """All eight steps everybody moves into the other layout, and goes on there."""
    questions = known_questions(12, 11, ["counting", "stories", "copying"])
    with LLM(model_max_context_length=512, scheduler_max_num_seqs=4) as llm:
        layouts = []

        def always(_sharing, _num_steps, *, unified, decoding) -> bool:
            layouts.append(unified)
            return True

        llm._engine._chooser.wants_change = always
        prompts = [llm.encode_chat(question.messages) for question in questions]
        completions = llm.generate(prompts, SamplingParams(temperature=0))
        assert [done.text for done in completions] == [question.answer for question in questions]
        assert layouts[:4] == [False, True, False, True]


@pytest.mark.llama
@pytest.mark.parametrize("kind", ["mamba", "lfm2", "gemma3"])
def test_models_that_are_not_plain_attention(tiny_model, kind):
    """What four prompts share is computed once, then it is found again, and the answers are those of each alone."""
    path, params = str(tiny_model(kind)), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
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
def test_a_long_history_is_answered_and_reused(known_questions):
    """Twelve turns; each turn computes only what is new."""
    messages = []
    with LLM(model_max_context_length=2048, scheduler_max_num_seqs=2) as llm:
        for question in known_questions(12, 4, ["colours", "capitals", "spelling"]):
            messages += question.messages
            done = llm.chat(messages, SamplingParams(temperature=0))
            assert done.text == question.answer
            messages.append({"role": "assistant", "content": done.text})
            if len(messages) > 2:
                assert done.prompt_tokens - done.cached_tokens < 60


@pytest.mark.llama
def test_the_example_of_the_readme(builtin_path, capsys):
    """It runs as it is printed, and what it prints makes sense."""
    page = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "LLM()" in block)
    exec(example, {})
    assert capsys.readouterr().out == "72\ng-a-r-d-e-n\n3 4 5 6 7 8 9\n"


def test_embed():
    """A vector for each text; alike as far as the texts are."""
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
