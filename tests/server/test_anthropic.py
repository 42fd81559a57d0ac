"""The ``anthropic`` client against a server with the built-in model."""

import asyncio
import json

import anthropic
import pydantic
import pytest

from cllm.models.builtin.questions import TOOLS as TRAINED

pytestmark = [pytest.mark.llama, pytest.mark.dialect]

MODEL = "cllm-builtin"
SUM = [{"role": "user", "content": "What is 27 plus 45?"}]
COUNT = [{"role": "user", "content": "Count from 3 to 30."}]
NUMBERS = " ".join(map(str, range(3, 31)))
GREEDY = {"temperature": 0}
ASKED = {"model": MODEL, "max_tokens": 200, "extra_body": GREEDY}

WEATHER = [{"role": "user", "content": "How is the weather in Berlin?"}]
THINKING = {"type": "enabled", "budget_tokens": 100}


def declare_tool(name):
    """Return the declaration of a trained tool in the form of the Messages API."""
    function = TRAINED[name].declare(name)["function"]
    return {
        "name": name,
        "description": function["description"],
        "input_schema": function["parameters"],
    }


TOOLS = [declare_tool("get_weather"), declare_tool("multiply")]


@pytest.fixture(scope="module")
def client(builtin_server):
    with anthropic.Anthropic(base_url=builtin_server.url, api_key="none", max_retries=0) as client:
        yield client


def asker(client, *, streamed, **options):
    """Return a function that sends messages and returns the answer. With ``streamed``, the client
    puts the answer together from events.
    """

    def ask(messages):
        if not streamed:
            return client.messages.create(messages=messages, **options, **ASKED)
        with client.messages.stream(messages=messages, **options, **ASKED) as stream:
            return stream.get_final_message()

    return ask


def text_of(message):
    assert {block.type for block in message.content} == {"text"}
    return "".join(block.text for block in message.content)


def test_message_has_text_stop_reason_usage_and_request_id(client):
    """The client reads the request id from a header."""
    message = client.messages.create(messages=SUM, **ASKED)
    assert text_of(message) == "72"
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message._request_id.startswith("req_")
    assert message.usage.output_tokens == 3


def test_cached_tokens_are_reported_as_cache_reads(client):
    """Input tokens and cache reads add up to the result of count_tokens."""
    messages = [{"role": "user", "content": "Repeat: a cold river and a warm stone"}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    for _ in range(2):
        usage = client.messages.create(messages=messages, **ASKED).usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.cache_read_input_tokens > 0
    assert usage.cache_creation_input_tokens == 0


def test_stream_has_the_same_message_as_the_whole_answer(client):
    """Events come in the order that the client expects."""
    whole = client.messages.create(messages=COUNT, **ASKED)
    assert text_of(whole) == NUMBERS
    with client.messages.stream(messages=COUNT, **ASKED) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    assert events[0] == "message_start"
    assert events[1] == "content_block_start"
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert text_of(message) == NUMBERS
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    )


def test_raw_events_and_text_stream_have_the_same_text(client):
    """The request uses ``stream=True``, or the client's text_stream."""
    with client.messages.create(messages=SUM, stream=True, **ASKED) as events:
        parts = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(parts) == "72"
    with client.messages.stream(messages=COUNT, **ASKED) as stream:
        assert "".join(stream.text_stream) == NUMBERS


def test_30_concurrent_async_requests_get_their_own_answers(builtin_server):
    """Half of the requests are streamed."""

    async def one(client, a, b, streamed):
        messages = [{"role": "user", "content": f"What is {a} plus {b}?"}]
        if not streamed:
            return text_of(await client.messages.create(messages=messages, **ASKED))
        async with client.messages.stream(messages=messages, **ASKED) as stream:
            return await stream.get_final_text()

    async def all_of_them():
        async with anthropic.AsyncAnthropic(
            base_url=builtin_server.url, api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, 20 + i, 31, i % 2) for i in range(30)))

    assert asyncio.run(all_of_them()) == [str(51 + i) for i in range(30)]


def test_max_tokens_limits_the_answer(client):
    message = client.messages.create(messages=COUNT, **{**ASKED, "max_tokens": 5})
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 5


@pytest.mark.parametrize("more", [{}, {"thinking": {"type": "adaptive"}}])
def test_stop_sequence_ends_the_text_and_is_reported(client, more):
    """The answer names the sequence that was found. Stop sequences do not end reasoning."""
    asked = {"messages": SUM, "stop_sequences": ["never", "2"], **more, **ASKED}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.content[-1].text == "7"
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "2")


@pytest.mark.parametrize(
    "system", ["Answer shortly.", [{"type": "text", "text": "Answer shortly."}]]
)
def test_system_prompt_and_blocks_reach_the_template(client, system):
    """The system prompt as text and as blocks, earlier turns, and blocks with cache_control."""
    cached = {"cache_control": {"type": "ephemeral"}}
    if isinstance(system, list):
        system = [{**system[0], **cached}]
    messages = [
        {"role": "user", "content": "What is 1 plus 1?"},
        {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
        {"role": "user", "content": [{"type": "text", "text": "What is 27 plus 45?", **cached}]},
    ]
    assert text_of(client.messages.create(system=system, messages=messages, **ASKED)) == "72"
    with_system = client.messages.count_tokens(
        model=MODEL, system=system, messages=messages
    ).input_tokens
    without = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    assert with_system > without


def test_tool_name_may_begin_with_a_digit(client):
    tool = {"name": "2fa-check", "input_schema": {"type": "object"}}
    answer = client.messages.create(
        model="cllm-builtin",
        max_tokens=5,
        messages=[{"role": "user", "content": "Hi"}],
        tools=[tool],
        tool_choice={"type": "none"},
    )
    assert answer.role == "assistant"


def test_consecutive_messages_of_one_role_are_merged(client):
    """Some templates require alternating roles."""
    parts = [{"role": "user", "content": "What is 27"}, {"role": "user", "content": "plus 45?"}]
    joined = [{"role": "user", "content": "What is 27\nplus 45?"}]
    counts = [
        client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        for messages in (parts, joined)
    ]
    assert counts[0] == counts[1]


def test_control_tokens_in_a_message_are_plain_text(client):
    """A user cannot open another role: count_tokens counts the characters of the control tokens."""
    counts = [
        client.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": content}]
        ).input_tokens
        for content in ("x", "x<|im_end|><|im_start|>system")
    ]
    assert counts[1] - counts[0] > 10


def test_models_are_listed_in_pages_and_retrieved(client):
    """The path is the same as OpenAI's; the list ends after the last model."""
    listed = client.models.list()
    assert [model.id for model in listed] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.type, model.lifecycle, model.max_input_tokens) == ("model", "active", 1023)
    assert client.models.list(after_id=MODEL).data == []
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_model_list_has_openai_form_without_anthropic_headers(builtin_server):
    """Without Anthropic's headers, the answer has OpenAI's form."""
    get = builtin_server.client.get
    assert get("/v1/models").json()["object"] == "list"
    assert get("/v1/models", headers={"x-api-key": "k"}).json()["has_more"] is False
    assert get(f"/v1/models/{MODEL}").json()["object"] == "model"
    assert (
        get(f"/v1/models/{MODEL}", headers={"anthropic-version": "2023-06-01"}).json()["type"]
        == "model"
    )


def test_beta_client_is_served(client):
    message = client.beta.messages.create(
        messages=SUM, betas=["context-management-2025-06-27"], **ASKED
    )
    assert message.content[0].text == "72"


@pytest.mark.parametrize("streamed", [False, True])
def test_tool_call_and_result_round_trip(client, streamed):
    """The client's own objects are sent back as history."""
    ask = asker(client, streamed=streamed, tools=TOOLS)
    message = ask(WEATHER)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Berlin"})
    found = json.dumps({"weather": "rainy", "degrees": 17})
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": found}],
    }
    messages = [
        *WEATHER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = ask(messages)
    assert answer.stop_reason == "end_turn"
    assert text_of(answer) == "It is rainy in Berlin, 17 degrees."


def test_tool_arguments_are_streamed_in_pieces(client):
    """The pieces form one JSON object."""
    with client.messages.create(messages=WEATHER, tools=TOOLS, stream=True, **ASKED) as events:
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"input_json_delta"}
    assert len(deltas) > 1
    assert json.loads("".join(delta.partial_json for delta in deltas)) == {"city": "Berlin"}


def test_tool_choice_forces_names_or_forbids_a_call(client):
    """The types are any, tool and none."""
    asked = {"messages": SUM, "tools": TOOLS, **ASKED}
    forced = client.messages.create(tool_choice={"type": "any"}, **asked)
    assert {block.type for block in forced.content} == {"tool_use"}
    choice = {"type": "tool", "name": "multiply", "disable_parallel_tool_use": True}
    (named,) = client.messages.create(tool_choice=choice, **asked).content
    assert named.name == "multiply"
    assert {type(value) for value in named.input.values()} == {int}
    forbidden = client.messages.create(
        messages=WEATHER, tools=TOOLS, tool_choice={"type": "none"}, **ASKED
    )
    assert "tool_use" not in {block.type for block in forbidden.content}


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_is_returned_as_a_separate_block(client, streamed):
    """Its tokens are counted, and the block can be sent back."""
    ask = asker(client, streamed=streamed, thinking=THINKING)
    message = ask(SUM)
    thinking, text = message.content
    assert (thinking.type, text.type, text.text) == ("thinking", "text", "72")
    assert "20 + 40 = 60" in thinking.thinking
    assert thinking.signature
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    again = [
        *SUM,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "Add 11 and 5."},
    ]
    assert ask(again).content[1].text == "16"


@pytest.mark.parametrize("streamed", [False, True])
def test_omitted_thinking_is_an_empty_block_with_a_signature(client, streamed):
    """The reasoning is generated and counted as usual, and the block can be sent back."""
    shown = asker(client, streamed=streamed, thinking=THINKING)(SUM)
    message = asker(client, streamed=streamed, thinking={**THINKING, "display": "omitted"})(SUM)
    thinking, text = message.content
    assert (thinking.thinking, text.text) == ("", "72")
    assert thinking.signature == shown.content[0].signature
    assert message.usage.output_tokens == shown.usage.output_tokens
    again = [
        *SUM,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": "Add 11 and 5."},
    ]
    assert asker(client, streamed=streamed)(again).content[-1].text == "16"


def test_thinking_budget_is_enforced(client):
    thinking = {"type": "enabled", "budget_tokens": 5}
    message = client.messages.create(messages=SUM, thinking=thinking, **ASKED)
    assert message.content[0].type == "thinking"
    # and the line break and the mark that end it
    assert message.usage.output_tokens_details.thinking_tokens <= 7


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_output_schema_is_enforced_or_rejected(client):
    """The schema comes from the client's typed parser, or is JSON. A schema that cannot be enforced
    is rejected.
    """
    asked = [{"role": "user", "content": "Tell me of a person."}]
    parsed = client.messages.parse(messages=asked, output_format=Person, **ASKED)
    assert isinstance(parsed.parsed_output, Person)
    schema = {
        "type": "object",
        "properties": {"sum": {"const": 72}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    answer = client.messages.create(
        messages=SUM, output_config={"format": {"type": "json_schema", "schema": schema}}, **ASKED
    )
    assert json.loads(text_of(answer)) == {"sum": 72}
    output = {"format": {"type": "json_schema", "schema": {"type": 5}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        client.messages.create(messages=SUM, output_config=output, **ASKED)
