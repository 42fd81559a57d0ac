"""Streams have only the ends of lines that belong to their format: clients made with httpx, such as
``ollama``, split them as ``str.splitlines`` does.
"""

import json
from typing import Any

import ollama
import openai
import pytest
from pydantic_core import to_json

from cllm.server.ollama.pull import encode_line as pull_line
from cllm.server.openai.batches.lines import answer_line

TEXT = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\\\u2028j 你好"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {TEXT: {"const": TEXT}},
    "required": [TEXT],
}
SCHEMA |= {"additionalProperties": False}
ASK = [{"role": "user", "content": "x"}]
NAMED = {"name": "a", "schema": SCHEMA, "strict": True}
TOOL = {"name": "f", "parameters": SCHEMA, "strict": True}
ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA, "strict": True}
CHAT = {"messages": ASK, "max_tokens": 300}
CHOICE = {"structured_outputs": {"choice": [TEXT]}}


def strings_of(value: Any) -> str:
    """Return all strings of a JSON value, joined."""
    if isinstance(value, dict):
        return "".join(strings_of(part) for part in value.values())
    if isinstance(value, list):
        return "".join(map(strings_of, value))
    return value if isinstance(value, str) else ""


def read_events(data: bytes) -> list[Any]:
    """Return the JSON values of a stream, read by a client that uses ``str.splitlines``."""
    events = []
    for line in data.decode().splitlines():
        name, _, value = line.partition(":")
        if line.startswith("{"):
            events.append(json.loads(line))
        elif name == "data" and value.strip() != "[DONE]":
            events.append(json.loads(value))
        else:
            assert name in ("", "event") or value.strip() == "[DONE]", line
    return events


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, **CHOICE}),
        ("/v1/chat/completions", {**CHAT, **CHOICE, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_schema", "json_schema": NAMED}}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 300, **CHOICE, "logprobs": 1}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "echo": True, "logprobs": 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 300, "text": {"format": {"type": "json_schema", **NAMED}}}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 300, "tools": [{"type": "function", **TOOL}], "tool_choice": "required"}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "instructions": TEXT, "metadata": {"k": TEXT}}),
        ("/v1/messages", {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/v1/messages", {**CHAT, "tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any"}}),
        ("/api/chat", {"messages": ASK, "format": SCHEMA, "options": {"num_predict": 300}}),
        ("/api/chat", {"messages": ASK, "format": SCHEMA, "logprobs": True, "options": {"num_predict": 300}}),
        ("/api/generate", {"prompt": "x", "format": SCHEMA, "options": {"num_predict": 300}}),
        ("/completion", {"prompt": "x", "n_predict": 300, "json_schema": SCHEMA}),
    ],
)  # fmt: skip
def test_stream_has_no_line_ends_within_its_events(narrow_server, path, body):
    content = narrow_server.client.post(
        path, json={"model": "fake", "stream": True, **body}
    ).content
    text = "".join(strings_of(event) for event in read_events(content))
    if "logprobs" not in body:
        assert "\u2028" in text
        assert "\u2029" in text
        assert "\x85" in text
    assert not {"\u2028", "\u2029", "\x85"} & set(content.decode())


def test_ollama_and_openai_clients_read_all_line_ends(narrow_server):
    with ollama.Client(narrow_server.url) as client:
        answer = client.chat("fake", ASK, format=SCHEMA, options={"num_predict": 300}, stream=True)
        text = "".join(part.message.content or "" for part in answer)
        assert json.loads(text) == {TEXT: TEXT}
    url = f"{narrow_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="fake", **CHAT, extra_body=CHOICE, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == TEXT


@pytest.mark.parametrize(
    "line",
    [
        answer_line(TEXT, 200, TEXT, to_json({"content": TEXT})),
        pull_line({"status": f"pulling {TEXT}", "digest": TEXT}),
    ],
)
def test_line_of_a_file_or_of_progress_is_one_line(line):
    (only,) = line.decode().splitlines()
    assert TEXT in strings_of(json.loads(only))
