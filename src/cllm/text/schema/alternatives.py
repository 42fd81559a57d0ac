"""The values that a schema allows, as alternatives of one type each, and the intersection of
alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from cllm.text.schema.finite_values import Schema
from cllm.text.schema.lark import finds

# A schema of one type with all keywords of that type, or a schema that is only a reference. ``in``
# has the values that constants allow, and ``parts`` the schemas that a string must all satisfy.
# ``options`` says which option of each 'oneOf', by id(), it satisfies.
Alternative = dict[str, Any]
Alternatives = list[Alternative] | None  # None: any value

BOUNDS: dict[str, Callable[..., Any]] = {
    "minimum": max,
    "exclusiveMinimum": max,
    "maximum": min,
    "exclusiveMaximum": min,
}
NUMBER: Alternative = dict.fromkeys([*BOUNDS, "multipleOf"])
KEYWORDS_OF: dict[str, Alternative] = {  # with their default values
    "null": {},
    "boolean": {},
    "integer": NUMBER,
    "number": NUMBER,
    "string": {"minLength": None, "maxLength": None, "pattern": None, "format": None},
    "array": {"prefixItems": [], "items": True, "minItems": 0, "maxItems": math.inf},
    "object": {
        "properties": {},
        "patternProperties": {},
        "additionalProperties": True,
        "required": [],
        "minProperties": 0,
        "maxProperties": math.inf,
    },
}
ANY = ["null", "boolean", "number", "string", "array", "object"]
IN_PLACE = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")


def own_alternatives(schema: dict[str, Any]) -> list[Alternative]:
    """Return the alternatives for the keywords that do not refer to other schemas for the same
    value.
    """
    kinds = schema.get("type", ANY)
    kinds = dict.fromkeys([kinds] if isinstance(kinds, str) else kinds)
    alternatives = []
    for kind in kinds:
        if kind == "integer" and "number" in kinds:
            continue
        own = {keyword: schema[keyword] for keyword in KEYWORDS_OF[kind] if keyword in schema}
        if kind == "string":
            own = {"parts": [own] if own else []}
        elif "multipleOf" in own:
            own["multipleOf"] = [own["multipleOf"]]
        alternative = {"type": kind, **KEYWORDS_OF[kind], **own}
        if kind == "object" and alternative["patternProperties"]:
            names = alternative["properties"]
            alternative["properties"] = {
                name: with_patterns(names[name], name, alternative) for name in names
            }
        alternatives.append(alternative)
    return alternatives


def of_any_type(alternatives: Alternatives) -> list[Alternative]:
    return own_alternatives({}) if alternatives is None else alternatives


def join_options(options: Iterable[Alternatives]) -> Alternatives:
    alternatives: list[Alternative] = []
    for option in options:
        if option is None:
            return None
        alternatives += option
    return alternatives


def with_option(alternatives: Alternatives, choice: int, option: int) -> list[Alternative]:
    """Return ``alternatives``, marked as one option of a ``oneOf``."""
    return [
        part | {"options": part.get("options", {}) | {choice: option}}
        for part in of_any_type(alternatives)
    ]


def constants(values: list[Any]) -> list[Alternative]:
    scalars: dict[str, list[Any]] = {}
    alternatives: list[Alternative] = []
    for value in values:
        match value:
            case None:
                alternatives += own_alternatives({"type": "null"})
            case list():
                items = [{"const": item} for item in value]
                alternatives += own_alternatives(
                    {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
                )
            case dict():
                properties = {name: {"const": inner} for name, inner in value.items()}
                exact = {
                    "properties": properties,
                    "required": [*value],
                    "additionalProperties": False,
                }
                alternatives += own_alternatives({"type": "object", **exact})
            case _:
                kind = (
                    "boolean"
                    if isinstance(value, bool)
                    else "string"
                    if isinstance(value, str)
                    else "number"
                )
                scalars.setdefault(kind, []).append(value)
    for kind, some in scalars.items():
        alternatives += [own_alternatives({"type": kind})[0] | {"in": [*dict.fromkeys(some)]}]
    return alternatives


def intersect(first: Schema, second: Schema) -> Schema:
    """Return a schema for the values that both allow."""
    if first in (True, {}) or second is False or first == second:
        return second
    if second in (True, {}) or first is False:
        return first
    return {"allOf": [first, second]}


def merge_options(one: Alternative, other: Alternative) -> Alternative | None:
    """Return the options that two alternatives satisfy together, or None if these contradict each
    other.
    """
    options = one.get("options", {}) | other.get("options", {})
    if any(options[choice] != option for choice, option in one.get("options", {}).items()):
        return None
    return {"options": options} if options else {}


def merge(one: Alternative, other: Alternative) -> Alternative | None:
    """Return the values that both allow; None if their types or options exclude each other.

    Neither is a reference.
    """
    if (options := merge_options(one, other)) is None:
        return None
    kinds = {one["type"], other["type"]}
    if len(kinds) > 1 and kinds != {"integer", "number"}:
        return None
    merged = one | other | {"type": "integer" if len(kinds) > 1 else one["type"]} | options
    if "in" in one and "in" in other:
        allowed = set(other["in"])
        merged["in"] = [value for value in one["in"] if value in allowed]
    match merged["type"]:
        case "integer" | "number":
            for keyword, narrower in BOUNDS.items():
                values = [part[keyword] for part in (one, other) if part[keyword] is not None]
                merged[keyword] = narrower(values, default=None)
            merged["multipleOf"] = [*(one["multipleOf"] or ()), *(other["multipleOf"] or ())]
        case "string":
            merged["parts"] = one["parts"] + other["parts"]
        case "array":
            merged |= merge_arrays(one, other)
        case "object":
            merged |= merge_objects(one, other)
    return merged


def merge_arrays(one: Alternative, other: Alternative) -> Alternative:
    length = max(len(one["prefixItems"]), len(other["prefixItems"]))
    return {
        "prefixItems": [
            intersect(item_schema(one, i), item_schema(other, i)) for i in range(length)
        ],
        "items": intersect(one["items"], other["items"]),
        "minItems": max(one["minItems"], other["minItems"]),
        "maxItems": min(one["maxItems"], other["maxItems"]),
    }


def item_schema(alternative: Alternative, index: int) -> Schema:
    """Return the schema of an item."""
    first = alternative["prefixItems"]
    schema: Schema = first[index] if index < len(first) else alternative["items"]
    return schema


def merge_objects(one: Alternative, other: Alternative) -> Alternative:
    def like(part: Alternative, pattern: str) -> Schema:
        schema: Schema = part["patternProperties"].get(pattern, part["additionalProperties"])
        return schema

    names = {**one["properties"], **other["properties"]}
    patterns = {**one["patternProperties"], **other["patternProperties"]}
    return {
        "properties": {
            name: intersect(property_schema(one, name), property_schema(other, name))
            for name in names
        },
        "patternProperties": {
            pattern: intersect(like(one, pattern), like(other, pattern)) for pattern in patterns
        },
        "additionalProperties": intersect(
            one["additionalProperties"], other["additionalProperties"]
        ),
        "required": [*dict.fromkeys(one["required"] + other["required"])],
        "minProperties": max(one["minProperties"], other["minProperties"]),
        "maxProperties": min(one["maxProperties"], other["maxProperties"]),
    }


def property_schema(alternative: Alternative, name: str) -> Schema:
    """Return the schema of a property's value."""
    if name in alternative["properties"]:
        schema: Schema = alternative["properties"][name]
        return schema
    if any(finds(pattern, name) for pattern in alternative["patternProperties"]):
        return with_patterns(True, name, alternative)
    others: Schema = alternative["additionalProperties"]
    return others


def with_patterns(schema: Schema, name: str, alternative: Alternative) -> Schema:
    """Return ``schema``, combined with the schemas of all patterns that ``name`` matches."""
    for pattern, other in alternative["patternProperties"].items():
        if finds(pattern, name):
            schema = intersect(schema, other)
    return schema
