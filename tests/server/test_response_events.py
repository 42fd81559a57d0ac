"""Deltas of all channels become the events of a response; no server runs."""

import json

import msgspec
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response import Response

from cllm.core.params import SamplingParams
from cllm.errors import EngineError
from cllm.server.openai.responses.items import MessageItem, make_messages
from cllm.server.openai.responses.stream import ResponseEvents
from cllm.server.openai.responses.tools import ToolTarget, extract_input
from cllm.serving.answer import Generation
from cllm.text.output_reader import Delta
from cllm.text.tools.parser import Channel

HEAD = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "in_progress",
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "tool_choice": "auto",
    "tools": [],
}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


def events_of(deltas, end="end", on_end=lambda response: None, called=None):
    """Return the events for ``deltas``, given one at a time, as dicts; and the response."""
    events = ResponseEvents(
        Generation("resp_1", [[1]], SamplingParams()), HEAD, on_end, called or {}
    )
    data = events.begin() + b"".join(events.deltas([delta]) for delta in deltas)
    data += events.end() if end == "end" else events.fault(EngineError("The engine went away."))
    blocks = data.decode().strip().split("\n\n")
    found = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    for event in found:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found, json.loads(msgspec.json.encode(events.response))


def short(kind):
    return kind.removeprefix("response.")


THOUGHT = [
    Delta(0, "Let me", 2, channel=Channel.REASONING),
    Delta(0, " see.", 2, channel=Channel.REASONING),
]
CALLS = [
    Delta(0, "", 1, channel=Channel.CALL, call=0, name="f"),
    Delta(0, '{"a":', 2, channel=Channel.CALL, call=0),
    Delta(0, "1}", 2, channel=Channel.CALL, call=0),
    Delta(0, "{}", 2, channel=Channel.CALL, call=1, name="g"),
    Delta(0, "", 1, "tool_calls"),
]


def test_reasoning_text_and_calls_become_separate_items():
    """Each item is closed before the next one is opened."""
    events, response = events_of([*THOUGHT, Delta(0, "Hm.", 1), *CALLS])
    assert [short(event["type"]) for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event["output_index"] for event in events if "output_index" in event] == [0] * 7 + [
        1
    ] * 6 + [2] * 5 + [3] * 4
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert [item.get("arguments") for item in response["output"][2:]] == ['{"a":1}', "{}"]
    assert response["output"] == [
        event["item"] for event in events if event["type"] == "response.output_item.done"
    ]
    assert (
        pydantic.TypeAdapter(Response).validate_python(response).output[0].content[0].text
        == "Let me see."
    )


def test_response_items_become_one_assistant_message():
    """It has the reasoning, the text and the calls; the results of the tools follow."""
    _, response = events_of([*THOUGHT, Delta(0, "Hm.", 1), *CALLS])
    user = MessageItem(role="user", content="Q").resource()
    gave = {
        "type": "function_call_output",
        "call_id": response["output"][2]["call_id"],
        "output": "3",
    }
    messages = make_messages([user, *response["output"], gave], "Be kind.")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["reasoning_content"] == "Let me see."
    assert messages[2]["content"] == "Hm."
    assert [call["function"]["name"] for call in messages[2]["tool_calls"]] == ["f", "g"]
    assert messages[2]["tool_calls"][0]["id"] == messages[3]["tool_call_id"]


def test_empty_answer_has_an_empty_message():
    events, response = events_of([Delta(0, "", 1, "stop")])
    assert [short(event["type"]) for event in events][2:] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert response["output"][0]["content"][0]["text"] == ""


def test_fault_ends_the_stream_with_a_failed_response_that_is_not_stored():
    """The failed response contains the output so far."""
    kept = []
    events, _ = events_of([Delta(0, "Hm.", 1)], end="fault", on_end=kept.append)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "The engine went away."}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hm."
    assert kept == []


PATCH = '*** Begin Patch\n+a "b"\n*** End Patch'
CALLED = {
    "apply_patch": ToolTarget("apply_patch", is_custom=True),
    "mcp__docs__find": ToolTarget("find", "mcp__docs__"),
}


def get_call(name, *pieces):
    return [
        Delta(0, piece, 1, channel=Channel.CALL, name=name if i == 0 else "")
        for i, piece in enumerate(pieces)
    ]


def test_custom_tool_call_has_its_own_items_and_events():
    arguments = json.dumps({"input": PATCH})
    deltas = [
        *get_call("apply_patch", "", arguments[:9], arguments[9:]),
        Delta(0, "", 1, "tool_calls"),
    ]
    events, response = events_of(deltas, called=CALLED)
    added, delta, done, ended = events[2:6]
    assert [short(event["type"]) for event in events[2:]] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert (added["item"]["type"], added["item"]["name"], added["item"]["input"]) == (
        "custom_tool_call",
        "apply_patch",
        "",
    )
    assert delta["delta"] == done["input"] == ended["item"]["input"] == PATCH
    assert response["output"] == [ended["item"]]
    assert "arguments" not in ended["item"]


def test_namespaced_tool_call_names_tool_and_namespace():
    events, response = events_of(
        [*get_call("mcp__docs__find", "{}"), Delta(0, "", 1, "tool_calls")], called=CALLED
    )
    (item,) = response["output"]
    assert (item["type"], item["name"], item["namespace"], item["arguments"]) == (
        "function_call",
        "find",
        "mcp__docs__",
        "{}",
    )
    assert [event["name"] for event in events if event["type"].endswith("arguments.done")] == [
        "find"
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"input": "cut o', "cut o"),
        ('{"inp', ""),
        ("{", ""),
        ("", ""),
        ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ("ls -l", "ls -l"),
    ],
)
def test_input_of_a_custom_tool_is_extracted_from_the_arguments(arguments, text):
    assert extract_input(arguments) == text
