"""Reduce JSON schemas (draft 2020-12, and what older drafts define differently) to fewer,
enforceable keywords.

Keywords that cannot be enforced are refused or, if only best effort was requested, left out and
named. Apart from that, the result allows nothing that the schema forbids. It may allow less: an
object whose schema has ``properties`` has no others unless the schema says so, and counts are
limited.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from cllm.errors import BadRequest
from cllm.text.schema.closed_objects import (
    ALONE,
    OPTIONS,
    SAYS_WHAT_ELSE,
    Names,
    close,
    has_own_options,
    list_parts,
)
from cllm.text.schema.finite_values import Schema
from cllm.text.schema.places import SchemaPlaces, follow
from cllm.text.schema.repetitions import MAX_EXPANSION, expands_too_far
from cllm.text.schema.string_formats import FORMATS, split_lookaheads

MAX_DEPTH = 40  # schemas within schemas; JSON nests twice as deep, and llguidance reads 128 levels
MAX_SCHEMAS = 10_000
MAX_REPEAT = 10_000  # items, properties or characters that a schema may count
MAX_UNIQUE = 6  # values whose sets are written out

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
NOT_ENFORCED = {"contains", "$recursiveRef"}
CONDITIONAL = {
    "anyOf",
    "oneOf",
    "if",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "contains",
}
# sets in Rust's regular expressions, plain text in ECMAScript's
NOT_PORTABLE = re.compile(r"\[[^\]]*(?:&&|--|~~|\[:)")


class Unenforceable(Exception):
    """A keyword cannot be enforced at its place."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)
        self.where = where
        self.why = why


def enforceable(schema: Any, param: str, unenforced: set[str] | None = None) -> dict[str, Any]:
    """Return the schema with its keywords translated as KEYWORDS says, without annotations.

    Keywords that cannot be enforced are left out and added to ``unenforced``; if that is None, they
    are refused. Raises BadRequest, naming ``param`` and the keyword, for refused keywords, and for
    a schema that is invalid or too large.
    """
    return Translator(schema, param, unenforced).translate()


def invalid_schema(param: str, where: str, why: str) -> BadRequest:
    place = f" at {where[:200]}" if where else ""
    message = f"Invalid schema in '{param}'{place}: {why.rstrip('.')[:300]}."
    return BadRequest(message, param=param, code="invalid_json_schema")


class Translator:
    """Translates one schema. ``where`` is a path in it. All methods may raise Unenforceable."""

    def __init__(self, root: Any, param: str, unenforced: set[str] | None) -> None:
        self._root = root
        self._param = param
        self._unenforced = unenforced
        self._num_schemas = 0
        self._places = SchemaPlaces(root)
        # names of definitions, by the id() of their schema and whether it is closed
        self._names: dict[tuple[int, bool], str] = {}
        self._targets: list[tuple[str, Any, bool]] = []  # definitions still to translate
        # for each schema being translated: the names for its options, and whether it is only a
        # reference
        self._levels: list[tuple[Names | None, bool]] = []

    def translate(self) -> dict[str, Any]:
        root = self._schema(self._root, "", 0)
        definitions: dict[str, Schema] = {}
        while self._targets:
            reference, target, is_closed = self._targets.pop()
            around = ALONE if is_closed else None
            definitions[self._names[id(target), is_closed]] = self._schema(
                target, reference, 0, around
            )
        if isinstance(root, bool):
            root = {} if root else {"allOf": [False]}
        return root | ({"$defs": definitions} if definitions else {})

    def _refuse(self, where: str, why: str) -> NoReturn:
        raise invalid_schema(self._param, where, why)

    def _leave_out(self, keyword: str, where: str, why: str) -> None:
        if self._unenforced is None:
            self._refuse(where, why)
        self._unenforced.add(keyword)

    def _count_part(self, where: str, depth: int) -> None:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            self._refuse(where, f"it has more than {MAX_SCHEMAS} parts")
        if depth > MAX_DEPTH:
            self._refuse(where, f"it is nested deeper than {MAX_DEPTH} levels")

    def _schema(self, schema: Any, where: str, depth: int, around: Names | None = ALONE) -> Schema:
        """Translate ``schema``.

        ``around`` has the names in the enclosing schemas for the same value, if ``schema`` is the
        one that must forbid other properties; it is None if ``schema`` must not forbid them.
        """
        self._count_part(where, depth)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._refuse(where, "a schema must be an object or a boolean")
        for keyword in NOT_ENFORCED & schema.keys():
            self._leave_out(keyword, where, f"'{keyword}' cannot be enforced")
        if "if" in schema and schema.keys() & {"then", "else"}:
            self._leave_out("if", where, "'if' cannot be enforced")
        is_reference = schema.keys() & KEYWORDS.keys() == {"$ref"} and around == ALONE
        names = None if around is None or is_reference else self._collect_names(schema, around)
        self._levels.append((names, is_reference))
        reduced: dict[str, Any] = {}
        # their order sets the order of properties in the text
        for keyword, value in schema.items():
            translate = KEYWORDS.get(keyword)
            if translate is not None:
                place = f"{where}.{keyword}" if where else keyword
                try:
                    new = translate(self, keyword, value, place, depth, schema)
                except Unenforceable as error:
                    self._leave_out(keyword, error.where, error.why)
                    continue
                if "allOf" in new:
                    new["allOf"] = [*reduced.get("allOf", []), *new["allOf"]]
                reduced |= new
        self._levels.pop()
        if names is not None and not has_own_options(schema):
            close(reduced, names)
        return reduced

    def _collect_names(self, schema: dict[str, Any], around: Names) -> Names | None:
        """Return what ``schema``, its parts and ``around`` name; None if other properties are not
        to be forbidden.
        """
        names = Names({**around.properties}, {**around.patterns}, around.has_properties)
        parts: list[Any] = [schema]
        seen: set[int] = set()
        while parts:
            part = parts.pop(0)
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            if part.keys() & SAYS_WHAT_ELSE:
                return None
            names.add(part)
            parts += list_parts(
                part, with_options=part is not schema or not has_own_options(schema)
            )
            # its own translation reports the error
            with contextlib.suppress(BadRequest, Unenforceable):
                parts += [self._resolve(part, "")] if "$ref" in part else []
        least = schema.get("minProperties", 0)
        return None if isinstance(least, int) and least > len(names.properties) else names

    def _mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(where, "it must be an object")
        return value

    def _list(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            self._refuse(where, "it must be a list")
        return value

    # --- keywords: each method returns one keyword's translation, a part of the new schema -------

    def type(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str) or name not in TYPES:
                self._refuse(where, f"there is no type {str(name)[:40]!r}")
        return {keyword: value}

    def constant(self, keyword: str, value: Any, where: str, depth: int, *_: Any) -> dict[str, Any]:
        for one in self._list(value, where) if keyword == "enum" else [value]:
            self._value(one, where, depth)
        return {keyword: value}

    def _value(self, value: Any, where: str, depth: int) -> None:
        self._count_part(where, depth)
        if isinstance(value, (list, dict)):
            for one in value.values() if isinstance(value, dict) else value:
                self._value(one, where, depth + 1)
        elif isinstance(value, float):
            self.number("", value, where)

    def number(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)):
            self._refuse(where, "it must be a number")
        if keyword == "multipleOf" and value <= 0:
            self._refuse(where, "it must be larger than 0")
        return {keyword: value}

    def exclusive(
        self, keyword: str, value: Any, where: str, _: int, schema: dict[str, Any]
    ) -> dict[str, Any]:
        if isinstance(value, bool):  # draft 4: whether the other bound is exclusive
            limit = schema.get(
                {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}[keyword]
            )
            return self.number(keyword, limit, where) if value and limit is not None else {}
        return self.number(keyword, value, where)

    def count(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value != value // 1
            or value < 0
        ):
            self._refuse(where, "it must be a whole number that is not negative")
        if value > MAX_REPEAT and keyword.startswith("min"):
            self._refuse(where, f"more than {MAX_REPEAT} cannot be enforced")
        return {keyword: int(min(value, MAX_REPEAT))}

    def pattern(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            self._refuse(where, "it must be a string")
        if NOT_PORTABLE.search(value):
            raise Unenforceable(where, "'&&', '--', '~~' and '[:' in brackets are not supported")
        if expands_too_far(value):
            raise Unenforceable(
                where, f"its nested repetitions multiply to more than {MAX_EXPANSION}"
            )
        first, *more = split_lookaheads(value)
        return {keyword: first} | ({"allOf": [{keyword: one} for one in more]} if more else {})

    def format(
        self, keyword: str, value: Any, where: str, _: int, schema: dict[str, Any]
    ) -> dict[str, Any]:
        """Translate the format of strings; for other types it is an annotation."""
        types = schema.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return {}
        if not isinstance(value, str):
            self._refuse(where, "it must be a string")
        if value not in FORMATS and "pattern" in schema:  # the pattern describes it
            return {}
        if value not in FORMATS:
            names = ", ".join(sorted(FORMATS))
            raise Unenforceable(
                where, f"the format {str(value)[:40]!r} cannot be enforced, only {names}"
            )
        return {"allOf": [FORMATS[value]]}

    def required(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        if not all(isinstance(name, str) for name in self._list(value, where)):
            self._refuse(where, "it must be a list of strings")
        return {keyword: list(dict.fromkeys(value))}

    def one(self, keyword: str, value: Any, where: str, depth: int, *_: Any) -> dict[str, Any]:
        return {keyword: self._schema(value, where, depth + 1)}

    def all_of(
        self, keyword: str, value: Any, where: str, depth: int, schema: dict[str, Any]
    ) -> dict[str, Any]:
        options = self._list(value, where)
        if not options:
            self._refuse(where, "it must not be empty")
        around = ALONE if keyword == "prefixItems" else None
        if keyword in OPTIONS and has_own_options(schema):
            around = self._levels[-1][0]
        return {
            keyword: [
                self._schema(option, f"{where}[{i}]", depth + 1, around)
                for i, option in enumerate(options)
            ]
        }

    def by_name(self, keyword: str, value: Any, where: str, depth: int, *_: Any) -> dict[str, Any]:
        schemas = self._mapping(value, where).items()
        if keyword == "patternProperties":
            for name, _schema in schemas:
                if len(self.pattern(keyword, name, where)) > 1:
                    raise Unenforceable(
                        where, "look-aheads in the patterns of names are not supported"
                    )
        return {
            keyword: {
                name: self._schema(schema, f"{where}.{name}", depth + 1) for name, schema in schemas
            }
        }

    def items(
        self, keyword: str, value: Any, where: str, depth: int, schema: dict[str, Any]
    ) -> dict[str, Any]:
        if not isinstance(value, list):
            return self.one(keyword, value, where, depth)
        rest = schema.get("additionalItems", True)  # until 2019-09
        return self.all_of("prefixItems", value, where, depth, {}) | self.one(
            "items", rest, where, depth
        )

    def negation(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        if value not in (True, {}, False):
            raise Unenforceable(where, f"'{keyword}' cannot be enforced")
        return {} if value is False else {"allOf": [False]}

    def names(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        """Translate the names of properties to a list of them, or to a pattern that they match."""
        names = self._follow(value, where)
        if isinstance(names, bool):
            return {} if names else {"allOf": [{"maxProperties": 0}]}
        said = self._mapping(names, where).keys() & KEYWORDS.keys()
        if names.get("type", "string") == "string":
            said -= {"type"}
        allowed: dict[str, Any] = {"additionalProperties": False}
        if said in ({"enum"}, {"const"}):
            (word,) = said
            self.constant(word, names[word], where, 0)
            listed = names[word] if word == "enum" else [names[word]]
            allowed["properties"] = {name: True for name in listed if isinstance(name, str)}
        elif said and said <= {"minLength", "maxLength"}:
            low, high = (
                self.count(word, names[word], where)[word] if word in names else ""
                for word in LENGTHS
            )
            allowed["patternProperties"] = {f"^(?s:.){{{low or 0},{high}}}$": True}
        elif said == {"pattern"} or (
            said == {"format"} and FORMATS.get(str(names["format"]), {}).keys() == {"pattern"}
        ):
            pattern = names["pattern"] if "pattern" in said else FORMATS[names["format"]]["pattern"]
            if not isinstance(pattern, str):
                self._refuse(where, "its pattern must be a string")
            allowed |= self.by_name("patternProperties", {pattern: True}, where, 0)
        elif said:
            raise Unenforceable(
                where,
                f"'{keyword}' can be enforced for 'enum', 'const', 'pattern' or lengths alone",
            )
        else:
            return {}
        return {"allOf": [allowed]}

    def unique(
        self, keyword: str, value: Any, where: str, depth: int, schema: dict[str, Any]
    ) -> dict[str, Any]:
        """Translate to all sets of the possible items, if these are few; each set is allowed in one
        order only.
        """
        items = self._follow(schema.get("items"), where)
        listed = (
            items.get("enum", [items["const"]] if "const" in items else None)
            if isinstance(items, dict)
            else None
        )
        if value is False or schema.get("maxItems") in (0, 1):
            return {}
        if not isinstance(listed, list) or len(listed) > MAX_UNIQUE or "prefixItems" in schema:
            raise Unenforceable(
                where,
                f"'{keyword}' can be enforced only where 'items' has an 'enum' of at most "
                f"{MAX_UNIQUE} values",
            )
        # 1, 1.0 and True are equal here
        listed = [one for i, one in enumerate(listed) if one not in listed[:i]]
        sets = itertools.chain(*(itertools.combinations(listed, n) for n in range(len(listed) + 1)))
        options = [
            {"prefixItems": [{"const": one} for one in some], "items": False, "minItems": len(some)}
            for some in sets
        ]
        self.constant("enum", listed, where, depth)
        return {"allOf": [{"anyOf": options}]}

    def dependent(
        self, keyword: str, value: Any, where: str, depth: int, *_: Any
    ) -> dict[str, Any]:
        """Translate to a choice: the property is absent, or what it requires holds."""
        parts = []
        for name, needed in self._mapping(value, where).items():
            place = f"{where}.{name}"
            if isinstance(needed, list) or keyword == "dependentRequired":
                then: Schema = self.required("required", needed, place)
            else:
                then = self._schema(needed, place, depth + 1, None)
            parts.append(
                {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, then]}]}
            )
        return {"allOf": parts} if parts else {}

    def unevaluated(
        self, keyword: str, value: Any, where: str, depth: int, schema: dict[str, Any]
    ) -> dict[str, Any]:
        """Translate to 'additionalProperties' or 'items', as if adjacent and referenced schemas
        were one.
        """
        seen: list[Any] = []
        parts = [schema]
        while parts:
            part = parts.pop()
            if not isinstance(part, dict) or any(part is one for one in seen):
                continue
            seen.append(part)
            if part.keys() & CONDITIONAL:
                raise Unenforceable(
                    where,
                    f"'{keyword}' cannot be enforced beside {min(part.keys() & CONDITIONAL)!r}",
                )
            parts += self._list(part.get("allOf") or [], where)
            if "$ref" in part:
                parts.append(self._resolve(part, where))
            self._list(part.get("prefixItems") or [], where)
            for word in ("properties", "patternProperties"):
                self._mapping(part.get(word) or {}, where)
        rest = self._schema(value, where, depth + 1)
        others = [one for one in seen if one is not schema]
        if keyword == "unevaluatedProperties":
            if any("additionalProperties" in one for one in seen) or any(
                keyword in one for one in others
            ):
                return {}
            known = {name: True for one in seen for name in one.get("properties") or ()}
            like = {name: True for one in seen for name in one.get("patternProperties") or ()}
            return {
                "allOf": [
                    {"properties": known, "patternProperties": like, "additionalProperties": rest}
                ]
            }
        if any("items" in one for one in seen) or any(keyword in one for one in others):
            return {}
        longest = max(len(one.get("prefixItems") or ()) for one in seen)
        return {"allOf": [{"prefixItems": [True] * longest, "items": rest}]}

    def reference(
        self, keyword: str, value: Any, where: str, _: int, schema: dict[str, Any]
    ) -> dict[str, Any]:
        target = self._resolve(schema, where, keyword)
        key = id(target), self._levels[-1][1]
        if key not in self._names:
            self._names[key] = str(len(self._names))
            self._targets.append((str(value), target, key[1]))
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _resolve(self, schema: dict[str, Any], where: str, keyword: str = "$ref") -> Any:
        """Return what ``schema`` refers to."""
        reference = schema[keyword]
        if not isinstance(reference, str):
            self._refuse(where, "it must be a string")
        if isinstance(schema.get("$id"), str) and schema is not self._root:
            raise Unenforceable(
                where, f"'$id' beside '{keyword}' is not supported: drafts differ in what it means"
            )
        if keyword == "$dynamicRef" and self._places.num_dynamic[reference.rpartition("#")[2]] > 1:
            why = "'$dynamicRef' cannot be enforced if there is more than one such '$dynamicAnchor'"
            raise Unenforceable(where, why)
        place = self._places.find(schema, reference)
        if place is None:
            why = (
                f"only references within the schema are followed, and {reference[:100]!r} is "
                f"not in it"
            )
            raise Unenforceable(where, why)
        try:
            return follow(*place)
        except LookupError:
            self._refuse(where, f"there is nothing at {reference[:100]!r}")

    def _follow(self, option: Any, where: str) -> Any:
        """Return the target of ``option`` if that is only a reference, else ``option`` itself."""
        seen: list[Any] = []
        while (
            isinstance(option, dict)
            and "$ref" in option
            and not option.keys() & KEYWORDS.keys() - {"$ref"}
        ):
            if option["$ref"] in seen:
                self._refuse(where, "it refers to itself")
            seen.append(option["$ref"])
            option = self._resolve(option, where)
        return option


T = Translator
LENGTHS = ("minLength", "maxLength")
KEYWORDS: dict[str, Callable[..., dict[str, Any]]] = {
    "type": T.type,
    "const": T.constant,
    "enum": T.constant,
    "$ref": T.reference,
    "$dynamicRef": T.reference,
    "allOf": T.all_of,
    "anyOf": T.all_of,
    "oneOf": T.all_of,
    "not": T.negation,
    "properties": T.by_name,
    "patternProperties": T.by_name,
    "additionalProperties": T.one,
    "propertyNames": T.names,
    "dependencies": T.dependent,
    "dependentRequired": T.dependent,
    "dependentSchemas": T.dependent,
    "unevaluatedProperties": T.unevaluated,
    "required": T.required,
    "minProperties": T.count,
    "maxProperties": T.count,
    "items": T.items,
    "prefixItems": T.all_of,
    "uniqueItems": T.unique,
    "unevaluatedItems": T.unevaluated,
    "minItems": T.count,
    "maxItems": T.count,
    "minLength": T.count,
    "maxLength": T.count,
    "pattern": T.pattern,
    "format": T.format,
    "minimum": T.number,
    "maximum": T.number,
    "exclusiveMinimum": T.exclusive,
    "exclusiveMaximum": T.exclusive,
    "multipleOf": T.number,
}

ASSERTIONS = KEYWORDS.keys() | NOT_ENFORCED | {"if"}  # all keywords that constrain a value
