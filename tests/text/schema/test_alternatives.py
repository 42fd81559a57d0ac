"""Alternatives of schemas: their keywords, and which values their intersection allows."""

from __future__ import annotations

import math
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.text.schema.alternatives import (
    Alternative,
    constants,
    intersect,
    item_schema,
    join_options,
    merge,
    merge_options,
    of_any_type,
    own_alternatives,
    property_schema,
    with_option,
)

WORD, WHOLE, NONE = {"type": "string"}, {"type": "integer"}, {"type": "null"}


def only(schema: dict[str, Any]) -> Alternative:
    (alternative,) = own_alternatives(schema)
    return alternative


def holds(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def allows(alternative: Alternative, value: Any) -> bool:
    """Return whether ``alternative`` allows ``value``, by its documented meaning."""
    if not holds({"type": alternative["type"]}, value):
        return False
    if value not in alternative.get("in", [value]):
        return False
    match value:
        case str():
            return all(holds(part, value) for part in alternative["parts"])
        case list():
            return alternative["minItems"] <= len(value) <= alternative["maxItems"] and all(
                holds(item_schema(alternative, i), item) for i, item in enumerate(value)
            )
        case dict():
            return allows_object(alternative, value)
        case None | bool():
            return True
    limits = {
        keyword: limit
        for keyword, limit in alternative.items()
        if keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        and limit is not None
    }
    steps = [{"multipleOf": step} for step in alternative["multipleOf"] or ()]
    return holds(limits | {"allOf": [True, *steps]}, value)


def allows_object(alternative: Alternative, value: dict[str, Any]) -> bool:
    def schema_of(name: str) -> Any:
        if name in alternative["properties"]:
            return alternative["properties"][name]
        patterns = alternative["patternProperties"]
        like = [schema for pattern, schema in patterns.items() if re.search(pattern, name)]
        return {"allOf": like} if like else alternative["additionalProperties"]

    return (
        set(alternative["required"]) <= value.keys()
        and alternative["minProperties"] <= len(value) <= alternative["maxProperties"]
        and all(holds(schema_of(name), inner) for name, inner in value.items())
    )


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-4, 9)
    | st.sampled_from(["", "a", "ab", "b", 0.5, -1.5]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "x1", "y1"]), inner, max_size=3)
    ),
    max_leaves=5,
)
parts = st.sampled_from([True, False, WORD, WHOLE, NONE, {"type": "number"}, {"const": "a"}, {}])
names = st.sampled_from(["a", "b", "x1"])
counts = st.integers(0, 3)
keywords = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["array", "object", "string", "number", "integer", ["null", "object"]]),
        "minimum": st.integers(-3, 3),
        "maximum": st.integers(0, 8),
        "exclusiveMinimum": st.integers(-3, 3),
        "exclusiveMaximum": st.integers(0, 8),
        "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
        "minLength": counts,
        "maxLength": counts,
        "pattern": st.sampled_from(["^a", "b$"]),
        "prefixItems": st.lists(parts, max_size=2),
        "items": parts,
        "minItems": counts,
        "maxItems": counts,
        "properties": st.dictionaries(names, parts, max_size=2),
        "patternProperties": st.dictionaries(st.just("^x"), parts),
        "additionalProperties": parts,
        "required": st.lists(names, max_size=2, unique=True),
        "minProperties": counts,
        "maxProperties": counts,
    },
)  # fmt: skip


@given(keywords, values)
def test_own_alternatives_allow_what_the_schema_allows(schema, value):
    found = own_alternatives(schema)
    assert any(allows(one, value) for one in found) == holds(schema, value)


@given(keywords, keywords, values)
def test_merged_alternatives_allow_what_both_allow(first, second, value):
    pairs = [(a, b) for a in own_alternatives(first) for b in own_alternatives(second)]
    merged = [both for a, b in pairs if (both := merge(a, b)) is not None]
    assert any(allows(both, value) for both in merged) == (
        holds(first, value) and holds(second, value)
    )


MERGED: list[dict[str, Any]] = [
    {"type": "number", "minimum": 0, "exclusiveMaximum": 6},
    {"type": "integer", "exclusiveMinimum": 1, "maximum": 6},
    {"type": "number", "minimum": 2, "maximum": 5, "multipleOf": 2},
    {"type": "number", "exclusiveMinimum": 4, "exclusiveMaximum": 7, "multipleOf": 1.5},
    {"type": "array", "minItems": 1, "maxItems": 3, "prefixItems": [WHOLE]},
    {"type": "array", "minItems": 2, "maxItems": 4, "items": WHOLE},
    {"type": "object", "minProperties": 1, "maxProperties": 3, "required": ["a"]},
    {"type": "object", "minProperties": 2, "maxProperties": 4, "properties": {"a": WHOLE}},
    {"type": "object", "patternProperties": {"^x": WHOLE}, "additionalProperties": NONE},
    {"type": ["string", "null"], "minLength": 2, "pattern": "^a"},
    {"type": "string", "maxLength": 3},
]
TRIED: list[Any] = [
    *(*range(8), 0.5, 1.5, 4.5, None, "", "a", "ab", "bb", "abcd"),
    *([1] * length for length in range(6)),
    *(["a", *[1] * length] for length in range(3)),
    *(dict.fromkeys("abcde"[:length], 1) for length in range(6)),
    *({"x": 1}, {"x": None}, {"a": None}, {"a": "b", "c": None}, {"b": 1, "c": 1}),
]


@pytest.mark.parametrize("first", MERGED, ids=str)
@pytest.mark.parametrize("second", MERGED, ids=str)
def test_narrower_keyword_of_two_merged_alternatives_holds(first, second):
    merged = [merge(a, b) for a in own_alternatives(first) for b in own_alternatives(second)]
    allowed = [one for one in TRIED if any(both and allows(both, one) for both in merged)]
    assert allowed == [one for one in TRIED if holds(first, one) and holds(second, one)]


@given(st.lists(values, max_size=4), values)
def test_constants_allow_their_values_only(listed, value):
    found = constants(listed)
    assert any(allows(one, value) for one in found) == holds({"enum": listed}, value)


def test_integer_is_left_out_beside_number():
    assert [one["type"] for one in own_alternatives({"type": ["integer", "null", "number"]})] == [
        "null",
        "number",
    ]
    assert [one["type"] for one in own_alternatives({"type": ["integer", "null"]})] == [
        "integer",
        "null",
    ]


def test_alternative_has_all_keywords_of_its_type():
    assert only({"type": "array", "minItems": 2, "minLength": 1}) == {
        "type": "array",
        "prefixItems": [],
        "items": True,
        "minItems": 2,
        "maxItems": math.inf,
    }


def test_properties_satisfy_the_patterns_that_their_names_match():
    schema = {
        "type": "object",
        "properties": {"x1": WHOLE, "y": WORD},
        "patternProperties": {"^x": {"minimum": 3}, "1$": {"maximum": 5}},
        "additionalProperties": NONE,
    }
    found = only(schema)
    assert found["properties"]["y"] == WORD
    for alternative_name in ("x1", "x2", "z1"):
        assert holds(property_schema(found, alternative_name), 4)
    assert not holds(property_schema(found, "x1"), 2)
    assert not holds(property_schema(found, "x1"), 6)
    assert holds(property_schema(found, "x2"), 6)
    assert not holds(property_schema(found, "z1"), 6)
    assert property_schema(found, "z") == NONE


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (True, WORD, WORD),
        (WORD, {}, WORD),
        (False, WORD, False),
        ({}, False, False),
        (WORD, WORD, WORD),
        (WORD, WHOLE, {"allOf": [WORD, WHOLE]}),
    ],
)
def test_intersection_is_no_larger_than_needed(first, second, both):
    assert intersect(first, second) == both


def test_types_that_exclude_each_other_cannot_be_merged():
    assert merge(only(WORD), only(WHOLE)) is None
    both = merge(only({"type": "number", "minimum": 1.5}), only(WHOLE))
    assert both is not None
    assert (both["type"], both["minimum"]) == ("integer", 1.5)


def test_merged_properties_keep_the_order_of_the_first_schema():
    first = only({"type": "object", "properties": {"b": WORD, "a": WORD}, "required": ["c"]})
    second = only({"type": "object", "properties": {"c": WORD, "a": WORD}, "required": ["a", "c"]})
    both = merge(first, second)
    assert both is not None
    assert [*both["properties"]] == ["b", "a", "c"]
    assert both["required"] == ["c", "a"]


def test_any_value_joined_with_an_option_is_any_value():
    assert join_options([own_alternatives(WORD), None]) is None
    assert join_options([own_alternatives(WORD), [], own_alternatives(NONE)]) == [
        only(WORD),
        only(NONE),
    ]
    assert join_options([]) == []
    assert len(of_any_type(None)) == 6
    assert of_any_type([]) == []


def test_different_options_of_one_choice_contradict_each_other():
    first, second = with_option([only(WORD)], 1, 0)[0], with_option([only(WORD)], 1, 1)[0]
    other = with_option([only(WORD)], 2, 1)[0]
    assert merge_options(first, second) is None
    assert merge(first, second) is None
    assert merge_options(first, other) == {"options": {1: 0, 2: 1}}
    assert merge_options(only(WORD), only(WORD)) == {}
    nested = with_option([first], 2, 1)[0]
    assert nested["options"] == {1: 0, 2: 1}
    assert [one["options"] for one in with_option(None, 3, 0)] == [{3: 0}] * 6
