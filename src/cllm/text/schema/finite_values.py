"""Checks whether a finite value can satisfy a schema that refers to itself."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any] | bool


def add_ends(definitions: dict[str, Schema]) -> set[str]:
    """Return references to the definitions that a finite value can satisfy."""
    known: set[str] = set()
    while True:
        new = {f"#/$defs/{name}" for name, schema in definitions.items() if has_end(schema, known)}
        if new <= known:
            return known
        known = new


def has_end(schema: Schema, known: set[str]) -> bool:
    """Return whether a finite value can satisfy ``schema``.

    Finite values can satisfy the references in ``known``.
    """
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"] not in known:
        return False
    if not all(has_end(part, known) for part in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(has_end(option, known) for option in schema[keyword]):
            return False
    types = schema.get("type", ["null", "object", "array"])
    if set(types if isinstance(types, list) else [types]) - {"object", "array"}:
        return True
    if "object" in types:
        properties = schema.get("properties", {})
        if all(has_end(properties.get(name, True), known) for name in schema.get("required", ())):
            return True
    if "array" in types:
        prefix, needed = schema.get("prefixItems", []), schema.get("minItems", 0)
        if all(has_end(item, known) for item in prefix[:needed]):
            return needed <= len(prefix) or has_end(schema.get("items", True), known)
    return False
