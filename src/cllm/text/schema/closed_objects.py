"""Forbid properties that a schema with ``properties`` does not name, unless the schema says
otherwise.

The standard allows any other property. Models then invent names, and repeat them; llama.cpp closes
such objects too. The names are collected from a schema together with all schemas composed with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

OPTIONS = ("anyOf", "oneOf")
# Keywords that say which other properties are allowed, or refer to a schema that may say so.
SAYS_WHAT_ELSE = {
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "$dynamicRef",
    "$recursiveRef",
}


@dataclass
class Names:
    """The properties and name patterns that the schemas of one object name, in their order."""

    properties: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    has_properties: bool = False  # the keyword is present, even if it is empty

    def add(self, schema: dict[str, Any]) -> None:
        self.has_properties = self.has_properties or "properties" in schema
        named = [*as_dict(schema.get("properties")), *as_list(schema.get("required"))]
        for keyword in ("dependentRequired", "dependencies"):
            for needed in as_dict(schema.get(keyword)).values():
                named += as_list(needed)
        self.properties |= dict.fromkeys((name for name in named if isinstance(name, str)), True)
        self.patterns |= dict.fromkeys(as_dict(schema.get("patternProperties")), True)


ALONE = Names()


def has_own_options(schema: dict[str, Any]) -> bool:
    """Whether a schema is one choice, whose options can be closed separately."""
    return len(schema.keys() & set(OPTIONS)) == 1


def list_parts(schema: dict[str, Any], *, with_options: bool) -> Iterator[Any]:
    """Yield the schemas within ``schema`` that apply to the same value, without following
    references.
    """
    for keyword in ("allOf", *(OPTIONS if with_options else ())):
        yield from as_list(schema.get(keyword))
    for keyword in ("dependentSchemas", "dependencies"):
        yield from as_dict(schema.get(keyword)).values()
    yield schema.get("then")
    yield schema.get("else")


def close(translated: dict[str, Any], names: Names) -> None:
    """Forbid all properties except ``names``."""
    if not names.has_properties:
        return
    if (
        translated.keys() & {"allOf", "$ref"}
        or names.properties.keys() != translated.get("properties", {}).keys()
    ):
        own = {
            "properties": names.properties,
            "patternProperties": names.patterns,
            "additionalProperties": False,
        }
        translated["allOf"] = [*translated.get("allOf", []), own]
    else:
        translated["additionalProperties"] = False


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
