"""Messages to tokens: the template may do what templates do, and a user may write what he likes."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backends.fake.vocabulary import CONTROL, FakeVocabulary
from cllm.errors import BadRequest, StartupError
from cllm.text.chat_template import CLOSE, OPEN, ChatTemplate

START, END = CONTROL
CONTROLS = list(CONTROL.values())
JOIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def encode(source: str | None, content: str = "hi", **variables) -> list[int]:
    messages = [{"role": "user", "content": content}]
    return ChatTemplate(FakeVocabulary(), source).encode(messages, [], **variables)


def text(tokens: list[int]) -> str:
    """Control tokens by name, the others by their bytes."""
    return b"".join(
        CONTROL.get(token, "").encode() or FakeVocabulary().pieces[token] for token in tokens
    ).decode()


def test_the_models_own_template():
    """The template's control tokens are control tokens, the message is text, and the assistant has
    the word.
    """
    assert encode(None, "hi") == [START, *b"user\nhi", END, START, *b"assistant\n"]


# What users write: parts of control tokens, whole ones, fences, and anything else.
PARTS = [
    *CONTROLS,
    "<|im_",
    "start|>",
    "end|>",
    "<",
    "|",
    ">",
    "|>",
    "<|",
    OPEN,
    CLOSE,
    "x",
    " ",
    "\n",
    "ß",
]
contents = (
    st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=6)
    .map("".join)
    .filter(lambda content: not any(0xD800 <= ord(char) < 0xE000 for char in content))
)


@given(contents)
def test_no_control_token_comes_out_of_a_message(content):
    """Whatever a message says, its tokens are the bytes of its text; only fences themselves are
    replaced.
    """
    plain = content.replace(OPEN, "\ufffd").replace(CLOSE, "\ufffd").encode()
    assert encode(None, content) == [START, *b"user\n", *plain, END, START, *b"assistant\n"]


@given(contents, contents)
def test_nor_out_of_names_roles_and_tools(one, other):
    """The same holds for every other text of the client: roles, nested values, keys, tools."""
    source = (
        "{{ messages[0].role }}|{{ messages[0].nested[0].key }}|{{ tools | tojson }}{{ "
        "tools[0] | join }}"
    )
    messages = [{"role": one, "nested": [{"key": other}]}]
    tokens = ChatTemplate(FakeVocabulary(), source).encode(messages, [{"name": one, other: 1}])
    assert not set(tokens) & CONTROL.keys()


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_token_in_two_messages(name):
    """Two texts that a template writes side by side do not make a control token together."""
    template = ChatTemplate(FakeVocabulary(), JOIN)
    for at in range(1, len(name)):
        messages = [{"role": "user", "content": part} for part in (name[:at], name[at:])]
        assert template.encode(messages, []) == list(name.encode())


class NestedVocabulary(FakeVocabulary):
    """A control token whose text lies within another's."""

    def __init__(self) -> None:
        super().__init__()
        self.control_tokens = ["<|a<b>c|>", "<b>"]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if parse_special and ("<b>" in text or "<|a<b>c|>" in text):
            return [257]
        return list(text.encode())


def test_a_control_token_within_another():
    """Both are plain text, and no fence is left in the prompt."""
    messages = [{"role": "user", "content": "<|a<b>c|>"}]
    assert ChatTemplate(NestedVocabulary(), JOIN).encode(messages, []) == list(b"<|a<b>c|>")


class BeginningVocabulary(FakeVocabulary):
    """Begins each text with a control token, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.control_tokens = [*FakeVocabulary.control_tokens, "<s>"]
        self.special_texts = {"bos_token": "<s>", "eos_token": ""}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokens = super().tokenize(
            text.removeprefix("<s>"), add_special=False, parse_special=parse_special
        )
        return [259] * add_special + [259] * (parse_special and text.startswith("<s>")) + tokens


def test_one_begin_token_where_the_template_writes_it():
    """A template that writes bos_token itself does not get a second one."""
    messages = [{"role": "user", "content": "hi"}]
    tokens = ChatTemplate(BeginningVocabulary(), "{{ bos_token }}" + JOIN).encode(messages, [])
    assert tokens == [259, *b"hi"]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ ('' | attr('__class__')).__base__ }}",
        "{{ '{0.__class__.__base__}'.format('') }}",
        "{{ messages.clear() }}",
        "{{ messages.append.__self__ }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ self.__init__.__globals__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox(source):
    """A template cannot reach Python's insides or other files, nor change the messages."""
    try:
        tokens = encode(source)
    except BadRequest:
        return
    assert tokens == [], "an undefined attribute prints as nothing"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ messages", "{% for m in messages %}", "{{ 1 | no_such_filter }}"]
)
def test_a_syntax_error(source):
    """A template that cannot be read stops the start, not a request."""
    with pytest.raises(StartupError, match="syntax error"):
        ChatTemplate(FakeVocabulary(), source)


def test_raise_exception():
    """What a template refuses is the client's fault, in the template's own words."""
    with pytest.raises(BadRequest, match="roles must alternate") as refused:
        encode("{{ raise_exception('roles must alternate') }}")
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ messages[7].content }}", "{{ messages + 1 }}", "{{ none.x.y }}"]
)
def test_a_template_that_fails(source):
    """Any failure of the template is a refusal, not our bug."""
    with pytest.raises(BadRequest) as refused:
        encode(source)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ tools | tojson }}", "{{ messages[0].content.encode('no') }}"]
)
def test_a_template_that_fails_in_other_ways(source):
    """Python's less usual errors too, and tools that are nested too deeply, are a refusal and not
    our bug.
    """
    tools = deep = {}
    for _ in range(2000):
        deep["x"] = deep = {}
    with pytest.raises(BadRequest):
        ChatTemplate(FakeVocabulary(), source).encode([{"role": "user", "content": "hi"}], [tools])


def test_lists_that_grow():
    """A template may keep a queue, as some do for the ids of calls; what it was given stays as it
    was.
    """
    source = (
        "{%- set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = "
        "ns.ids.append(m.content) %}{% endfor %}"
        "{{ ns.ids.pop(0) }}{{ ns.ids | length }}{% set _ = messages.append(1) %}"
    )
    messages = [{"role": "user", "content": content} for content in "ab"]
    template = ChatTemplate(FakeVocabulary(), source)
    assert template.render(messages, []) == template.render(messages, []) == "a1"


def test_json_of_what_filters_make():
    """A generator is a list; what has no form in JSON is refused."""
    assert text(encode("{{ messages | map(attribute='role') | tojson }}")) == '["user"]'
    with pytest.raises(BadRequest, match="no form in JSON"):
        encode("{{ raise_exception | tojson }}")


def test_a_model_without_a_template():
    """It has no chat, and says so."""
    vocabulary = FakeVocabulary()
    vocabulary.chat_template = None
    with pytest.raises(BadRequest, match="no chat template"):
        ChatTemplate(vocabulary).encode([{"role": "user", "content": "hi"}], [])


def test_tools_and_variables_reach_the_template():
    """Tools are a list or undefined; variables have the names of the caller; special texts are
    there.
    """
    source = (
        "{% if tools %}{{ tools[0].name }}{{ tools | tojson }}{% else %}none{% endif %} {{ "
        "thinking }}{{ eos_token }}"
    )
    template = ChatTemplate(FakeVocabulary(), source)
    assert text(template.encode([], [{"name": "é"}], thinking=True)) == 'é[{"name": "é"}] True'
    assert text(template.encode([], [], thinking="x")) == "none x"


def test_tools_by_another_name():
    """SmolLM3's template asks for xml_tools, which nobody else may have."""
    source = "{% if xml_tools %}{{ xml_tools[0].name }}{% else %}none{% endif %}"
    template = ChatTemplate(FakeVocabulary(), source)
    assert (template.render([], [{"name": "x"}]), template.render([], [])) == ("x", "none")


def test_what_templates_expect():
    """Loop controls, generation marks, today's date, and blocks that swallow their line."""
    source = (
        "{%- for i in range(9) -%}{% if i == 2 %}{% break %}{% endif %}{{ i }}{%- endfor %}\n"
        "  {% generation %}\nx\n  {% endgeneration %}\n{{ strftime_now('%Y') }}"
    )
    assert text(encode(source)) == f"01x\n{datetime.datetime.now().astimezone().year}"


EACH = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
FIRST_ONLY = (
    "{% if not loop.first and m.role == 'system' %}{{ raise_exception('not here') }}{% endif %}"
)
SYSTEMS = {
    "anywhere": EACH,
    "first": EACH.replace("%}[", "%}" + FIRST_ONLY + "["),
    "dropped": EACH.replace("%}[", "%}{% if m.role != 'system' or loop.first %}[").replace(
        "]{%", "]{% endif %}{%"
    ),
    "never": EACH.replace("%}[", "%}{{ raise_exception('no system') if m.role == 'system' }}["),
}


def said(*messages: str) -> list[dict[str, str]]:
    """``u:text`` is a user's message, and so on."""
    roles = {"u": "user", "s": "system", "a": "assistant"}
    return [{"role": roles[message[0]], "content": message[2:]} for message in messages]


@pytest.mark.parametrize(
    ("name", "messages", "prompt"),
    [
        ("anywhere", said("s:S", "u:Q", "s:T"), "[system:S][user:Q][system:T]"),
        ("first", said("s:S", "u:Q", "s:T"), "[system:S][user:Q\n\nT]"),
        ("dropped", said("s:S", "u:Q", "s:T"), "[system:S][user:Q\n\nT]"),
        ("first", said("s:S", "s:T", "u:Q"), "[system:S\n\nT][user:Q]"),
        ("first", said("u:Q", "s:T", "u:R"), "[user:Q\n\nT\n\nR]"),
        (
            "first",
            said("u:Q", "a:A", "s:T", "u:R", "u:V"),
            "[user:Q][assistant:A][user:T\n\nR][user:V]",
        ),
        ("never", said("s:S", "u:Q", "a:A"), "[user:S\n\nQ][assistant:A]"),
    ],
)
def test_system_message_that_a_template_would_not_show_joins_its_neighbour(name, messages, prompt):
    """Claude Code sends one behind the user's; templates refuse it or, worse, leave it out."""
    assert ChatTemplate(FakeVocabulary(), SYSTEMS[name]).render(messages, []) == prompt
