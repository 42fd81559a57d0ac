"""Find the targets of a schema's references."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import urljoin

BY_NAME = {
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
}
CONSTANTS = {"const", "enum", "default", "examples"}  # keywords whose values are not schemas


class Places:
    """The possible targets of a schema's references, and what they are relative to."""

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
                    (value, base, keyword in BY_NAME and not has_names)
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
            base = urljoin(base, own).rstrip("#")
            self.schemas[base] = schema
        for anchor in anchors:
            if isinstance(anchor, str):
                self.schemas[f"{base}#{anchor}"] = schema
        if isinstance(schema.get("$dynamicAnchor"), str):
            self.num_dynamic[schema["$dynamicAnchor"]] += 1
        self.bases[id(schema)] = base
        return base
