"""Declare tools to chat templates: with fields that some require, in the system message, or in
words for templates without tools. Write calls as text for templates that do not show them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from cllm.errors import BadRequest
from cllm.text.templates.turns import count_systems

if TYPE_CHECKING:  # this imports more than a process that only renders needs
    from cllm.text.tools.model_family import Calls

Schema = dict[str, Any]
MAX_DEPTH = 64
PLAIN_NAME = re.compile(r"[\w.-]+")  # of a parameter, which all templates write in the same way
PROBED_NAME = "probetool"
PROBED_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": PROBED_NAME,
            "description": "a",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
TYPES = ((bool, "boolean"), (int, "integer"), (float, "number"), (list, "array"), (dict, "object"))
PLACE = re.compile(r"\$(\w+)")
INTRODUCTION = """You can call functions. These are declared:
{declarations}
To call one, answer with nothing but this, once for each call, and wait for the result:
{example}"""


def render_with_tools(
    render: Callable[[list[Schema] | None], str], tools: list[Schema], *, is_shown: bool
) -> str:
    """Return the result of ``render`` for ``tools``.

    If it fails or, for a template that shows tools, omits parameters, missing fields of the tools
    are filled in. Raises the first BadRequest of ``render``.
    """
    first: BadRequest | None = None
    best, fewest = None, sys.maxsize
    try:
        for declared in list_declarations(tools):
            try:
                text = render(declared)
            except BadRequest as error:
                first = first or error
                continue
            num_omitted = count_omitted(tools, text) if is_shown else 0
            if num_omitted < fewest:
                best, fewest = text, num_omitted
            if not num_omitted:
                break
    except RecursionError:
        pass
    if best is None:
        assert first
        raise first
    return best


def list_declarations(tools: list[Schema]) -> Iterator[list[Schema] | None]:
    """Yield ``tools``, and then versions in which more and more missing fields are filled in.

    In the last versions, the parameters' schema is part of the description.
    """
    yield tools or None
    if not tools:  # some templates loop over them
        yield tools
    elif all(isinstance(tool.get("function"), dict) for tool in tools):
        for declare in (with_description, with_types, with_schema_as_text):
            yield [{**tool, "function": declare(tool["function"])} for tool in tools]


def count_omitted(tools: list[Schema], text: str) -> int:
    """Return how many parameters of ``tools`` are missing from ``text``, a prompt."""
    functions = (tool.get("function") for tool in tools)
    schemas = (f.get("parameters") for f in functions if isinstance(f, dict))
    properties = (s.get("properties") for s in schemas if isinstance(s, dict))
    names = {name for given in properties if isinstance(given, dict) for name in given}
    return sum(name not in text for name in names if PLAIN_NAME.fullmatch(name))


def with_tools_in_system(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return ``messages`` with the declarations of ``tools`` as a field of the system message."""
    if not messages or messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    declared = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    return [{**messages[0], "tools": declared}, *messages[1:]]


def with_description(function: Schema) -> Schema:
    empty = {"type": "object", "properties": {}}
    given = {key: value for key, value in function.items() if value is not None}
    return {"description": "", **given, "parameters": empty | (given.get("parameters") or {})}


def with_types(function: Schema) -> Schema:
    described = with_description(function)
    return {**described, "parameters": complete(described["parameters"], 0)}


def with_schema_as_text(function: Schema) -> Schema:
    described = with_description(function)
    schema = json.dumps(described["parameters"], ensure_ascii=False)
    text = f"{described['description']}\nParameters: {schema}".strip()
    return {**described, "description": text, "parameters": {"type": "object", "properties": {}}}


def complete(schema: Any, depth: int) -> Schema:
    """Return ``schema`` with one type and a description at each place, and defaults as text."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return {"type": "string", "description": ""}
    kind = choose_type(schema)
    whole = {"description": "", **schema, "type": kind}
    if kind == "object":
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        whole["properties"] = {
            name: complete(value, depth + 1) for name, value in properties.items()
        }
        whole["required"] = read_list(schema, "required")
    if kind == "array":
        whole["items"] = complete(schema.get("items"), depth + 1)
    if "enum" in schema:
        whole["enum"] = [as_text(value) for value in read_list(schema, "enum")]
        if not whole["enum"]:
            del whole["enum"]
    if "default" in schema:
        whole["default"] = as_text(schema["default"])
    return whole


def choose_type(schema: Schema) -> str:
    """Return the first type that a value of ``schema`` may have, other than null."""
    kind = schema.get("type")
    kinds = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    named = [kind for kind in kinds if isinstance(kind, str) and kind != "null"]
    if named:
        return named[0]
    for key, implied in (("properties", "object"), ("items", "array")):
        if key in schema:
            return implied
    values = [*read_list(schema, "enum"), schema.get("const"), schema.get("default")]
    first = next((value for value in values if value is not None), "")
    return next((name for python, name in TYPES if isinstance(first, python)), "string")


def read_list(schema: Schema, keyword: str) -> list[Any]:
    """Return the value of ``keyword``; clients also send ``"required": true``, which is no list."""
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parse_object(arguments: str) -> dict[str, Any] | None:
    """Return the object that ``arguments``, JSON text, contains; None if it contains none.

    Lone surrogates, which are not text, become question marks.
    """
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def object_or_text(arguments: str) -> dict[str, Any]:
    """Return the object that ``arguments`` contains, or else one that contains ``arguments``."""
    parsed = parse_object(arguments or "{}")
    return {"arguments": arguments} if parsed is None else parsed


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
            # many templates require that roles alternate
            if changed and changed[-1]["role"] == "user":
                added[-1].append(text)
                continue
            changed.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            functions = [call["function"] for call in message["tool_calls"]]
            # clients also send "" for no arguments
            texts = [
                write_call(calls, function["name"], as_text(function["arguments"]) or "{}")
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


def write_call(calls: Calls, name: str, arguments: str) -> str:
    parts = {"name": json.dumps(name, ensure_ascii=False), "word": name, "arguments": arguments}
    values = object_or_text(arguments)
    if "$keywords" in calls.write:
        parts["keywords"] = ", ".join(
            f"{key}={python_literal(value)}" for key, value in values.items()
        )
    if "$pairs" in calls.write:
        parts["pairs"] = "".join(write_pair(calls, key, value) for key, value in values.items())
    return calls.begin + PLACE.sub(lambda match: parts.get(match[1], ""), calls.write) + calls.end


def python_literal(value: Any) -> str:
    """Return ``value`` as a Python literal."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def write_pair(calls: Calls, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    parts = {"key": key, "string": json.dumps(isinstance(value, str)), "value": text}
    return PLACE.sub(lambda match: parts[match[1]], calls.pair)
