"""Options of oneOf: which exclude each other, together with all keywords beside and around them."""

from __future__ import annotations

from typing import Any

import pytest
from schema_texts import allows, check, check_best_effort

from cllm.errors import BadRequest

X = {"properties": {"k": {"const": "x"}}, "required": ["k"]}
Y = {"properties": {"k": {"const": "y"}, "n": {"type": "null"}}, "required": ["k"]}
OPEN_X, OPEN_Y = {"properties": X["properties"]}, {"properties": Y["properties"]}
REQUIRED = {"required": ["k"]}
A, B = {"required": ["a"]}, {"required": ["b"]}
AB = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}}
NEVER_EMPTY = {"type": "array", "minItems": 1}

# a schema, texts that it allows, and texts that it does not
ENFORCED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "the type beside": ({"type": "object", "oneOf": [X, Y]}, ['{"k": "x"}', '{"k": "y", "n": null}'], ['{"k": "z"}']),
    "the type after": ({"oneOf": [X, Y], "type": "object"}, ['{"k": "x"}'], ["3"]),
    "required beside": ({"type": "object", **REQUIRED, "oneOf": [OPEN_X, OPEN_Y]}, ['{"k": "x"}'], ["{}"]),
    "required in another part": (
        {"type": "object", "allOf": [{"oneOf": [OPEN_X, OPEN_Y]}, REQUIRED]}, ['{"k": "y"}'], ["{}"],
    ),
    "behind a reference": (
        {"$ref": "#/$defs/u", **REQUIRED, "$defs": {"u": {"type": "object", "oneOf": [OPEN_X, OPEN_Y]}}},
        ['{"k": "x"}'], ["{}"],
    ),
    "references as options": (
        {"type": "object", "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": X, "y": Y}},
        ['{"k": "x"}', '{"k": "y"}'], ['{"k": "x", "n": null}'],
    ),
    "choices in choices": (
        {"type": "object", "oneOf": [{"oneOf": [X, Y]}, {"properties": {"k": {"const": "z"}}, **REQUIRED}]},
        ['{"k": "x"}', '{"k": "z"}'], ['{"k": "w"}'],
    ),
    "the same choice twice": (
        {"allOf": [{"$ref": "#/$defs/u"}, {"$ref": "#/$defs/u"}], "$defs": {"u": {"type": "object", "oneOf": [X, Y]}}},
        ['{"k": "x"}', '{"k": "y"}'], ["{}"],
    ),
    "a constant deep inside": (
        {"type": "object", "required": ["v"], "oneOf": [
            {"properties": {"v": {"type": "object", **X}}}, {"properties": {"v": {"type": "object", **Y}}}]},
        ['{"v": {"k": "x"}}', '{"v": {"k": "y"}}'], ["{}"],
    ),
    "a name that the other forbids": (
        {"type": "object", "oneOf": [{**AB, **A}, {"properties": {"a": False, "b": True}}]},
        ['{"a": 1}', '{"b": 3}'], ['{"a": 2}'],
    ),
    "an item": (
        {"oneOf": [NEVER_EMPTY | {"items": {"type": "string"}}, NEVER_EMPTY | {"items": {"type": "null"}}]},
        ["[null]", '["a"]'], ['["a", null]', "[]"],
    ),
    "the place in a tuple": (
        {"type": "array", "minItems": 2, "oneOf": [
            {"prefixItems": [True, {"const": 1}]}, {"prefixItems": [True, {"const": 2}]}]},
        ["[5, 1]", "[5, 2]"], ["[5, 3]", "[1]"],
    ),
    "lengths of lists": (
        {"type": "array", "items": {"const": 1}, "oneOf": [{"maxItems": 1}, {"minItems": 3}]},
        ["[]", "[1, 1, 1]"], ["[1, 1]"],
    ),
    "numbers of properties": (
        {"type": "object", "additionalProperties": {"const": 1}, "oneOf": [{"maxProperties": 0}, {"minProperties": 1}]},
        ["{}", '{"a": 1}'], ['{"a": 2}'],
    ),
    "ranges": ({"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 4}]}, ["3", "4"], ["3.5"]),
    "constants and ranges": ({"oneOf": [{"const": -1}, {"type": "integer", "minimum": 0}]}, ["-1", "7"], ["-2"]),
    "patterns": ({"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, ['"ax"', '"b"'], ['"c"']),
    "a constant and a pattern": (
        {"type": "string", "oneOf": [{"const": "auto"}, {"pattern": "^[0-9]+$"}]}, ['"auto"', '"12"'], ['"x"'],
    ),
    "lengths": ({"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 2}]}, ['"a"', '"ab"'], []),
    "exactly one of two names": (AB | {"oneOf": [A, B]}, ['{"a": 1}', '{"b": 2}'], ["{}", '{"a": 1, "b": 2}']),
    "exactly one of three names": (
        {"type": "object", "properties": {n: {"const": 1} for n in "abc"}, "oneOf": [A, B, {"required": ["c"]}]},
        ['{"a": 1}', '{"c": 1}'], ['{"a": 1, "c": 1}', "{}"],
    ),
    "names that the options describe": (
        {"type": "object", "oneOf": [{"properties": {"a": {"const": 1}}, **A}, {"properties": {"b": True}, **B}]},
        ['{"a": 1}', '{"b": 2}'], ['{"a": 1, "b": 2}'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENFORCED)
def test_options_are_compared_with_all_that_applies_to_the_value(name):
    schema, valid, invalid = ENFORCED[name]
    assert check(schema, 30), "random texts are valid"
    assert [text for text in valid if not allows(schema, text)] == []
    assert [text for text in invalid if allows(schema, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 5}]},
        {"oneOf": [True, {"type": "number", "multipleOf": 3}]},
        {"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
        AB | {"oneOf": [A, {"required": ["a", "b"]}]},
        {"type": "array", "oneOf": [{"items": {"const": 1}}, {"items": {"const": 2}}]},
        {"type": "object", "oneOf": [OPEN_X, OPEN_Y]},
    ],
)
def test_options_that_overlap_are_rejected_or_named(schema):
    with pytest.raises(BadRequest, match="'oneOf' cannot be enforced"):
        check(schema)
    assert check_best_effort(schema)[1] == {"oneOf"}


def test_recursive_options_are_compared_to_a_limited_depth():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
    schema = {"$ref": "#/$defs/n", "$defs": {"n": {"oneOf": [node, {"type": "null"}, {**node}]}}}
    with pytest.raises(BadRequest, match="'oneOf' cannot be enforced"):
        check(schema)
