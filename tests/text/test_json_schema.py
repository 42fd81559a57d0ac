"""Schemas: what is refused, by which keyword; and for all else that random texts of the grammar are valid."""

from __future__ import annotations

import contextlib
import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm import LLM, SamplingParams
from cllm.core.params import MAX_LEXER_STATES
from cllm.errors import BadRequest
from cllm.sampling.grammar import Grammar
from cllm.text.grammar import Checker, Constraint, Special, bytes_tokenizer
from cllm.text.json_schema import MAX_DEPTH, MAX_REPEAT, enforceable

BYTES = bytes_tokenizer({}, 257)
CHECKER = Checker(Special(257, {}), MAX_LEXER_STATES)
CLOSING = set(b'"]}')


def write(grammar: Grammar, rng: random.Random, limit: int = 2000) -> bytes | None:
    """A random text of the grammar that hurries to its end; None if it does not get there."""
    matcher, text = grammar.matcher(), bytearray()
    while not matcher.stopped and len(text) < limit:
        mask = matcher.allowed()
        assert mask is not None, bytes(text)
        ids = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
        if 256 in ids and (len(ids) == 1 or rng.random() < 0.5):
            return bytes(text)
        ids = [i for i in ids if i != 256]
        closing = [i for i in ids if i in CLOSING]
        matcher.consume(token := rng.choice(closing if closing and rng.random() < 0.4 else ids))
        text.append(token)
    return bytes(text) if matcher.stopped else None


def check(schema, num_texts: int = 8, seed: int = 0) -> list:
    """Values of random texts of ``schema``, all of them valid. Raises BadRequest if it is refused."""
    grammar = Grammar(CHECKER.check(Constraint("json_schema", schema), "schema"), BYTES)
    assert not grammar.error
    rng = random.Random(seed)
    texts = [write(grammar, rng) for _ in range(num_texts)]
    values = [json.loads(text) for text in texts if text is not None]
    values = [value for value in values if "Infinity" not in json.dumps(value)]  # a number too long for the validator
    for value in values:
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    return values


names = st.sampled_from(["a", "b", "name", "a b", 'q"', "é", "$ref", "0"])
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
        st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}]),
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
    st.sampled_from([True, {}, {"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}]),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, *[st.integers(-99, 99)] * 2
    ),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low}, numbers),
    st.sampled_from([3, 7, 0.5, 0.125]).map(lambda step: {"type": "number", "multipleOf": step, "minimum": -9}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, *[st.integers(0, 5)] * 2
    ),
    st.sampled_from(["^[a-c]+$", "x", "^(a|bc){2,3}$", r"^\d{2}-\w$", "a.c"]).map(lambda text: {"pattern": text}),
    st.sampled_from(["date", "time", "email", "ipv4", "uuid"]).map(lambda name: {"type": "string", "format": name}),
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
    "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False},
}


@given(objects(schemas), st.integers(0, 2**32))
def test_what_is_not_refused_is_enforced(schema, seed):
    """Any schema is refused, or every text of its grammar is valid."""
    try:
        check({**schema, "$defs": DEFINITIONS}, seed=seed)
    except BadRequest as error:
        assert error.param == "schema"


FEATURES = {
    "annotations": {"type": "integer", "title": "x", "description": "y", "default": 3, "examples": [1], "$comment": ""},
    "unknown keywords": {"type": "integer", "x-order": 1, "nullable": True},
    "no type": {"minLength": 2, "minimum": 3},
    "exclusive": {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 4},
    "constants in objects": {"const": {"a": [1, {"b": None}]}},
    "pointers": {"$ref": "#/x~1y/100%25", "x/y": {"100%": {"const": 5}}},
    "anchors": {"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 5}}},
    "references with siblings": {"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer", "minimum": 2}}},
    "recursion": {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    "tuples": {"type": "array", "prefixItems": [{"const": 1}, {"const": "x"}], "items": False},
    "more than a tuple": {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "minItems": 3},
    "additionalItems beside prefixItems": {"type": "array", "prefixItems": [{"const": 1}], "additionalItems": False,
                                           "minItems": 1, "maxItems": 1},
    "additionalProperties": {"type": "object", "properties": {"a": True}, "additionalProperties": {"type": "null"}},
    "required and unknown": {"type": "object", "required": ["z"], "additionalProperties": {"type": "integer"}},
    "patterns of names": {"type": "object", "patternProperties": {"^x_": {"type": "null"}},
                          "additionalProperties": False},
    "one more property": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
    "at most": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
    "oneOf by type": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "formats of numbers": {"type": "integer", "format": "int32", "minimum": 0, "maximum": 9},
    "harmless ones": {"type": "array", "uniqueItems": False, "unevaluatedItems": True, "items": {"type": "null"}},
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    assert check(FEATURES[name], 30), "some text comes to its end"


def test_options_behind_references():
    """A union as pydantic writes it, told apart by a constant."""
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


def test_items_as_a_list():
    """As drafts before 2020-12 had it."""
    schema = {"type": "array", "items": [{"const": 1}, {"const": 2}], "additionalItems": False, "minItems": 1}
    assert enforceable(schema, "x") == {
        "type": "array",
        "prefixItems": [{"const": 1}, {"const": 2}],
        "items": False,
        "minItems": 1,
    }


def test_exclusive_limits():
    """As draft 4 had them."""
    schema = {"type": "integer", "minimum": 2, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}
    assert enforceable(schema, "x") == {"type": "integer", "minimum": 2, "exclusiveMinimum": 2, "maximum": 3}


def test_properties_come_in_their_order():
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["a", "z"]}
    assert [*check({**schema, "additionalProperties": False}, 1)[0]] == ["z", "a"]


def test_blanks_are_bounded():
    """At most one, behind a comma or a colon."""
    grammar = CHECKER.check(Constraint("json_schema", FEATURES["constants in objects"]), "x")
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
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "uniqueItems": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {}}},
    "unevaluatedItems": {"unevaluatedItems": False},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "$recursiveRef": {"$schema": "https://json-schema.org/draft/2019-09/schema", "$recursiveRef": "#"},
    "minProperties": {"minProperties": 2, "additionalProperties": {}},
    "$ref": {"$ref": "http://127.0.0.1/x"},
    "begin with '#'": {"$ref": "file:///etc/passwd"},
    "nothing at": {"$ref": "#/$defs/a"},
    "$id": {"properties": {"a": {"$id": "b", "$ref": "#/c"}}, "c": {}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
    "format": {"type": "string", "format": "iri"},
    "look-a": {"type": "string", "pattern": "(?=a)"},
    "'&&'": {"pattern": "[a-z&&[b]]"},
    "type": {"type": "int"},
    "a whole number": {"minLength": 1.5},
    "a list of strings": {"required": [1]},
    "an object": {"properties": []},
    "a list": {"anyOf": {}},
    "an object or a boolean": {"items": "x"},
    "exactly": {"const": 2**53 + 1},
    "beyond": {"minimum": 10**400},
    f"{MAX_REPEAT}": {"type": "string", "minLength": 10**9, "maxLength": 10**9},
    "maxItems": {"items": {"type": "null"}, "maxItems": 10**6},
    "deeper": nested(MAX_DEPTH + 1),
    "parts": {"enum": [*range(20_000)]},
    "finite": {"$ref": "#"},
    "no finite value": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "finite value": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "minimum": {"type": "integer", "minimum": 5, "maximum": 3},
    "nsatisfiable": {"allOf": [{"type": "integer"}, {"type": "string"}]},
}  # fmt: skip


@pytest.mark.parametrize("sign", REFUSED)
def test_what_cannot_be_enforced_is_refused(sign):
    """The message names the keyword or the limit."""
    with pytest.raises(BadRequest) as caught:
        check(REFUSED[sign])
    assert sign in str(caught.value)
    assert caught.value.param == "schema"
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "schema", [5, "x", None, [], False, {"required": ["a"], "properties": {"a": False}, "type": "object"}]
)
def test_what_is_no_schema_or_allows_nothing(schema):
    with pytest.raises(BadRequest):
        check(schema)


def test_a_ladder_of_references():
    """Each step twice as wide as the last would be, were references written out."""
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
        grammar = CHECKER.check(Constraint("json_schema", schema), "schema")
        messages = [{"role": "user", "content": "Write Anna, who is 30, as JSON."}]
        done = llm.chat(messages, SamplingParams(grammar=grammar, n=2, max_tokens=80, seed=i, **params))
        for output in done.outputs:
            if output.finish_reason == "stop":
                jsonschema.validate(json.loads(output.text), schema, jsonschema.Draft202012Validator)
                num_ended += 1
    return num_ended


@pytest.mark.llama
@pytest.mark.slow
def test_features_with_the_built_in_model(builtin):
    """A vocabulary of more than bytes, whose tokens go beyond the borders of JSON's."""
    assert follow(builtin, [*FEATURES.values()], temperature=1.5) > len(FEATURES)


@pytest.mark.llama
@pytest.mark.slow
@settings(max_examples=5)
@given(schema=objects(schemas))
def test_any_schema_with_the_built_in_model(builtin, schema):
    with contextlib.suppress(BadRequest):
        follow(builtin, [{**schema, "$defs": DEFINITIONS}], temperature=2.0)
