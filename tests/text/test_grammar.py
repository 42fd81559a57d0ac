"""Constraints in the terms of client APIs, to grammars."""

from __future__ import annotations

import re
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.params import MAX_LEXER_STATES
from cllm.errors import BadRequest
from cllm.sampling.grammar import Grammar
from cllm.text.grammar import MAX_TEXT, Checker, Constraint, Special, bytes_tokenizer
from cllm.text.tools.call_grammar import BoundMessage, CallableTool
from cllm.text.tools.model_family import load_families

BYTES = bytes_tokenizer({}, 257)
CHECKER = Checker(Special(300, {257: "<|im_start|>", 280: "</think>"}), MAX_LEXER_STATES)


def accepts(grammar: str, text: str) -> bool:
    matcher = Grammar(grammar, BYTES).matcher()
    for byte in text.encode():
        mask = matcher.compute_mask() if not matcher.is_stopped else None
        if mask is None or not mask[byte // 8] >> byte % 8 & 1:
            return False
        matcher.consume(byte)
    mask = matcher.compute_mask()
    return matcher.is_stopped or (mask is not None and bool(mask[32] & 1))


def lark(kind: str, value=None) -> str:
    return CHECKER.check(Constraint(kind, value), "field").grammar


@given(
    st.lists(st.text(min_size=1, max_size=8).filter(str.strip), min_size=1, max_size=5),
    st.text(max_size=8),
)
def test_choice_grammar_allows_only_the_choices(choices, other):
    grammar = lark("choice", choices)
    assert all(accepts(grammar, choice) for choice in choices)
    assert accepts(grammar, other) == (other in choices)


@pytest.mark.parametrize(
    "pattern",
    [
        "a+b?",
        "/[/]",
        r"\/x",
        r"\d{2,3}",
        "a\nb",
        r"\.\\",
        "^a|b$",
        "(?i)ab",
        "[^a]",
        "é|😀",
        r"\$\{x\}",
        ".*",
    ],
)
def test_regex_matches_whole_texts(pattern):
    """Digits are ASCII."""
    grammar = lark("regex", pattern)
    texts = [
        "",
        "a",
        "b",
        "ab",
        "aab",
        "AB",
        "/",
        "//",
        "/[",
        "x",
        "/x",
        "12",
        "123",
        "1234",
        "a\nb",
        ".\\",
        "é",
        "😀",
        "${x}",
    ]
    for text in [*texts, "/a/", "٣٣"]:
        assert accepts(grammar, text) == bool(re.fullmatch(pattern, text, re.ASCII)), text


def test_lark_grammar_is_accepted():
    assert accepts(lark("grammar", 'start: "a" /[0-9]+/'), "a17")
    gbnf = 'root ::= item ("," item)*\nitem ::= [a-c]+ # letters'
    assert accepts(lark("grammar", gbnf), "ab,c")
    assert not accepts(lark("grammar", gbnf), "ab,d")


def test_json_object_grammar_allows_only_objects():
    grammar = lark("json_object")
    assert accepts(grammar, '{"a": [1, {"b": null}]}')
    assert not accepts(grammar, "[1]")
    assert not accepts(grammar, '{"a":  1}')


@pytest.mark.parametrize(
    ("kind", "value", "sign"),
    [
        ("regex", "(?=a)", "look-around"),
        ("regex", "(a", "unclosed"),
        ("regex", "", "empty"),
        ("regex", "a" * (MAX_TEXT + 1), "longer"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "((a{1,500}){1,500}){1,500}", "multiply to more than 10000"),
        ("grammar", "start: /(a{1,500}){1,500}/{2}", "multiply to more than 10000"),
        ("grammar", 'root ::= (("a"{1,500}){1,500}){1,500}', "multiply to more than 10000"),
        ("json_schema", {"pattern": "((a{1,500}){1,500}){1,500}"}, "multiply to more than 10000"),
        ("regex", "a{0}", "nothing but an empty text"),
        ("grammar", "root ::= ", "nothing but an empty text"),
        ("grammar", 'start: "" ""', "nothing but an empty text"),
        ("choice", [], "1 to"),
        ("choice", [""], "empty"),
        ("choice", ["a"] * 5000, "1 to"),
        ("choice", "ab", "list"),
        ("grammar", "", "empty"),
        ("grammar", "root ::= x", "'x' not found"),
        ("grammar", 'x ::= "a"', "root"),
        ("grammar", "start: x", "unknown name"),
        ("grammar", '{"grammars": []}', ""),
        ("grammar", "start: a\na: a", "no text"),
        ("grammar", 'start: "a" <|im_start|>', "special tokens"),
        ("grammar", 'start: "a" <[65]>', "special tokens"),
        ("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "recursion"),
        ("grammar", "start: " + "(" * 9000 + '"a"' + ")" * 9000, "nested"),
    ],
)
def test_invalid_constraint_is_rejected(kind, value, sign):
    with pytest.raises(BadRequest) as caught:
        lark(kind, value)
    assert sign in str(caught.value)
    assert caught.value.param == "field"
    assert len(str(caught.value)) < 400


def test_nested_repetitions_are_rejected_before_compiling():
    begun = time.process_time()
    with pytest.raises(BadRequest):
        lark("regex", "((a{1,500}){1,500}){1,500}")
    assert time.process_time() - begun < 0.1


def test_messages_may_name_special_tokens_of_the_vocabulary():
    def message(token: int) -> dict:
        control = {"<tool_call>": token}
        return msgspec.to_builtins(
            BoundMessage(load_families()["hermes"], {"f": CallableTool({})}, control, calls=True)
        )

    assert "<[280]>" in lark("message", message(280))
    with pytest.raises(BadRequest):
        lark("message", message(300))


def test_regex_matching_takes_linear_time():
    """The patterns make backtracking engines hang."""
    matcher = Grammar(lark("regex", "^(a+)+$"), BYTES).matcher()
    for _ in range(5000):
        matcher.consume(ord("a"))
    assert matcher.compute_mask() is not None


def test_grammar_with_a_large_middle_state_is_rejected():
    properties = {f"p{i}": {"type": "integer"} for i in range(1000)}
    with pytest.raises(BadRequest) as caught:
        lark("json_schema", {"type": "object", "properties": properties})
    assert "items" in str(caught.value)


def test_multiples_too_large_for_the_lexer_are_left_out() -> None:
    """They would fail in the middle of a text."""
    schema = {"type": "integer", "multipleOf": 50_000, "minimum": 1}
    assert CHECKER.check(Constraint("json_schema", schema, strict=False), "p").unenforced == (
        "multipleOf",
    )
    assert (
        CHECKER.check(Constraint("json_schema", schema | {"multipleOf": 400}), "p").unenforced == ()
    )
    for faulty in (schema, {"allOf": [{"type": "number", "multipleOf": 0.97}, {"multipleOf": 89}]}):
        with pytest.raises(BadRequest, match="above 4000"):
            CHECKER.check(Constraint("json_schema", faulty), "p")


def test_too_complex_schema_keeps_only_its_type_unless_strict() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
    checked = CHECKER.check(Constraint("json_schema", schema, strict=False), "p")
    assert checked.unenforced == ("schema",)
    assert accepts(checked.grammar, '{"other": 1}')
    assert not accepts(checked.grammar, "1")
    with pytest.raises(BadRequest):
        CHECKER.check(Constraint("json_schema", schema), "p")
