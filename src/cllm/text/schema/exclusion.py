"""Checks whether alternatives of a schema exclude each other, and makes them do so.

The options of ``oneOf`` must exclude each other, because a value may satisfy only one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import Any

from cllm.text.schema.alternatives import Alternative, item_schema, merge, property_schema
from cllm.text.schema.finite_values import Schema
from cllm.text.schema.lark import find_term_fault, json_leaf
from cllm.text.schema.number_terms import allowed_constants, number_terminal, read_bounds

MAX_DEPTH = 4  # of properties and items that are compared
MAX_PATTERNS = 200  # pairs of patterns that are compared, about 2 ms each


class Exclusion:
    """Compares the alternatives of one schema."""

    def __init__(self, alternatives_of: Callable[[Schema], list[Alternative]]) -> None:
        """``alternatives_of`` returns the alternatives of a schema, without references."""
        self._alternatives_of = alternatives_of
        self._known: dict[tuple[int, Any], tuple[Any, list[Alternative]]] = {}
        self._num_patterns = 0

    def separate(self, alternatives: list[Alternative]) -> list[Alternative] | None:
        """Return ``alternatives``, changed so that those of different options exclude each other;
        None if that is impossible.

        An object that lacks a name which another option requires may be forbidden that name.
        """
        separated = [*alternatives]
        for i, j in combinations(range(len(alternatives)), 2):
            one, other = alternatives[i], alternatives[j]
            if is_same_option(one, other) or self.are_apart(one, other):
                continue
            narrowed = [
                exclude_name(other, one, separated[i]),
                exclude_name(one, other, separated[j]),
            ]
            if None in narrowed:
                return None
            separated[i], separated[j] = (part for part in narrowed if part)
        return separated

    def are_apart(self, one: Alternative, other: Alternative, depth: int = 0) -> bool:
        """Whether it is certain that no value satisfies both."""
        kinds = {one["type"], other["type"]}
        if len(kinds) > 1 and kinds != {"integer", "number"}:
            return True
        match one["type"]:
            case "object":
                names = dict.fromkeys([*one["required"], *other["required"]])
                return (
                    max(one["minProperties"], other["minProperties"], len(names))
                    > min(one["maxProperties"], other["maxProperties"])
                ) or any(self._exclude_each_other(one, other, name, depth) for name in names)
            case "array":
                low = max(one["minItems"], other["minItems"])
                lengths = [len(one["prefixItems"]), len(other["prefixItems"])]
                return low > min(one["maxItems"], other["maxItems"]) or any(
                    self._exclude_each_other(one, other, i, depth)
                    for i in range(min(low, max(lengths) + 1))
                )
        both = merge(one | {"options": {}}, other | {"options": {}})
        return both is None or self._is_empty(both)

    def _exclude_each_other(
        self, one: Alternative, other: Alternative, place: str | int, depth: int
    ) -> bool:
        """Whether the alternatives for one property or item exclude each other."""
        return depth < MAX_DEPTH and all(
            self.are_apart(first, second, depth + 1)
            for first, second in product(self._values(one, place), self._values(other, place))
        )

    def _values(self, part: Alternative, place: str | int) -> list[Alternative]:
        key = id(part), place
        if key not in self._known:
            schema = (
                property_schema(part, place) if isinstance(place, str) else item_schema(part, place)
            )
            self._known[key] = part, self._alternatives_of(schema)
        return self._known[key][1]

    def _is_empty(self, part: Alternative) -> bool:
        """Whether it is certain that a scalar alternative allows no value."""
        match part["type"]:
            case "integer" | "number" if "in" in part:
                return not allowed_constants(part)
            case "integer" | "number":
                bounds = read_bounds(part)
                return number_terminal(*bounds, integer=part["type"] == "integer") is None
            case "string" if part["parts"] and part.get("in") != []:
                return self._is_empty_string(part)
        return part.get("in") == []

    def _is_empty_string(self, part: Alternative) -> bool:
        self._num_patterns += 1
        if self._num_patterns > MAX_PATTERNS:
            return False
        values = {"enum": part["in"]} if "in" in part else {}
        leaf = {"type": "string", **values, "allOf": part["parts"]}
        return "Unsatisfiable" in find_term_fault(json_leaf(leaf))


def is_same_option(one: Alternative, other: Alternative) -> bool:
    """Whether two alternatives belong to the same option of every ``oneOf`` that both satisfy."""
    options = one.get("options", {})
    return all(
        options.get(choice, option) == option for choice, option in other.get("options", {}).items()
    )


def exclude_name(other: Alternative, one: Alternative, narrowed: Alternative) -> Alternative | None:
    """Return ``narrowed``, derived from ``one``, without a name that only ``other`` requires; None
    if there is no such name.
    """
    names = [name for name in other.get("required", ()) if name not in one.get("required", ())]
    if not names:
        return None
    return narrowed | {"properties": narrowed["properties"] | {names[0]: False}}
