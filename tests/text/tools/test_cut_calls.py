"""Answers that max_tokens cuts inside a mark or a call's head: no part of it is shown as text."""

from __future__ import annotations

import json

import pytest
from call_texts import CALLING, FAMILIES, THINK, TOOLS, WEATHER, with_thoughts

from cllm.core.output import FinishReason, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.vocabulary import Pieces
from cllm.text.choice import Choice
from cllm.text.tools.argument_readers import parse_partial_object
from cllm.text.tools.model_family import ModelFamily, load_families
from cllm.text.tools.parser import Channel, Parser

BYTES = Pieces.of([bytes([i]) for i in range(256)])


def read(
    family: ModelFamily, text: bytes, finish=FinishReason.LENGTH, tools=TOOLS, size=1, **options
):
    """Return the text, the reasoning and the calls' arguments of an answer with a token a byte."""
    pieces = BYTES if size == 1 else Pieces.of([text])
    tokens = list(text) if size == 1 else [0]
    choice = Choice(0, pieces, SamplingParams(), Parser(family, tools, **options))
    found: dict[str, str] = dict.fromkeys(Channel, "")
    for i, token in enumerate(tokens):
        end = str(finish) if i == len(tokens) - 1 else ""
        for part in choice.parts(TokenOutput("r", 0, token, end)):
            found[part.channel] += part.text
    return found[Channel.TEXT], found[Channel.REASONING], found[Channel.CALL]


@pytest.mark.parametrize("size", [1, 0], ids=["streamed", "whole"])
@pytest.mark.parametrize("name", CALLING)
def test_cut_call_is_never_shown_as_text(name, size):
    """At each byte, also in the middle of a character."""
    family, call = load_families()[name], WEATHER[name].encode()
    for length in range(1, len(call) + 1):
        text, reasoning, arguments = read(family, call[:length], size=size)
        assert (text, reasoning) == ("", ""), call[:length]
        value = parse_partial_object(arguments)
        assert "Oslo".startswith(value.get("city", "")), (call[:length], arguments)
        assert value.get("days") in (None, "", 2), (call[:length], arguments)


@pytest.mark.parametrize("name", CALLING)
def test_second_call_that_is_cut_is_never_shown_as_text(name):
    family, how = load_families()[name], load_families()[name].calls
    inner = WEATHER[name].removeprefix(how.begin).removesuffix(how.end or "\0")
    if family.header:
        inner = "<|call|><|start|>assistant" + WEATHER[name]
    first = WEATHER[name].removesuffix(how.end or "\0")
    both = (first + how.between + inner + how.end).encode()
    for length in range(len(first.encode()), len(both) + 1):
        text, _, arguments = read(family, both[:length])
        assert text == "", both[:length]
        assert arguments.replace(" ", "").startswith('{"city":"Oslo","days":2}')


@pytest.mark.parametrize("name", CALLING)
def test_cut_marks_of_reasoning_are_never_shown(name):
    family = with_thoughts(name)
    if family.header:
        thought = "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant"
    else:
        thought = f"{family.reasoning.open}\na < b\n{family.reasoning.close}\n\n"
    whole = (thought + WEATHER[name]).encode()
    for length in range(1, len(whole) + 1):
        text, reasoning, _ = read(family, whole[:length])
        assert text == "", whole[:length]
        assert "a < b".startswith(reasoning.rstrip()), whole[:length]


@pytest.mark.parametrize("name", CALLING)
def test_text_before_a_cut_call_stays(name):
    family = load_families()[name]
    if family.header or family.calls.bare:
        return
    whole = ("Well: " + WEATHER[name]).encode()
    for length in range(6, len(whole)):
        assert read(family, whole[:length])[0].rstrip() == "Well:", whole[:length]


@pytest.mark.parametrize("name", CALLING)
def test_beginning_of_a_mark_is_text_if_the_answer_ends_there(name):
    family = load_families()[name]
    for mark in (*family.calls.open, THINK.open):
        for length in range(1, len(mark)):
            said = "a " + mark[:length]
            if not family.header:
                assert read(family, said.encode(), FinishReason.STOP)[0] == said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Write <tool_call> around the object, as I explained"),
        ("hermes", 'It is <tool_call>{"name": "get_news", "argu'),
        ("llama3", '{"name": "Alice", "age": 30, "ci'),
        ("llama3", '{"names": ["Alice"'),
        ("prompted", "Here it is:\n```json\n[1, 2, 3"),
        ("prompted", '```json\n{"city": "Oslo", "da'),
        ("pythonic", "[Paris is the capital of Fra"),
        ("glm", "The tag <tool_call> is followed by a na"),
        ("qwen3_coder", "The tag <tool_call>\nis followed by it"),
        ("hermes", "if a < b and c"),
        ("hermes", "caf\u00e9"),
        ("harmony", "Hello"),
    ],
)
def test_cut_text_that_cannot_become_a_call_stays_text(name, text):
    assert read(load_families()[name], text.encode())[0] == text


def test_incomplete_character_is_replaced_unless_it_is_in_a_mark():
    family = load_families()["hermes"]
    assert read(family, "caf\u00e9".encode()[:-1])[0] == "caf\ufffd"
    deepseek = load_families()["deepseek_v31"]
    assert read(deepseek, b"a<" + "\uff5c".encode()[:2])[0] == "a"


def test_closing_mark_of_a_forced_call_is_not_shown():
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call'
    text, _, arguments = read(load_families()["hermes"], call.encode())
    assert (text, json.loads(arguments)) == ("", {})


@pytest.mark.parametrize("name", ["seed", "think"])
def test_cut_text_without_tools_keeps_its_last_character(name):
    assert read(load_families()[name], b"if a <", tools={})[0] == "if a <"


@pytest.mark.parametrize("size", [1, 0], ids=["streamed", "whole"])
@pytest.mark.parametrize("tools", [TOOLS, {}], ids=["tools", "none"])
@pytest.mark.parametrize("name", FAMILIES)
def test_cut_text_keeps_what_a_control_token_cannot_complete(name, tools, size):
    family = with_thoughts(name)
    begin = "<|channel|>final<|message|>" if family.header else ""
    for mark in family.marks:
        for length in range(1, len(mark)):
            text = f"{begin}if a {mark[:length]}".encode()
            said = read(
                family, text, tools=tools, size=size, control=dict.fromkeys(family.marks, 0)
            )[0]
            assert said == f"if a {mark[:length]}", mark


def test_cut_mark_of_a_control_token_and_letters_is_not_shown():
    family = load_families()["gemma4"]
    for begun, shown in [
        (b"if a <", "if a <"),
        (b"if a <|chan", "if a <|chan"),
        (b"if a <|channel>", "if a"),
        (b"if a <|channel>tho", "if a"),
    ]:
        said = read(family, begun, control={"<|channel>": 1, "<|tool_call>": 2, "<channel|>": 3})[0]
        assert said.rstrip() == shown


@pytest.mark.parametrize("name", [name for name in CALLING if name != "harmony"])
def test_only_call_that_ends_with_the_last_token_is_not_cut(name):
    call = WEATHER[name].encode()
    for text, finish in ((call, "tool_calls"), (call[: call.index(b"Oslo") + 1], "length")):
        parser = Parser(load_families()[name], TOOLS, max_calls=1)
        choice = Choice(0, Pieces.of([text]), SamplingParams(), parser)
        choice.parts(TokenOutput("r", 0, 0, str(FinishReason.LENGTH)))
        assert choice.finish == finish
