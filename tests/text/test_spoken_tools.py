"""Tools in words, and how a conversation with calls looks to templates that want something else."""

import json

import pytest

from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.text.chat import Channel, Chat
from cllm.text.chat_form import ChatForm
from cllm.text.chat_template import ChatTemplate
from cllm.text.form import Form, forms
from cllm.text.parser import Parser
from cllm.text.spoken_tools import spoken

TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
CALL = {
    "id": "call_12",
    "type": "function",
    "function": {"name": "get_time", "arguments": '{"city": "Rome"}'},
}
TALK = [
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
    return bytes(ChatTemplate(vocabulary).encode(messages, TOOLS)).decode()


def test_a_template_without_tools_gets_them_in_words() -> None:
    """Declarations before the first question; calls and results as text, the roles still in
    turn.
    """
    form = ChatForm(Vocabulary("{{ messages }}"))
    assert form.capabilities == {"tools"}
    system, question, call, result = form.messages(Chat(TALK), TOOLS)
    assert system == TALK[0]
    assert '"get_time"' in question["content"]
    assert question["content"].endswith("\n\nWhat time is it?")
    assert [message["role"] for message in (question, call, result)] == [
        "user",
        "assistant",
        "user",
    ]
    parser = Parser(form.form, {"get_time": {}})
    parts = parser.feed(call["content"]) + parser.flush()
    assert (
        "".join(part.text for part in parts if part.channel == Channel.CALL) == '{"city": "Rome"}'
    )
    assert result["content"].count("<tool_response>") == 2
    assert form.messages(Chat(TALK[:2]), []) == TALK[:2]


def test_a_template_with_tools_gets_what_it_was_given() -> None:
    form = ChatForm(Vocabulary("{{ tools }}{{ tool_calls }}<tool_call>"))
    assert form.messages(Chat(TALK), TOOLS) == TALK
    declares = spoken(TALK[:2], TOOLS, forms()["hermes"].calls, "tool_calls", knows_results=False)
    assert "get_time" in declares[1]["content"]


def test_code_blocks_are_calls_only_if_they_name_a_tool() -> None:
    form = ChatForm(Vocabulary("{{ messages }}")).form
    for block in ("tool_code", "json"):
        parser = Parser(form, {"get_time": {}})
        parts = (
            parser.feed(f'```{block}\n{{"name": "get_time", "parameters": {{"a": 1}}}}\n```')
            + parser.flush()
        )
        assert [(part.channel, part.name) for part in parts] == [(Channel.CALL, "get_time")]
        text = f'```{block}\n{{"name": "Anna", "arguments": {{}}}}\n```'
        parser = Parser(form, {"get_time": {}})
        parts = parser.feed(text) + parser.flush()
        assert "".join(part.text for part in parts) == text
        assert {part.channel for part in parts} == {Channel.TEXT}


LOOP = (
    "{%- for m in messages %}{%- for call in m.tool_calls or [] %}{{ HOW }}{%- endfor %}{%- "
    "endfor %}"
)


def loop(how: str) -> str:
    """A template that writes something of each call."""
    return LOOP.replace("HOW", how)


def test_arguments_come_as_the_template_wants_them() -> None:
    """As an object for ``tojson``, as text for a template that would print a dict, and unchanged
    for one that asks.
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


def test_calls_are_shown_by_templates_that_want_no_content() -> None:
    """Where the calls stand under ``content is none``, it is None, even if there was some text."""
    told = (
        "{%- for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name "
        "}}{% else %}"
    )
    told += "<{{ m.content }}>{% endif %}{% endfor %}"
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    name = CALL["function"]["name"]
    assert rendered(told, [calls]) == rendered(told, [{**calls, "content": "so"}]) == name
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
def test_calls_that_a_template_does_not_know_are_written_as_the_model_would(
    family: str, expected: str
) -> None:
    """With their arguments, which the parser reads again; their results keep their role."""
    calls = forms()[family].calls
    function = {"name": "f", "arguments": '{"city": "Rome\\n", "deep": {"a": [true, null]}}'}
    talk = [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}, TALK[-1]]
    message, result = spoken(talk, [], calls, "{{ tools }}", knows_results=True)
    assert message["content"].replace('"', "'").startswith(expected)
    assert result == TALK[-1]
    parser = Parser(Form((), calls), {"f": {}})
    parts = parser.feed(message["content"]) + parser.flush()
    assert json.loads("".join(part.text for part in parts)) == json.loads(function["arguments"])


def test_ids_of_nine_characters_for_those_who_insist() -> None:
    template = loop("raise_exception('bad') if call.id|length != 9 else call.id")
    of_result = (
        "{%- for m in messages if m.role == 'tool' %}{{ '-' ~ m.tool_call_id }}{%- endfor %}"
    )
    first, second, third = rendered(template + of_result).split("-")
    assert first == second != third
    assert len(third) == 9


def test_reasoning_reaches_the_template_by_the_name_that_it_has() -> None:
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    told = "{%- for message in messages %}{{ message.reasoning_content }}{%- endfor %}"
    assert rendered(told, [message]) == "hm"
    assert (
        rendered("{%- for message in messages %}{{ message.thinking }}{%- endfor %}", [message])
        == "hm"
    )
    assert json.dumps(message)  # and is not changed
