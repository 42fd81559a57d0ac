"""Rules written for reduced schemas: which texts they allow, what they share, and why none exist."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import jsonschema
import pytest
from schema_texts import BYTES

from cllm.errors import BadRequest
from cllm.sampling.grammar import Grammar
from cllm.text.schema.lark import Rules, search_matcher
from cllm.text.schema.rules import (
    CHUNK,
    MAX_ALTERNATIVES,
    as_integer,
    json_rule,
    repeat,
    separated_items,
)

WHOLE = {"type": "integer"}


class Written:
    """The rules of one schema, and the texts that they allow."""

    def __init__(self, schema: Any, unenforced: set[str] | None = None, **options: bool) -> None:
        rules = Rules(**options)
        start = json_rule(schema, rules, "schema", unenforced)
        self.text = f"start: {start}\n{rules}"
        self.grammar = Grammar(self.text, BYTES)
        assert not self.grammar.error

    def allows(self, text: str) -> bool:
        matcher, tokens = self.grammar.matcher()._at(), list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def refusal(schema: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        json_rule(schema, Rules(), "schema")
    assert caught.value.param == "schema"
    return str(caught.value)


@pytest.mark.parametrize("prefix", [[], [{"const": 0}], [{"const": 0}, {"const": 1}]])
@pytest.mark.parametrize("items", [True, False])
@pytest.mark.parametrize("low", range(4))
def test_arrays_have_the_lengths_that_the_schema_allows(prefix, items, low):
    for high in (low, low + 1, math.inf):
        schema = {"type": "array", "items": items, "minItems": low}
        schema |= {"prefixItems": prefix} if prefix else {}
        schema |= {"maxItems": high} if high < math.inf else {}
        valid = [
            length
            for length in range(6)
            if jsonschema.Draft202012Validator(schema).is_valid([*range(length)])
        ]
        if not valid:
            assert "items" in refusal(schema)
            continue
        written = Written(schema)
        assert [n for n in range(6) if written.allows(json.dumps([*range(n)]))] == valid


PROPERTIES = {"a": {"const": 1}, "b": {"const": 1}, "c": {"const": 1}}


@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"], ["a", "b", "c"]])
@pytest.mark.parametrize("others", [False, {"const": 1}])
@pytest.mark.parametrize("low", range(4))
def test_objects_have_the_properties_that_the_schema_allows(required, others, low):
    """All sets of properties are tried. Counts that cannot be enforced are refused."""
    subsets = [names for n in range(5) for names in itertools.combinations([*PROPERTIES, "z"], n)]
    for high in (low, low + 1, math.inf):
        schema = {"type": "object", "properties": PROPERTIES, "required": required}
        schema |= {"additionalProperties": others, "minProperties": low}
        schema |= {"maxProperties": high} if high < math.inf else {}
        validator = jsonschema.Draft202012Validator(schema)
        valid = [names for names in subsets if validator.is_valid(dict.fromkeys(names, 1))]
        try:
            written = Written(schema)
        except BadRequest as error:
            assert "Properties' cannot be enforced" in str(error) or not valid, schema
            continue
        allowed = [
            names for names in subsets if written.allows(json.dumps(dict.fromkeys(names, 1)))
        ]
        assert allowed == valid, schema


def test_members_keep_the_order_of_the_schema():
    schema = {"type": "object", "properties": PROPERTIES, "required": ["b"]}
    written = Written(schema)
    for names in itertools.permutations(PROPERTIES):
        text = json.dumps(dict.fromkeys(names, 1))
        assert written.allows(text) == (names == ("a", "b", "c")), text


def test_name_satisfies_all_patterns_that_it_matches():
    """A name that matches two patterns may be left out, but must not have a wrong value."""
    patterns = {"^x": {"const": 1}, "y$": WHOLE}
    written = Written(
        {"type": "object", "patternProperties": patterns, "additionalProperties": {"const": "z"}}
    )
    assert written.allows('{"x":1,"ay":7,"z":"z"}')
    for text in ('{"x":2}', '{"ay":"z"}', '{"xy":2}', '{"xy":"z"}', '{"z":1}'):
        assert not written.allows(text), text


def test_pattern_of_names_is_compiled_once_for_each_schema():
    """A pattern takes milliseconds, and the time must not show which patterns others use."""
    names = {f"n{i}": True for i in range(300)}
    Written({"type": "object", "patternProperties": {"^x": True, "5$": WHOLE}, "properties": names})
    assert search_matcher.cache_info().misses == 2
    Written({"type": "object", "patternProperties": {"^x": True}, "properties": names})
    assert search_matcher.cache_info().misses == 1


def test_name_cannot_be_written_with_escapes():
    """It would be a second property of the same name, or one that a pattern excludes."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": True}
    written = Written(schema)
    assert written.allows('{"a":1,"b":2}')
    assert not written.allows(r'{"a":1,"\u0061":2}')
    assert not written.allows('{"a":1,"a":1}')


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "'a' can have no value"),
        ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "more properties than"),
        ({"type": "object", "additionalProperties": False, "minProperties": 1}, "more properties"),
        ({"type": "array", "prefixItems": [True], "items": False, "minItems": 2}, "at most 1 items"),
        ({"type": "array", "prefixItems": [True, False], "minItems": 2}, "at most 1 items"),
        ({"type": "number", "minimum": 2, "exclusiveMaximum": 2}, "'minimum' is above"),
        ({"allOf": [{"type": "string"}, {"const": 1}]}, "exclude each other"),
        ({"enum": [1.5], "type": "integer"}, "exclude each other"),
        ({"items": {"$ref": "#"}, "minItems": 1, "type": "array"}, "no finite value"),
        (False, "are 'false'"),
        ({"anyOf": []}, "must not be empty"),
    ],
)  # fmt: skip
def test_reason_is_given_if_no_value_is_allowed(schema, why):
    assert why in refusal(schema)


def test_optional_part_without_a_value_is_left_out():
    nothing = {"type": "string", "const": 1}
    written = Written({"type": "object", "properties": {"a": nothing, "b": {"const": 1}}})
    assert written.allows('{"b":1}')
    assert not written.allows('{"a":1}')
    assert Written({"type": "array", "items": nothing}).allows("[]")
    assert Written({"anyOf": [nothing, {"type": "null"}]}).allows("null")


def test_equal_schemas_are_written_once():
    inner = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 5}}}
    one = Written({"type": "array", "prefixItems": [inner]}).text
    three = Written({"type": "array", "prefixItems": [inner] * 3}).text
    assert one.count("\n") == three.count("\n")


def test_recursive_schema_is_written_once():
    node = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}, "n": {"const": 1}},
    }
    written = Written(node)
    assert written.text.count('"\\"n\\""') == 1
    assert written.allows('{"left":{"right":{"n":1},"n":1}}')
    assert not written.allows('{"left":{"n":2}}')


@pytest.mark.parametrize(
    ("schema", "keyword", "text"),
    [
        ({"type": "number", "multipleOf": 4001}, "multipleOf", "1"),
        ({"allOf": [{"multipleOf": 70}, {"multipleOf": 71}], "type": "integer"}, "multipleOf", "1"),
        ({"type": "object", "minProperties": 2, "additionalProperties": True, "properties": {"a": True}},
         "minProperties", "{}"),
        ({"type": "object", "maxProperties": 2, "properties": PROPERTIES}, "maxProperties", '{"a":1,"b":1,"c":1}'),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]}, "oneOf", "1"),
    ],
)  # fmt: skip
def test_keyword_that_cannot_be_enforced_is_left_out_or_refused(schema, keyword, text):
    assert f"'{keyword}' cannot be enforced" in refusal(schema)
    unenforced: set[str] = set()
    assert Written(schema, unenforced).allows(text)
    assert unenforced == {keyword}


def test_only_careful_rules_leave_out_a_leaf_that_does_not_compile():
    schema = {"type": "string", "pattern": "(a", "maxLength": 2}
    unenforced: set[str] = set()
    with pytest.raises(AssertionError):
        Written(schema, unenforced)
    assert unenforced == set()
    written = Written(schema, unenforced, careful=True)
    assert unenforced == {"pattern"}
    assert written.allows('"zz"')
    assert not written.allows('"zzz"')


def test_compositions_that_multiply_too_far_are_refused():
    many = {"anyOf": [{"type": "object", "properties": {f"a{i}": True}} for i in range(40)]}
    assert str(MAX_ALTERNATIVES) in refusal({"allOf": [many, many, many]})


def test_long_strings_have_exact_lengths():
    """Their characters are counted in chunks."""
    low, high = CHUNK - 1, 2 * CHUNK + 1
    written = Written({"type": "string", "minLength": low, "maxLength": high})
    lengths = [low - 1, low, CHUNK, CHUNK + 1, 2 * CHUNK, high, high + 1]
    allowed = [n for n in lengths if written.allows(json.dumps("x" * n))]
    assert allowed == lengths[1:-1]


@pytest.mark.parametrize(
    ("low", "high", "first", "following"),
    [
        (0, 0, "", ""),
        (0, math.inf, "(x (/, ?/ x)*)?", "(/, ?/ x)*"),
        (1, 1, "x ", "(/, ?/ x){1,1}"),
        (2, 3, "x (/, ?/ x){1,2}", "(/, ?/ x){2,3}"),
        (2, math.inf, "x (/, ?/ x){1,}", "(/, ?/ x){2,}"),
    ],
)
def test_items_are_separated_by_commas(low, high, first, following):
    assert separated_items("x", low, high, is_first=True) == first
    assert separated_items("x", low, high, is_first=False) == following
    assert separated_items(None, 0, high, is_first=True) == ""


def test_repetition_below_zero_is_none():
    assert repeat("x", -1, 0) == ""
    assert repeat("x", -1, 2) == "(x){0,2}"


@pytest.mark.parametrize(("step", "whole"), [(0.25, 25), (3, 3), (1.5, 15), (0.1, 1), (1e-3, 1)])
def test_step_without_its_decimal_point(step, whole):
    assert as_integer(step) == whole
