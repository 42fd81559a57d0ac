"""How many calls an answer has that must call: with a model that never stops by itself."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from conftest import PATIENCE

from cllm.models.builtin.questions import TOOLS
from cllm.server.anthropic.schema import CountBody
from cllm.text.chat import MAX_FORCED_CALLS

pytestmark = [pytest.mark.llama, pytest.mark.dialect]

MULTIPLY, TIME = (TOOLS[name].declare(name)["function"] for name in ("multiply", "get_time"))
ASK = [{"role": "user", "content": "What is 27 plus 45?"}]
NESTED = [{"type": "function", "function": tool} for tool in (MULTIPLY, TIME)]
FLAT = [{"type": "function", **tool} for tool in (MULTIPLY, TIME)]
SCHEMAS = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in (MULTIPLY, TIME)]
NAME = {"type": "function", "function": {"name": "multiply"}}
FLAT_NAME = {"type": "function", "name": "multiply"}


@pytest.fixture(scope="module")
def call(builtin_server):
    """Return the names of the calls, and the reason why the answer ended."""
    with httpx.Client(base_url=builtin_server.url, timeout=PATIENCE) as http:
        end = http.post("/tokenize", json={"content": "<|im_end|>"}).json()["tokens"]
        never_ends = {str(token): -100 for token in end}

        def post(path, body):
            body = {"model": "cllm-builtin", "temperature": 0, "logit_bias": never_ends, **body}
            return http.post(path, json=body).raise_for_status().json()

        def chat(choice, **options):
            body = {"messages": ASK, "tools": NESTED, "tool_choice": choice, "max_tokens": 900}
            answer = post("/v1/chat/completions", body | options)["choices"][0]
            calls = answer["message"]["tool_calls"]
            return [one["function"]["name"] for one in calls], answer["finish_reason"]

        def responses(choice, **options):
            body = {"input": ASK, "tools": FLAT, "tool_choice": choice, "max_output_tokens": 900}
            answer = post("/v1/responses", body | options)
            assert {item["type"] for item in answer["output"]} == {"function_call"}
            return [item["name"] for item in answer["output"]], answer["status"]

        yield {"chat": chat, "responses": responses}


@pytest.mark.parametrize(
    ("dialect", "choice", "ended"),
    [
        ("chat", NAME, "tool_calls"),
        (
            "chat",
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAME]}},
            "tool_calls",
        ),
        ("responses", FLAT_NAME, "completed"),
        (
            "responses",
            {"type": "allowed_tools", "mode": "required", "tools": [FLAT_NAME]},
            "completed",
        ),
    ],
)
def test_named_function_is_called_exactly_once(call, dialect, choice, ended):
    assert call[dialect](choice) == (["multiply"], ended)


@pytest.mark.parametrize(("dialect", "ended"), [("chat", "tool_calls"), ("responses", "completed")])
def test_required_calls_end_before_max_tokens(call, dialect, ended):
    names, reason = call[dialect]("required")
    assert len(names) == MAX_FORCED_CALLS
    assert reason == ended


def test_required_gives_one_call_if_parallel_calls_are_off(call):
    assert len(call["chat"]("required", parallel_tool_calls=False)[0]) == 1
    assert len(call["responses"]("required", parallel_tool_calls=False)[0]) == 1


@pytest.mark.parametrize(
    ("choice", "most"),
    [
        ({"type": "tool", "name": "multiply"}, 1),
        ({"type": "any"}, MAX_FORCED_CALLS),
        ({"type": "any", "disable_parallel_tool_use": True}, 1),
        ({"type": "auto"}, None),
    ],
)
def test_tool_choice_of_anthropic_messages_limits_calls(choice, most):
    body = CountBody.model_validate(
        {"model": "m", "messages": ASK, "tools": SCHEMAS, "tool_choice": choice}
    )
    assert body.chat().max_calls == most


def text_of_chat(answer):
    (choice,) = answer["choices"]
    said = choice.get("message") or choice["delta"]
    return said.get("content") or "", choice["finish_reason"]


def text_of_response(answer):
    texts = [
        part["text"]
        for item in answer["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]
    return "".join(texts), answer["status"]


def text_of_message(answer):
    blocks = [block["text"] for block in answer["content"] if block["type"] == "text"]
    return "".join(blocks), answer["stop_reason"]


def read_chat_stream(events):
    parts = [text_of_chat(event) for event in events if event.get("choices")]
    return "".join(text for text, _ in parts), parts[-1][1]


def read_response_stream(events):
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    text, status = text_of_response(events[-1]["response"])
    assert "".join(deltas) == text
    return text, status


def read_message_stream(events):
    deltas = [event["delta"] for event in events if event["type"].endswith("_delta")]
    return "".join(delta.get("text", "") for delta in deltas), deltas[-1]["stop_reason"]


CUT = {
    "/v1/chat/completions": ("max_tokens", NESTED, "required", "length"),
    "/v1/responses": ("max_output_tokens", FLAT, "required", "incomplete"),
    "/v1/messages": ("max_tokens", SCHEMAS, {"type": "any"}, "max_tokens"),
}
WHOLE = {
    "/v1/chat/completions": text_of_chat,
    "/v1/responses": text_of_response,
    "/v1/messages": text_of_message,
}
STREAMED = {
    "/v1/chat/completions": read_chat_stream,
    "/v1/responses": read_response_stream,
    "/v1/messages": read_message_stream,
}


@pytest.mark.parametrize("path", CUT)
def test_cut_forced_call_says_so_and_shows_no_text(builtin_server, path):
    """Wherever it is cut: in a mark, in its head, in the arguments or between two calls."""
    limit, tools, choice, reason = CUT[path]
    key = "input" if path == "/v1/responses" else "messages"
    body: dict[str, Any] = {
        "model": "cllm-builtin",
        key: ASK,
        "tools": tools,
        "tool_choice": choice,
    }
    body["temperature"] = 0
    with httpx.Client(base_url=builtin_server.url, timeout=PATIENCE) as http:
        for count in (1, 2, 4, 8, 12, 16):
            given = body | {limit: count}
            answer = http.post(path, json=given).raise_for_status().json()
            lines = http.post(path, json=given | {"stream": True}).raise_for_status().text
            data = [line[6:] for line in lines.splitlines() if line.startswith("data: {")]
            assert WHOLE[path](answer) == ("", reason), count
            assert STREAMED[path](list(map(json.loads, data))) == ("", reason), count
