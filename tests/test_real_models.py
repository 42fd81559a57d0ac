"""Real, trained models: what the built-in one is too small for.

tools/real_models.py fetches them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import repeat

from cllm import LLM, Completion, Output, SamplingParams
from cllm.backends.llama_cpp.quantize import quantize

pytestmark = [pytest.mark.llama, pytest.mark.slow, pytest.mark.real]

# Difference of logprobs that another order of additions can bridge, with float32 weights. (For
# others, ggml rounds what a weight is multiplied with to 8 bits, and a difference in the last bit
# becomes one of 0.1.)
TIE = 0.03
PROMPTS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "List three fruits that are red.",
    "How do I boil an egg?",
    "What is a prime number?",
    "Translate to French: the house is small.",
    "Explain photosynthesis to a child.",
    "Who wrote Romeo and Juliet?",
    "Give me a name for a black cat.",
    "What is the boiling point of water?",
    "Write a Python function that adds two numbers.",
    "Summarize: the dog ran, the cat slept, the bird sang.",
    "What are the seasons of the year?",
    "Tell me a fact about the moon.",
]
WINDOW = 512  # tokens that most layers of Gemma 3 see
LONG = " ".join(
    f"In the year {year}, the town of Arles had {year * 7} inhabitants, {year % 13} schools and "
    f"{year % 7} bridges over the river."
    for year in range(1850, 1880)
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def smollm2(real_model) -> Path:
    return real_model("smollm2-135m.gguf")


@pytest.fixture(scope="module")
def smollm2_f32(smollm2, tmp_path_factory) -> Path:
    return write_as_float32(smollm2, tmp_path_factory.mktemp("f32"))


@pytest.fixture(scope="module")
def gemma3_f32(real_model, tmp_path_factory) -> Path:
    return write_as_float32(real_model("gemma3-270m.gguf"), tmp_path_factory.mktemp("f32"))


def write_as_float32(model: Path, folder: Path) -> Path:
    path = folder / model.name
    quantize(model, path, "F32", threads=None, progress=lambda _share: None)
    return path


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **more)


def are_equal_except_at_a_tie(one, other) -> bool:
    """Whether two greedy outputs are equal up to a place where two tokens are nearly as probable;
    ``one`` has the logprobs of the best ones.
    """
    for mine, other_token, logprobs in zip(one.tokens, other.tokens, one.logprobs, strict=False):
        if mine != other_token:
            best = dict(logprobs.top)
            return other_token in best and best[mine] - best[other_token] < TIE
    return one.tokens == other.tokens


def test_greedy_texts_are_those_of_llama_cpp(smollm2_f32):
    """Its own Python interface, with its own rendering of the chat template."""
    llama_cpp = pytest.importorskip("llama_cpp")
    own = llama_cpp.Llama(str(smollm2_f32), n_ctx=1024, flash_attn=True, verbose=False)
    with LLM(str(smollm2_f32), model_max_context_length=1024, scheduler_max_num_seqs=1) as llm:
        for prompt in PROMPTS[: repeat(15, 5)]:
            theirs = own.create_chat_completion(ask(prompt), max_tokens=40, temperature=0)
            mine = llm.chat(ask(prompt), greedy(40, logprobs=2)).outputs[0]
            assert is_text_except_at_a_tie(llm, mine, theirs["choices"][0]["message"]["content"])
    own.close()


def is_text_except_at_a_tie(llm: LLM, output, text: str) -> bool:
    for n, logprobs in enumerate(output.logprobs):
        if not text.startswith(llm.detokenize(output.tokens[: n + 1]).removesuffix("\ufffd")):
            (_, best), (_, second) = logprobs.top
            return best - second < TIE
    return output.text == text


def test_own_attention_kernel_changes_no_text(smollm2_f32, gemma3_f32):
    settings = {"model_max_context_length": 2048, "scheduler_max_num_seqs": 1}
    for model, prompts in ((smollm2_f32, PROMPTS[: repeat(15, 5)]), (gemma3_f32, [LONG])):
        texts = []
        for kernels in ("auto", "off"):
            with LLM(str(model), backend_llama_cpp_kernels=kernels, **settings) as llm:
                if kernels == "auto" and not llm.info.attention:
                    pytest.skip("this build of llama.cpp has no kernel of ours")
                done = llm.generate(prompts, greedy(24, logprobs=5))
                texts += [[each.outputs[0] for each in done]]
        assert all(map(are_equal_except_at_a_tie, *texts))


@pytest.mark.parametrize("name", ["smollm2-135m.gguf", "gemma3-270m.gguf"])
def test_32_at_once_get_exactly_what_they_get_alone(real_model, name):
    """With quantized weights, a difference in the last bit would soon change the texts."""
    chats = [ask(f"{prompt} Answer number {i}.") for i in (1, 2, 3) for prompt in PROMPTS][:32]
    with LLM(str(real_model(name)), model_max_context_length=1024) as llm:
        if name.startswith("gemma") and llm.info.attention != "AVX-512":
            pytest.skip("ggml computes Q6_K, and the number of rows changes its bits")
        params = greedy(repeat(32, 12), logprobs=2)
        alone = [llm.chat(chat, params).outputs[0] for chat in chats]
        together = [done.outputs[0] for done in llm.chat(chats, params)]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert [each.logprobs for each in together] == [each.logprobs for each in alone]


def test_tool_is_called_and_a_schema_followed(smollm2):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    with LLM(str(smollm2), model_max_context_length=2048) as llm:
        done = llm.chat(
            ask("What is the weather in Paris?"), greedy(60), [WEATHER], tool_choice="get_weather"
        )
        (call,) = done.tool_calls
        assert (call.name, call.parsed) == ("get_weather", {"city": "Paris"})
        person = ask("Anna is a nurse. She is 31 years old. Give her name and age.")
        assert llm.chat(person, greedy(60), response_format=schema).parsed == {
            "name": "Anna",
            "age": 31,
        }


def test_long_conversation_is_computed_once(smollm2_f32):
    """Every turn finds all earlier ones, and the answers are those of a fresh server."""
    messages, params = [], greedy(repeat(24, 12), logprobs=5)
    with LLM(str(smollm2_f32), model_max_context_length=4096) as llm:
        for prompt in PROMPTS[: repeat(15, 10)]:
            messages += ask(prompt)
            done = llm.chat(messages, params)
            messages.append(done.outputs[0].message)
            if len(messages) > 2:
                assert done.prompt_tokens - done.cached_tokens < 60
    with LLM(str(smollm2_f32), model_max_context_length=4096) as llm:
        fresh = llm.chat(messages[:-1], params)
        assert fresh.cached_tokens == 0
    assert are_equal_except_at_a_tie(fresh.outputs[0], done.outputs[0])


@pytest.fixture(scope="module")
def alone(gemma3_f32) -> Completion:
    """Return how a prompt longer than the sliding window is continued."""
    with LLM(str(gemma3_f32), model_max_context_length=2048, scheduler_max_num_seqs=1) as llm:
        (done,) = llm.generate(LONG, greedy(24, logprobs=5))
    assert done.prompt_tokens > 2 * WINDOW
    return done


def test_text_longer_than_the_sliding_window_is_continued_as_by_llama_cpp(gemma3_f32, alone):
    llama_cpp = pytest.importorskip("llama_cpp")
    own = llama_cpp.Llama(str(gemma3_f32), n_ctx=2048, flash_attn=True, verbose=False)
    theirs = own.create_completion(LONG, max_tokens=24, temperature=0)
    own.close()
    assert alone.text == theirs["choices"][0]["text"]


def test_sequence_with_a_sliding_window_continues_after_it_was_parked(gemma3_f32, alone):
    with LLM(str(gemma3_f32), model_max_context_length=2048, scheduler_max_num_seqs=1) as llm:
        pieces = llm.stream(LONG, greedy(24), priority="batch")
        parked = Output()
        for _ in range(5):
            parked.add(next(pieces))
        llm.generate("One, two, three,", greedy(4), priority="interactive")  # has the only place
        assert len(parked.tokens) < 24
        for piece in pieces:
            parked.add(piece)
    assert are_equal_except_at_a_tie(alone.outputs[0], parked)


def test_part_of_a_prefix_with_a_sliding_window_is_reused(gemma3_f32):
    """By requests that come together, wherever their prompts differ from the first one."""
    settings = {"model_max_context_length": 2048}
    parts = [LONG[:length] for length in (len(LONG), len(LONG) * 3 // 4, len(LONG) // 3)]
    prompts = [f"{part} Then, in the year 1900, the" for part in parts]
    params = greedy(16, logprobs=5)
    with LLM(str(gemma3_f32), **settings) as llm:
        llm.generate(LONG, greedy(1))
        together = llm.generate(prompts, params)
        if sys.platform == "linux" and not llm.info.on_gpu:
            assert llm.info.layout == "paged"
    for prompt, done in zip(prompts, together, strict=True):
        assert done.prompt_tokens - done.cached_tokens < 20
        with LLM(str(gemma3_f32), **settings) as llm:
            (alone,) = llm.generate(prompt, params)
        assert are_equal_except_at_a_tie(alone.outputs[0], done.outputs[0])


def test_32_sequences_with_a_sliding_window_take_memory_for_their_tokens(real_model):
    """Each of them could have all 32,768 tokens of the context."""
    with LLM(str(real_model("gemma3-270m.gguf")), scheduler_max_num_seqs=32) as llm:
        if llm.info.layout != "paged":
            pytest.skip("it needs paged memory")
        assert (llm.info.max_num_seqs, llm.info.context_length) == (32, 32768)
        pages = llm._backend._pages  # type: ignore[attr-defined]
        before = pages.num_bytes_used
        prompts = [f"{prompt} Number {i}." for i in (1, 2, 3) for prompt in PROMPTS][:32]
        done = llm.generate(prompts, greedy(4, ignore_eos=True))
        num_tokens = sum(each.prompt_tokens + 4 for each in done)
        used = pages.num_bytes_used - before
    assert used < 4 * num_tokens * llm.info.kv_bytes_per_token


def test_prefix_with_a_sliding_window_is_found_on_disk(gemma3_f32, alone, tmp_path):
    settings = {"model_max_context_length": 2048, "kv_disk_cache": str(tmp_path)}
    with LLM(str(gemma3_f32), **settings) as llm:
        (first,) = llm.generate(LONG, greedy(1))
    with LLM(str(gemma3_f32), **settings) as llm:
        (again,) = llm.generate(LONG, greedy(24))
    assert (first.cached_tokens, again.cached_tokens > WINDOW) == (0, True)
    assert are_equal_except_at_a_tie(alone.outputs[0], again.outputs[0])
