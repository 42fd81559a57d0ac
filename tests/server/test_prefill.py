"""A last message of the assistant is continued in every dialect; real clients and the built-in
model.
"""

import json

import anthropic
import ollama
import openai
import pytest

from cllm.models.builtin.questions import TOOLS

pytestmark = [pytest.mark.llama, pytest.mark.dialect]

MODEL = "cllm-builtin"
COUNT = {"role": "user", "content": "Count from 3 to 30."}
NUMBERS = " ".join(map(str, range(3, 31)))
BEGUN = "3 4 5"
REST = NUMBERS.removeprefix(BEGUN)
WEATHER = TOOLS["get_weather"].declare("get_weather")
CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.fixture(scope="module")
def chat(client):
    def chat(*messages, stream=False, **options):
        more = {
            "extra_body": {**CONTINUE, **options.pop("extra_body", {})},
            "stream": stream,
            **options,
        }
        answer = client.chat.completions.create(
            model=MODEL, messages=[COUNT, *messages], temperature=0, **more
        )
        if not stream:
            return answer.choices[0].message.content
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    return chat


@pytest.fixture(scope="module")
def messages(builtin_server):
    with anthropic.Anthropic(base_url=builtin_server.url, api_key="none", max_retries=0) as client:

        def messages(*said, stream=False, **options):
            asked = {
                "model": MODEL,
                "max_tokens": 200,
                "messages": [COUNT, *said],
                "extra_body": {"temperature": 0},
            }
            if not stream:
                return client.messages.create(**asked, **options)
            with client.messages.stream(**asked, **options) as events:
                return events.get_final_message()

        yield messages


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize("stream", [False, True])
def test_openai_continues_a_final_message_if_asked_to(chat, stream):
    """The answer is only the new text, with its leading space."""
    assert chat(said(BEGUN), stream=stream) == REST
    assert chat(said(BEGUN + " "), stream=stream, max_tokens=2) != ""
    assert chat(said(BEGUN), stream=stream, extra_body=dict.fromkeys(CONTINUE)) != REST


@pytest.mark.parametrize("stream", [False, True])
def test_openai_continues_with_tools_and_stop_strings(chat, stream):
    assert chat(said(BEGUN), stream=stream, tools=[WEATHER]).startswith(REST)
    assert chat(said(BEGUN), stream=stream, stop=[" 8"]) == " 6 7"


def test_openai_constrains_the_new_text(chat):
    """The constraint applies to the new text only, as in vLLM."""
    pattern = {"extra_body": {"structured_outputs": {"regex": " [0-9] [0-9]!"}}}
    assert chat(said(BEGUN), **pattern) == " 6 7!"
    assert chat(said(BEGUN), tools=[WEATHER], **pattern) == " 6 7!"


def test_openai_continues_reasoning(client):
    """The model completes the reasoning and then answers."""
    asked = [{"role": "user", "content": "What is 27 plus 45?"}]
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    options = {"model": MODEL, "temperature": 0}
    whole = (
        client.chat.completions.create(messages=asked, extra_body=thinking, **options)
        .choices[0]
        .message
    )
    begun, rest = whole.reasoning_content[:11], whole.reasoning_content[11:]
    message = said("", reasoning_content=begun)
    answer = client.chat.completions.create(
        messages=[*asked, message], extra_body=CONTINUE, **options
    )
    assert answer.choices[0].message.reasoning_content == rest
    assert answer.choices[0].message.content == whole.content == "72"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_openai_response_continues_a_final_message_if_asked_to(client, stream):
    asked = {"model": MODEL, "input": [COUNT, said(BEGUN)], "temperature": 0}
    more = {"extra_body": {"continue_final_message": True}}
    if stream:
        *_, last = client.responses.create(**asked, **more, stream=True)
        assert last.response.output_text == REST
    else:
        assert client.responses.create(**asked, **more).output_text == REST
        assert client.responses.create(**asked).output_text != REST


@pytest.mark.parametrize(
    ("said", "options", "param"),
    [
        ([], {}, "continue_final_message"),
        (
            [said("", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}])],
            {},
            "continue_final_message",
        ),
        ([said(BEGUN)], {"extra_body": {"add_generation_prompt": True}}, "add_generation_prompt"),
        ([said(BEGUN)], {"extra_body": {"continue_final_message": False}}, "add_generation_prompt"),
        ([said(BEGUN)], {"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_openai_rejects_messages_that_cannot_be_continued(chat, said, options, param):
    with pytest.raises(openai.BadRequestError) as raised:
        chat(*said, **options)
    assert raised.value.param == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 50}]
)
def test_anthropic_always_continues_a_final_message(messages, stream, thinking):
    """The model does not think again about text that has begun."""
    tool = {"name": "f", "input_schema": {"type": "object"}}
    message = messages(said(BEGUN), stream=stream, thinking=thinking, tools=[tool])
    assert [block.text for block in message.content] == [REST]
    blocks = [
        {"type": "thinking", "thinking": "Easy.", "signature": "cllm"},
        {"type": "text", "text": BEGUN},
    ]
    assert messages(said(blocks), stream=stream).content[0].text == REST
    assert (
        messages(said(""), stream=stream).content[-1].text
        == messages(stream=stream).content[-1].text
        == NUMBERS
    )


@pytest.mark.parametrize(
    ("content", "options", "named"),
    [
        (BEGUN + " ", {}, "white space"),
        ([{"type": "text", "text": BEGUN + "\n"}], {}, "white space"),
        ([{"type": "tool_use", "id": "t", "name": "f", "input": {}}], {}, "tool_result"),
        (
            BEGUN,
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format.schema",
        ),
        (
            BEGUN,
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}},
            "tool_choice",
        ),
    ],
)
def test_anthropic_rejects_the_prefills_that_anthropic_rejects(messages, content, options, named):
    with pytest.raises(anthropic.BadRequestError, match=named):
        messages(said(content), **options)


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_continues_a_final_message(builtin_server, stream):
    """A constraint applies to the new text. After tool calls, a new message begins."""
    with ollama.Client(builtin_server.url) as client:

        def chat(*said, **options):
            lines = client.chat(
                MODEL, [COUNT, *said], stream=stream, options={"temperature": 0}, **options
            )
            return "".join(line.message.content for line in (lines if stream else [lines]))

        assert chat(said(BEGUN)) == REST
        assert chat(said("")) == NUMBERS
        number = {"type": "integer", "minimum": 0, "maximum": 9}
        assert json.loads(chat(said("The answer is: "), format=number)) in range(10)


def test_prompt_of_a_continued_message_ends_with_it(builtin_server):
    """The prompt has no end-of-message tokens after the text."""
    asked = {"messages": [COUNT, said(BEGUN)], **CONTINUE}
    prompt = builtin_server.client.post("/apply-template", json=asked).json()["prompt"]
    assert prompt.endswith(BEGUN)
    tokens = builtin_server.client.post("/tokenize", json=asked).json()["tokens"]
    counted = builtin_server.client.post(
        "/v1/messages/count_tokens", json={"model": MODEL, "messages": asked["messages"]}
    ).json()
    assert counted["input_tokens"] == len(tokens)
