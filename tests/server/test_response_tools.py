"""Tools, reasoning and schemas of the Responses API, with OpenAI's own client and the built-in
model.
"""

import json
from typing import Literal

import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from cllm.models.builtin.questions import TOOLS

pytestmark = [pytest.mark.llama, pytest.mark.slow, pytest.mark.dialect]

DECLARED = [
    {"type": "function", "strict": False, **TOOLS[name].declare(name)["function"]}
    for name in ("get_weather", "multiply", "get_time")
]
ASK = "How is the weather in Paris?"
SUM = "What is 27 plus 45?"
THOUGHTS = "20 + 40 = 60\n7 + 5 = 12\n60 + 12 = 72"
RESULT = '{"weather": "sunny", "degrees": 21}'
ANSWER = "It is sunny in Paris, 21 degrees."


@pytest.fixture(scope="module")
def create(client):
    def create(question, **options):
        return client.responses.create(
            model="cllm-builtin", input=question, temperature=0, **options
        )

    return create


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "name": "get_weather"}]
)
def test_tool_result_is_used_by_response_id_and_by_sent_items(choice, create):
    """The model calls a declared tool and uses its result."""
    first = create(ASK, tools=DECLARED, tool_choice=choice)
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        {"city": "Paris"},
    )
    assert first.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    assert create([result], tools=DECLARED, previous_response_id=first.id).output_text == ANSWER
    items = [{"role": "user", "content": ASK}, call.to_dict(), result]
    assert create(items, tools=DECLARED).output_text == ANSWER


def test_tool_call_is_streamed(create):
    """The pieces of the arguments form one JSON object; the events have the client's own types."""
    events = list(create(ASK, tools=DECLARED, stream=True))
    for event in events:
        pydantic.TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    deltas = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert len(deltas) > 2
    assert json.loads("".join(deltas)) == {"city": "Paris"}
    assert (done.name, done.arguments) == ("get_weather", "".join(deltas))
    assert events[-1].response.output[0].arguments == done.arguments


def test_custom_tool_is_called_with_plain_text(create):
    """Streamed as the client's own types. The call and its result are read again by the response's
    id.
    """
    tool = {"type": "custom", "name": "note", "description": "Writes a note down."}
    choice = {"type": "custom", "name": "note"}
    events = list(create(ASK, tools=[tool], tool_choice=choice, max_output_tokens=100, stream=True))
    for event in events:
        pydantic.TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    (call,) = events[-1].response.output
    assert (call.type, call.name) == ("custom_tool_call", "note")
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert done.input == call.input
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "written"}
    then = create(
        [result], tools=[tool], previous_response_id=events[-1].response.id, max_output_tokens=100
    )
    assert then.usage.input_tokens > events[-1].response.usage.input_tokens


def test_streaming_helper_of_the_client_assembles_a_call(client):
    with client.responses.stream(
        model="cllm-builtin", input=ASK, tools=DECLARED, temperature=0
    ) as stream:
        snapshots = [
            event.snapshot
            for event in stream
            if event.type == "response.function_call_arguments.delta"
        ]
        (call,) = stream.get_final_response().output
    assert snapshots[-1] == call.arguments
    assert json.loads(call.arguments) == {"city": "Paris"}


def test_tool_choice_forbids_or_limits_calls(create):
    """The values are none and allowed_tools."""
    assert [item.type for item in create(ASK, tools=DECLARED, tool_choice="none").output] == [
        "message"
    ]
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "multiply"}],
    }
    (call, *_) = create(ASK, tools=DECLARED, tool_choice=allowed, parallel_tool_calls=False).output
    assert call.name == "multiply"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_a_separate_item(create, stream):
    """It comes before the message, and its tokens are counted."""
    response = create(SUM, reasoning={"effort": "low"}, stream=stream)
    if stream:
        events = list(response)
        response = events[-1].response
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == THOUGHTS
        assert len(deltas) > 3
    thought, message = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHTS)
    assert message.content[0].text == response.output_text == "72"
    assert 5 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    again = [{"role": "user", "content": SUM}, *[item.to_dict() for item in response.output]]
    assert create([*again, {"role": "user", "content": SUM}]).output_text == "72"


class Sum(pydantic.BaseModel):
    sum: Literal[70, 71, 72]


def test_client_parses_a_structured_answer(client):
    """The client returns the type that its user declared."""
    response = client.responses.parse(
        model="cllm-builtin", input=SUM, text_format=Sum, max_output_tokens=50
    )
    assert response.output_parsed.sum in (70, 71, 72)
    assert response.text.format.type == "json_schema"
    with client.responses.stream(
        model="cllm-builtin", input=SUM, text_format=Sum, max_output_tokens=50
    ) as stream:
        (done,) = [event for event in stream if event.type == "response.output_text.done"]
    assert isinstance(done.parsed, Sum)


def test_unenforceable_schema_is_rejected_with_the_field(create):
    """The error has the field's name in the Responses API."""
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        create(
            SUM,
            text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        )
    assert refused.value.param.startswith("text.format")
    with pytest.raises(openai.BadRequestError) as refused:
        create(ASK, tools=DECLARED, tool_choice={"type": "function", "name": "nobody"})
    assert refused.value.param == "tool_choice"


def test_logprobs_cover_each_token_of_the_text(create):
    """Streamed or not; together their bytes are the text."""
    response = create(SUM, top_logprobs=3)
    told = response.output[0].content[0].logprobs
    assert [len(token.top_logprobs) for token in told] == [3] * len(told)
    assert bytes(byte for token in told for byte in token.bytes).decode() == "72"
    assert all(token.logprob <= 0 for token in told)
    events = list(create(SUM, include=["message.output_text.logprobs"], stream=True))
    deltas = [
        entry
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert [entry.token for entry in deltas] == [token.token for token in told]
    for event in events:
        pydantic.TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    assert create(SUM).output[0].content[0].logprobs == []
