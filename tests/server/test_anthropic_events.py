"""The real client reads the same message from whole and from streamed answers, for arbitrary
deltas; no server runs.
"""

import asyncio
import json
from types import SimpleNamespace

import anthropic
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.params import SamplingParams
from cllm.errors import EngineError
from cllm.server.anthropic.stream import MessageEvents, collect
from cllm.serving.answer import Generation
from cllm.text.output_reader import Delta
from cllm.text.tools.parser import Channel

pytestmark = pytest.mark.slow  # loading the client takes seconds

TEXTS = st.text(max_size=20)
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=10), max_size=4)
BLOCKS = st.lists(
    st.tuples(st.sampled_from([Channel.TEXT, Channel.REASONING]), TEXTS)
    | st.tuples(st.just(Channel.CALL), ARGUMENTS),
    max_size=5,
)


def cut(text, draw):
    """Return ``text`` in pieces, some of them empty."""
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@st.composite
def answers(draw):
    """Draw the deltas of an answer, step by step, and the expected blocks as (type, text or
    arguments).
    """
    deltas, expected, call = [], [], -1
    for channel, content in draw(BLOCKS):
        if channel is Channel.CALL:
            call += 1
            name = f"function_{call}"
            deltas.append(Delta(0, "", 1, channel=channel, call=call, name=name))
            pieces = cut(json.dumps(content), draw)
            deltas += [Delta(0, piece, 1, channel=channel, call=call) for piece in pieces]
            expected.append(("tool_use", content))
            continue
        deltas += [Delta(0, piece, 1, channel=channel) for piece in cut(content, draw)]
        kind = {"text": "text", "reasoning": "thinking"}[channel]
        if content and expected and expected[-1][0] == kind:
            expected[-1] = (kind, expected[-1][1] + content)
        elif content:
            expected.append((kind, content))
    deltas.append(Delta(0, "", 1, finish="tool_calls" if call >= 0 else "stop"))
    ends = sorted({*draw(st.lists(st.integers(1, len(deltas)), max_size=4)), len(deltas)})
    return [deltas[a:b] for a, b in zip([0, *ends], ends, strict=False)], expected


def generation():
    made = Generation("msg_1", [[1, 2, 3]], SamplingParams())
    made.usage.prompt_tokens, made.usage.cached_tokens, made.usage.completion_tokens = 3, 2, 7
    return made


def replaying(data):
    """Return a client whose server answers every request with ``data``."""
    answer = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data)
    transport = httpx2.MockTransport(lambda _: answer)
    return anthropic.Anthropic(
        base_url="http://x",
        api_key="x",
        max_retries=0,
        http_client=httpx2.Client(transport=transport),
    )


def streamed(data):
    with (
        replaying(data) as client,
        client.messages.stream(model="m", max_tokens=9, messages=[]) as stream,
    ):
        return stream.get_final_message()


def blocks_of(message):
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in message.content]


class Replayed(SimpleNamespace):
    async def __aiter__(self):
        for step in self.steps:
            yield step


@given(answers())
def test_streamed_and_whole_messages_match_the_deltas(answer):
    """This holds for all channels, and however their texts are cut."""
    steps, expected = answer
    events = MessageEvents(generation(), "m", "req_1")
    data = events.begin() + b"".join(map(events.deltas, steps)) + events.end()
    message = streamed(data)
    whole = anthropic.types.Message.model_validate(
        asyncio.run(collect(Replayed(generation=generation(), steps=steps), "m"))
    )
    assert blocks_of(message) == blocks_of(whole) == expected
    assert message.stop_reason == whole.stop_reason
    assert message.stop_reason == (
        "tool_use" if any(kind == "tool_use" for kind, _ in expected) else "end_turn"
    )
    assert message.usage.input_tokens == whole.usage.input_tokens == 1
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.output_tokens == 7
    assert all(block.signature for block in message.content if block.type == "thinking")
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [block.name for block in calls] == [f"function_{i}" for i in range(len(calls))]
    assert len({block.id for block in calls}) == len(calls)


def test_stop_sequence_is_reported():
    steps = [[Delta(0, "a", 1)], [Delta(0, "", 1, finish="stop", stop="\n\n")]]
    events = MessageEvents(generation(), "m", "req_1")
    message = streamed(events.begin() + b"".join(map(events.deltas, steps)) + events.end())
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\n\n")


def test_truncated_tool_call_has_an_object_as_input():
    """The truncated arguments are not valid JSON, but clients expect an object."""
    steps = [
        [Delta(0, "", 1, channel=Channel.CALL, name="add")],
        [Delta(0, '{"a": 1, "b": "tw', 1, "length", channel=Channel.CALL)],
    ]
    message = asyncio.run(collect(Replayed(generation=generation(), steps=steps), "m"))
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {"a": 1, "b": "tw"}


def test_fault_in_a_stream_raises_the_clients_error():
    events = MessageEvents(generation(), "m", "req_1")
    data = (
        events.begin() + events.deltas([Delta(0, "a", 1)]) + events.fault(EngineError("it broke"))
    )
    try:
        streamed(data)
    except anthropic.APIStatusError as error:
        assert error.type == "api_error"
        assert error.api_message == "it broke"
    else:
        raise AssertionError("no error")
