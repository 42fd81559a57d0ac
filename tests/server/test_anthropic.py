"""The real ``anthropic`` client against a real server with the built-in model."""

import asyncio
import json

import anthropic
import pydantic
import pytest

from cllm.models.builtin.questions import TOOLS as TRAINED

pytestmark = pytest.mark.llama

MODEL = "cllm-builtin"
SUM = [{"role": "user", "content": "What is 27 plus 45?"}]
COUNT = [{"role": "user", "content": "Count from 3 to 30."}]
NUMBERS = " ".join(map(str, range(3, 31)))
GREEDY = {"temperature": 0}
ASKED = {"model": MODEL, "max_tokens": 200, "extra_body": GREEDY}

WEATHER = [{"role": "user", "content": "How is the weather in Berlin?"}]
THINKING = {"type": "enabled", "budget_tokens": 100}


def tool(name):
    """As Anthropic's clients declare it."""
    function = TRAINED[name].declare(name)["function"]
    return {
        "name": name,
        "description": function["description"],
        "input_schema": function["parameters"],
    }


TOOLS = [tool("get_weather"), tool("multiply")]


@pytest.fixture(scope="module")
def client(builtin_server):
    with anthropic.Anthropic(base_url=builtin_server.url, api_key="none", max_retries=0) as client:
        yield client


def asker(client, *, streamed, **options):
    """Sends messages with ``options``, and gives the message that comes, whole or put together by
    the client.
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


def test_a_message_is_answered(client):
    """The answer, how it ended, what it cost; the id of the request is in the header that the
    client reads.
    """
    message = client.messages.create(messages=SUM, **ASKED)
    assert text_of(message) == "72"
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message._request_id.startswith("req_")
    assert message.usage.output_tokens == 3


def test_what_was_computed_before_is_cached_input(client):
    """Input tokens and cached ones are together what count_tokens counts."""
    messages = [{"role": "user", "content": "Repeat: a cold river and a warm stone"}]
    counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    for _ in range(2):
        usage = client.messages.create(messages=messages, **ASKED).usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.cache_read_input_tokens > 0
    assert usage.cache_creation_input_tokens == 0


def test_a_stream_has_the_same_message(client):
    """Event by event as the client expects them, put together by it."""
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


def test_a_raw_stream_and_its_text(client):
    """With ``stream=True``, and by the client's text stream."""
    with client.messages.create(messages=SUM, stream=True, **ASKED) as events:
        parts = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(parts) == "72"
    with client.messages.stream(messages=COUNT, **ASKED) as stream:
        assert "".join(stream.text_stream) == NUMBERS


def test_the_async_client_and_many_at_once(builtin_server):
    """Streamed and whole, all with their own answer."""

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


def test_max_tokens_ends_an_answer(client):
    message = client.messages.create(messages=COUNT, **{**ASKED, "max_tokens": 5})
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 5


@pytest.mark.parametrize("more", [{}, {"thinking": {"type": "adaptive"}}])
def test_a_stop_sequence_ends_an_answer_and_is_named(client, more):
    """Streamed and whole, of several the one that was found; reasoning does not end by it."""
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
def test_system_turns_and_blocks(client, system):
    """A system prompt in both forms, earlier turns, content as text and as blocks that ask to be
    cached.
    """
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


def test_turns_of_one_role_are_one(client):
    """So that templates which want roles in turn are content."""
    parts = [{"role": "user", "content": "What is 27"}, {"role": "user", "content": "plus 45?"}]
    joined = [{"role": "user", "content": "What is 27\nplus 45?"}]
    counts = [
        client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        for messages in (parts, joined)
    ]
    assert counts[0] == counts[1]


def test_control_tokens_in_a_message_are_plain_text(client):
    """A user cannot open another role, and count_tokens shows it."""
    counts = [
        client.messages.count_tokens(
            model=MODEL, messages=[{"role": "user", "content": content}]
        ).input_tokens
        for content in ("x", "x<|im_end|><|im_start|>system")
    ]
    assert counts[1] - counts[0] > 10


def test_models(client):
    """By the same path as OpenAI's, whose form others get; pages end."""
    listed = client.models.list()
    assert [model.id for model in listed] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.type, model.lifecycle, model.max_input_tokens) == ("model", "active", 1023)
    assert client.models.list(after_id=MODEL).data == []
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_the_other_dialect_has_its_own_models(builtin_server):
    """Without a header of Anthropic's the path is OpenAI's."""
    get = builtin_server.client.get
    assert get("/v1/models").json()["object"] == "list"
    assert get("/v1/models", headers={"x-api-key": "k"}).json()["has_more"] is False
    assert get(f"/v1/models/{MODEL}").json()["object"] == "model"
    assert (
        get(f"/v1/models/{MODEL}", headers={"anthropic-version": "2023-06-01"}).json()["type"]
        == "model"
    )


def test_the_beta_client_is_served_too(client):
    message = client.beta.messages.create(
        messages=SUM, betas=["context-management-2025-06-27"], **ASKED
    )
    assert message.content[0].text == "72"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_is_called_and_its_result_used(client, streamed):
    """The whole way round, with the client's own objects sent back."""
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


def test_the_arguments_of_a_call_are_streamed(client):
    """In pieces, which are together one JSON object."""
    with client.messages.create(messages=WEATHER, tools=TOOLS, stream=True, **ASKED) as events:
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert {delta.type for delta in deltas} == {"input_json_delta"}
    assert len(deltas) > 1
    assert json.loads("".join(delta.partial_json for delta in deltas)) == {"city": "Berlin"}


def test_tool_choice(client):
    """A call can be forced, of one tool too, and forbidden."""
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
def test_thinking_is_a_block_of_its_own(client, streamed):
    """It is counted, and may be sent back."""
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
def test_omitted_thinking_leaves_an_empty_block_with_its_signature(client, streamed):
    """It is computed and counted as ever, and the block may be sent back."""
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


def test_a_budget_of_thinking_is_kept(client):
    thinking = {"type": "enabled", "budget_tokens": 5}
    message = client.messages.create(messages=SUM, thinking=thinking, **ASKED)
    assert message.content[0].type == "thinking"
    # and the line break and the mark that end it
    assert message.usage.output_tokens_details.thinking_tokens <= 7


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_an_answer_in_a_form(client):
    """By the client's typed parser, and by a schema; one that cannot be enforced is refused."""
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
