"""Tools and reasoning, with the real ``openai`` client and the built-in model."""

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from cllm.models.builtin.questions import TOOLS
from cllm.server.openai.schema import ChatBody
from cllm.text.templates.call_ids import link_results

pytestmark = [pytest.mark.llama, pytest.mark.dialect]

DECLARED = [TOOLS[name].declare(name) for name in ("get_weather", "multiply", "get_time")]
ASK = [{"role": "user", "content": "How is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 27 plus 45?"}]
STORY = [{"role": "user", "content": "Tell a story about a fox named Ida in the forest."}]
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def create(client):
    def create(messages, **options):
        return client.chat.completions.create(
            model="cllm-builtin", messages=messages, temperature=0, **options
        )

    return create


def nested(depth: int) -> dict[str, Any]:
    """Return the schema of a city, nested in ``depth`` objects."""
    return {"properties": {"city": nested(depth - 1)}} if depth else {}


def streamed(chunks) -> dict:
    """Return the message assembled from the deltas of a stream."""
    whole: dict[str, Any] = {
        "content": "",
        "reasoning": "",
        "calls": [],
        "finish": None,
        "num_deltas": 0,
    }
    for chunk in chunks:
        for choice in chunk.choices:
            whole["content"] += choice.delta.content or ""
            whole["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            whole["finish"] = choice.finish_reason or whole["finish"]
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(whole["calls"])
                    whole["calls"].append([call.id, call.function.name, ""])
                whole["calls"][call.index][2] += call.function.arguments
                whole["num_deltas"] += 1
    return whole


def test_tool_is_called_for_any_form_of_its_declaration(create) -> None:
    """Real clients send other key orders, titles, descriptions and optional properties."""
    city = {"title": "City", "description": 'Its name, such as "Rome"', "type": "string"}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "properties": {"city": city},
        "type": "object",
    }
    for more in ({}, {"required": ["city"], "additionalProperties": False}):
        function = {
            "parameters": schema | more,
            "description": "Get the weather of a city",
            "name": "get_weather",
        }
        (call,) = (
            create(ASK, tools=[{"type": "function", "function": function}])
            .choices[0]
            .message.tool_calls
        )
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "get_weather",
            {"city": "Paris"},
        )


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_tool_call_and_result_round_trip(choice, create) -> None:
    """The model calls a declared tool and uses its result."""
    first = create(ASK, tools=DECLARED, tool_choice=choice).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    (call,) = first.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "Paris"},
    )
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": '{"weather": "sunny", "degrees": 21}',
    }
    second = create([*ASK, first.message, result], tools=DECLARED).choices[0]
    assert (second.message.content, second.finish_reason) == (
        "It is sunny in Paris, 21 degrees.",
        "stop",
    )
    assert second.message.tool_calls is None


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_streamed_call_has_id_and_name_first(choice, create) -> None:
    """The pieces of the arguments form one JSON object."""
    whole = streamed(create(ASK, tools=DECLARED, tool_choice=choice, stream=True))
    ((call_id, name, arguments),) = whole["calls"]
    assert call_id
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Paris"})
    assert (whole["content"], whole["finish"]) == ("", "tool_calls")
    assert whole["num_deltas"] > 3


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"extra_body": THINK, "tool_choice": "required"},
        {"stream_options": {"include_usage": True}},
    ],
)
def test_first_chunk_of_a_pure_call_has_no_content(more, create) -> None:
    """OpenAI's first chunk has null for a call, and an empty text for a text."""
    chunks = [
        chunk.choices[0].delta
        for chunk in create(ASK, tools=DECLARED, stream=True, **more)
        if chunk.choices
    ]
    assert (chunks[0].role, chunks[0].content) == ("assistant", None)
    assert all(delta.content is None and delta.role is None for delta in chunks[1:])
    text = [chunk.choices[0].delta for chunk in create(SUM, stream=True)]
    assert (text[0].role, text[0].content) == ("assistant", "")


def test_strict_arguments_follow_their_schema_with_choice_auto(create) -> None:
    """The schema excludes the city that the model would name. The model may still answer with text."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    strict = {
        "name": "get_weather",
        "parameters": schema | {"additionalProperties": False},
        "strict": True,
    }
    tools = [{"type": "function", "function": strict}]
    answer = create(ASK, tools=tools).choices[0]
    (call,) = answer.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert create(SUM, tools=tools).choices[0].message.content
    refused = {"not": {}} | schema
    tools = [{"type": "function", "function": strict | {"parameters": refused}}]
    with pytest.raises(openai.BadRequestError) as caught:
        create(ASK, tools=tools)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}},
        {"type": ["array"]},
        {"type": 7},
        {"properties": None, "required": True},
        {"properties": {"city": None}},
        {"properties": {"city": {"type": "any"}}},
        {"properties": {"city": {"type": {}}}},
        {"properties": {"city": {"type": "string", "required": True}}},
        nested(50),
    ],
)
def test_malformed_schema_is_ignored_unless_strict(schema, create, client) -> None:
    """Generated schemas of real clients have such errors, and most servers do not check them."""
    function = {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": schema,
    }
    tools = [{"type": "function", "function": function}]
    answer = client.chat.completions.with_raw_response.create(
        model="cllm-builtin", messages=ASK, tools=tools, temperature=0
    )
    (call,) = answer.parse().choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris"},
    )
    assert "parameters" in answer.headers["x-cllm-unenforced-keywords"]
    function["strict"] = True
    with pytest.raises(openai.BadRequestError, match="Function 'get_weather'") as caught:
        create(ASK, tools=tools)
    assert (caught.value.param, caught.value.code) == ("tools", "invalid_json_schema")


@pytest.mark.parametrize("name", ["multiply", "get_time"])
def test_named_tool_is_called_for_any_question(name, create) -> None:
    choice = {"type": "function", "function": {"name": name}}
    answer = create(SUM, tools=DECLARED, tool_choice=choice, max_tokens=200).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == name
    properties = TOOLS[name].declare(name)["function"]["parameters"]["properties"]
    assert json.loads(call.function.arguments).keys() == properties.keys()
    assert answer.finish_reason == "tool_calls"


def test_tool_choice_none_and_allowed_tools_limit_calls(create) -> None:
    answer = create(ASK, tools=DECLARED, tool_choice="none", max_tokens=40).choices[0]
    assert answer.message.tool_calls is None
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    answer = create(
        [{"role": "user", "content": "What time is it in Rome?"}],
        tools=DECLARED,
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    ).choices[0]
    assert answer.message.tool_calls[0].function.name == "get_time"


def test_parallel_tool_calls_false_ends_after_one_call(create) -> None:
    answer = create(ASK, tools=DECLARED, tool_choice="required", parallel_tool_calls=False).choices[
        0
    ]
    assert len(answer.message.tool_calls) == 1
    assert answer.finish_reason == "tool_calls"


def test_answer_goes_on_although_an_equal_request_ends_after_one_call(create) -> None:
    """Their prompts and parameters are equal."""
    long: dict[str, Any] = {"tools": DECLARED, "extra_body": {"ignore_eos": True}}
    with create(ASK, stream=True, **long) as chunks:
        first = next(chunks)
        other = create(ASK, parallel_tool_calls=False, **long).choices[0]
        assert streamed([first, *chunks])["finish"] == "length"
    assert other.finish_reason == "tool_calls"


def test_each_choice_has_its_calls_and_max_tokens_truncates_them(create) -> None:
    answer = create(ASK, tools=DECLARED, n=3)
    assert [choice.message.tool_calls[0].function.name for choice in answer.choices] == [
        "get_weather"
    ] * 3
    ids = {choice.message.tool_calls[0].id for choice in answer.choices}
    assert len(ids) == 3
    cut = create(ASK, tools=DECLARED, max_tokens=14).choices[0]
    assert cut.finish_reason == "length"
    assert '{"city": "Paris"}'.startswith(cut.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": DECLARED,
                "tool_choice": {"type": "function", "function": {"name": "nobody"}},
            },
            "tool_choice",
        ),
        ({"tools": DECLARED, "tool_choice": "always"}, "tool_choice"),
        ({"tools": DECLARED, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"extra_body": {"thinking_token_budget": -1}}, "thinking_token_budget"),
        ({"extra_body": {"chat_template_kwargs": {"add_generation_prompt": False}}}, None),
    ],
)
def test_invalid_tool_options_name_the_field(options, param, create) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(ASK, **options)
    assert param is None or caught.value.param.startswith(param)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_unenforceable_schema_is_rejected_for_strict_functions_only(choice, create) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": "("}},
        "required": ["city"],
    }
    function = {"name": "get_weather", "parameters": schema}
    (call,) = (
        create(ASK, tools=[{"type": "function", "function": function}], tool_choice=choice)
        .choices[0]
        .message.tool_calls
    )
    assert json.loads(call.function.arguments).keys() == {"city"}
    with pytest.raises(openai.BadRequestError) as caught:
        create(
            ASK,
            tools=[{"type": "function", "function": {**function, "strict": True}}],
            tool_choice=choice,
        )
    assert caught.value.param == "tools"


def test_reasoning_is_separated_from_the_text(create) -> None:
    """The template opens the reasoning, so the generated text begins inside it."""
    answer = create(SUM, extra_body=THINK)
    message = answer.choices[0].message
    assert message.content == "72"
    assert message.reasoning_content == "20 + 40 = 60\n7 + 5 = 12\n60 + 12 = 72"
    num_thoughts = answer.usage.completion_tokens_details.reasoning_tokens
    assert 5 < num_thoughts < answer.usage.completion_tokens
    whole = streamed(create(SUM, extra_body=THINK, stream=True))
    assert (whole["content"], whole["reasoning"]) == ("72", message.reasoning_content)
    plain = create(SUM)
    assert plain.choices[0].message.content == "72"
    assert getattr(plain.choices[0].message, "reasoning_content", None) is None
    again = create([*SUM, {"role": "assistant", "content": "72", "reasoning_content": "hm"}, *SUM])
    assert again.choices[0].message.content


@pytest.mark.parametrize("effort", ["low", "high", "none"])
def test_reasoning_effort_switches_reasoning(effort, create) -> None:
    """Every effort switches it on; none switches it off."""
    message = create(SUM, reasoning_effort=effort).choices[0].message
    assert message.content == "72"
    assert bool(getattr(message, "reasoning_content", None)) == (effort != "none")


@pytest.mark.parametrize("budget", [0, 1, 8])
def test_reasoning_budget_is_enforced(budget, create) -> None:
    """When it is used up, the reasoning is closed and the answer begins."""
    answer = create(SUM, extra_body={**THINK, "thinking_token_budget": budget}, max_tokens=40)
    details = answer.usage.completion_tokens_details
    # the line break and the mark that end it are read while it goes on
    assert details.reasoning_tokens <= budget + 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content.strip()
    assert "</think>" not in answer.choices[0].message.content
    free = create(SUM, extra_body={**THINK, "thinking_token_budget": 500})
    assert free.choices[0].message.content == "72"


def test_forced_call_follows_free_reasoning(create) -> None:
    """The call's grammar does not constrain the reasoning."""
    answer = create(
        ASK,
        tools=DECLARED,
        tool_choice="required",
        extra_body={**THINK, "thinking_token_budget": 8},
        max_tokens=300,
    ).choices[0]
    assert json.loads(answer.message.tool_calls[0].function.arguments)
    assert answer.finish_reason == "tool_calls"


def test_structured_output_follows_free_reasoning(create) -> None:
    schema = {
        "type": "object",
        "properties": {"sum": {"enum": [70, 71, 72]}},
        "additionalProperties": False,
        "required": ["sum"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    answer = create(SUM, response_format=form, extra_body=THINK, max_tokens=200).choices[0]
    assert json.loads(answer.message.content) == {"sum": 72}
    assert answer.message.reasoning_content == "20 + 40 = 60\n7 + 5 = 12\n60 + 12 = 72"


def test_stop_strings_apply_to_the_text_only(create) -> None:
    """They do not apply to reasoning and to the arguments of a call."""
    answer = create(SUM, extra_body=THINK, stop=["=", "2"])
    assert answer.choices[0].message.content == "7"
    assert "=" in answer.choices[0].message.reasoning_content
    answer = create(ASK, tools=DECLARED, stop=["Paris"]).choices[0]
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"city": "Paris"}


class Multiply(pydantic.BaseModel):
    """Multiply two numbers"""

    a: int
    b: int


def test_client_parses_typed_calls(client) -> None:
    """Whole and streamed."""
    options = {
        "model": "cllm-builtin",
        "messages": [{"role": "user", "content": "Multiply 6 by 7."}],
        "tools": [openai.pydantic_function_tool(Multiply, name="multiply")],
        "temperature": 0,
    }
    answer = client.chat.completions.parse(**options, tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == Multiply(a=6, b=7)
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert call.function.parsed_arguments == Multiply(a=6, b=7)


TEXT = "It is 21 degrees."
QUESTION = {"role": "user", "content": "How is the weather?"}
BLOCK = {"type": "tool_result", "tool_use_id": "a", "content": TEXT}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": TEXT}
SHORT = {"model": "cllm-builtin", "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [QUESTION, {"role": "tool", "content": TEXT}]}),
        ("/v1/messages", {"messages": [QUESTION, {"role": "user", "content": [BLOCK]}]}),
        ("/api/chat", {"messages": [QUESTION, {"role": "tool", "content": TEXT}], "stream": False}),
        ("/v1/responses", {"input": [QUESTION, OUTPUT]}),
    ],
)
def test_tool_result_without_its_call_is_served(builtin_server, path, body) -> None:
    """Clients that shorten a conversation drop the call first."""
    answer = httpx.post(builtin_server.url + path, json={**SHORT, **body}, timeout=60)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("key", [{"tool_call_id": "b"}, {}])
def test_tool_result_without_its_call_is_in_the_prompt(builtin_server, key) -> None:
    messages = [QUESTION, {"role": "tool", "content": TEXT, **key}]
    answer = httpx.post(
        f"{builtin_server.url}/apply-template", json={"messages": messages}, timeout=60
    )
    assert TEXT in answer.json()["prompt"]


def test_tool_results_without_ids_belong_to_the_calls_in_their_order() -> None:
    calls = [
        {"type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("f", "g")
    ]
    results = [{"role": "tool", "content": text} for text in ("first", "second")]
    messages = [*ASK, {"role": "assistant", "tool_calls": calls}, *results]
    chat = ChatBody(model="m", messages=messages).chat()
    linked = link_results(chat.messages)[-2:]
    assert [message["name"] for message in linked] == ["f", "g"]
    made = [call["id"] for call in link_results(chat.messages)[-3]["tool_calls"]]
    assert [message["tool_call_id"] for message in linked] == made
