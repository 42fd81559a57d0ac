"""Invalid schemas of forced calls: what is valid of them is enforced, the rest is named."""

from __future__ import annotations

from typing import Any

import pytest
from call_texts import WORDS, grammar_of

from cllm.errors import BadRequest
from cllm.text.schema.repair import repair
from cllm.text.tools.model_family import load_families


def only(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


# a schema, arguments that it allows, arguments that it does not, and the keywords that are dropped
REPAIRED: dict[str, tuple[Any, str, str, set[str]]] = {
    "any type": (only(type="any"), '{"a": [1]}', "{}", {"type"}),
    "capitals": (
        {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}, "required": ["a"]},
        '{"a": "x"}', '{"a": 1}', set(),
    ),
    "capitals in lists": (only(type=["STRING", "NULL"]), '{"a": null}', '{"a": 1}', set()),
    "an array in capitals": (only(type="ARRAY", items={"type": "INTEGER"}), '{"a": [1]}', '{"a": ["x"]}', set()),
    "python types": (
        {"type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "list[str]"}}, "required": ["a", "b"]},
        '{"a": 1.5, "b": ["x"]}', '{"a": "x", "b": []}', set(),
    ),
    "an unknown type": (only(type="Widget"), '{"a": {}}', "{}", {"type"}),
    "no type": (only(type=None), '{"a": 1}', "{}", {"type"}),
    "a missing definition": (only(**{"$ref": "#/$defs/nothing"}), '{"a": 1}', "{}", {"$ref"}),
    "a missing component": (only(**{"$ref": "#/components/schemas/x"}), '{"a": 1}', "{}", {"$ref"}),
    "definitions": (
        only(**{"$ref": "#/definitions/n"}) | {"definitions": {"n": {"type": "INTEGER"}}},
        '{"a": 1}', '{"a": "x"}', set(),
    ),
    "required in a property": (only(type="string", required=True), '{"a": "x"}', "{}", {"required"}),
    "one required name": ({"properties": {"a": {"type": "integer"}}, "required": "a"}, '{"a": 1}', "{}", set()),
    "no properties": ({"type": "object", "properties": None}, '{"b": 1}', "1", set()),
    "one value": (only(enum="x"), '{"a": "x"}', '{"a": "y"}', set()),
    "a bound as text": (only(type="integer", minimum="1"), '{"a": 0}', '{"a": "x"}', {"minimum"}),
    "no options": (only(anyOf=[]), '{"a": 1}', "{}", {"anyOf"}),
    "a list of arguments": ({"type": "array", "items": {"type": "string"}}, '{"b": 1}', "[]", {"type"}),
    "contradictory bounds": (only(type="integer", minimum=5, maximum=1), '{"b": 1}', "1", {"parameters"}),
    "a circle": (only(**{"$ref": "#/properties/a"}), '{"b": 1}', "1", {"parameters"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REPAIRED)
def test_valid_parts_of_a_schema_are_enforced(name):
    schema, allowed, refused, dropped = REPAIRED[name]
    unenforced: set[str] = set()
    family, words = load_families()["hermes"], WORDS["few"]
    grammar = grammar_of(family, {"f": schema}, strict=False, unenforced=unenforced)
    call = '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>'
    assert words.follows(grammar, call.replace("ARGUMENTS", allowed))
    assert not words.follows(grammar, call.replace("ARGUMENTS", refused))
    assert unenforced == dropped


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (only(type="any"), "there is no type 'any' at properties.a"),
        ({"type": "OBJECT"}, "must be 'object', not 'OBJECT'"),
        (only(**{"$ref": "#/$defs/nothing"}), r"properties\.a\.\$ref: there is nothing at"),
        (
            only(type="string", required=True),
            "'required' must be a list of strings at properties.a",
        ),
    ],
)
def test_strict_function_with_an_invalid_schema_is_rejected_with_the_place(schema, why):
    with pytest.raises(BadRequest, match=f"Function 'f'.*{why}"):
        grammar_of(load_families()["hermes"], {"f": schema})


@pytest.mark.parametrize("name", ["glm", "qwen3_coder", "gemma4", "lfm2"])
def test_families_without_json_accept_invalid_schemas_too(name):
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}, "required": ["a"]}
    assert grammar_of(load_families()[name], {"f": schema}, strict=False, unenforced=set())


def test_valid_schemas_stay_as_they_are():
    schema = {
        "type": ["object"],
        "properties": {"type": {"type": "string", "pattern": "a", "maxLength": 3}, "b": True},
        "anyOf": [{"required": ["b"]}, {"minProperties": 1}],
        "additionalProperties": False,
        "x-other": None,
        "default": {"type": 5},
    }
    dropped: set[str] = set()
    assert repair(schema, dropped) == {
        key: value for key, value in schema.items() if value is not None
    }
    assert not dropped
