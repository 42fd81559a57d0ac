"""The output of every model family, in every chunking: same parts, nothing lost, constant cost per
token.
"""

import itertools
import json
import re
import string
import time

import pytest
from call_texts import CALLING, FAMILIES, pieces_of, with_thoughts
from conftest import repeat
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.text.tools.model_family import ModelFamily, find_family, load_families
from cllm.text.tools.parser import Channel, Parser

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object"},
        "any": {},
    },
}
TOOLS = {"get_weather": SCHEMA, "get_time": SCHEMA, "x": {}}


def read(
    family: ModelFamily, chunks: list[str], tools=TOOLS, **options
) -> list[tuple[str, str, int, str]]:
    """Return the parts, merged where they belong together: channel, name, ordinal, text."""
    parser = Parser(family, tools, **options)
    merged: list[list] = []
    for part in [part for chunk in chunks for part in parser.feed(chunk)] + parser.flush():
        if (
            merged
            and not part.name
            and merged[-1][0] == part.channel
            and merged[-1][2] == part.call
        ):
            merged[-1][3] += part.text
        elif part.text or part.name:
            merged.append([part.channel, part.name, part.call, part.text])
    return [tuple(part) for part in merged]


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(at)]


def written(family: ModelFamily, calls: list[tuple[str, dict]]) -> str:
    """Return ``calls`` as a model writes them, built from the family."""
    how = family.calls

    def bare(value) -> str:
        if isinstance(value, str):
            return how.quote + value + how.quote
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{bare(item)}" for key, item in value.items()) + "}"
        return (
            "[" + ",".join(map(bare, value)) + "]" if isinstance(value, list) else json.dumps(value)
        )

    def one(ordinal: int, name: str, arguments: dict) -> str:
        pairs = "".join(
            how.pair.replace("$key", key)
            .replace("$string", json.dumps(isinstance(value, str)))
            .replace("$value", value if isinstance(value, str) else json.dumps(value))
            for key, value in arguments.items()
        )
        words = {
            "name": json.dumps(name),
            "word": name,
            "ordinal": str(ordinal),
            "arguments": bare(arguments) if how.quote else json.dumps(arguments),
            "pairs": pairs,
            "keywords": ", ".join(f"{key}={value!r}" for key, value in arguments.items()),
        }
        return re.sub(r"\$(\w+)", lambda match: words[match[1]], how.write)

    opener = family.header.open[0] + "assistant" if family.header else how.between
    return how.begin + opener.join(one(i, *call) for i, call in enumerate(calls)) + how.end


texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="<>|[]`"),
    max_size=30,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "city": texts.map(str.strip) | st.just('a "quoted\\" {word}'),
        "days": st.integers(-5, 10**6),
        "deep": st.dictionaries(
            st.text(string.ascii_lowercase, min_size=1, max_size=5), st.integers() | st.booleans()
        ),
    },
)
calls = st.lists(
    st.tuples(st.sampled_from(["get_weather", "get_time"]), arguments), min_size=1, max_size=3
)
places = st.lists(st.integers(0, 10**6), max_size=12)


@pytest.mark.parametrize("name", CALLING)
@given(calls=calls, places=places, thought=texts, said=texts)
@settings(max_examples=repeat(60, 15), deadline=None)
def test_parts_are_read_in_order(name, calls, places, thought, said) -> None:
    """Reasoning, text and calls, each call's arguments as one JSON object, in any chunking."""
    family = with_thoughts(name)
    if family.header:
        start = family.header.open[0] + "assistant"
        message = f"<|channel|>analysis<|message|>{thought}<|end|>{start}"
        message += f"<|channel|>commentary<|message|>{said}<|end|>{start}" if said.strip() else ""
    else:
        message = f"{family.reasoning.open}\n{thought}\n{family.reasoning.close}\n\n{said}\n"
    if family.calls.bare:  # nothing is said before
        said = ""
        message = f"{family.reasoning.open}\n{thought}\n{family.reasoning.close}\n\n"
    message += written(family, calls)
    parts = read(family, [message])
    expected = [("reasoning", thought.strip())] * bool(thought.strip()) + [
        ("text", said.strip())
    ] * bool(said.strip())
    assert [(part[0], part[3]) for part in parts if part[0] != Channel.CALL] == expected
    read_calls = [part for part in parts if part[0] == Channel.CALL]
    assert [(part[1], part[2], json.loads(part[3])) for part in read_calls] == [
        (name, i, arguments) for i, (name, arguments) in enumerate(calls)
    ]
    assert read(family, cut(message, places)) == parts
    assert read(family, list(message)) == parts


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=repeat(150, 30), deadline=None)
def test_any_text_gives_the_same_parts_in_any_chunking(name, data) -> None:
    """Broken calls, partial marks, and marks in unexpected places."""
    message = "".join(data.draw(st.lists(st.sampled_from(pieces_of(name)), max_size=12)))
    inside = data.draw(st.booleans())
    family = with_thoughts(name)
    parts = read(family, [message], inside=inside)
    assert read(family, list(message), inside=inside) == parts
    assert read(family, cut(message, data.draw(places)), inside=inside) == parts


@pytest.mark.parametrize("name", [name for name in CALLING if not load_families()[name].header])
@given(data=st.data())
@settings(max_examples=repeat(60, 15), deadline=None)
def test_marks_are_text_without_tools_and_reasoning(name, data) -> None:
    message = "".join(data.draw(st.lists(st.sampled_from(pieces_of(name)), max_size=12)))
    parts = read(
        ModelFamily((), load_families()[name].calls), cut(message, data.draw(places)), tools={}
    )
    assert "".join(part[3] for part in parts) == message
    assert {part[0] for part in parts} <= {Channel.TEXT}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hermes", "<tool_call>nothing of the kind</tool_call> so it goes"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>\n{"nom'),
        ("llama3", '{"name": "Anna", "age": {"years": 5}}'),
        ("llama3", '{"answer": 42}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", '["name", {"type": "list"}]'),
        ("pythonic", "[see(the manual)] for more"),
        ("pythonic", "[a link](https://example.org)"),
        ("lfm2", "<|tool_call_start|>nothing"),
        ("seed", "<seed:tool_call>\n<function=broken"),
        ("command", '<|START_ACTION|>[{"tool_name": 1}]<|END_ACTION|>'),
        ("mistral", "[TOOL_CALLS] is a mark"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>no call<｜tool▁call▁end｜>"),
        ("gemma4", "<|tool_call>call it what you like"),
        ("glm", "<tool_call>what a call!</tool_call>"),
        ("qwen3_coder", "<function=broken"),
    ],
)
def test_text_that_resembles_a_call_is_text(name: str, message: str) -> None:
    assert read(load_families()[name], list(message)) == [(Channel.TEXT, "", 0, message)]


@pytest.mark.parametrize(
    ("name", "message", "expected"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "x"}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        (
            "hermes",
            '<tool_call>{"name": "x", "arguments": {"a": [1, {"b": 2}</tool_call>',
            '{"a": [1, {"b": 2}]}',
        ),
        (
            "hermes",
            '<tool_call>{"name": "x", "arguments": {"a": "</tool_call>"}}</tool_call>',
            '{"a": "</tool_call>"}',
        ),
        ("kimi", "<|tool_call_begin|>x:0<|tool_call_argument_begin|>{<|tool_call_end|>", "{}"),
        ("hermes", '<tool_call>{"name": "x", "arguments": null}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "x", "arguments": {"a": "b', '{"a": "b'),
        (
            "hermes",
            (
                '<tool_call>{"type": "function", "function": {"name": "x", "arguments": {"a": '
                "1}}}</tool_call>"
            ),
            '{"a": 1}',
        ),
        (
            "hermes",
            '<tool_call>{"function": {"arguments": {"a": 1}, "name": "x"}}</tool_call>',
            '{"a": 1}',
        ),
        ("llama3", '[{"name": "get_time", "parameters": {"a": "]"}}]', '{"a": "]"}'),
        ("llama3", '{"function": {"name": "get_time", "parameters": {"a": 1}}}', '{"a": 1}'),
        ("glm", "<tool_call>x<arg_key>a</arg_key><arg_value>b", '{"a": "b"}'),
        ("qwen3_coder", "<tool_call><function=x>\n</function></tool_call>", "{}"),
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=city>\n12\n</parameter>\n</function>",
            '{"city": "12"}',
        ),
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=any>\nTrue\n</parameter>\n</function>",
            '{"any": true}',
        ),
        (
            "minicpm",
            '<function name="x"><param name="a"><![CDATA[</param>\n]]></param></function>',
            '{"a": "</param>\\n"}',
        ),
        ("minicpm", '<function name="x"><param name="a"></param></function>', '{"a": ""}'),
        ("phi4", 'functools[{"name": "x", "arguments": {"a": 1}}]', '{"a": 1}'),
        ("mistral", '[TOOL_CALLS]x[ARGS]{"a": 1}', '{"a": 1}'),
        ("mistral_args", '[TOOL_CALLS]x[CALL_ID]abcdefghi[ARGS]{"a": 1}', '{"a": 1}'),
        ("llama3", '<|python_tag|>{"name": "get_time", "parameters": {}}', "{}"),
    ],
)
def test_variants_of_calls_are_read(name: str, message: str, expected: str) -> None:
    for chunks in ([message], list(message)):
        assert [(part[0], part[3]) for part in read(load_families()[name], chunks)] == [
            (Channel.CALL, expected)
        ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("(city='Oslo', days=2)", {"city": "Oslo", "days": 2}),
        ("()", {}),
        (
            "( a = -1.5e3 , b = None, c=True,d=false )",
            {"a": -1500.0, "b": None, "c": True, "d": False},
        ),
        (r"""(a="it's \"so\"\n\t\\", b='"', c='')""", {"a": 'it\'s "so"\n\t\\', "b": '"', "c": ""}),
        (r"(a='\x41\u00e9\U0001F600\101\d')", {"a": "Aé😀A\\d"}),
        ('(a=\'\'\'one\n"two" \'\'\', b="""3 " 4""")', {"a": 'one\n"two" ', "b": '3 " 4'}),
        (
            "(a=[1, 'x', (2, 3),], b={'k': [True, {}]}, c=[])",
            {"a": [1, "x", [2, 3]], "b": {"k": [True, {}]}, "c": []},
        ),
        ("(unit=celsius, s='a, b=c)')", {"unit": "celsius", "s": "a, b=c)"}),
        # which JSON lacks
        ("(a=NaN, b=Infinity, c=-Infinity)", {"a": "NaN", "b": "Infinity", "c": "-Infinity"}),
    ],
)
def test_python_keyword_arguments_become_json(written: str, expected: dict) -> None:
    """In any chunking. Text after the closing bracket is not touched."""
    message = f"<|tool_call_start|>[x{written}, get_time(city='a')]<|tool_call_end|>so"
    for chunks in ([message], list(message)):
        first, second, text = read(load_families()["lfm2"], chunks)
        assert (first[1], json.loads(first[3])) == ("x", expected)
        assert (second[1], second[3]) == ("get_time", '{"city": "a"}')
        assert text == (Channel.TEXT, "", 0, "so")


def test_declared_call_ends_unclosed_reasoning() -> None:
    """In families whose models forget to close it. Calls of other functions are reasoning."""
    family = with_thoughts("kimi")
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    for chunk in (list, lambda text: [text]):
        parts = read(family, chunk("hm " + call.format("get_time")), inside=True)
        assert parts == [(Channel.REASONING, "", 0, "hm"), (Channel.CALL, "get_time", 0, "{}")]
        parts = read(family, chunk("hm " + call.format("no_tool") + "</think>so"), inside=True)
        assert [part[0] for part in parts] == [Channel.REASONING, Channel.TEXT]
        assert "no_tool" in parts[0][3]


@pytest.mark.parametrize("chunk", [list, lambda text: [text]])
def test_marks_around_text_are_dropped(chunk) -> None:
    """Reasoning after text is recognized if its mark cannot be text."""
    family = load_families()["command"]
    message = "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>"
    expected = [(Channel.REASONING, "", 0, "a"), (Channel.TEXT, "", 0, "b")]
    assert read(family, chunk(message)) == read(family, chunk(message), tools={}) == expected
    message = "b<|channel>thought\na<channel|>c<channel|>"
    expected = [
        (Channel.TEXT, "", 0, "b"),
        (Channel.REASONING, "", 0, "a"),
        (Channel.TEXT, "", 0, "c"),
    ]
    assert read(load_families()["gemma4"], chunk(message)) == expected


@pytest.mark.parametrize("broken", ['{"a": 1}', '{"a": 1', '{"a": 1}}}'])
def test_text_after_a_badly_closed_call_is_kept(broken: str) -> None:
    """Brackets are missing, or there are too many."""
    message = f'<tool_call>{{"name": "x", "arguments": {broken}\n</tool_call>\nAnd so on.'
    for chunks in ([message], list(message)):
        call, *text = read(load_families()["hermes"], chunks)
        assert json.loads(call[3]) == {"a": 1}
        assert "".join(part[3] for part in text).endswith("And so on.")


def test_marks_in_another_channel_are_not_special() -> None:
    call = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    family = with_thoughts("hermes")
    assert read(family, [f"<think>{call}</think>a"]) == [
        (Channel.REASONING, "", 0, call),
        (Channel.TEXT, "", 0, "a"),
    ]
    assert read(family, ["a <think> b"]) == [(Channel.TEXT, "", 0, "a <think> b")]
    assert read(family, ["hm</think>a"], inside=True) == [
        (Channel.REASONING, "", 0, "hm"),
        (Channel.TEXT, "", 0, "a"),
    ]


THINKS = load_families()["think"]
MARK_IDS = {"<think>": 1, "</think>": 2}


def read_tokens(*tokens: str | int, control=MARK_IDS, **options) -> str:
    """Return the text of ``tokens``, of which ids are control tokens, with reasoning in brackets."""
    parser = Parser(THINKS, {}, control=control, **options)
    names = {token: text for text, token in MARK_IDS.items()}
    parts = [
        part
        for token in tokens
        for part in parser.feed(names.get(token, token), is_control=token in parser.control_ids)
    ]
    grouped = itertools.groupby(parts + parser.flush(), key=lambda part: part.channel)
    texts = ((channel, "".join(part.text for part in group)) for channel, group in grouped)
    return "".join(f"[{text}]" if channel == Channel.REASONING else text for channel, text in texts)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        # the text is what remains without the reasoning
        ((1, "a", 2, "\n\n", "b\n", 1, "c", 2, "d"), "[a]b[c]\nd"),
        ((1, "a", 2, "b\n", 1, "\nc\n", 2, "\n", "\n", "d"), "[a]b[c]\n\n\nd"),
        ((1, "a", 2, "b\n", 1, "c"), "[a]b[c]"),
        ((1, "a", 2, "b", "\n  ", 1, "c", 2, " \n"), "[a]b[c]"),
        ((1, "a", 2, "b\n", 1, "c", 2, "\n", 1, "d", 2, "e"), "[a]b[cd]\n\ne"),
        # it is only mentioned: in other tokens, within a line, in code
        (("see\n", "<th", "ink>"), "see\n<think>"),
        (("see\n<thi", 1, "a", 2, "b"), "see\n<thi<think>a</think>b"),
        (("see `", 1, "a", 2, "`"), "see `<think>a</think>`"),
        (("```\n", 1, "a\n", 2, "\n```\n", 1, "b"), "```\n<think>a\n</think>\n```[b]"),
        # there is nothing to end
        (("a\n", 2, "\nb"), "a\nb"),
        (("a </think> b",), "a </think> b"),
    ],
)
def test_control_token_resumes_reasoning(tokens, expected) -> None:
    """At the beginning of a line, outside of code blocks."""
    assert read_tokens(*tokens) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x\n<think>a</think>\ny", "x[a]\n\ny"),
        ("x\n  <think>a</think>y", "x[a]\n  y"),
        ("x <think>a</think>", "x <think>a</think>"),
        ("x\n```\n<think>a\n```\ny", "x\n```\n<think>a\n```\ny"),
        ("x\n~~~ py\n<think>a", "x\n~~~ py\n<think>a"),
        ("```\nx\n```\n<think>a", "```\nx\n```[a]"),
    ],
)
@pytest.mark.parametrize("chunk", [list, lambda text: [text]])
def test_mark_of_ordinary_tokens_resumes_reasoning(chunk, text, expected) -> None:
    """At the beginning of a line, outside of code blocks."""
    assert read_tokens(*chunk(text), control={}) == expected


def test_call_may_follow_reasoning_that_has_resumed() -> None:
    call = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    parts = read(with_thoughts("hermes"), ["a\n<think>b</think>\n" + call])
    assert [part[0] for part in parts] == [Channel.TEXT, Channel.REASONING, Channel.CALL]


def test_parser_is_done_after_the_maximum_number_of_calls() -> None:
    call = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    parser = Parser(load_families()["hermes"], TOOLS, max_calls=1)
    assert [part.name for part in parser.feed(call + call)] == ["x"]
    assert parser.done
    assert parser.feed(call) == parser.flush() == []


@pytest.mark.parametrize(
    ("template", "open_mark", "begin"),
    [
        ('{{ "<tool_call>" }}', None, "<tool_call>"),
        ('{{ "<tool_call>" }}{{ "<think>" }}', "<think>", "<tool_call>"),
        ('{{ "<tool_call><arg_key>" }}{{ "<think>" }}', "<think>", "<arg_key>"),
        ('{{ "[TOOL_CALLS]" }}[THINK]', "[THINK]", '{"name"'),
        ('{{ "[TOOL_CALLS]" }}[ARGS]', None, "[ARGS]"),
        (
            "<seed:tool_call><function=example_function_name><seed:think>",
            "<seed:think>",
            "<seed:tool_call>",
        ),
        ('<function=example_function_name>{"a": 1}</function>', None, "<function="),
        ("<|START_ACTION|><|START_THINKING|>", "<|START_THINKING|>", '"tool_name"'),
        ("<tool_call> so <tool_calls>[</tool_calls>", None, '{"name"'),
        ("List of tools: <|tool_list_start|>", None, "$keywords"),
        ("nothing", None, None),
    ],
)
def test_family_is_chosen_by_the_template(
    template: str, open_mark: str | None, begin: str | None
) -> None:
    family = find_family(template)
    assert (family.reasoning.open if family.reasoning else None) == open_mark
    assert begin in family.calls.write + family.calls.pair if begin else family.calls is None


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("kind", ["text", "argument", "openers", "space"])
def test_cost_per_token_is_constant(name: str, kind: str) -> None:
    """Four times the tokens take about four times as long. If the parser looked back, it would be
    sixteen times in every attempt.
    """
    family = load_families()[name]
    head, _, _ = written(family, [("get_weather", {"city": "Oslo"})]).partition("slo")
    opener = family.calls.open[0] if family.calls.open else family.header.open[0]
    begin, token = {
        "text": ("", "word "),
        "argument": (head, "word "),
        "openers": ("", opener),
        "space": ("", " "),
    }[kind]

    def seconds(num_tokens: int) -> float:
        parser = Parser(family, TOOLS)
        parser.feed(begin)
        begun = time.process_time()
        for _ in range(num_tokens):
            parser.feed(token)
        return time.process_time() - begun

    assert any(seconds(16_000) < 9 * seconds(4_000) + 0.01 for _ in range(5))


UNDECLARED = {
    "hermes": [
        '<tool_call>{"arguments": {}, "name": "y"}</tool_call>',
        '<tool_call>{"name": "y"}</tool_call>',
    ],
    "qwen3_coder": [
        "<function=y>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<function=y></function>",
    ],
    "mistral": ["[TOOL_CALLS]y[ARGS]{}"],
    "kimi": ["<|tool_call_begin|>functions.y:0<|tool_call_argument_begin|>{}"],
    "lfm2": ["<|tool_call_start|>[y(a=1)]"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in UNDECLARED for text in UNDECLARED[name]]
)
@pytest.mark.parametrize("said", ["", "I call. "])
def test_call_of_an_undeclared_function_is_text(name: str, text: str, said: str) -> None:
    """In any form and order. The calls after it are read."""
    family = load_families()[name]
    for chunks in ([said + text], [*(said + text)]):
        assert read(family, chunks) == [(Channel.TEXT, "", 0, said + text)]
    call = written(family, [("get_time", {})])
    assert [
        part[1] for part in read(family, [said + text + "\n", call]) if part[0] == Channel.CALL
    ] == ["get_time"]


def test_message_to_an_undeclared_function_is_text() -> None:
    parts = read(
        load_families()["harmony"], [written(load_families()["harmony"], [("y", {"a": 1})])]
    )
    assert parts == [(Channel.TEXT, "", 0, '{"a": 1}')]
