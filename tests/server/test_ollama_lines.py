"""The real client reads the same answer from whole and from streamed answers, for arbitrary deltas;
no server runs.
"""

import asyncio
import json
from types import SimpleNamespace

import ollama
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.core.params import SamplingParams
from cllm.errors import EngineError
from cllm.server.ollama.stream import Clock, OllamaLines, collect
from cllm.serving.answer import Generation
from cllm.text.output_reader import Delta
from cllm.text.tools.parser import Channel

pytestmark = pytest.mark.slow  # loading the client takes seconds

ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=10), max_size=4)
CALLS = st.lists(ARGUMENTS, max_size=3)


class Replayed(SimpleNamespace):
    async def __aiter__(self):
        for step in self.steps:
            yield step


def generation():
    made = Generation("1", [[1, 2, 3]], SamplingParams())
    made.usage.prompt_tokens, made.usage.completion_tokens = 3, 7
    return made


def lines_of(steps, *, chat=True):
    lines = OllamaLines(generation(), "m", Clock(), FakeVocabulary(), chat=chat)
    data = lines.begin() + b"".join(map(lines.deltas, steps)) + lines.end()
    kind = ollama.ChatResponse if chat else ollama.GenerateResponse
    return [kind(**json.loads(line)) for line in data.splitlines()]


def whole(steps, *, chat=True):
    answer = asyncio.run(
        collect(
            Replayed(generation=generation(), steps=steps),
            "m",
            Clock(),
            FakeVocabulary(),
            chat=chat,
        )
    )
    return (ollama.ChatResponse if chat else ollama.GenerateResponse)(
        **json.loads(json.dumps(answer))
    )


def pieces(text, at):
    return [text[:at], text[at:]]


@given(st.text(), st.text(), CALLS, st.integers(0, 20))
def test_streamed_and_whole_chats_match_the_deltas(thinking, text, calls, at):
    """Reasoning, text and calls, however they are cut. Each call comes in one piece, with an object
    as arguments.
    """
    steps = [[Delta(0, piece, 1, channel=Channel.REASONING)] for piece in pieces(thinking, at)]
    steps += [[Delta(0, piece, 1)] for piece in pieces(text, at)]
    for call, arguments in enumerate(calls):
        steps.append([Delta(0, "", 1, channel=Channel.CALL, call=call, name=f"f{call}")])
        steps += [
            [Delta(0, piece, 1, channel=Channel.CALL, call=call)]
            for piece in pieces(json.dumps(arguments), at)
        ]
    steps.append([Delta(0, "", 1, finish="tool_calls" if calls else "stop")])
    streamed, answer = lines_of(steps), whole(steps)
    assert "".join(line.message.content for line in streamed) == answer.message.content == text
    assert (
        "".join(line.message.thinking or "" for line in streamed)
        == (answer.message.thinking or "")
        == thinking
    )
    called = [call.function for line in streamed for call in line.message.tool_calls or []]
    assert called == [call.function for call in answer.message.tool_calls or []]
    assert [(call.name, call.arguments) for call in called] == [
        (f"f{i}", made) for i, made in enumerate(calls)
    ]
    assert [line.done for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1].done_reason == answer.done_reason == "stop"
    assert (streamed[-1].prompt_eval_count, streamed[-1].eval_count) == (3, 7)


@given(st.text(), st.text(min_size=1))
def test_generate_answers_in_the_field_response(thinking, text):
    steps = [[Delta(0, thinking, 1, channel=Channel.REASONING)], [Delta(0, text, 1, "length")]]
    streamed, answer = lines_of(steps, chat=False), whole(steps, chat=False)
    assert "".join(line.response for line in streamed) == answer.response == text
    assert "".join(line.thinking or "" for line in streamed) == (answer.thinking or "") == thinking
    assert streamed[-1].done_reason == answer.done_reason == "length"


def test_truncated_tool_call_has_an_object_as_arguments():
    steps = [
        [Delta(0, "", 1, channel=Channel.CALL, name="add")],
        [Delta(0, '{"a": 1, "b": "tw', 1, "length", channel=Channel.CALL)],
    ]
    for answer in (whole(steps), lines_of(steps)[0]):
        assert answer.message.tool_calls[0].function.arguments == {"a": 1, "b": "tw"}


def test_fault_in_a_stream_is_a_line_with_an_error():
    lines = OllamaLines(generation(), "m", Clock(), FakeVocabulary(), chat=True)
    assert json.loads(lines.fault(EngineError("it broke"))) == {"error": "it broke"}


@pytest.mark.parametrize("seconds", [0, 0.01])
def test_durations_add_up_to_the_total(seconds, monkeypatch):
    """Loading, reading the prompt, generating."""
    now = iter(range(1000, 9000, 1000))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(now))
    clock = Clock()
    clock.submit()
    clock.token()
    clock.token()
    figures = clock.ending(generation(), Delta(0, "", 0))
    assert (
        figures["load_duration"]
        == figures["prompt_eval_duration"]
        == figures["eval_duration"]
        == 1000
    )
