"""Repair schemas of arguments whose keywords have values that JSON Schema does not allow.

Clients send the type names of other languages, and keywords in the wrong places. Other servers
accept these, so only strict functions need a valid schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cllm.text.schema.faults import BY_NAME, LISTS, SINGLE
from cllm.text.schema.json_schema import TYPES
from cllm.text.schema.places import SchemaPlaces, follow

NAMES = {
    "null": ("none", "nil", "nonetype"),
    "boolean": ("bool",),
    "integer": ("int", "int32", "int64", "long", "short"),
    "number": ("float", "double", "decimal", "num", "numeric"),
    "string": ("str", "text", "char", "date", "datetime", "date-time", "file", "uuid", "enum"),
    "array": ("list", "tuple", "set", "arr", "sequence"),
    "object": ("dict", "dictionary", "map", "mapping", "struct", "hash", "hashmap", "json"),
}
TYPE_OF = {alias: name for name, aliases in NAMES.items() for alias in (name, *aliases)}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


IS_VALID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("minimum", "maximum"), is_number),
    "multipleOf": lambda value: is_number(value) and value > 0,
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        lambda value: isinstance(value, bool) or is_number(value),
    ),
    **{
        f"{end}{what}": is_count
        for end in ("min", "max")
        for what in ("Length", "Items", "Properties")
    },
    **dict.fromkeys(("pattern", "format"), lambda value: isinstance(value, str)),
}


def repair(schema: dict[str, Any], dropped: set[str]) -> dict[str, Any]:
    """Return ``schema`` with type names of JSON Schema, and without keywords whose values are
    invalid; these are added to ``dropped``.
    """
    return Repair(SchemaPlaces(schema), dropped).object(schema)


class Repair:
    """Repairs the parts of one schema, in which ``places`` finds references."""

    def __init__(self, places: SchemaPlaces, dropped: set[str]) -> None:
        self._places = places
        self._dropped = dropped

    def object(self, schema: dict[str, Any]) -> dict[str, Any]:
        repaired: dict[str, Any] = {}
        for keyword, value in schema.items():
            new = self._keyword(schema, keyword, value)
            if new is not None:
                repaired[keyword] = new
            elif value is not None or keyword == "type":
                self._dropped.add(keyword)
        return repaired

    def _part(self, schema: Any) -> Any:
        if isinstance(schema, dict):
            return self.object(schema)
        return schema if isinstance(schema, bool) else True

    def _keyword(self, schema: dict[str, Any], keyword: str, value: Any) -> Any:
        """Return a valid value of ``keyword``; None if there is none."""
        if keyword == "type":
            return repair_type(value)
        if keyword in BY_NAME:
            if not isinstance(value, dict):
                return None
            return {name: self._part(part) for name, part in value.items()}
        if keyword in LISTS or (keyword == "items" and isinstance(value, list)):
            parts = value if isinstance(value, list) else []
            return [self._part(part) for part in parts] or None
        if keyword in SINGLE:
            return self._part(value) if isinstance(value, (dict, bool)) else None
        if keyword in ("required", "enum"):
            values = [value] if isinstance(value, str) else value
            if not isinstance(values, list):
                return None
            return [one for one in values if keyword == "enum" or isinstance(one, str)]
        if keyword == "$ref" and not (isinstance(value, str) and self._leads_somewhere(schema)):
            return None
        is_valid = IS_VALID.get(keyword)
        return value if is_valid is None or is_valid(value) else None

    def _leads_somewhere(self, schema: dict[str, Any]) -> bool:
        place = self._places.find(schema, schema["$ref"])
        try:
            return place is None or follow(*place) is not None
        except LookupError:
            return False


def repair_type(value: Any) -> str | list[str] | None:
    """Return the JSON type that ``value`` means, with any case or a parameter as in list[str]; None
    for any.
    """
    if isinstance(value, list):
        types = [repair_type(one) for one in value]
        names = [name for name in types if isinstance(name, str)]
        return [*dict.fromkeys(names)] if names and len(names) == len(types) else None
    if not isinstance(value, str) or value in TYPES:
        return value if isinstance(value, str) else None
    return TYPE_OF.get(value.partition("[")[0].partition("<")[0].strip().lower())
