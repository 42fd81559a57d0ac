"""Tools in words, for chat templates that know none."""

from __future__ import annotations

import json
import re
from typing import Any

from cllm.text.form import Calls

INTRODUCTION = """You can call functions. These are declared:
{declarations}
To call one, answer with nothing but this, once for each call, and wait for the result:
{example}"""


def spoken(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], calls: Calls, template: str
) -> list[dict[str, Any]]:
    """``messages`` in which the first of a user declares ``tools``, unless ``template`` does that by itself.

    If it does not know calls either, those of the assistant become its text, and their results a user's.
    """
    if "tool_calls" not in template:
        messages = without_calls(messages, calls)
    if not tools or re.search(r"\btools\b", template):
        return messages
    declarations = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = written(calls, "name of the function", '{"name of an argument": "its value"}')
    introduction = INTRODUCTION.format(declarations=declarations, example=example)
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": introduction}, *messages]
    first = {**messages[at], "content": f"{introduction}\n\n{messages[at].get('content') or ''}"}
    return [*messages[:at], first, *messages[at + 1 :]]


def without_calls(messages: list[dict[str, Any]], calls: Calls) -> list[dict[str, Any]]:
    changed: list[dict[str, Any]] = []
    for message in messages:
        text = message.get("content") or ""
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if changed and changed[-1]["role"] == "user":  # many templates want the roles to alternate
                changed[-1] = {**changed[-1], "content": f"{changed[-1]['content']}\n{text}"}
            else:
                changed.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            texts = [written(calls, function["name"], as_text(function["arguments"])) for function in functions]
            changed.append({"role": "assistant", "content": "\n".join([*([text] if text else []), *texts])})
        else:
            changed.append(message)
    return changed


def as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def written(calls: Calls, name: str, arguments: str) -> str:
    words = {"name": json.dumps(name, ensure_ascii=False), "word": name, "arguments": arguments}
    text = re.sub(r"\$(\w+)", lambda match: words.get(match[1], ""), calls.write)
    return calls.begin + text + calls.end
