"""JSON Schemas: which keywords are rejected; for all others, random texts of the grammar are valid."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from conftest import repeat
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_texts import BYTES, CHECKER, allows, check, check_best_effort, write

from cllm import LLM, SamplingParams
from cllm.errors import BadRequest
from cllm.sampling.grammar import Grammar
from cllm.text.grammar import Constraint, to_lark
from cllm.text.schema.faults import find_fault
from cllm.text.schema.json_schema import KEYWORDS, MAX_DEPTH, MAX_REPEAT, enforceable

names = st.sampled_from(["a", "b", "name", "a b", 'q"', "é", "$ref", "0"])
dependents = st.dictionaries(
    names, st.lists(names, max_size=2, unique=True), min_size=1, max_size=2
)
extras = st.fixed_dictionaries(
    {},
    optional={
        "dependentRequired": dependents,
        "propertyNames": st.sampled_from([{"maxLength": 3}, {"enum": ["a", "b"]}]),
    },
)
rests = st.sampled_from(
    [
        {},
        {"additionalProperties": False},
        {"additionalProperties": {"type": "integer"}},
        {"unevaluatedProperties": False},
    ]
)
numbers = st.integers(-1000, 1000) | st.floats(-50, 50).map(lambda number: round(number, 3))
constants = st.none() | st.booleans() | numbers | st.text(max_size=5)


def objects(schemas):
    return st.builds(
        lambda properties, required, additional: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in required],
            **additional,
        },
        st.dictionaries(names, schemas, max_size=4),
        st.sets(names),
        st.builds(dict.__or__, rests, extras),
    )


def arrays(schemas):
    return st.builds(
        lambda items, prefix, low, more: {
            "type": "array",
            "items": items,
            **({"prefixItems": prefix} if prefix else {}),
            "minItems": low,
            "maxItems": low + more,
        },
        schemas,
        st.lists(schemas, max_size=2),
        st.integers(0, 2),
        st.integers(0, 2),
    )


leaves = st.one_of(
    st.sampled_from(
        [True, {}, {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]
    ),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        *[st.integers(-99, 99)] * 2,
    ),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low}, numbers),
    st.sampled_from([3, 7, 0.5, 0.125]).map(
        lambda step: {"type": "number", "multipleOf": step, "minimum": -9}
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        *[st.integers(0, 5)] * 2,
    ),
    st.sampled_from(["^[a-c]+$", "x", "^(a|bc){2,3}$", r"^\d{2}-\w$", "a.c"]).map(
        lambda text: {"pattern": text}
    ),
    st.sampled_from(["date", "time", "email", "ipv4", "uuid", "hostname", "json-pointer"]).map(
        lambda name: {"type": "string", "format": name}
    ),
    st.lists(constants, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    constants.map(lambda value: {"const": value}),
    st.sampled_from(["node", "leaf"]).map(lambda name: {"$ref": f"#/$defs/{name}"}),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"oneOf": options}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
    ),
    max_leaves=8,
)
DEFINITIONS = {
    "leaf": {"type": "string", "maxLength": 3},
    "node": {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}},
        "additionalProperties": False,
    },
}


@given(objects(schemas), st.integers(0, 2**32))
def test_accepted_schema_is_enforced(schema, seed):
    """Any schema is rejected, or every text of its grammar is valid."""
    try:
        check({**schema, "$defs": DEFINITIONS}, seed=seed)
    except BadRequest as error:
        assert error.param == "schema"


hard = st.sampled_from(
    [
        {"uniqueItems": True},
        {"contains": {"const": 1}},
        {"not": {"type": "null"}},
        {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"minimum": 3}},
        {"format": "regex"},
        {"pattern": "(?=a)b"},
        {"pattern": r"(a)\1", "minLength": 2},
        {"pattern": "((a{1,500}){1,500}){1,500}"},
        {"minProperties": 3},
        {"maxProperties": 2},
        {"propertyNames": {"maxLength": 3, "pattern": "a"}},
        {"patternProperties": {"^(?=a)": True}},
        {"unevaluatedProperties": False, "anyOf": [True]},
        {"$ref": "http://127.0.0.1/x"},
        {"multipleOf": 1e-15},
    ]
)


def made_hard(draw_schema):
    return st.builds(
        lambda schema, more: schema | more if isinstance(schema, dict) else more, draw_schema, hard
    )


@settings(max_examples=repeat(40, 10))
@given(objects(made_hard(schemas) | schemas) | made_hard(objects(schemas)), st.integers(0, 2**32))
def test_best_effort_enforces_the_remaining_keywords(schema, seed):
    """Keywords that are not reported as left out hold. The schema is rejected only if no value
    satisfies it.
    """
    try:
        check_best_effort({**schema, "$defs": DEFINITIONS}, 4, seed)
    except BadRequest as error:
        assert re.search("allows no|no finite|alternatives|items", str(error)), error


@pytest.mark.parametrize(
    ("schema", "unenforced"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 4}, {"uniqueItems"}),
        ({"type": "string", "format": "sort-of-a-date", "maxLength": 5}, {"format"}),
        ({"type": "array", "contains": {"const": 1}, "items": {"enum": [1, 2]}}, {"contains"}),
        ({"type": "integer", "not": {"const": 3}, "minimum": 1, "maximum": 5}, {"not"}),
        ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 9}, "maximum": 50}, {"if"}),
        ({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "number", "maximum": 5}]}, {"oneOf"}),
        ({"type": "string", "pattern": "(?<=a)b", "maxLength": 3}, {"pattern"}),
        ({"$ref": "https://example.com/schema.json", "type": "integer"}, {"$ref"}),
        ({"type": "object", "minProperties": 3, "additionalProperties": {"type": "null"}}, {"minProperties"}),
        ({"type": "object", "patternProperties": {"(?=a)": {"type": "null"}}}, {"patternProperties"}),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}, "b": {"contains": {}}}},
         {"contains", "uniqueItems"}),
    ],
)  # fmt: skip
def test_keywords_that_cannot_be_enforced_are_left_out_and_named(schema, unenforced):
    """The rest of the schema holds. With strict, the schema is rejected."""
    values, left_out = check_best_effort(schema, 20)
    assert left_out == unenforced
    assert values
    with pytest.raises(BadRequest) as caught:
        check(schema)
    assert any(
        keyword in str(caught.value) for keyword in unenforced | {"refer", "format", "look-around"}
    )


@pytest.mark.parametrize(
    "sign",
    ["a whole number", "type", "an object", "nothing at", f"{MAX_REPEAT}", "parts", "deeper"],
)
def test_invalid_schema_is_rejected_in_best_effort_mode(sign):
    with pytest.raises(BadRequest, match=re.escape(sign)):
        check_best_effort(REFUSED[sign])


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLOSED = {
    "plain": (CITY, ['{"city":"x"}'], ['{"city":"x","a":1}', '{"city":"x","city":"y"}']),
    "no properties at all": ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
    "nested": ({"type": "array", "items": CITY}, ['[{"city":"x"}]'], ['[{"city":"x","a":1}]']),
    "behind a "
    "reference": ({"$ref": "#/$defs/c", "$defs": {"c": CITY}}, ['{"city":"x"}'], ['{"city":"x","a":1}']),
    "or nothing": ({"anyOf": [CITY, {"type": "null"}]}, ["null", '{"city":"x"}'], ['{"city":"x","a":1}']),
    "a choice": ({"anyOf": [CITY, {"type": "object", "properties": {"b": {"const": 1}}}]},
                 ['{"city":"x"}', '{"b":1}', "{}"], ['{"city":"x","b":1}', '{"b":2}']),
    "a choice of references": ({"anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}],
                                "$defs": {"c": CITY, "d": {"properties": {"b": {"const": 1}}}}},
                               ['{"city":"x"}', '{"b":1}'], ['{"city":"x","b":1}']),
    "one of two names": ({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}},
                          "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
                         ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"a":1,"c":3}']),
    "inherited": ({"allOf": [{"$ref": "#/$defs/c"}, {"properties": {"b": {"const": 1}}}], "$defs": {"c": CITY}},
                  ['{"city":"x","b":1}', '{"city":"x"}'], ['{"city":"x","b":1,"a":1}', '{"b":1}']),
    "a reference and "
    "more": ({"$ref": "#/$defs/c", "properties": {"b": {"const": 1}}, "$defs": {"c": CITY}},
                             ['{"city":"x","b":1}'], ['{"city":"x","b":1,"a":1}']),
    "both a part and whole": ({"type": "object", "properties": {"a": {"$ref": "#/$defs/c"}, "b": {
        "allOf": [{"$ref": "#/$defs/c"}, {"properties": {"d": {"const": 1}}}]}}, "$defs": {"c": CITY}},
        ['{"a":{"city":"x"},"b":{"city":"x","d":1}}'], ['{"a":{"city":"x","d":1}}']),
    "required, but not "
    "described": ({"type": "object", "properties": {"a": {"const": 1}}, "required": ["b"]},
                                    ['{"b":[3]}', '{"a":1,"b":null}'], ['{"b":1,"c":2}']),
    "patterns of "
    "names": ({"properties": {"a": {"const": 1}}, "patternProperties": {"^x_": {"const": 2}}},
                          ['{"a":1,"x_y":2}'], ['{"y":1}', '{"x_y":1}']),
    "recursive": ({"type": "object", "properties": {"next": {"$ref": "#"}}},
                  ['{"next":{"next":{}}}'], ['{"next":{"a":1}}']),
}  # fmt: skip
OPEN = {
    "it says so": (CITY | {"additionalProperties": True}, '{"city":"x","a":1}'),
    "it says what": (CITY | {"additionalProperties": {"type": "integer"}}, '{"city":"x","a":1}'),
    "no properties are named": ({"type": "object"}, '{"a":1}'),
    "another part says so": ({"allOf": [CITY, {"additionalProperties": {"const": 1}, "properties": {"city": True}}]},
                             '{"city":"x","a":1}'),
    "unevaluated ones are "
    "described": (CITY | {"unevaluatedProperties": {"const": 2}}, '{"city":"x","b":2}'),
    "more are asked "
    "for": ({"properties": {"a": {"const": 1}}, "required": ["a"], "minProperties": 2}, '{"a":1,"b":2}'),
    "names are "
    "limited": ({"type": "object", "properties": {"a": True}, "propertyNames": {"maxLength": 2}}, '{"b":1}'),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
def test_objects_with_properties_are_closed(name):
    """No model can then invent or repeat names."""
    schema, good, bad = CLOSED[name]
    assert [text for text in good if not allows(schema, text)] == []
    assert [text for text in bad if allows(schema, text)] == []


@pytest.mark.parametrize("name", OPEN)
def test_objects_stay_open_where_the_schema_says_so(name):
    assert allows(*OPEN[name])


NUMBER = re.compile(r"-?(\d+)(?:\.(\d+))?(?:[eE][+-]?(\d+))?")
ENDLESS = {
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "either": {"type": ["integer", "number"]},
    "untyped": {},
    "nested in untyped": {"type": "object", "additionalProperties": {"type": "array"}},
    "bounded on one side": {"type": "number", "minimum": 0.5},
    "bounded on both": {"type": "number", "exclusiveMinimum": -3, "maximum": 8.25},
    "of steps": {"type": "number", "multipleOf": 0.25},
    "of whole steps": {"type": "integer", "multipleOf": 7},
    "composed": {"allOf": [{"minimum": 3}, {"type": ["number", "null"]}]},
    "beside patterns": {
        "type": "object",
        "patternProperties": {"a": {"type": "number"}},
        "minProperties": 1,
    },
}


def longest_number(constraint: Constraint) -> tuple[int, ...]:
    """Return the digits before the point, after it and in the exponent, for a model that writes
    digits wherever it may.
    """
    grammar = Grammar(CHECKER.check(constraint, "schema").grammar, BYTES)
    found: tuple[int, ...] = (0, 0, 0)
    for seed in range(12):
        rng, matcher, text = random.Random(seed), grammar.matcher(), bytearray()
        while not matcher.is_stopped and len(text) < 300:
            mask = matcher.compute_mask()
            ids = [i for i in range(256) if mask[i // 8] >> i % 8 & 1]
            # which there is in strings
            digits = [i for i in ids if i in b"0123456789" and ord("x") not in ids]
            ids = digits if digits and rng.random() < 0.98 else ids
            if not ids:
                break
            matcher.consume(token := rng.choice(ids))
            text.append(token)
        outside = re.sub(rb'"(?:\\.|[^"\\])*(?:"|$)', b"", bytes(text)).decode()
        for number in NUMBER.finditer(outside):
            found = tuple(
                max(n, len(digits or "")) for n, digits in zip(found, number.groups(), strict=True)
            )
    return found


@pytest.mark.parametrize("name", ENDLESS)
def test_numbers_have_a_limited_number_of_digits(name):
    before, after, exponent = longest_number(Constraint("json_schema", ENDLESS[name]))
    assert 0 < before <= 20
    assert after <= 17
    assert exponent <= 3


def test_numbers_in_json_objects_have_a_limited_number_of_digits():
    before, after, exponent = longest_number(Constraint("json_object"))
    assert (before <= 20, after <= 17, exponent <= 3) == (True, True, True)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": 10**30 + 1}, "1" + "0" * 29 + "1"),
        ({"enum": [2**53 + 1, "a"]}, "9007199254740993"),
        ({"const": 1e-30}, "1e-30"),
        (
            {"type": "integer", "minimum": 10**24, "maximum": 10**24 + 5},
            "1000000000000000000000003",
        ),
        ({"type": "integer", "maximum": 2**64 - 1}, "18446744073709551615"),
        ({"type": "integer"}, "99999999999999999999"),
        ({"type": "number"}, "-12345678901234567890.12345678901234567e-300"),
        ({"type": "string", "pattern": "^[0-9]{40}$"}, '"' + "7" * 40 + '"'),
    ],
)
def test_constants_bounds_and_patterns_widen_the_digit_limit(schema, text):
    """An unbounded integer may have 20 digits."""
    assert allows(schema, text)


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        ({"type": "string", "maxLength": 10**9}, lambda n: json.dumps("a" * n)),
        (
            {"type": "array", "items": {"type": "null"}, "maxItems": 10**9},
            lambda n: json.dumps([None] * n),
        ),
    ],
)
def test_large_upper_limits_of_counts_are_lowered(schema, most):
    assert allows(schema, most(MAX_REPEAT - 1))
    assert not allows(schema, most(MAX_REPEAT + 1))
    low = {"maxLength": "minLength", "maxItems": "minItems"}
    with pytest.raises(BadRequest, match=f"more than {MAX_REPEAT} cannot be enforced"):
        check_best_effort({low.get(key, key): value for key, value in schema.items()})


FEATURES: dict[str, Any] = {
    "annotations": {"type": "integer", "title": "x", "description": "y", "default": 3, "examples": [1], "$comment": ""},
    "unknown keywords": {"type": "integer", "x-order": 1, "nullable": True},
    "no type": {"minLength": 2, "minimum": 3},
    "exclusive": {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 4},
    "constants in objects": {"const": {"a": [1, {"b": None}]}},
    "pointers": {"$ref": "#/x~1y/100%25", "x/y": {"100%": {"const": 5}}},
    "anchors": {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 5}}},
    "references with "
    "siblings": {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer", "minimum": 2}}},
    "recursion": {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    "tuples": {"type": "array", "prefixItems": [{"const": 1}, {"const": "x"}], "items": False},
    "more than a "
    "tuple": {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "minItems": 3},
    "additionalItems beside "
    "prefixItems": {"type": "array", "prefixItems": [{"const": 1}], "additionalItems": False,
                                           "minItems": 1, "maxItems": 1},
    "additionalProperties": {"type": "object", "properties": {"a": True}, "additionalProperties": {"type": "null"}},
    "required and "
    "unknown": {"type": "object", "required": ["z"], "additionalProperties": {"type": "integer"}},
    "patterns of names": {"type": "object", "patternProperties": {"^x_": {"type": "null"}},
                          "additionalProperties": False},
    "one more "
    "property": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    "at most": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
    "oneOf by type": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "names in a "
    "list": {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"const": 1}},
    "one name": {"type": "object", "propertyNames": {"const": "a"}, "properties": {"b": {}}, "minProperties": 1},
    "names like a "
    "pattern": {"type": "object", "propertyNames": {"type": "string", "pattern": "^[ab]{1,2}$"},
                             "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
    "lengths of "
    "names": {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "maxProperties": 2,
                         "$defs": {"n": {"maxLength": 2}}, "additionalProperties": {"type": "null"}},
    "names of a "
    "format": {"propertyNames": {"format": "date"}, "additionalProperties": {"const": 1}, "type": "object"},
    "any names": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"const": 1}},
    "no names": {"type": "object", "propertyNames": False},
    "one needs "
    "others": {"type": "object", "properties": {"a": True, "b": {"const": 2}, "c": {"const": 3}},
                         "dependentRequired": {"a": ["b"], "c": ["a"]}, "additionalProperties": False},
    "one needs "
    "more": {"type": "object", "properties": {"a": {"const": 1}, "b": {"type": "integer"}},
                       "dependentSchemas": {"a": {"required": ["b"], "properties": {"b": {"maximum": 5}}}, "b": True},
                       "additionalProperties": False},
    "one excludes "
    "all": {"type": "object", "properties": {"a": {"const": 1}}, "dependentSchemas": {"a": False}},
    "closed over "
    "parts": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": {"const": 2}}}], "required": ["a"],
                          "$defs": {"base": {"type": "object", "properties": {"a": {"const": 1}}}},
                          "unevaluatedProperties": False},
    "closed alone": {"type": "object", "properties": {"a": {"const": 1}}, "patternProperties": {"^x": {"const": 2}},
                     "unevaluatedProperties": {"type": "null"}},
    "a closed tuple": {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False,
                       "allOf": [{"prefixItems": [True, {"type": "null"}]}]},
    "a tuple with a "
    "rest": {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": {"const": 2}},
    "sets": {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True, "minItems": 2},
    "sets of "
    "one": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
    "addresses": {"$id": "http://a.b/c/", "$ref": "d#/$defs/e",
                  "$defs": {"x": {"$id": "d", "$defs": {"e": {"$ref": "#/$defs/f"}, "f": {"const": 5}}}}},
    "anchors "
    "within": {"$id": "http://a.b/c", "type": "object", "required": ["b"], "additionalProperties": False,
                       "properties": {"a": {"$anchor": "here", "const": 5}, "b": {"$ref": "#here"}}},
    "names of "
    "keywords": {"type": "object", "properties": {"$id": {"const": 1}, "enum": {"$ref": "#/properties/$id"}},
                          "required": ["enum", "$id"], "additionalProperties": False},
    "one dynamic "
    "anchor": {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "const": 5}}},
    "passwords": {"type": "string", "pattern": r"^(?=.*[0-9])(?=.*[A-Z])[0-9A-Za-z]{4}$"},
    "email addresses": {"type": "string", "format": "email",
                        "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]*[a-z]@[a-z]+\.[a-z]{2}$"},
    "decimal numbers": {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
    "formats of numbers": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 9},
    "a named pattern": {"type": "string", "format": "nanoid", "pattern": "^[a-z]{3}$"},
    "never": {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 1}}, "additionalProperties": False},
    "harmless "
    "ones": {"type": "array", "uniqueItems": False, "unevaluatedItems": True, "items": {"type": "null"}},
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_supported_keywords_are_enforced(name):
    assert check(FEATURES[name], 30), "some text comes to its end"


def test_union_of_references_is_told_apart_by_a_constant():
    """This is how pydantic writes a union."""
    kinds = {
        kind: {
            "type": "object",
            "properties": {"kind": {"const": kind}, "n": {"type": inner}},
            "required": ["kind", "n"],
        }
        for kind, inner in (("cat", "boolean"), ("dog", "null"))
    }
    schema = {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds], "$defs": kinds}
    assert {value["kind"] for value in check(schema, 30)} == {"cat", "dog"}


def test_dependencies_of_older_drafts_are_enforced():
    """These drafts are older than 2019-09."""
    schema = {
        "type": "object",
        "properties": {"a": True, "b": True},
        "dependencies": {"a": ["b"], "b": {"required": ["c"]}},
    }
    assert allows(schema, '{"c":1}')
    assert not allows(schema, '{"a":1}')
    assert not allows(schema, '{"b":1}')
    assert not allows(schema, '{"a":1,"c":1}')
    assert allows(schema, '{"a":1,"b":1,"c":1}')


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("bound", [2**63 - 1, 2**62, 3.4028234663852886e38, 10**400])
def test_bounds_beyond_float_precision_are_exact(kind, bound):
    schema = {"type": kind, "minimum": -bound, "maximum": bound}
    whole = int(Decimal(str(bound)))  # of a float, the decimal number that it is written as
    assert allows(schema, str(-whole))
    assert allows(schema, str(whole))
    assert not allows(schema, str(whole + 1))
    assert not allows(schema, str(-whole - 1))
    assert allows(schema, "1.5") == (kind == "number")
    assert allows({"type": kind, "minimum": bound}, str(whole + 7))
    assert not allows({"type": kind, "minimum": bound}, str(whole - 1))


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("[a-z]{1,255}", ["child1", "a"], ["", "1"]),
        (r"^x\{2,5}", ["x{2,5}", "x{2,5}a"], ["xx"]),
        ("(^.+\\..+)|(^[a-z_-]+)", ["a.b", "a-b", "Z.z"], ["Z", "."]),
        ("(?:^a|b$)", ["ax", "xb"], ["xa", "bx"]),
        ("^(a|b)(c)$", ["ac", "bc"], ["a", "c"]),
    ],
)
def test_patterns_of_names_are_searched_for(pattern, names, others):
    """Anchors may be within parentheses. Counts at the end of a pattern do not matter."""
    schema = {"type": "object", "patternProperties": {pattern: {"const": 1}}}
    closed = schema | {"additionalProperties": False}
    for name in names:
        assert allows(closed, json.dumps({name: 1})), name
        assert not allows(schema, json.dumps({name: 2})), name
    for name in others:
        assert not allows(closed, json.dumps({name: 1})), name
        assert allows(schema, json.dumps({name: 2})), name


def test_items_as_a_list_are_enforced():
    """Drafts before 2020-12 write it in this way."""
    schema = {
        "type": "array",
        "items": [{"const": 1}, {"const": 2}],
        "additionalItems": False,
        "minItems": 1,
    }
    assert enforceable(schema, "x") == {
        "type": "array",
        "prefixItems": [{"const": 1}, {"const": 2}],
        "items": False,
        "minItems": 1,
    }


def test_boolean_exclusive_limits_are_enforced():
    """Draft 4 writes them in this way."""
    schema = {
        "type": "integer",
        "minimum": 2,
        "exclusiveMinimum": True,
        "maximum": 3,
        "exclusiveMaximum": False,
    }
    assert enforceable(schema, "x") == {
        "type": "integer",
        "minimum": 2,
        "exclusiveMinimum": 2,
        "maximum": 3,
    }


def test_properties_are_written_in_the_order_of_the_schema():
    schema = {
        "type": "object",
        "properties": {"z": {"const": 1}, "a": {"const": 2}},
        "required": ["a", "z"],
    }
    assert [*check({**schema, "additionalProperties": False}, 1)[0]] == ["z", "a"]


def test_white_space_is_limited():
    """One blank is allowed after a comma or a colon."""
    grammar = CHECKER.check(
        Constraint("json_schema", FEATURES["constants in objects"]), "x"
    ).grammar
    rng = random.Random(1)
    texts = {write(Grammar(grammar, BYTES), rng) for _ in range(60)}
    assert b'{"a":[1,{"b":null}]}' in texts
    assert b'{"a": [1, {"b": null}]}' in texts
    assert len(texts) == 8


def nested(depth: int, keyword: str = "items") -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {keyword: schema}
    return schema


REFUSED = {
    "not": {"not": {"type": "null"}},
    "if": {"if": {"type": "null"}, "then": {}},
    "contains": {"contains": {"const": 1}},
    "propertyNames": {"propertyNames": {"maxLength": 3, "pattern": "a"}},
    "uniqueItems": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    "at most 6": {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3, 4, 5, 6, 7]}},
    "dependencies": {"dependencies": {"a": 5}},
    "dependentRequired": {"dependentRequired": ["a"]},
    "dependentSchemas": {"dependentSchemas": {"a": 5}},
    "unevaluatedItems": {"anyOf": [True], "unevaluatedItems": False},
    "unevaluatedProperties": {"anyOf": [True], "unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a", "$defs": {"a": {"$dynamicAnchor": "a", "items": {"$dynamicAnchor": "a"}}}},
    "$recursiveRef": {"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveRef": "#"},
    "minProperties": {"minProperties": 2, "additionalProperties": {}},
    "$ref": {"$ref": "http://127.0.0.1/x"},
    "not in it": {"$ref": "file:///etc/passwd"},
    "nothing at": {"$ref": "#/$defs/a"},
    "$id": {"properties": {"a": {"$id": "b", "$ref": "#/c"}}, "c": {}},
    "names are not": {"patternProperties": {"^(?=a)": True}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
    "format": {"type": "string", "format": "regex"},
    "look-a": {"type": "string", "pattern": "(?=a)"},
    "'&&'": {"pattern": "[a-z&&[b]]"},
    "type": {"type": "int"},
    "a whole number": {"minLength": 1.5},
    "a list of strings": {"required": [1]},
    "an object": {"properties": []},
    "a list": {"anyOf": {}},
    "an object or a boolean": {"items": "x"},
    f"{MAX_REPEAT}": {"type": "string", "minLength": 10**9, "maxLength": 10**9},
    "minItems": {"type": "array", "minItems": 10**6},
    "deeper": nested(MAX_DEPTH + 1),
    "parts": {"enum": [*range(20_000)]},
    "finite": {"$ref": "#"},
    "no finite "
    "value": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "finite value": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "minimum": {"type": "integer", "minimum": 5, "maximum": 3},
    "exclude each other": {"allOf": [{"type": "integer"}, {"type": "string"}]},
    "larger than 0": {"multipleOf": 0},
    "a number": {"minimum": True},
}  # fmt: skip


@pytest.mark.parametrize("sign", REFUSED)
def test_unenforceable_keyword_is_rejected(sign):
    """The message names the keyword or the limit."""
    with pytest.raises(BadRequest) as caught:
        check(REFUSED[sign])
    assert sign in str(caught.value)
    assert caught.value.param == "schema"
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "schema",
    [5, "x", None, [], False, {"required": ["a"], "properties": {"a": False}, "type": "object"}],
)
def test_invalid_or_unsatisfiable_schema_is_rejected(schema):
    with pytest.raises(BadRequest):
        check(schema)


VALUES = [
    *(None, True, 0, -1, 1.5, 10**30, "", "a", "object", "#", "#/a/0"),
    *([], {}, [[]], [None], [{}], [{"": None}], {"": None}, {"a": {}}, {"a": []}, {"a": None}),
    *(["a", {}], ["object", {}], [["a"]], ["a", "a"], [1, 2], {"type": {}}, {"$ref": {}}),
]  # fmt: skip
BASES: list[dict[str, Any]] = [
    {},
    {"type": "string"},
    {"type": ["array", "null"]},
    {"type": "integer"},
    CITY,
]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("keyword", sorted(KEYWORDS))
def test_any_value_of_a_keyword_is_translated_or_rejected(keyword, strict):
    """Nothing but BadRequest is raised: for its own value, beside others, and inside of them. A
    short run puts each schema in some of the places, in turn.
    """
    for number, (value, base) in enumerate(itertools.product(VALUES, BASES)):
        schema = {**base, keyword: value}
        places: list[dict[str, Any]] = [
            schema,
            {"anyOf": [schema, {"type": "null"}]},
            {"properties": {"a": schema}},
            {"propertyNames": schema, "unevaluatedProperties": False},
            {"propertyNames": {"type": "string", keyword: value}},
            {"unevaluatedItems": {"type": "string"}, **schema},
            {"unevaluatedProperties": False, "$ref": "#/$defs/a", "$defs": {"a": schema}},
        ]
        for place in range(repeat(len(places), 3)):
            whole = places[(number + place) % len(places)]
            with contextlib.suppress(BadRequest):
                to_lark(Constraint("json_schema", whole, strict), "schema", set(), careful=True)


@pytest.mark.parametrize("pointer", ["#/items/7", "#/items/-1", "#/items/" + "9" * 5000, "#/a/b"])
def test_pointer_to_nothing_is_rejected(pointer):
    with pytest.raises(BadRequest, match="there is nothing at"):
        check({"items": [{"$ref": pointer}]})


@pytest.mark.parametrize("reference", ["//[x", "http://[", "http://[::1]]/#/a"])
def test_reference_that_is_no_uri_is_rejected(reference):
    with pytest.raises(BadRequest, match="is not in it"):
        check({"$id": "http://a.b", "$ref": reference})


@pytest.mark.parametrize("reference", ["", "#"])
def test_reference_that_leads_to_itself_at_once_is_rejected(reference):
    """One that leads to itself in a property or an item is not."""
    option = {"type": "object", "$ref": reference}
    with pytest.raises(BadRequest, match="leads to itself without an end"):
        check({"anyOf": [option, {"type": "null"}]})
    check({"anyOf": [{"type": "array", "items": {"$ref": reference}}, {"type": "null"}]})


def test_repeated_references_do_not_grow_exponentially():
    """Written out, each definition would be twice as large as the one before."""
    definitions = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    check({"$ref": "#/$defs/d0", "$defs": definitions | {"d60": {"const": 1}}}, 2)


@pytest.fixture(scope="module")
def builtin(builtin_path):
    with LLM(model_max_context_length=512, scheduler_max_num_seqs=8) as llm:
        yield llm


def follow(llm: LLM, schemas: list[dict], **params) -> int:
    """How many answers came to their end; they are valid."""
    num_ended = 0
    for i, schema in enumerate(schemas):
        grammar = CHECKER.check(Constraint("json_schema", schema), "schema").grammar
        messages = [{"role": "user", "content": "Write Anna, who is 30, as JSON."}]
        done = llm.chat(
            messages, SamplingParams(grammar=grammar, n=2, max_tokens=80, seed=i, **params)
        )
        for output in done.outputs:
            if output.finish_reason == "stop":
                jsonschema.validate(
                    json.loads(output.text), schema, jsonschema.Draft202012Validator
                )
                num_ended += 1
    return num_ended


@pytest.mark.llama
@pytest.mark.slow
def test_supported_keywords_are_enforced_with_the_builtin_vocabulary(builtin):
    """Its tokens cross the borders of JSON's tokens."""
    assert follow(builtin, [*FEATURES.values()], temperature=1.5) > len(FEATURES)


@pytest.mark.llama
@pytest.mark.slow
@settings(max_examples=5)
@given(schema=objects(schemas))
def test_any_schema_is_enforced_with_the_builtin_vocabulary(builtin, schema):
    with contextlib.suppress(BadRequest):
        follow(builtin, [{**schema, "$defs": DEFINITIONS}], temperature=2.0)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "dict"}, "no type 'dict'"),
        ({"type": [["string"]]}, "no type"),
        ({"properties": [1]}, "'properties' must be an object"),
        ({"properties": {"a": {"items": {"type": 7}}}}, "at properties.a.items"),
        ({"anyOf": {"type": "string"}}, "'anyOf' must be a list"),
        ({"items": [{"type": "x"}]}, "at items.0"),
        ({"required": ["a", 1]}, "'required' must be"),
        ({"enum": "ab"}, "'enum' must be"),
        ({"not": 5}, "must be an object or a boolean at not"),
    ],
)
def test_fault_of_an_invalid_schema_is_named(schema: dict, why: str) -> None:
    assert why in find_fault(schema)


def test_unenforceable_keywords_are_not_schema_faults() -> None:
    """Unknown keywords, and null for absent values, are not faults either. Too deep nesting is one."""
    schema = {
        "not": {"type": "string"},
        "x-mine": 5,
        "required": None,
        "properties": {"type": {"type": ["null"]}},
    }
    assert find_fault(schema | {"format": "what", "items": True, "enum": None}) == ""
    for _ in range(60):
        schema = {"items": schema}
    assert "deeper" in find_fault(schema)
