"""Find the targets of a schema's references."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import unquote, urljoin

MAY_BE_BY_NAME = {
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
}
CONSTANTS = {"const", "enum", "default", "examples"}  # keywords whose values are not schemas

MAX_DIGITS = 10  # of an index; Python refuses to read thousands


class SchemaPlaces:
    """The possible targets of a schema's references, and the base URIs of these."""

    def __init__(self, root: Any) -> None:
        self.schemas: dict[str, Any] = {"": root}  # by '$id', and by '$id#$anchor'
        self.bases: dict[int, str] = {}  # the base URI of references, by the id() of their schema
        self.num_dynamic: Counter[str] = Counter()
        waiting = [(root, "", False)]
        while waiting:
            schema, base, has_names = waiting.pop()
            if isinstance(schema, dict) and not has_names:
                base = self._enter(schema, base)
            if isinstance(schema, dict):
                waiting += [
                    (value, base, keyword in MAY_BE_BY_NAME and not has_names)
                    for keyword, value in schema.items()
                    if has_names or keyword not in CONSTANTS
                ]
            elif isinstance(schema, list):
                waiting += [(value, base, False) for value in schema]

    def _enter(self, schema: dict[str, Any], base: str) -> str:
        own, anchors = schema.get("$id"), [schema.get("$anchor"), schema.get("$dynamicAnchor")]
        if isinstance(own, str) and own.startswith("#"):  # until draft 7
            anchors.append(own[1:])
        elif isinstance(own, str):
            base = join_uris(base, own).rstrip("#")
            self.schemas[base] = schema
        for anchor in anchors:
            if isinstance(anchor, str):
                self.schemas[f"{base}#{anchor}"] = schema
        if isinstance(schema.get("$dynamicAnchor"), str):
            self.num_dynamic[schema["$dynamicAnchor"]] += 1
        self.bases[id(schema)] = base
        return base

    def find(self, schema: dict[str, Any], reference: str) -> tuple[Any, str] | None:
        """Return the schema that a reference of ``schema`` names, and the JSON pointer from there
        ("" if none); None if it is not in the root.
        """
        base = self.bases.get(id(schema), "")
        address, _, fragment = (
            base + reference if reference.startswith("#") else join_uris(base, reference)
        ).partition("#")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            address, fragment = f"{address}#{fragment}", ""
        return (self.schemas[address], fragment) if address in self.schemas else None


def join_uris(base: str, reference: str) -> str:
    """Return the URI of a reference; the reference itself if it is no URI."""
    try:
        return urljoin(base, reference)
    except ValueError:  # such as an IPv6 address that is not closed
        return reference


def follow(target: Any, pointer: str) -> Any:
    """Return the value to which a JSON pointer from ``target`` leads. Raises LookupError."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target[key]
        elif isinstance(target, list) and key.isdecimal() and len(key) < MAX_DIGITS:
            target = target[int(key)]
        else:
            raise LookupError(key)
    return target
