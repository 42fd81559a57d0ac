"""Tools described in the prompt, and conversations with calls for templates that expect something
else.
"""

import json
from typing import Any

import pytest
from call_texts import chat_format_of

from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.text.chat import Chat
from cllm.text.templates.chat_template import ChatTemplate
from cllm.text.templates.tool_declarations import declare_tools
from cllm.text.tools.model_family import ModelFamily, load_families
from cllm.text.tools.parser import Channel, Parser

TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
CALL: dict[str, Any] = {
    "id": "call_12",
    "type": "function",
    "function": {"name": "get_time", "arguments": '{"city": "Rome"}'},
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_12", "content": "noon"},
    {"role": "tool", "tool_call_id": "call_13", "content": "night"},
]


class Vocabulary(FakeVocabulary):
    def __init__(self, template: str) -> None:
        super().__init__()
        self.chat_template = template


def rendered(template: str, messages=TALK) -> str:
    vocabulary = Vocabulary(template)
    return ChatTemplate(vocabulary).render(messages, TOOLS)


def test_template_without_tools_gets_them_as_text() -> None:
    """Declarations are in the first user message. Calls and results are text, and roles alternate."""
    chat_format = chat_format_of(Vocabulary("{{ messages }}"))
    assert chat_format.capabilities == {"tools"}
    system, question, call, result = chat_format.template_input(Chat(TALK, TOOLS)).messages
    assert system == TALK[0]
    assert '"get_time"' in question["content"]
    assert question["content"].endswith("\n\nWhat time is it?")
    assert [message["role"] for message in (question, call, result)] == [
        "user",
        "assistant",
        "user",
    ]
    parser = Parser(chat_format.family, {"get_time": {}})
    parts = parser.feed(call["content"]) + parser.flush()
    assert (
        "".join(part.text for part in parts if part.channel == Channel.CALL) == '{"city": "Rome"}'
    )
    assert result["content"].count("<tool_response>") == 2
    assert chat_format.template_input(Chat(TALK[:2])).messages == TALK[:2]


def test_template_with_tools_gets_the_messages_unchanged() -> None:
    chat_format = chat_format_of(Vocabulary("{{ tools }}{{ tool_calls }}<tool_call>"))
    assert chat_format.template_input(Chat(TALK, TOOLS)).messages == TALK
    declares = declare_tools(
        TALK[:2], TOOLS, load_families()["hermes"].calls, "tool_calls", knows_results=False
    )
    assert "get_time" in declares[1]["content"]


def test_code_blocks_are_calls_only_if_they_name_a_tool() -> None:
    family = chat_format_of(Vocabulary("{{ messages }}")).family
    for block in ("tool_code", "json"):
        parser = Parser(family, {"get_time": {}})
        parts = (
            parser.feed(f'```{block}\n{{"name": "get_time", "parameters": {{"a": 1}}}}\n```')
            + parser.flush()
        )
        assert [(part.channel, part.name) for part in parts] == [(Channel.CALL, "get_time")]
        text = f'```{block}\n{{"name": "Anna", "arguments": {{}}}}\n```'
        parser = Parser(family, {"get_time": {}})
        parts = parser.feed(text) + parser.flush()
        assert "".join(part.text for part in parts) == text
        assert {part.channel for part in parts} == {Channel.TEXT}


LOOP = (
    "{%- for m in messages %}{%- for call in m.tool_calls or [] %}{{ HOW }}{%- endfor %}{%- "
    "endfor %}"
)


def loop(how: str) -> str:
    """Return a template that writes ``body`` for each call."""
    return LOOP.replace("HOW", how)


def test_arguments_have_the_type_that_the_template_expects() -> None:
    """An object for ``tojson``, text for a template that would print a dict, and unchanged for one
    that checks.
    """
    assert rendered(loop("call.function.arguments | tojson")) == '{"city": "Rome"}'
    assert rendered(loop("call.function.arguments.city")) == "Rome"
    assert rendered(loop("'' ~ call.function.arguments")) == '{"city": "Rome"}'
    assert rendered(loop("'<' + call.function.arguments")) == '<{"city": "Rome"}'
    asks = "call.function.arguments if call.function.arguments is string else 'no'"
    exact = {**CALL, "function": {"name": "f", "arguments": '{"a":1 }'}}
    assert rendered(loop(asks), [{**TALK[2], "tool_calls": [exact]}]) == '{"a":1 }'
    broken = {**CALL, "function": {"name": "f", "arguments": "{broken"}}
    assert (
        rendered(loop("call.function.arguments | tojson"), [{**TALK[2], "tool_calls": [broken]}])
        == '"{broken"'
    )
    given = {**CALL, "function": {"name": "f", "arguments": {"a": [1]}}}
    assert (
        rendered(loop("'<' + call.function.arguments"), [{**TALK[2], "tool_calls": [given]}])
        == '<{"a": [1]}'
    )


def test_content_is_none_for_templates_that_require_it() -> None:
    """Otherwise they would not show calls of a message with text, which gets its own message."""
    told = (
        "{%- for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name "
        "}}{% else %}"
    )
    told += "<{{ m.content }}>{% endif %}{% endfor %}"
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    name = CALL["function"]["name"]
    assert rendered(told, [calls]) == name
    assert rendered(told, [{**calls, "content": "so"}]) == f"<so>{name}"
    assert rendered(told, [{"role": "assistant", "content": ""}]) == "<>"
    both = (
        loop("call.function.name")
        + "{%- for m in messages if m.content is not none %}<{{ m.content }}>{% endfor %}"
    )
    assert rendered(both, [calls]) == name
    assert rendered(both, [{**calls, "content": "so"}]) == f"{name}<so>"


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "lfm2",
            "<|tool_call_start|>[f(city='Rome\\n', deep={'a': [True, None]})]<|tool_call_end|>",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=city>\nRome\n\n</parameter>\n<parameter=deep>\n",
        ),
    ],
)
def test_calls_become_text_if_the_template_omits_them(family: str, expected: str) -> None:
    """The parser reads them again. Results keep their role."""
    calls = load_families()[family].calls
    function = {"name": "f", "arguments": '{"city": "Rome\\n", "deep": {"a": [true, null]}}'}
    talk: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        TALK[-1],
    ]
    message, result = declare_tools(talk, [], calls, "{{ tools }}", knows_results=True)
    assert message["content"].replace('"', "'").startswith(expected)
    assert result == TALK[-1]
    parser = Parser(ModelFamily((), calls), {"f": {}})
    parts = parser.feed(message["content"]) + parser.flush()
    assert json.loads("".join(part.text for part in parts)) == json.loads(function["arguments"])


@pytest.mark.parametrize("arguments", ["", "{}", {}])
def test_a_call_without_arguments_becomes_valid_json(arguments: Any) -> None:
    function = {"name": "f", "arguments": arguments}
    calls = load_families()["prompted"].calls
    assert calls
    talk = [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    [message] = declare_tools(talk, [], calls, "", knows_results=False)
    assert '"arguments": {}' in message["content"]


def test_call_ids_have_nine_characters_if_the_template_requires_it() -> None:
    template = loop("raise_exception('bad') if call.id|length != 9 else call.id")
    of_result = (
        "{%- for m in messages if m.role == 'tool' %}{{ '-' ~ m.tool_call_id }}{%- endfor %}"
    )
    first, second, third = rendered(template + of_result).split("-")
    assert first == second != third
    assert len(third) == 9


def test_reasoning_has_the_name_that_the_template_uses() -> None:
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    told = "{%- for message in messages %}{{ message.reasoning_content }}{%- endfor %}"
    assert rendered(told, [message]) == "hm"
    assert (
        rendered("{%- for message in messages %}{{ message.thinking }}{%- endfor %}", [message])
        == "hm"
    )
    assert json.dumps(message)  # and is not changed
