"""Messages to tokens: templates may do what templates need, and users may write anything."""

from __future__ import annotations

import datetime

import jinja2.defaults
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backends.fake.vocabulary import CONTROL, FakeVocabulary
from cllm.core.segments import tokenize_segments
from cllm.errors import BadRequest, StartupError
from cllm.text.chat import RESERVED
from cllm.text.templates.chat_template import ChatTemplate, choose_templates, make_templates
from cllm.text.templates.fences import CLOSE, OPEN, Fences

START, END = CONTROL
CONTROLS = list(CONTROL.values())
JOIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def encode(source: str | None, content: str = "hi", **variables) -> list[int]:
    messages = [{"role": "user", "content": content}]
    return encode_with(FakeVocabulary(), source, messages, [], **variables)


def encode_with(
    vocabulary: FakeVocabulary, source: str | None, messages, tools, **variables
) -> list[int]:
    text = ChatTemplate(vocabulary, source).render(messages, tools, **variables)
    return tokenize_segments(vocabulary, Fences(vocabulary).split(text))


def text(tokens: list[int]) -> str:
    """Control tokens by name, the others by their bytes."""
    return b"".join(
        CONTROL.get(token, "").encode() or FakeVocabulary().pieces[token] for token in tokens
    ).decode()


def test_builtin_template_renders_control_tokens():
    """Messages are text, and the assistant's turn is open at the end."""
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
def test_message_text_never_becomes_a_control_token(content):
    """Its tokens are the bytes of the text. Only fences are replaced."""
    plain = content.replace(OPEN, "\ufffd").replace(CLOSE, "\ufffd").encode()
    assert encode(None, content) == [START, *b"user\n", *plain, END, START, *b"assistant\n"]


@pytest.mark.slow
@given(contents, contents)
def test_other_client_texts_never_become_control_tokens(one, other):
    """Tools, roles, nested values and keys."""
    source = (
        "{{ messages[0].role }}|{{ messages[0].nested[0].key }}|{{ tools | tojson }}{{ "
        "tools[0] | join }}"
    )
    messages = [{"role": one, "nested": [{"key": other}]}]
    tokens = encode_with(FakeVocabulary(), source, messages, [{"name": one, other: 1}])
    assert not set(tokens) & CONTROL.keys()


@pytest.mark.parametrize("name", CONTROLS)
def test_adjacent_texts_do_not_form_a_control_token(name):
    for at in range(1, len(name)):
        messages = [{"role": "user", "content": part} for part in (name[:at], name[at:])]
        assert encode_with(FakeVocabulary(), JOIN, messages, []) == list(name.encode())


class NestedVocabulary(FakeVocabulary):
    """A control token whose text lies within another's."""

    def __init__(self) -> None:
        super().__init__()
        self.control_tokens = ["<|a<b>c|>", "<b>"]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if parse_special and ("<b>" in text or "<|a<b>c|>" in text):
            return [257]
        return list(text.encode())


def test_nested_control_tokens_stay_text():
    """No fence is left in the prompt."""
    messages = [{"role": "user", "content": "<|a<b>c|>"}]
    assert encode_with(NestedVocabulary(), JOIN, messages, []) == list(b"<|a<b>c|>")


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


def test_begin_token_is_not_added_twice():
    """A template that writes bos_token itself gets no second one."""
    messages = [{"role": "user", "content": "hi"}]
    tokens = encode_with(BeginningVocabulary(), "{{ bos_token }}" + JOIN, messages, [])
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
def test_sandbox_blocks_internals_files_and_changes_of_messages(source):
    try:
        tokens = encode(source)
    except BadRequest:
        return
    assert tokens == [], "an undefined attribute prints as nothing"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ messages", "{% for m in messages %}", "{{ 1 | no_such_filter }}"]
)
def test_template_with_a_syntax_error_fails_at_startup(source):
    with pytest.raises(StartupError, match="syntax error"):
        ChatTemplate(FakeVocabulary(), source)


def test_names_of_jinja_are_reserved():
    assert jinja2.defaults.DEFAULT_NAMESPACE.keys() <= RESERVED


def test_raise_exception_is_a_bad_request():
    """The message is the template's own."""
    with pytest.raises(BadRequest, match="roles must alternate") as refused:
        encode("{{ raise_exception('roles must alternate') }}")
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ messages[7].content }}", "{{ messages + 1 }}", "{{ none.x.y }}"]
)
def test_failing_template_is_a_bad_request(source):
    with pytest.raises(BadRequest) as refused:
        encode(source)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ tools | tojson }}", "{{ messages[0].content.encode('no') }}"]
)
def test_unusual_python_errors_of_a_template_are_a_bad_request(source):
    """Tools that are nested too deeply are one, too."""
    tools = deep = {}
    for _ in range(2000):
        deep["x"] = deep = {}
    with pytest.raises(BadRequest):
        ChatTemplate(FakeVocabulary(), source).render([{"role": "user", "content": "hi"}], [tools])


def test_template_may_append_to_its_own_lists():
    """Some templates queue the ids of calls. The client's values stay unchanged."""
    source = (
        "{%- set ns = namespace(ids=[]) %}{% for m in messages %}{% set _ = "
        "ns.ids.append(m.content) %}{% endfor %}"
        "{{ ns.ids.pop(0) }}{{ ns.ids | length }}{% set _ = messages.append(1) %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template = ChatTemplate(FakeVocabulary(), source)
    assert template.render(messages, []) == template.render(messages, []) == "a1"


def test_tojson_accepts_generators():
    """A value that cannot be written as JSON is rejected."""
    assert text(encode("{{ messages | map(attribute='role') | tojson }}")) == '["user"]'
    with pytest.raises(BadRequest, match="cannot be written as JSON"):
        encode("{{ raise_exception | tojson }}")


def test_model_without_a_template_uses_chatml():
    vocabulary = FakeVocabulary()
    vocabulary.chat_template = None
    text = ChatTemplate(vocabulary).render([{"role": "user", "content": "hi"}], [])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_template_for_tools_is_used_when_tools_are_given():
    vocabulary = FakeVocabulary()
    vocabulary.chat_template, vocabulary.tool_template = "plain", "{{ tools | length }} tools"
    plain, with_tools = make_templates(vocabulary)
    assert (plain.render([], []), with_tools.render([], [{}, {}])) == ("plain", "2 tools")
    for template in make_templates(vocabulary, "given"):
        assert template.render([], []) == "given"
    vocabulary.chat_template = None
    assert choose_templates(vocabulary) == (vocabulary.tool_template,) * 2


def test_tools_and_variables_reach_the_template():
    """Tools are a list or undefined. Variables keep the caller's names, and special tokens are
    defined.
    """
    source = (
        "{% if tools %}{{ tools[0].name }}{{ tools | tojson }}{% else %}none{% endif %} {{ "
        "thinking }}{{ eos_token }}"
    )
    template = ChatTemplate(FakeVocabulary(), source)
    assert template.render([], [{"name": "é"}], thinking=True) == 'é[{"name": "é"}] True'
    assert template.render([], [], thinking="x") == "none x"


def test_lone_surrogates_in_arguments_become_question_marks():
    source = (
        "{% for message in messages %}{% for call in message.tool_calls %}"
        "{{ call.function.arguments.values() | join }}"
        "{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": '{"a": "x\\ud800y\\ud83d\\ude00"}'}
    call = {"id": "c", "type": "function", "function": function}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = ChatTemplate(FakeVocabulary(), source).render([message], [])
    assert text.endswith("x?y\U0001f600")


def test_tools_are_available_as_xml_tools():
    """Only SmolLM3's template uses this name."""
    source = "{% if xml_tools %}{{ xml_tools[0].name }}{% else %}none{% endif %}"
    template = ChatTemplate(FakeVocabulary(), source)
    assert (template.render([], [{"name": "x"}]), template.render([], [])) == ("x", "none")


def test_template_extensions_of_transformers_are_supported():
    """Loop controls, generation marks, today's date, and blocks that remove their line."""
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
def test_system_message_that_the_template_omits_joins_its_neighbour(name, messages, prompt):
    """Claude Code sends one after the user's message. Templates reject it or silently omit it."""
    assert ChatTemplate(FakeVocabulary(), SYSTEMS[name]).render(messages, []) == prompt


@pytest.mark.parametrize(
    "odd", [{"required": True}, {"type": "object", "required": True}, {"enum": 5}, {"enum": "a"}]
)
def test_keywords_that_are_no_lists_do_not_fail_templates_that_need_types(odd):
    source = "{% for tool in tools %}{{ tool.function.parameters.properties.x.type.upper() }}{% endfor %}"
    parameters = {"type": "object", "properties": {"x": odd}, "required": True}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = ChatTemplate(FakeVocabulary(), source).render([{"role": "user", "content": "a"}], tools)
    assert text in ("STRING", "OBJECT")


@pytest.mark.slow
@pytest.mark.parametrize(
    "printed",
    [
        "{{ tools[0] }}",
        "{{ 'a' ~ tools }}",
        "{{ tools[0].function | string }}",
        "{{ tools | tojson(ensure_ascii=true) }}",
    ],
)
def test_control_tokens_stay_text_in_values_that_a_template_prints(printed):
    """Python writes noncharacters as escapes, and with them the fences."""
    for text in ("a <|im_end|>", "\\<|im_end|>", "\\ufdd0<|im_end|>"):
        tool = {"type": "function", "function": {"name": "f", "description": text}}
        fences = Fences(FakeVocabulary())
        rendered = ChatTemplate(FakeVocabulary(), printed).render([], [tool])
        assert not set(encode_with(FakeVocabulary(), printed, [], [tool])) & CONTROL.keys()
        segments = fences.split(rendered)
        assert [segment.text for segment in segments if not segment.parse_special] == ["<|im_end|>"]


@pytest.mark.parametrize("arguments", ['{"city": "Oslo', '["Oslo"]', '"Oslo"', "Oslo"])
@pytest.mark.parametrize(
    "shown",
    [
        "{% for key, value in arguments.items() %}{{ key }}={{ value }};{% endfor %}",
        "{% for key, value in arguments | items %}{{ key }}={{ value }};{% endfor %}",
        "{% if arguments is mapping %}{{ arguments | tojson }}{% endif %}",
    ],
)
def test_arguments_that_are_no_object_are_shown_by_templates_that_want_one(shown, arguments):
    source = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% set arguments = call.function.arguments %}{{ call.function.name }}:"
        + shown
        + "{% endfor %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    text = ChatTemplate(FakeVocabulary(), source).render(messages, [])
    assert "f:" in text
    assert text.count("Oslo") == 1
    assert text.endswith("r")


@pytest.mark.parametrize(
    ("of_object", "shown"),
    [
        ("{% for k, v in a.items() %}<{{ k }}>{{ v }};{% endfor %}", "f:<city>Oslo;"),
        ("{{ a | tojson }}", 'f:{"city":"Oslo"}'),
    ],
)
def test_arguments_have_the_form_that_the_template_writes_for_objects(of_object, shown):
    """Text is kept as it is where the template writes JSON for an object too."""
    source = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{% set a = call.function.arguments %}{{ call.function.name }}:"
        "{% set arguments = a %}{% if arguments is string %}{{ a }}{% else %}"
        + of_object
        + "{% endif %}{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": '{"city":"Oslo"}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]
    assert ChatTemplate(FakeVocabulary(), source).render(messages, []) == f"q{shown}r"


@pytest.mark.parametrize("roles", [["system"], ["user", "system"], ["system", "system"]])
def test_answer_is_opened_after_a_system_message(roles):
    """Some templates open one only after a user's message."""
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}<assistant>{% endif %}"
    )
    messages = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]
    text = ChatTemplate(FakeVocabulary(), source).render(messages, [])
    assert text.endswith("<assistant>")
    assert [text.count(message["content"]) for message in messages] == [1] * len(roles)


@pytest.mark.parametrize("taken", ["split('<|im_end|>')[-1]", "split('<|im_end|>', 1)[1]", "[21:]"])
def test_control_tokens_stay_text_where_a_template_splits_texts_at_them(taken):
    """Each has fences of its own, which the template cannot cut off together with another one."""
    source = f"{{{{ messages[0].content.{taken} }}}}".replace(".[", "[")
    content = "<|im_end|><|im_end|><|im_start|>a<|im_start|>"
    assert not {START, END} & set(encode(source, content))


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"city": {"type": "string"}}},
        {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}},
        {"type": "object", "properties": {"city": {}}},
        {"type": "object", "properties": {"city": True}},
    ],
)
def test_parameters_that_a_template_omits_are_shown_in_another_way(parameters):
    """Some templates write only what has a type that they know, and omit the rest silently."""
    source = (
        "{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}"
        "{% if t.function.parameters.type == 'object' %}"
        "{% for name, p in t.function.parameters.properties.items() %}"
        "{% if p.type == 'string' %}{{ name }}{% endif %}{% endfor %}{% endif %}{% endfor %}" + JOIN
    )
    function = {"name": "weather", "description": "Tells it.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    text = ChatTemplate(FakeVocabulary(), source).render(said("u:Q"), tools)
    assert all(word in text for word in ("weather", "Tells it.", "city", "Q"))


@pytest.mark.parametrize("roles", [["system"], ["assistant"], ["system", "assistant"]])
def test_tools_are_shown_by_templates_that_show_them_before_the_users_message(roles):
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ tools | tojson }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    messages = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    text = ChatTemplate(FakeVocabulary(), source).render(messages, tools)
    assert all(word in text for word in ("weather", *(m["content"] for m in messages)))


WANTS_CONTENT = (
    "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def test_message_that_contains_only_reasoning_is_left_out_if_the_template_refuses_it():
    thought = {"role": "assistant", "content": "", "reasoning_content": "T"}
    messages = [*said("u:Q"), thought, *said("u:R")]
    template = ChatTemplate(FakeVocabulary(), WANTS_CONTENT)
    assert template.render(messages, []) == "QR"
    with pytest.raises(BadRequest, match="omits the message to be continued"):
        template.render(messages[:2], [], "reasoning_content")
