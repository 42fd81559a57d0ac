"""A stream can be continued by another server after each of its frames. The client reads the same
as of an undisturbed stream.
"""

import asyncio
import json
import random

import msgspec
import pytest
from conftest import repeat
from framed_streams import Frame, join_progress, make_app, read_events, stream

from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.models.builtin.questions import TOOLS as TRAINED
from cllm.serving.delivered import Delivered, Origin, Progress, ProgressRecorder
from cllm.text.output_reader import Usage

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "What is 5 + 3?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
    "required": ["city", "count"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
CHAT = {"model": "m", "messages": MESSAGES, "stream": True, "max_tokens": 40}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
RANDOM = {"temperature": 1.0}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}

CASES = {
    "chat": ("/v1/chat/completions", CHAT | USAGE),
    "chat-random": ("/v1/chat/completions", CHAT | RANDOM | LOGPROBS | USAGE | {"n": 3}),
    "chat-stop": ("/v1/chat/completions", CHAT | LOGPROBS | {"stop": ["\x1c\x1d\x1e", ' !"#']}),
    "chat-schema": ("/v1/chat/completions", CHAT | RANDOM | {"response_format": FORMAT}),
    "chat-call": (
        "/v1/chat/completions",
        CHAT | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 80},
    ),
    "completions": (
        "/v1/completions",
        {
            "prompt": ["ab", "q"],
            "n": 2,
            "echo": True,
            "logprobs": 1,
            "stream": True,
            "max_tokens": 9,
            **RANDOM,
        },
    ),
    "completions-mirostat": (
        "/v1/completions",
        {"prompt": "ab", "stream": True, "max_tokens": 20, "mirostat": 2, **RANDOM, **USAGE},
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "What is 5 + 3?",
            "stream": True,
            "max_output_tokens": 24,
            "include": ["message.output_text.logprobs"],
        },
    ),
    "responses-call": (
        "/v1/responses",
        {
            "input": "What is 5 + 3?",
            "stream": True,
            "max_output_tokens": 80,
            "tools": [{"type": "function", **TOOL}],
            "tool_choice": "required",
        },
    ),
    "messages": ("/v1/messages", CHAT | {"stop_sequences": ["\x1c\x1d\x1e"]}),
    "messages-call": (
        "/v1/messages",
        CHAT
        | {
            "max_tokens": 80,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    "ollama-chat": (
        "/api/chat",
        {"model": "m", "messages": MESSAGES, "options": {"num_predict": 30}, "logprobs": True},
    ),
    "ollama-generate": (
        "/api/generate",
        {
            "model": "m",
            "prompt": "a",
            "raw": True,
            "options": {"num_predict": 30},
            "format": SCHEMA,
        },
    ),
    "llama-server": (
        "/completion",
        {"prompt": "ab", "stream": True, "n_predict": 20, **RANDOM},
    ),
    "native": ("/generate_stream", {"prompt": "ab", "max_tokens": 20, **RANDOM}),
}


async def check_cuts(app, path, body, num_cuts):
    """Cut a stream after each frame, or after ``num_cuts`` of them."""
    await stream(app, path, body)  # so that the cache is the same for all that follow
    frames = await stream(app, path, body)
    whole = read_events(b"".join(frame.data for frame in frames))
    cuts = [*range(1, len(frames))]
    if num_cuts < len(cuts):
        cuts = random.Random(7).sample(cuts, num_cuts)
    assert cuts
    for cut in cuts:
        before = frames[:cut]
        after = await stream(app, path, body, Delivered(join_progress(before), 0.0))
        data = b"".join(frame.data for frame in [*before, *after])
        assert read_events(data) == whole, f"cut after frame {cut} of {len(frames)}"


@pytest.mark.parametrize("case", CASES)
def test_client_reads_the_same_wherever_a_stream_is_cut(case):
    async def test():
        async with make_app(backend="fake", max_num_seqs=4, context_length=1024) as app:
            await check_cuts(app, *CASES[case], num_cuts=repeat(1000, 20))

    asyncio.run(test())


WEATHER = [{"role": "user", "content": "How is the weather in Berlin?"}]
GET_WEATHER = TRAINED["get_weather"].declare("get_weather")["function"]
BY_CHAT_TOOL = [{"type": "function", "function": GET_WEATHER}]
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
BUILTIN = {
    "chat-thinking": ("/v1/chat/completions", CHAT | THINKING | USAGE | {"max_tokens": 200}, "8"),
    "chat-call": (
        "/v1/chat/completions",
        CHAT | {"messages": WEATHER, "tools": BY_CHAT_TOOL, "max_tokens": 200, "n": 2},
        "Berlin",
    ),
    "responses-thinking": (
        "/v1/responses",
        {
            "input": "What is 5 + 3?",
            "stream": True,
            "reasoning": {"effort": "high"},
            "max_output_tokens": 200,
        },
        "8",
    ),
    "messages-thinking": (
        "/v1/messages",
        CHAT | {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1200},
        "8",
    ),
    "messages-call": (
        "/v1/messages",
        CHAT
        | {
            "messages": WEATHER,
            "tools": [{"name": "get_weather", "input_schema": GET_WEATHER["parameters"]}],
            "max_tokens": 200,
        },
        "Berlin",
    ),
    "ollama-thinking": (
        "/api/chat",
        {"model": "m", "messages": MESSAGES, "think": True},
        "8",
    ),
    "ollama-call": (
        "/api/chat",
        {"model": "m", "messages": WEATHER, "tools": BY_CHAT_TOOL},
        "Berlin",
    ),
}


@pytest.mark.llama
@pytest.mark.parametrize("case", BUILTIN)
def test_reasoning_and_calls_of_a_model_continue_wherever_a_stream_is_cut(case, builtin_path):
    path, body, answer = BUILTIN[case]

    async def test():
        async with make_app(path=str(builtin_path), max_num_seqs=4, context_length=2048) as app:
            await check_cuts(app, path, body, num_cuts=repeat(1000, 8))
            frames = await stream(app, path, body)
            assert answer in json.dumps(read_events(b"".join(frame.data for frame in frames)))

    asyncio.run(test())


@pytest.mark.llama
def test_server_that_continues_a_stream_ends_its_reasoning_if_the_client_has_asked(builtin_path):
    """The first server had forced a part of the message, or nothing yet."""
    fields = {"reasoning_control": True, "reasoning_budget_message": "\nTime is up."}
    body = CHAT | THINKING | fields | {"max_tokens": 200, "temperature": 0}

    async def test():
        async with make_app(path=str(builtin_path), max_num_seqs=4, context_length=2048) as app:
            frames = await stream(app, "/v1/chat/completions", body)
            for cut in (4, 8):
                parts = [frame.progress for frame in frames[:cut]]
                outputs, *more = msgspec.msgpack.decode(parts[-1])
                assert not more
                parts[-1] = msgspec.msgpack.encode((outputs, None, None, True))
                told = [Frame(part, b"") for part in parts]
                rest = await stream(
                    app, "/v1/chat/completions", body, Delivered(join_progress(told), 0.0)
                )
                text = json.dumps(read_events(b"".join(frame.data for frame in rest)))
                assert "\\nTime is up." in text.replace("\\\\", "\\")
                assert '"content"' in text

    asyncio.run(test())


def test_progress_says_once_that_the_client_has_ended_the_reasoning():
    request = Request("a-0", [1], SamplingParams())
    recorder = ProgressRecorder([request], Origin("a", 0.0, [None], b"", 0), Usage())
    recorder.take(is_last=False)
    told = []
    for _ in range(3):
        recorder.end_reasoning()
        for outputs in ([], [TokenOutput("a-0", 0, 5)]):
            recorder.add(outputs)
            told.append(recorder.take(is_last=False))
    flags = [msgspec.msgpack.decode(part, type=Progress).ends_reasoning for part in told]
    assert flags == [False, True, False, False, False, False]
