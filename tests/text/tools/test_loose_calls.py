"""Free text in which only tool calls are constrained, for every family, over vocabularies with and
without control tokens for its marks.
"""

import json
import random

import jsonschema
import pytest
from call_texts import CALLING, TOOLS, WEATHER, WORDS, grammar_of, with_thoughts

from cllm.text.tools.model_family import ModelFamily, load_families
from cllm.text.tools.parser import Channel, Parser

THEN = "<|end|><|start|>assistant"
SAY = load_families()["harmony"].header.final
BARE = [name for name in CALLING if load_families()[name].calls.bare]
# Families in which a mark alone does not begin a call yet.
BRACKETS = [
    "apertus",
    "command",
    "hermes",
    "granite3",
    "mistral",
    "nemotron2",
    "tool_calls",
    "gigachat31",
    "prompted",
]


def main_mark(name: str) -> str:
    calls = load_families()[name].calls
    return next(mark for mark in calls.open if (calls.begin + calls.write).startswith(mark))


both = pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)


def loose(family: ModelFamily, words, **options) -> str:
    return grammar_of(family, words=words, strict=False, is_loose=True, **options)


def read(family: ModelFamily, text: str, **options) -> list[list[str]]:
    """Return what the parser makes of a text: the names of its calls, and their arguments."""
    calls: list[list[str]] = []
    parser = Parser(family, TOOLS, **options)
    for part in parser.feed(text) + parser.flush():
        if part.channel == Channel.CALL:
            calls += [[part.name, ""]] if part.name else []
            calls[-1][1] += part.text
    return calls


@both
@pytest.mark.parametrize("name", CALLING)
def test_text_without_calls_is_free(name: str, words) -> None:
    family = with_thoughts(name)
    say = SAY if family.header else ""
    for thinks in (False, True):
        grammar = loose(family, words, thinks=thinks)
        for text in (
            "x",
            "a < b and { [ so on\n",
            "<tool_",
            "\n\nhello",
            'to=functions.none {"name": "x"}',
            "🙂 é",
        ):
            assert words.follows(grammar, say + text), text
    assert words.follows(loose(family, words), say)


@both
@pytest.mark.parametrize("name", BRACKETS)
def test_text_that_mentions_marks_is_free(name: str, words) -> None:
    """It only resembles a call."""
    family = load_families()[name]
    mark = main_mark(name)
    grammar = loose(family, words)
    for text in (
        f"Calls begin with {mark}.",
        f"`{mark}` and `{mark}`",
        mark,
        f"{mark} is (not) a call",
    ):
        assert words.follows(grammar, text), text
        assert read(family, text) == []


@both
@pytest.mark.parametrize("name", CALLING)
def test_valid_calls_are_allowed(name: str, words) -> None:
    """Alone, after text, and after another call."""
    family, call = with_thoughts(name), WEATHER[name]
    grammar = loose(family, words)
    assert words.follows(grammar, call)
    if not family.calls.bare:
        assert words.follows(
            grammar, f"{SAY}I look.{THEN}{call}" if family.header else f"I look.\n{call}"
        )
        assert words.follows(grammar, f"{call}{THEN if family.header else ' and '}{call}")


@both
@pytest.mark.parametrize("name", CALLING)
def test_calls_must_have_declared_names_and_valid_arguments(name: str, words) -> None:
    family, call = with_thoughts(name), WEATHER[name]
    grammar = loose(family, words)
    wrong = [call.replace("2", '"x"'), call.replace("city", "town")]
    if not family.calls.bare or name == "prompted":
        wrong.append(call.replace("get_weather", "get_news"))
    for text in wrong:
        assert words.refuses(grammar, text), text


@both
@pytest.mark.parametrize("name", BARE)
def test_json_that_names_no_declared_function_is_text(name: str, words) -> None:
    """An answer in JSON is an example."""
    family = load_families()[name]
    for text in (
        '{"name": "Anna", "age": 30}',
        '[{"name": "x"}]',
        '{"name": "get_news", "parameters": 5}',
        "[get_news(1)]",
    ):
        assert words.follows(loose(family, words), text)
        assert read(family, text) == []


@both
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name":"get_time","arguments":{}}</tool_call>'),
        ("hermes", '<tool_call>\n\n{ "name": "get_time", "arguments": {} }\n</tool_call>'),
        ("llama3", '\n{"name":"get_time","parameters":{}}'),
        (
            "kimi",
            "<|tool_call_begin|>functions.get_time:12<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ),
        ("harmony", " to=functions.get_time<|channel|>commentary json<|message|>{}"),
    ],
)
def test_call_may_begin_with_other_white_space_or_headers(name: str, text: str, words) -> None:
    grammar = loose(load_families()[name], words)
    assert words.follows(grammar, text)
    assert read(load_families()[name], text) == [["get_time", "{}"]]
    if not load_families()[name].calls.bare:
        assert words.refuses(grammar, text.replace("get_time", "get_news"))


@both
@pytest.mark.parametrize("name", sorted(set(CALLING) - {"harmony"}))
def test_calls_after_free_reasoning_are_constrained(name: str, words) -> None:
    family, call = with_thoughts(name), WEATHER[name]
    begin, end = family.reasoning.open, family.reasoning.close
    wrong = call.replace("2", '"x"')
    thinks, inside = loose(family, words, thinks=True), loose(family, words, inside=True)
    for thought in ("hm", f"I could write {wrong}", ""):
        assert words.follows(thinks, begin + thought)  # cut off by the end of the text
        assert words.follows(inside, thought)
        for text in (call, "hello", ""):
            assert words.follows(thinks, f"{begin}{thought}{end}\n{text}")
            assert words.follows(inside, f"{thought}{end}\n{text}")
        if not family.calls.bare:
            assert words.refuses(thinks, f"{begin}{thought}{end}\n{wrong}")
            assert words.refuses(inside, f"{thought}{end}\n{wrong}")


def test_message_with_headers_may_have_several_calls() -> None:
    words, family, call = WORDS["few"], load_families()["harmony"], WEATHER["harmony"]
    thought = (
        "<|channel|>analysis<|message|>I write to=functions.get_news now.<|end|><|start|>assistant"
    )
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    grammar = loose(family, words, thinks=True)
    for text in (
        thought + call,
        thought + said + call,
        said + SAY + "hello",
        call + "<|call|>"[:0],
        thought,
    ):
        assert words.follows(grammar, text.removesuffix("<|start|>assistant")), text
    assert words.refuses(grammar, thought + call.replace("get_weather", "get_weather2"))
    assert words.refuses(grammar, thought + call.replace("get_weather", "get_"))
    begun = loose(family, words, begun=True)
    assert words.follows(begun, f" goes on<|end|><|start|>assistant{call}")
    assert words.refuses(begun, f" goes on<|end|><|start|>assistant{call.replace('city', 'town')}")


@both
@pytest.mark.parametrize("name", CALLING)
def test_resampling_turns_wrong_calls_into_valid_ones(name: str, words) -> None:
    """If the grammar rejects a token of a wrong call, a random allowed token replaces it."""
    family, call, rng = with_thoughts(name), WEATHER[name], random.Random(name)
    grammar = loose(family, words, thinks=bool(family.reasoning))
    for wrong in (
        ("get_weather", "get_news"),
        ("get_weather", "x"),
        ("2", '"x"'),
        ("city", "town"),
    ):
        said = "" if family.calls.bare else f"{SAY}I look.{THEN}" if family.header else "I look.\n"
        matcher, tokens = words.matcher(grammar), []
        for token in words.encode(said + call.replace(*wrong)):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [i for i in range(words.eos_token_id) if mask >> i & 1]
            tokens.append(token if token in allowed else rng.choice(allowed))
            assert matcher.consume_token(tokens[-1])
        calls = read(family, words.decode(tokens))
        assert calls or family.calls.bare or family.header
        for called, arguments in calls:
            assert called in TOOLS
            if matcher.is_accepting():
                jsonschema.validate(
                    json.loads(arguments), {"additionalProperties": False} | TOOLS[called]
                )


CITY, NUMBER = {"city": {"type": "string"}}, {"days": {"type": "integer"}}
OPEN_SCHEMAS = {
    "any object": ({"type": "object"}, False),
    "open": ({"type": "object", "additionalProperties": True}, False),
    "more properties": ({"type": "object", "properties": CITY, "additionalProperties": True}, True),
    "reference": (
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": CITY | NUMBER}}},
        True,
    ),
    "anyOf": ({"anyOf": [{"properties": CITY | NUMBER}, {"properties": CITY}]}, True),
    "allOf": ({"type": "object", "allOf": [{"properties": CITY}, {"properties": NUMBER}]}, True),
}
NO_JSON = [
    name for name in CALLING if not load_families()[name].calls.writes_json and name != "apertus"
]


@pytest.mark.parametrize("schema", OPEN_SCHEMAS)
@pytest.mark.parametrize("name", NO_JSON)
def test_function_without_listed_arguments_accepts_any(name: str, schema: str) -> None:
    words, unenforced = WORDS["few"], set()
    for options in ({"is_loose": True}, {}):
        grammar = grammar_of(
            load_families()[name],
            {"get_weather": OPEN_SCHEMAS[schema][0]},
            words,
            False,
            unenforced,
            **options,
        )
        assert words.follows(grammar, WEATHER[name])
    assert bool(unenforced) == OPEN_SCHEMAS[schema][1]


@pytest.mark.parametrize("name", NO_JSON)
def test_optional_arguments_may_be_in_any_order(name: str) -> None:
    """They may come before the required ones, too."""
    family, words = load_families()[name], WORDS["few"]
    properties = NUMBER | CITY | {"more": {"type": "boolean"}}
    for required in (["days"], ["city"], ["city", "days"], []):
        tools = {"get_weather": {"type": "object", "properties": properties, "required": required}}
        grammar = loose(family, words, tools=tools)
        assert words.follows(grammar, WEATHER[name]) == (required != ["city", "days"]), required


STRICT_SCHEMAS = {
    "anyOf": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "pattern": {"type": "string", "pattern": "^[a-z]+$"},
    "minLength": {"type": "string", "minLength": 9},
    "const": {"const": "Bergen"},
    "$ref": {"$ref": "#/$defs/A"},
}


@pytest.mark.parametrize("keyword", STRICT_SCHEMAS)
@pytest.mark.parametrize("name", NO_JSON)
def test_strict_is_best_effort_in_families_without_json(name: str, keyword: str) -> None:
    """Many clients set strict by default. A value that cannot be enforced is free; the others are
    enforced.
    """
    schema = {
        "type": "object",
        "properties": {"city": STRICT_SCHEMAS[keyword], "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"A": {"type": "string"}},
    }
    words, unenforced = WORDS["few"], set()
    grammar = grammar_of(
        load_families()[name], {"get_weather": schema}, words, True, unenforced, is_loose=True
    )
    if "$keywords" not in load_families()[name].calls.write:  # those values are JSON
        assert words.follows(grammar, WEATHER[name])
        assert keyword in unenforced
    assert words.refuses(grammar, WEATHER[name].replace("2", '"x"'))


@both
@pytest.mark.parametrize("name", ["lfm2", "pythonic"])
def test_brackets_in_strings_do_not_end_free_arguments(name: str, words) -> None:
    grammar = loose(load_families()[name], words, names_only=True)
    for arguments in ('city="a) b", days=[1, (2)]', "city='it (\\' is', more={'a': \")]\"}", ""):
        assert words.follows(grammar, WEATHER[name].replace('city="Oslo", days=2', arguments)), (
            arguments
        )
