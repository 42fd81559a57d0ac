"""Find errors in the schema of a function's arguments."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType
from typing import Any

from cllm.text.schema.json_schema import MAX_DEPTH, TYPES
from cllm.text.schema.places import MAY_BE_BY_NAME

# Keywords whose values, if present, must be schemas by name, a list of schemas, or one schema.
BY_NAME = MAY_BE_BY_NAME - {"dependencies"}  # which may also be lists of names
LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
SINGLE = {
    "items",
    "additionalProperties",
    "additionalItems",
    "not",
    "contains",
    "propertyNames",
    "if",
    "then",
    "else",
}


def find_argument_fault(schema: dict[str, Any]) -> str:
    """Return why ``schema`` is not a valid schema of a function's arguments, or ""."""
    kind = schema.get("type")
    if kind is not None and "object" not in (kind if isinstance(kind, list) else [kind]):
        return f"the type of a function's arguments must be 'object', not {str(kind)[:40]!r}"
    return find_fault(schema)


def find_fault(schema: Any, where: str = "", depth: int = 0) -> str:
    """Return why ``schema`` is not a valid schema, or "". Unknown keywords are accepted."""
    at = f" at {where[:100]}" if where else ""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict):
        return f"a schema must be an object or a boolean{at}"
    if depth > MAX_DEPTH:
        return f"it is nested deeper than {MAX_DEPTH} levels"
    kind, required = schema.get("type"), schema.get("required")
    for name in kind if isinstance(kind, list) else [] if kind is None else [kind]:
        if not (isinstance(name, str) and name in TYPES):
            return f"there is no type {str(name)[:40]!r}{at}"
    if not (
        required is None
        or (isinstance(required, list) and all(isinstance(name, str) for name in required))
    ):
        return f"'required' must be a list of strings{at}"
    if not isinstance(schema.get("enum", []), (list, NoneType)):
        return f"'enum' must be a list{at}"
    for keyword, value in schema.items():
        if value is None:
            continue
        parts: Iterable[tuple[Any, Any]] = [("", value)] if keyword in SINGLE else []
        if keyword in BY_NAME:
            if not isinstance(value, dict):
                return f"'{keyword}' must be an object{at}"
            parts = value.items()
        elif keyword in LISTS or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                return f"'{keyword}' must be a list{at}"
            parts = enumerate(value)
        for name, part in parts:
            place = f"{where}.{keyword}.{name}".strip(".")
            if fault := find_fault(part, place, depth + 1):
                return fault
    return ""
