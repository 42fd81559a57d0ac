"""Arguments of calls, as models write them, become JSON text: whole and cut anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from cllm.text.tools.argument_readers import (
    ArgumentReader,
    Bare,
    Keywords,
    Object,
    Pairs,
    count_begun,
    escape,
    list_types,
    parse_partial_object,
    unescape,
    write_value,
)
from cllm.text.tools.model_family import Tags

QUOTE = '<|"|>'
TAGS = Tags(key_open="<k=", key_close=">", value_close="</k>", trim=True)
TWO_TAGS = Tags(
    key_open="<key>",
    key_close="</key>",
    value_open="<value>",
    value_close="</value>",
    wrapped=("[[", "]]"),
)
SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "maybe": {"type": ["string", "null"]},
        "colour": {"enum": ["red", "blue"]},
    }
}


def read(make: Callable[[], ArgumentReader], pieces: list[str]) -> tuple[str, str | None]:
    """Return the JSON text of ``pieces``, and the text after the arguments; None if the pieces end
    before the arguments do, which then are closed.
    """
    reader, written = make(), ""
    for i, piece in enumerate(pieces):
        new, rest = reader.feed(piece)
        written += new
        if rest is not None:
            return written, rest + "".join(pieces[i + 1 :])
    return written + reader.close(), None


CASES: list[tuple[str, Callable[[], ArgumentReader], str, str, str | None]] = [
    # name, reader, text, JSON, rest
    ("object", Object, '{"a": [1, {"b": "}"}]} rest', '{"a": [1, {"b": "}"}]}', " rest"),
    ("escapes", Object, r'{"a": "\"}\\"}x', r'{"a": "\"}\\"}', "x"),
    ("cut off", Object, '{"a": [1, 2', '{"a": [1, 2', None),
    ("inside another", lambda: Object(1), '{"a": 1}}x', '{"a": 1}}', "x"),
    ("ended by a mark", lambda: Object(0, ("<|e|>",)), '{"a": [1<|e|>x', '{"a": [1]}', "<|e|>x"),
    ("a mark in a string", lambda: Object(0, ("<|e|>",)), '{"a": "<|e|>"}', '{"a": "<|e|>"}', ""),
    ("a mark only begun", lambda: Object(0, ("<|e|>",)), '{"a": 1 <|', '{"a": 1 <|', None),
    ("bare", lambda: Bare(QUOTE), "{a:1,b:{c:true}}x", '{"a":1,"b":{"c":true}}', "x"),
    (
        "bare strings",
        lambda: Bare(QUOTE),
        f'{{a:{QUOTE}say "hi"<|{QUOTE},b:[x y,None]}}',
        '{"a":"say \\"hi\\"<|","b":["x" "y",null]}',
        "",
    ),
    ("bare, cut off", lambda: Bare(QUOTE), f"{{a:{QUOTE}be<|", '{"a":"be<|"', None),
    ("keywords", Keywords, "(a=1, b='x')y", '{"a": 1, "b": "x"}', "y"),
    ("no keywords", Keywords, "()", "{}", ""),
    (
        "Python's literals",
        Keywords,
        "(a=[1, None], b={'c': (True, False)}, d=word)",
        '{"a": [1, null], "b": {"c": [true, false]}, "d": "word"}',
        "",
    ),
    ("empty strings", Keywords, "(a='', b=\"\")", '{"a": "", "b": ""}', ""),
    ("triple quotes", Keywords, "(a='''it's''\n''')", '{"a": "it\'s\'\'\\n"}', ""),
    ("the other quote", Keywords, "(a='\"')", '{"a": "\\""}', ""),
    (
        "Python's escapes",
        Keywords,
        r"(a='\n\x41\u00e9\U0001F600\101\'\q\\')",
        '{"a": "\\nA\\u00e9\\ud83d\\ude00A\'\\\\q\\\\"}',
        "",
    ),
    ("keywords, cut off", Keywords, "(a='be", '{"a": "be', None),
    ("pairs", lambda: Pairs(TAGS, SCHEMA), "<k=count>\n5\n</k>x", '{"count": 5}', "x"),
    (
        "lines of a string",
        lambda: Pairs(TAGS, SCHEMA),
        "<k=text>\na\n\nb\n</k>\n<k=count>2</k>!",
        '{"text": "a\\n\\nb", "count": 2}',
        "!",
    ),
    ("a string is no number", lambda: Pairs(TAGS, SCHEMA), "<k=text>5</k>.", '{"text": "5"}', "."),
    ("no pairs", lambda: Pairs(TAGS, SCHEMA), "  .", "{}", "."),
    ("an enum", lambda: Pairs(TAGS, SCHEMA), "<k=colour>5</k>.", '{"colour": "5"}', "."),
    ("null or string", lambda: Pairs(TAGS, SCHEMA), "<k=maybe>null</k>.", '{"maybe": null}', "."),
    ("a string or null", lambda: Pairs(TAGS, SCHEMA), "<k=maybe>5</k>.", '{"maybe": "5"}', "."),
    ("an unknown key", lambda: Pairs(TAGS, SCHEMA), "<k=z>[1]</k>.", '{"z": [1]}', "."),
    (
        "a key that says string",
        lambda: Pairs(TAGS, {}),
        '<k=z" string="true">5</k>.',
        '{"z": "5"}',
        ".",
    ),
    (
        "two tags",
        lambda: Pairs(TWO_TAGS, SCHEMA),
        "<key>text</key> <value>a</value><key>count</key><value>[[7]]!",
        '{"text": "a", "count": 7}',
        "!",
    ),
    (
        "a wrapped string",
        lambda: Pairs(TWO_TAGS, SCHEMA),
        "<key>text</key><value>[[</value>]].",
        '{"text": "</value>"}',
        ".",
    ),
    ("a key alone", lambda: Pairs(TWO_TAGS, {}), "<key>a</key>x", "{}", "<key>a</key>x"),
    ("pairs, cut off", lambda: Pairs(TAGS, SCHEMA), "<k=text>be", '{"text": "be"}', None),
    ("a number cut off", lambda: Pairs(TAGS, SCHEMA), "<k=count>12", '{"count": 12}', None),
    ("pairs without an end", lambda: Pairs(TAGS, SCHEMA), "<k=z>1</k>", '{"z": 1}', None),
]


@pytest.mark.parametrize(
    ("make", "text", "written", "rest"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_arguments_become_json(
    make: Callable[[], ArgumentReader], text: str, written: str, rest: str | None
) -> None:
    """The same for the whole text, for single characters and for each cut into two."""
    assert read(make, [text]) == (written, rest)
    assert read(make, list(text)) == (written, rest)
    for at in range(1, len(text)):
        assert read(make, [text[:at], text[at:]]) == (written, rest), f"cut at {at}"


def test_strings_stream() -> None:
    """A string is passed on before it ends; a value that may be anything waits for its end."""
    assert Object().feed('{"a": "be')[0] == '{"a": "be'
    assert Bare(QUOTE).feed(f"{{a:{QUOTE}be")[0] == '{"a":"be'
    assert Keywords().feed("(a='be")[0] == '{"a": "be'
    assert Pairs(TAGS, SCHEMA).feed("<k=text>be")[0] == '{"text": "be'
    assert Pairs(TAGS, SCHEMA).feed("<k=count>12")[0] == '{"count": '


def test_a_key_that_never_ends_ends_the_arguments() -> None:
    assert read(lambda: Pairs(TAGS, {}), ["<k=" + "x" * 5000])[0] == "{}"


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mark", "count"),
    [("a<", "<b>", 1), ("a<b", "<b>", 2), ("a<b>", "<b>", 0), ("a", "<b>", 0), ("<<", "<<<", 2)],
)
def test_beginning_of_a_mark(text: str, mark: str, count: int) -> None:
    assert count_begun(text, mark) == count


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", set(), 5),
        ("5", {"string"}, "5"),
        ("5", {"integer", "string"}, "5"),
        (" 5\n", {"integer"}, 5),
        ("None", set(), None),
        ("None", {"string"}, "None"),
        ("None", {"string", "null"}, None),
        ("True", {"boolean"}, True),
        ("False", set(), False),
        ("NaN", {"number"}, "NaN"),
        ("-Infinity", set(), "-Infinity"),
        (" two words", set(), " two words"),
        ('{"a": [1]}', set(), {"a": [1]}),
        ("[" * 100_000, set(), "[" * 100_000),
        ("é", set(), "é"),
    ],
)
def test_values_without_quotes(text: str, types: set[str], value: object) -> None:
    assert json.loads(write_value(text, types)) == value


def test_escapes() -> None:
    assert json.loads(f'"{escape(chr(34) + chr(92) + chr(10) + "é")}"') == '"\\\né'
    wanted = {r"\n": "\n", r"\0": "\0", r"\x7f": "\x7f", r"\"": '"', r"\z": r"\z", "\\\n": ""}
    assert {text: json.loads(f'"{unescape(text)}"') for text in wanted} == wanted
    assert json.loads(f'"{unescape(chr(92) + "Uffffffff")}"') == r"\Uffffffff"


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null", 3]}, {"integer", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": ["a", 1]}, set()),
        ({"type": "integer", "enum": ["a"]}, {"integer"}),
        ({}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_types_of_a_schema(schema: object, types: set[str]) -> None:
    assert list_types(schema) == types


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b": "be', {"a": 1, "b": "be"}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("[1]", {}),
        ("nothing", {}),
        ("", {}),
    ],
)
def test_object_that_was_cut_off(text: str, value: dict[str, object]) -> None:
    assert parse_partial_object(text) == value
