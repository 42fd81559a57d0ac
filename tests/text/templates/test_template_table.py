"""Short forms of public chat templates, which refuse and omit the same, with conversations of every
dialect in many orders.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from call_texts import chat_format_of
from template_texts import FAMILIES, FOLDER, NAMES, TOOLS, Vocabulary, talk

from cllm.server.anthropic.schema import CountBody
from cllm.server.ollama.schema import OllamaChatBody
from cllm.server.openai.responses.items import make_messages
from cllm.server.openai.schema import ChatBody
from cllm.text.chat import Chat
from cllm.text.chat_format import ChatFormat
from cllm.text.templates.chat_template import ChatTemplate
from cllm.text.templates.turns import shorten

HISTORIES = (
    *("u", "su", "uau", "suauau", "ssu", "usu", "sus", "susau", "ssuasus", "uasu", "uauasus"),
    *("uu", "uuau", "uaau", "au", "sau", "aau", "s", "a", "uEu", "sE", "eau", "ue"),
    *("uct", "suctau", "uctu", "suctuau", "uctsu", "uctct", "uCtCtau", "uctctuct", "uctcxs"),
    *("upttau", "uptt", "upttu", "uPttau", "ucu", "ucuau", "ucx"),
    *("urau", "ur", "uRtau", "uBt", "uBtau"),
    *("ut", "t", "utu", "tau", "sutau", "utt", "uctt", "uaut", "utct", "uxu", "uctautu"),
)


def of_openai(form: str) -> Chat:
    return ChatBody(model="m", messages=talk(form, first="developer"), tools=TOOLS).chat()


def of_ollama(form: str) -> Chat:
    messages = talk(form)
    for message in messages:
        message["thinking"] = message.pop("reasoning_content", None)
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return OllamaChatBody(model="m", messages=messages, tools=TOOLS).chat()


def of_anthropic(form: str) -> Chat:
    begins = len(form) - len(form.lstrip("s"))
    texts = [{"type": "text", "text": message["content"]} for message in talk(form)[:begins]]
    messages = [anthropic_message(message) for message in talk(form)[begins:]]
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]
    return CountBody(model="m", system=texts or None, messages=messages, tools=tools).chat()


def anthropic_message(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = {"content": message["content"]} if message["content"] else {}
        result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], **content}
        return {"role": "user", "content": [result]}
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        given = {"name": function["name"], "input": json.loads(function["arguments"])}
        blocks.append({"type": "tool_use", "id": call["id"], **given})
    return {"role": message["role"], "content": blocks}


def of_responses(form: str) -> Chat:
    items: list[dict[str, Any]] = []
    for message in talk(form, first="developer"):
        part = {"type": "input_text", "text": message["content"]}
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if message["content"] or "tool_calls" not in message:
            items.append({"type": "message", "role": message["role"], "content": [part]})
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", ())
        ]
    return Chat(make_messages(items, None), TOOLS)


DIALECTS = {
    "openai": of_openai,
    "anthropic": of_anthropic,
    "ollama": of_ollama,
    "responses": of_responses,
}


def is_expressible(dialect: str, form: str) -> bool:
    """Return whether the dialect has conversations of this form."""
    if dialect == "anthropic":  # needs a message, with content, and results after calls
        return bool(form.strip("s")) and not set(form) & {"e"} and form[-1] != "E"
    return form[-1] != "E" or dialect == "openai"


def find_faults(form: str, prompt: str) -> list[str]:
    messages = talk(form)
    faults = [f"the tool {name} is missing" for name in NAMES if name not in prompt]
    texts = [message["content"] for message in messages if message["content"]]
    faults += [f"{text}: {prompt.count(text)} times" for text in texts if prompt.count(text) != 1]
    begins = len(form) - len(form.lstrip("s"))
    shown = re.findall(r"text\d+x", prompt)
    if [text for text in shown if text in texts[begins:]] != texts[begins:]:
        faults.append(f"in the order {shown}")
    for message in messages:
        for call in message.get("tool_calls", ()):
            city = json.loads(call["function"]["arguments"])["city"]
            faults += [f"{city} is missing"] * (city not in prompt)
        thought = message.get("reasoning_content", "-")
        faults += [f"{thought} is repeated"] * (thought != "-" and prompt.count(thought) > 1)
    return faults


@cache
def load(family: str) -> tuple[ChatTemplate, ChatFormat]:
    vocabulary = Vocabulary((FOLDER / f"{family}.jinja").read_text())
    return ChatTemplate(vocabulary), chat_format_of(vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_is_shown_once_and_in_order(family: str, dialect: str) -> None:
    """Nothing is refused, and the tools are shown. Reasoning may be omitted, which some families do on purpose."""
    template, chat_format = load(family)
    faults = {}
    for form in HISTORIES:
        if not is_expressible(dialect, form):
            continue
        chat = DIALECTS[dialect](form)
        messages = chat_format.template_input(chat).messages
        prompt = template.render(messages, chat.tools, chat.continued)
        if found := find_faults(form, prompt):
            faults[form] = found
    assert not faults


def rendered(family: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    template, chat_format = load(family)
    return template.render(chat_format.template_input(Chat(messages, tools)).messages, tools)


def test_ids_of_kimi_name_the_function_and_count_over_the_conversation() -> None:
    prompt = rendered("kimi_k2", talk("uptt" + "uct" + "u"), TOOLS)
    ids = ["functions.get_weather:0", "functions.get_time:1", "functions.get_weather:2"]
    assert re.findall(r"call_begin\|>(.*?)<", prompt) == ids
    assert re.findall(r"Return of (.*)\n", prompt) == ids


@pytest.mark.parametrize(
    "refusal",
    [
        "id | length != 9",
        "id | length < 9",
        "id | length > 8",
        "id | length != 24",
        "id | length < 12",
        "not id.isdigit()",
        "not id.isalnum()",
        "id[:5] != 'call_' or id | length < 20",
    ],
)
def test_ids_have_the_form_that_the_template_accepts(refusal: str) -> None:
    """Calls and results have the same ones; different calls have different ones."""
    source = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{% set id = c.id %}"
        "{% if REFUSAL %}{{ raise_exception('id') }}{% endif %}"
        "[{{ c.function.name }} {{ c.function.arguments }} {{ id }}]{% endfor %}"
        "{% if m.role == 'tool' %}{% set id = m.tool_call_id %}"
        "{% if REFUSAL %}{{ raise_exception('id') }}{% endif %}({{ id }}){% endif %}{% endfor %}"
    ).replace("REFUSAL", refusal)
    prompt = ChatTemplate(Vocabulary(source)).render(talk("upttuctu"), TOOLS)
    called = re.findall(r" (\S+)\]", prompt)
    assert re.findall(r"\((\w+)\)", prompt) == called
    assert len(set(called)) == 3


def test_ids_that_the_template_accepts_are_kept() -> None:
    messages = talk("uct")
    key = messages[1]["tool_calls"][0]["id"] = messages[2]["tool_call_id"] = "abcDEF123"
    assert key in rendered("mistral_small", messages, TOOLS)


@pytest.mark.parametrize(
    "function",
    [
        {},
        {"description": "d"},
        {"parameters": {}},
        {"parameters": {"type": "object"}},
        {"parameters": {"properties": {"city": {}}}},
        {"parameters": {"type": "object", "properties": {"city": {"type": ["string", "null"]}}}},
        {"parameters": {"type": "object", "properties": {"city": {"enum": []}}}},
        {"parameters": {"type": "object", "properties": {"city": {"enum": [1, 2], "default": 1}}}},
        {"parameters": {"type": "object", "properties": {"city": {"type": "array"}}}},
        {"parameters": {"type": "object", "properties": {"city": {"anyOf": [{"type": "null"}]}}}},
        {"parameters": {"type": "object", "properties": {"city": True}}},
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_tools_may_lack_what_templates_read(family: str, function: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "find_it", **function}}]
    prompt = rendered(family, talk("u"), tools)
    assert "find_it" in prompt
    assert "city" in prompt or "city" not in str(function)


def test_long_histories_are_judged_by_what_they_repeat() -> None:
    """Every three successive forms of messages remain, and calls keep their results."""
    for form in ("u" + "a" + "ua" * 500 + "u", "su" + "Ct" * 500 + "a", "u" + "pttau" * 200):
        short = shorten(talk(form))
        assert len(short) < 40
        assert [message["role"] for message in short[:3]] == [m["role"] for m in talk(form)[:3]]
        made = {call["id"] for message in short for call in message.get("tool_calls", ())}
        assert {message["tool_call_id"] for message in short if message["role"] == "tool"} == made


@pytest.mark.parametrize("form", ["u", "su"])
def test_tools_are_shown_by_a_template_that_reads_them_in_the_system_message(form: str) -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tools %}"
        "<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>{% endfor %}<|assistant|>"
    )
    prompt = ChatTemplate(Vocabulary(source)).render(talk(form), TOOLS)
    assert prompt.startswith("<|system|>")
    assert prompt.count('"get_weather"') == 1
    assert "<|tool|>" not in ChatTemplate(Vocabulary(source)).render(talk(form), [])
