"""Text in which only calls are bound: every form, over vocabularies in which its marks are control tokens and not."""

import json
import random

import jsonschema
import pytest
from call_texts import CALLING, TOOLS, WEATHER, WORDS, grammar_of, with_thoughts

from cllm.text.chat import Channel
from cllm.text.form import Form, forms
from cllm.text.parser import Parser

THEN = "<|end|><|start|>assistant"
SAY = forms()["harmony"].header.final
BARE = [name for name in CALLING if forms()[name].calls.bare]
# Forms in which a mark alone does not begin a call yet.
BRACKETS = ["apertus", "command", "hermes", "granite3", "mistral", "nemotron2", "tool_calls", "gigachat31", "spoken"]


def main_mark(name: str) -> str:
    calls = forms()[name].calls
    return next(mark for mark in calls.open if (calls.begin + calls.write).startswith(mark))


both = pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)


def loose(form: Form, words, **options) -> str:
    return grammar_of(form, words=words, strict=False, is_loose=True, **options)


def read(form: Form, text: str, **options) -> dict[str, str]:
    """What the parser makes of a text: its calls, their arguments by their names."""
    calls: list[list[str]] = []
    parser = Parser(form, TOOLS, **options)
    for part in parser.feed(text) + parser.flush():
        if part.channel == Channel.CALL:
            calls += [[part.name, ""]] if part.name else []
            calls[-1][1] += part.text
    return calls


@both
@pytest.mark.parametrize("name", CALLING)
def test_text_is_free(name: str, words) -> None:
    form = with_thoughts(name)
    say = SAY if form.header else ""
    for thinks in (False, True):
        grammar = loose(form, words, thinks=thinks)
        for text in ("x", "a < b and { [ so on\n", "<tool_", "\n\nhello", 'to=functions.none {"name": "x"}', "🙂 é"):
            assert words.follows(grammar, say + text), text
    assert words.follows(loose(form, words), say)


@both
@pytest.mark.parametrize("name", BRACKETS)
def test_text_about_marks_is_text(name: str, words) -> None:
    """It only resembles a call."""
    form = forms()[name]
    mark = main_mark(name)
    grammar = loose(form, words)
    for text in (f"Calls begin with {mark}.", f"`{mark}` and `{mark}`", mark, f"{mark} is (not) a call"):
        assert words.follows(grammar, text), text
        assert read(form, text) == []


@both
@pytest.mark.parametrize("name", CALLING)
def test_calls_of_declared_functions_pass(name: str, words) -> None:
    """Alone, behind a text, and one behind another."""
    form, call = with_thoughts(name), WEATHER[name]
    grammar = loose(form, words)
    assert words.follows(grammar, call)
    if not form.calls.bare:
        assert words.follows(grammar, f"{SAY}I look.{THEN}{call}" if form.header else f"I look.\n{call}")
        assert words.follows(grammar, f"{call}{THEN if form.header else ' and '}{call}")


@both
@pytest.mark.parametrize("name", CALLING)
def test_calls_are_held_to_names_and_schemas(name: str, words) -> None:
    form, call = with_thoughts(name), WEATHER[name]
    grammar = loose(form, words)
    wrong = [call.replace("2", '"x"'), call.replace("city", "town")]
    if not form.calls.bare or name == "spoken":
        wrong.append(call.replace("get_weather", "get_news"))
    for text in wrong:
        assert words.refuses(grammar, text), text


@both
@pytest.mark.parametrize("name", BARE)
def test_what_begins_like_a_call_of_no_declared_function_is_text(name: str, words) -> None:
    """An answer in JSON, for instance."""
    form = forms()[name]
    for text in (
        '{"name": "Anna", "age": 30}',
        '[{"name": "x"}]',
        '{"name": "get_news", "parameters": 5}',
        "[get_news(1)]",
    ):
        assert words.follows(loose(form, words), text)
        assert read(form, text) == []


@both
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name":"get_time","arguments":{}}</tool_call>'),
        ("hermes", '<tool_call>\n\n{ "name": "get_time", "arguments": {} }\n</tool_call>'),
        ("llama3", '\n{"name":"get_time","parameters":{}}'),
        ("kimi", "<|tool_call_begin|>functions.get_time:12<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("harmony", " to=functions.get_time<|channel|>commentary json<|message|>{}"),
    ],
)
def test_other_white_space_and_headers_begin_a_call_too(name: str, text: str, words) -> None:
    grammar = loose(forms()[name], words)
    assert words.follows(grammar, text)
    assert read(forms()[name], text) == [["get_time", "{}"]]
    if not forms()[name].calls.bare:
        assert words.refuses(grammar, text.replace("get_time", "get_news"))


@both
@pytest.mark.parametrize("name", sorted(set(CALLING) - {"harmony"}))
def test_reasoning_is_free_and_what_follows_it_is_bound(name: str, words) -> None:
    form, call = with_thoughts(name), WEATHER[name]
    begin, end = form.reasoning.open, form.reasoning.close
    wrong = call.replace("2", '"x"')
    thinks, inside = loose(form, words, thinks=True), loose(form, words, inside=True)
    for thought in ("hm", f"I could write {wrong}", ""):
        assert words.follows(thinks, begin + thought)  # cut off by the end of the text
        assert words.follows(inside, thought)
        for text in (call, "hello", ""):
            assert words.follows(thinks, f"{begin}{thought}{end}\n{text}")
            assert words.follows(inside, f"{thought}{end}\n{text}")
        if not form.calls.bare:
            assert words.refuses(thinks, f"{begin}{thought}{end}\n{wrong}")
            assert words.refuses(inside, f"{thought}{end}\n{wrong}")


def test_a_message_with_headers_may_have_several() -> None:
    words, form, call = WORDS["few"], forms()["harmony"], WEATHER["harmony"]
    thought = "<|channel|>analysis<|message|>I write to=functions.get_news now.<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    grammar = loose(form, words, thinks=True)
    for text in (thought + call, thought + said + call, said + SAY + "hello", call + "<|call|>"[:0], thought):
        assert words.follows(grammar, text.removesuffix("<|start|>assistant")), text
    assert words.refuses(grammar, thought + call.replace("get_weather", "get_weather2"))
    assert words.refuses(grammar, thought + call.replace("get_weather", "get_"))
    begun = loose(form, words, begun=True)
    assert words.follows(begun, f" goes on<|end|><|start|>assistant{call}")
    assert words.refuses(begun, f" goes on<|end|><|start|>assistant{call.replace('city', 'town')}")


@both
@pytest.mark.parametrize("name", CALLING)
def test_wrong_calls_become_calls_of_declared_functions(name: str, words) -> None:
    """Where a token of a wrong call is refused, a random one that is allowed takes its place."""
    form, call, rng = with_thoughts(name), WEATHER[name], random.Random(name)
    grammar = loose(form, words, thinks=bool(form.reasoning))
    for wrong in (("get_weather", "get_news"), ("get_weather", "x"), ("2", '"x"'), ("city", "town")):
        said = "" if form.calls.bare else f"{SAY}I look.{THEN}" if form.header else "I look.\n"
        matcher, tokens = words.matcher(grammar), []
        for token in words.encode(said + call.replace(*wrong)):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [i for i in range(words.eos_token_id) if mask >> i & 1]
            tokens.append(token if token in allowed else rng.choice(allowed))
            assert matcher.consume_token(tokens[-1])
        calls = read(form, words.decode(tokens))
        assert calls or form.calls.bare or form.header
        for called, arguments in calls:
            assert called in TOOLS
            if matcher.is_accepting():
                jsonschema.validate(json.loads(arguments), {"additionalProperties": False} | TOOLS[called])
