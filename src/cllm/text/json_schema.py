"""JSON schemas (draft 2020-12, and what older drafts say otherwise) to those that llguidance enforces, all of them.

llguidance enforces most keywords and refuses others; it ignores what it does not know, and takes some that its grammar
cannot keep. What comes out here has only keywords that hold; for all else there is a BadRequest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, NoReturn
from urllib.parse import unquote

from cllm.errors import BadRequest

MAX_DEPTH = 40  # schemas within schemas; JSON nests twice as deep, and llguidance reads 128 levels
MAX_SCHEMAS = 10_000
MAX_REPEAT = 10_000  # items, properties or characters that a schema may count
LARGEST = 2**53  # the integers up to here are what they are in floating point

Schema = dict[str, Any] | bool

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
# Keywords that cannot be enforced, and the values with which they say nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "contains": (),
    "propertyNames": (True, {}),
    "uniqueItems": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
NOT_PORTABLE = re.compile(r"\[[^\]]*(?:&&|--|~~|\[:)")  # sets in Rust's regular expressions, characters in ECMAScript's


def enforceable(schema: Any, param: str) -> dict[str, Any]:
    """A schema that allows the same values, as llguidance wants it, without annotations.

    Raises BadRequest, naming ``param`` and the keyword, for a schema that cannot be enforced, that is none, that is too
    large, or that no finite value satisfies.
    """
    return Translator(schema, param).translate()


class Translator:
    """One schema on its way. ``where`` is the place in it, as a path."""

    def __init__(self, root: Any, param: str) -> None:
        self._root = root
        self._param = param
        self._num_schemas = 0
        self._names: dict[str, str] = {}  # of the definitions, by what refers to them
        self._targets: list[tuple[str, Any]] = []  # definitions that are not translated yet

    def translate(self) -> dict[str, Any]:
        root = self._schema(self._root, "", 0)
        definitions: dict[str, Schema] = {}
        while self._targets:
            reference, target = self._targets.pop()
            definitions[self._names[reference]] = self._schema(target, reference, 0)
        if not has_end(root, ended(definitions)):
            self._refuse("", "no finite value satisfies it")
        if isinstance(root, bool):
            return {}
        return root | ({"$defs": definitions} if definitions else {})

    def _refuse(self, where: str, why: str) -> NoReturn:
        place = f" at {where[:200]}" if where else ""
        raise BadRequest(
            f"Invalid schema in '{self._param}'{place}: {why}.", param=self._param, code="invalid_json_schema"
        )

    def _schema(self, schema: Any, where: str, depth: int) -> Schema:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            self._refuse(where, f"it has more than {MAX_SCHEMAS} parts")
        if depth > MAX_DEPTH:
            self._refuse(where, f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._refuse(where, "a schema must be an object or a boolean")
        for keyword, harmless in REFUSED.items():
            if keyword in schema and not any(schema[keyword] == value for value in harmless):
                self._refuse(where, f"'{keyword}' cannot be enforced")
        if "if" in schema and schema.keys() & {"then", "else"}:
            self._refuse(where, "'if' cannot be enforced")
        if depth and isinstance(schema.get("$id"), str):
            self._refuse(where, "'$id' within a schema is not supported")
        found: dict[str, Any] = {}
        for keyword, value in schema.items():  # their order is that of the properties in the text
            translate = KEYWORDS.get(keyword)
            if translate is not None:
                place = f"{where}.{keyword}" if where else keyword
                found |= translate(self, keyword, value, place, depth, schema)
        if found.get("minProperties", 0) > len(found.get("required", ())) + 1:
            self._refuse(where, "'minProperties' cannot be enforced beyond one more than 'required' names")
        return found

    def _mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse(where, "it must be an object")
        return value

    def _list(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            self._refuse(where, "it must be a list")
        return value

    # --- keywords: what becomes of one, as a part of the new schema --------------------------------------------------

    def type(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        for name in value if isinstance(value, list) else [value]:
            if name not in TYPES:
                self._refuse(where, f"there is no type {str(name)[:40]!r}")
        return {keyword: value}

    def constant(self, keyword: str, value: Any, where: str, depth: int, *_: Any) -> dict[str, Any]:
        for one in self._list(value, where) if keyword == "enum" else [value]:
            self._value(one, where, depth)
        return {keyword: value}

    def _value(self, value: Any, where: str, depth: int) -> None:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            self._refuse(where, f"it has more than {MAX_SCHEMAS} parts")
        if depth > MAX_DEPTH:
            self._refuse(where, f"it is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, (list, dict)):
            for one in value.values() if isinstance(value, dict) else value:
                self._value(one, where, depth + 1)
        elif isinstance(value, (int, float)):
            self.number("", value, where)

    def number(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        if not isinstance(value, (int, float)):
            self._refuse(where, "it must be a number")
        if abs(value) > LARGEST:
            self._refuse(where, f"numbers beyond {LARGEST} cannot be enforced exactly")
        return {keyword: value}

    def exclusive(self, keyword: str, value: Any, where: str, _: int, schema: dict[str, Any]) -> dict[str, Any]:
        if isinstance(value, bool):  # draft 4: it says of the other one that it is exclusive
            limit = schema.get({"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}[keyword])
            return self.number(keyword, limit, where) if value and limit is not None else {}
        return self.number(keyword, value, where)

    def count(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or value < 0:
            self._refuse(where, "it must be a whole number that is not negative")
        if value > MAX_REPEAT:
            self._refuse(where, f"more than {MAX_REPEAT} cannot be enforced")
        return {keyword: int(value)}

    def pattern(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        if not isinstance(value, str):
            self._refuse(where, "it must be a string")
        if NOT_PORTABLE.search(value):
            self._refuse(where, "'&&', '--', '~~' and '[:' in brackets are not supported")
        return {keyword: value}

    def format(self, keyword: str, value: Any, where: str, _: int, schema: dict[str, Any]) -> dict[str, Any]:
        """Of strings; of anything else it is an annotation."""
        types = schema.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return {}
        if value not in FORMATS:
            names = ", ".join(sorted(FORMATS))
            self._refuse(where, f"the format {str(value)[:40]!r} cannot be enforced, only {names}")
        return {keyword: value}

    def required(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        if not all(isinstance(name, str) for name in self._list(value, where)):
            self._refuse(where, "it must be a list of strings")
        return {keyword: list(dict.fromkeys(value))}

    def one(self, keyword: str, value: Any, where: str, depth: int, *_: Any) -> dict[str, Any]:
        return {keyword: self._schema(value, where, depth + 1)}

    def all_of(self, keyword: str, value: Any, where: str, depth: int, *_: Any) -> dict[str, Any]:
        options = self._list(value, where)
        if not options:
            self._refuse(where, "it must not be empty")
        if keyword == "oneOf":  # that they exclude each other is not looked for behind a reference
            options = [self._followed(option, where) for option in options]
        return {keyword: [self._schema(option, f"{where}[{i}]", depth + 1) for i, option in enumerate(options)]}

    def by_name(self, keyword: str, value: Any, where: str, depth: int, *_: Any) -> dict[str, Any]:
        schemas = self._mapping(value, where).items()
        if keyword == "patternProperties":
            for name, _schema in schemas:
                self.pattern(keyword, name, where)
        return {keyword: {name: self._schema(schema, f"{where}.{name}", depth + 1) for name, schema in schemas}}

    def items(self, keyword: str, value: Any, where: str, depth: int, schema: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value, list):
            return self.one(keyword, value, where, depth)
        rest = schema.get("additionalItems", True)  # until 2019-09
        return self.all_of("prefixItems", value, where, depth) | self.one("items", rest, where, depth)

    def reference(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        target = self._resolve(value, where)
        if value not in self._names:
            self._names[value] = str(len(self._names))
            self._targets.append((value, target))
        return {keyword: f"#/$defs/{self._names[value]}"}

    def _resolve(self, reference: Any, where: str) -> Any:
        if not isinstance(reference, str):
            self._refuse(where, "it must be a string")
        if not reference.startswith("#"):
            self._refuse(where, "only references within the schema, which begin with '#', are followed")
        target = self._root
        path = unquote(reference[1:])
        if path and not path.startswith("/"):
            return self._anchored(path, where)
        for part in path.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                self._refuse(where, f"there is nothing at {reference[:100]!r}")
        return target

    def _anchored(self, name: str, where: str) -> Any:
        for definitions in ("$defs", "definitions"):
            for schema in (self._root.get(definitions) or {}).values():
                if isinstance(schema, dict) and name in (schema.get("$anchor"), schema.get("$dynamicAnchor")):
                    return schema
        return self._refuse(where, f"there is no '$anchor' {name[:100]!r} among the definitions")

    def _followed(self, option: Any, where: str) -> Any:
        """What stands behind ``option`` if it is nothing but a reference."""
        seen: set[str] = set()
        while isinstance(option, dict) and "$ref" in option and not option.keys() & KEYWORDS.keys() - {"$ref"}:
            if option["$ref"] in seen:
                self._refuse(where, "it refers to itself")
            seen.add(option["$ref"])
            option = self._resolve(option["$ref"], where)
        return option


T = Translator
KEYWORDS: dict[str, Callable[..., dict[str, Any]]] = {
    "type": T.type,
    "const": T.constant,
    "enum": T.constant,
    "$ref": T.reference,
    "allOf": T.all_of,
    "anyOf": T.all_of,
    "oneOf": T.all_of,
    "properties": T.by_name,
    "patternProperties": T.by_name,
    "additionalProperties": T.one,
    "required": T.required,
    "minProperties": T.count,
    "maxProperties": T.count,
    "items": T.items,
    "prefixItems": T.all_of,
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


# What the values of keywords must be, if they are there: schemas by name, schemas in a list, a schema.
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
SINGLE = {"items", "additionalProperties", "additionalItems", "not", "contains", "propertyNames", "if", "then", "else"}


def fault_of(schema: Any, where: str = "", depth: int = 0) -> str:
    """Why this is no schema, or "". For those that nothing has to enforce: which keywords there are is not asked."""
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
    if not (required is None or (isinstance(required, list) and all(isinstance(name, str) for name in required))):
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
            if fault := fault_of(part, place, depth + 1):
                return fault
    return ""


def ended(definitions: dict[str, Schema]) -> set[str]:
    """The definitions that a finite value can satisfy, as references."""
    known: set[str] = set()
    while True:
        new = {f"#/$defs/{name}" for name, schema in definitions.items() if has_end(schema, known)}
        if new <= known:
            return known
        known = new


def has_end(schema: Schema, known: set[str]) -> bool:
    """Whether a text that follows ``schema`` can come to an end, if those that refer to ``known`` can."""
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
