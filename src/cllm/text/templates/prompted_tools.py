"""Describe tools in words, for chat templates without tools."""

from __future__ import annotations

import json
import re
from typing import Any

from cllm.text.templates.tool_defaults import object_or_text
from cllm.text.templates.turns import count_systems
from cllm.text.tools.model_family import Calls

PLACE = re.compile(r"\$(\w+)")
INTRODUCTION = """You can call functions. These are declared:
{declarations}
To call one, answer with nothing but this, once for each call, and wait for the result:
{example}"""


def declare_tools(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    calls: Calls,
    template: str,
    *,
    knows_results: bool,
) -> list[dict[str, Any]]:
    """Return ``messages`` with ``tools`` declared in the first user message, unless ``template``
    declares them.

    If the template does not show calls either, the assistant's calls become its text. Their results
    become user messages, unless the template ``knows_results``.
    """
    if "tool_calls" not in template:
        messages = write_calls_as_text(messages, calls, knows_results=knows_results)
    if not tools or re.search(r"\btools\b", template):
        return messages
    declarations = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = write_call(calls, "name of the function", '{"name of an argument": "its value"}')
    introduction = INTRODUCTION.format(declarations=declarations, example=example)
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        at = count_systems(messages)
        return [*messages[:at], {"role": "user", "content": introduction}, *messages[at:]]
    first = {**messages[at], "content": f"{introduction}\n\n{messages[at].get('content') or ''}"}
    return [*messages[:at], first, *messages[at + 1 :]]


def write_calls_as_text(
    messages: list[dict[str, Any]], calls: Calls, *, knows_results: bool
) -> list[dict[str, Any]]:
    changed: list[dict[str, Any]] = []
    added: list[list[str]] = []  # tool results to append to each message
    for message in messages:
        text = message.get("content") or ""
        if message["role"] == "tool" and not knows_results:
            text = f"<tool_response>\n{text}\n</tool_response>"
            # many templates want the roles to alternate
            if changed and changed[-1]["role"] == "user":
                added[-1].append(text)
                continue
            changed.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            texts = [
                write_call(calls, function["name"], as_text(function["arguments"]))
                for function in functions
            ]
            said = {"role": "assistant", "content": "\n".join([*([text] if text else []), *texts])}
            changed.append(
                {key: value for key, value in message.items() if key != "tool_calls"} | said
            )
        else:
            changed.append(message)
        added.append([])
    return [
        {**message, "content": "\n".join([message["content"], *texts])} if texts else message
        for message, texts in zip(changed, added, strict=True)
    ]


def as_text(arguments: Any) -> str:
    """Return the JSON text of a call's arguments; clients also send "" for none."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return text or "{}"


def write_call(calls: Calls, name: str, arguments: str) -> str:
    words = {"name": json.dumps(name, ensure_ascii=False), "word": name, "arguments": arguments}
    values = object_or_text(arguments)
    if "$keywords" in calls.write:
        words["keywords"] = ", ".join(
            f"{key}={python_literal(value)}" for key, value in values.items()
        )
    if "$pairs" in calls.write:
        words["pairs"] = "".join(write_pair(calls, key, value) for key, value in values.items())
    return calls.begin + PLACE.sub(lambda match: words.get(match[1], ""), calls.write) + calls.end


def python_literal(value: Any) -> str:
    """Return ``value`` as a Python literal."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def write_pair(calls: Calls, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    words = {"key": key, "string": json.dumps(isinstance(value, str)), "value": text}
    return PLACE.sub(lambda match: words[match[1]], calls.pair)
