"""In every dialect, the model can call declared functions only."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest

from cllm.core.params import SamplingParams
from cllm.local.llm import LLM
from cllm.models.builtin.questions import TOOLS

pytestmark = pytest.mark.llama

MODEL = "cllm-builtin"
ASK = [{"role": "user", "content": "How is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 27 plus 45?"}]
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
# The model has learned functions of other names, which it would call without a grammar.
STRANGER = {"name": "frobnicate", "description": "Get the weather of a city", "parameters": NUMBER}
TOOL = {"type": "function", "function": STRANGER}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}


def is_right(name: str, arguments: str | dict) -> bool:
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    return name == "frobnicate" and value.keys() == {"n"} and isinstance(value["n"], int)


def ask(client: openai.OpenAI, messages=ASK, **options):
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "tools": [TOOL], "max_tokens": 80} | options
    )


def test_60_of_60_calls_name_the_declared_function(client):
    """The model may also answer with text. Without the grammar, it calls the functions it was
    trained on.
    """
    choices = [
        choice
        for seed in range(4)
        for choice in ask(client, n=15, seed=seed, temperature=1.0).choices
    ]
    calls = [call.function for choice in choices for call in choice.message.tool_calls or ()]
    assert len(choices) == 60
    assert len(calls) > 50
    assert all(is_right(call.name, call.arguments) for call in calls)
    assert {choice.finish_reason for choice in choices if choice.message.tool_calls} == {
        "tool_calls"
    }


def test_streamed_calls_name_the_declared_function(client):
    chunks = [
        chunk.choices[0].delta for chunk in ask(client, temperature=0, stream=True) if chunk.choices
    ]
    calls = [call.function for chunk in chunks for call in chunk.tool_calls or ()]
    assert [call.name for call in calls if call.name] == ["frobnicate"]
    assert is_right("frobnicate", "".join(call.arguments for call in calls))


def test_reasoning_is_not_constrained(client):
    """It is free text, although the answer may only call the declared function."""
    message = ask(client, temperature=0, extra_body=THINK, max_tokens=40).choices[0].message
    assert message.reasoning_content
    assert not message.tool_calls
    assert ask(client, SUM, temperature=0, extra_body=THINK).choices[0].message.content == "72"


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_grammar_does_not_change_text_without_a_call(temperature, client):
    """Requests with ignore_eos have no grammar."""
    tools = [TOOLS["get_time"].declare("get_time")]
    asked = {"tools": tools, "temperature": temperature, "seed": 3, "max_tokens": 30}
    free = ask(client, SUM, **asked, extra_body={"ignore_eos": True}).choices[0].message.content
    text = ask(client, SUM, **asked).choices[0].message.content
    assert text
    assert free.startswith(text)


def test_second_call_of_a_message_is_constrained_too(client):
    """One call may follow another."""
    options = {"temperature": 1.0, "n": 15, "max_tokens": 120, "seed": 5}
    for choice in ask(client, parallel_tool_calls=True, **options).choices:
        assert all(
            is_right(call.function.name, call.function.arguments)
            for call in choice.message.tool_calls or ()
        )
    for choice in ask(client, parallel_tool_calls=False, **options).choices:
        assert len(choice.message.tool_calls or ()) <= 1


def test_responses_name_the_declared_function(client):
    tool = {"type": "function", "strict": False, **STRANGER}
    output = client.responses.create(
        model=MODEL, input=ASK, tools=[tool], temperature=0, max_output_tokens=80
    ).output
    (call,) = [item for item in output if item.type == "function_call"]
    assert is_right(call.name, call.arguments)


def test_anthropic_messages_name_the_declared_function(builtin_server):
    tool = {"name": "frobnicate", "description": STRANGER["description"], "input_schema": NUMBER}
    with anthropic.Anthropic(base_url=builtin_server.url, api_key="none", max_retries=0) as client:
        greedy = {"temperature": 0}
        message = client.messages.create(
            model=MODEL, messages=ASK, tools=[tool], max_tokens=80, extra_body=greedy
        )
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert is_right(call.name, call.input)


def test_ollama_chats_name_the_declared_function(builtin_server):
    body = {
        "model": MODEL,
        "messages": ASK,
        "tools": [TOOL],
        "stream": False,
        "options": {"temperature": 0},
    }
    (call,) = builtin_server.client.post("/api/chat", json=body).json()["message"]["tool_calls"]
    assert is_right(call["function"]["name"], call["function"]["arguments"])


def test_llm_names_the_declared_function(builtin_path):
    llm = LLM(model_max_context_length=1024, scheduler_max_num_seqs=4)
    for seed in range(4):
        done = llm.chat(ASK, SamplingParams(temperature=1.0, seed=seed, max_tokens=80), [TOOL])
        assert [call.name for call in done.tool_calls] == ["frobnicate"]
    assert llm.chat(SUM, SamplingParams(temperature=0), [TOOL]).text
    llm.close()
