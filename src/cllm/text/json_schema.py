"""JSON schemas (draft 2020-12, and what older drafts say otherwise) to those that llguidance enforces, all of them.

llguidance enforces most keywords and refuses others; it ignores what it does not know, and takes some that its grammar
cannot keep. What comes out here has only keywords that hold; for all else there is a BadRequest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import unquote, urljoin

from cllm.errors import BadRequest
from cllm.text.repetitions import MAX_EXPANSION, expands_too_far
from cllm.text.string_formats import FORMATS, patterns

MAX_DEPTH = 40  # schemas within schemas; JSON nests twice as deep, and llguidance reads 128 levels
MAX_SCHEMAS = 10_000
MAX_REPEAT = 10_000  # items, properties or characters that a schema may count
MAX_UNIQUE = 6  # values of which sets are written out
LARGEST = 2**53  # the integers up to here are what they are in floating point
WIDEST = 2**63 - 1024  # the largest number of floating point that is an integer of 64 bits
UPWARDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}

Schema = dict[str, Any] | bool

TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
# Keywords that cannot be enforced, and the values with which they say nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "contains": (),
    "$recursiveRef": (),
}
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
CONSTANTS = {"const", "enum", "default", "examples"}  # keywords with anything but schemas
CONDITIONAL = {"anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "$dynamicRef", "contains"}
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
        self._places = Places(root)
        self._names: dict[int, str] = {}  # of the definitions, by the ids of the schemas that are referred to
        self._targets: list[tuple[str, Any]] = []  # definitions that are not translated yet

    def translate(self) -> dict[str, Any]:
        root = self._schema(self._root, "", 0)
        definitions: dict[str, Schema] = {}
        while self._targets:
            reference, target = self._targets.pop()
            definitions[self._names[id(target)]] = self._schema(target, reference, 0)
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
        found: dict[str, Any] = {}
        for keyword, value in schema.items():  # their order is that of the properties in the text
            translate = KEYWORDS.get(keyword)
            if translate is not None:
                place = f"{where}.{keyword}" if where else keyword
                new = translate(self, keyword, value, place, depth, schema)
                if "allOf" in new:
                    new["allOf"] = [*found.get("allOf", []), *new["allOf"]]
                found |= new
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
            self.number("", value, where, depth, {})

    def number(self, keyword: str, value: Any, where: str, _: int, schema: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value, (int, float)):
            self._refuse(where, "it must be a number")
        if value * UPWARDS.get(keyword, 0) > LARGEST:  # a bound that is hardly one: what is left is narrower
            wide = min(abs(int(value)), WIDEST if schema.get("type") == "integer" else LARGEST)
            exact = float(wide) if float(wide) <= wide else math.nextafter(wide, 0)
            return {keyword: int(exact) * UPWARDS[keyword]}
        if abs(value) > LARGEST:
            self._refuse(where, f"numbers beyond {LARGEST} cannot be enforced exactly")
        return {keyword: value}

    def exclusive(self, keyword: str, value: Any, where: str, _: int, schema: dict[str, Any]) -> dict[str, Any]:
        if isinstance(value, bool):  # draft 4: it says of the other one that it is exclusive
            limit = schema.get({"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}[keyword])
            return self.number(keyword, limit, where, _, schema) if value and limit is not None else {}
        return self.number(keyword, value, where, _, schema)

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
        if expands_too_far(value):
            self._refuse(where, f"its nested repetitions multiply to more than {MAX_EXPANSION}")
        first, *more = patterns(value)
        return {keyword: first} | ({"allOf": [{keyword: one} for one in more]} if more else {})

    def format(self, keyword: str, value: Any, where: str, _: int, schema: dict[str, Any]) -> dict[str, Any]:
        """Of strings; of anything else it is an annotation."""
        types = schema.get("type", "string")
        if "string" not in (types if isinstance(types, list) else [types]):
            return {}
        if value not in FORMATS and "pattern" in schema:  # which says what it is
            return {}
        if value not in FORMATS:
            names = ", ".join(sorted(FORMATS))
            self._refuse(where, f"the format {str(value)[:40]!r} cannot be enforced, only {names}")
        return {"allOf": [FORMATS[value]]}

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
                if len(self.pattern(keyword, name, where)) > 1:
                    self._refuse(where, "look-aheads in the patterns of names are not supported")
        return {keyword: {name: self._schema(schema, f"{where}.{name}", depth + 1) for name, schema in schemas}}

    def items(self, keyword: str, value: Any, where: str, depth: int, schema: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value, list):
            return self.one(keyword, value, where, depth)
        rest = schema.get("additionalItems", True)  # until 2019-09
        return self.all_of("prefixItems", value, where, depth) | self.one("items", rest, where, depth)

    def negation(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        if value not in (True, {}, False):
            self._refuse(where, f"'{keyword}' cannot be enforced")
        return {} if value is False else {"allOf": [False]}

    def names(self, keyword: str, value: Any, where: str, *_: Any) -> dict[str, Any]:
        """Of properties: a list of them, or a pattern that they match."""
        names = self._followed(value, where)
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
            low, high = (self.count(word, names[word], where)[word] if word in names else "" for word in LENGTHS)
            allowed["patternProperties"] = {f"^(?s:.){{{low or 0},{high}}}$": True}
        elif said == {"pattern"} or (said == {"format"} and FORMATS.get(names["format"], {}).keys() == {"pattern"}):
            pattern = names["pattern"] if "pattern" in said else FORMATS[names["format"]]["pattern"]
            allowed |= self.by_name("patternProperties", {pattern: True}, where, 0)
        elif said:
            self._refuse(where, f"'{keyword}' can be enforced for 'enum', 'const', 'pattern' or lengths alone")
        else:
            return {}
        return {"allOf": [allowed]}

    def unique(self, keyword: str, value: Any, where: str, depth: int, schema: dict[str, Any]) -> dict[str, Any]:
        """Of few possible items: each set of them in one order."""
        items = self._followed(schema.get("items"), where)
        listed = items.get("enum", [items["const"]] if "const" in items else None) if isinstance(items, dict) else None
        if value is False or schema.get("maxItems") in (0, 1):
            return {}
        if not isinstance(listed, list) or len(listed) > MAX_UNIQUE or "prefixItems" in schema:
            self._refuse(
                where, f"'{keyword}' can be enforced only where 'items' has an 'enum' of at most {MAX_UNIQUE} values"
            )
        listed = [one for i, one in enumerate(listed) if one not in listed[:i]]  # and 1, 1.0 and True are one, alas
        sets = itertools.chain(*(itertools.combinations(listed, n) for n in range(len(listed) + 1)))
        options = [
            {"prefixItems": [{"const": one} for one in some], "items": False, "minItems": len(some)} for some in sets
        ]
        self.constant("enum", listed, where, depth)
        return {"allOf": [{"anyOf": options}]}

    def dependent(self, keyword: str, value: Any, where: str, depth: int, *_: Any) -> dict[str, Any]:
        """Either a property is not there, or what it asks for holds."""
        parts = []
        for name, needed in self._mapping(value, where).items():
            place = f"{where}.{name}"
            if isinstance(needed, list) or keyword == "dependentRequired":
                then: Schema = self.required("required", needed, place)
            else:
                then = self._schema(needed, place, depth + 1)
            parts.append({"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, then]}]})
        return {"allOf": parts} if parts else {}

    def unevaluated(self, keyword: str, value: Any, where: str, depth: int, schema: dict[str, Any]) -> dict[str, Any]:
        """What 'additionalProperties' or 'items' would be, if what is beside and behind references were one schema."""
        seen: list[Any] = []
        parts = [schema]
        while parts:
            part = parts.pop()
            if not isinstance(part, dict) or any(part is one for one in seen):
                continue
            seen.append(part)
            if part.keys() & CONDITIONAL:
                self._refuse(where, f"'{keyword}' cannot be enforced beside {min(part.keys() & CONDITIONAL)!r}")
            parts += part.get("allOf", [])
            if "$ref" in part:
                parts.append(self._resolve(part, where))
        rest = self._schema(value, where, depth + 1)
        others = [one for one in seen if one is not schema]
        if keyword == "unevaluatedProperties":
            if any("additionalProperties" in one for one in seen) or any(keyword in one for one in others):
                return {}
            known = {name: True for one in seen for name in one.get("properties", ())}
            like = {name: True for one in seen for name in one.get("patternProperties", ())}
            return {"allOf": [{"properties": known, "patternProperties": like, "additionalProperties": rest}]}
        if any("items" in one for one in seen) or any(keyword in one for one in others):
            return {}
        longest = max(len(one.get("prefixItems", ())) for one in seen)
        return {"allOf": [{"prefixItems": [True] * longest, "items": rest}]}

    def reference(self, keyword: str, value: Any, where: str, _: int, schema: dict[str, Any]) -> dict[str, Any]:
        target = self._resolve(schema, where, keyword)
        if id(target) not in self._names:
            self._names[id(target)] = str(len(self._names))
            self._targets.append((str(value), target))
        return {"$ref": f"#/$defs/{self._names[id(target)]}"}

    def _resolve(self, schema: dict[str, Any], where: str, keyword: str = "$ref") -> Any:
        """What ``schema`` refers to."""
        reference = schema[keyword]
        if not isinstance(reference, str):
            self._refuse(where, "it must be a string")
        if isinstance(schema.get("$id"), str) and schema is not self._root:
            self._refuse(where, f"'$id' beside '{keyword}' is not supported: drafts differ in what it means")
        if keyword == "$dynamicRef" and self._places.num_dynamic[reference.rpartition("#")[2]] > 1:
            self._refuse(where, "'$dynamicRef' cannot be enforced if there is more than one such '$dynamicAnchor'")
        base = self._places.bases.get(id(schema), "")
        address, _, fragment = (base + reference if reference.startswith("#") else urljoin(base, reference)).partition(
            "#"
        )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            address, fragment = f"{address}#{fragment}", ""
        if address not in self._places.schemas:
            self._refuse(where, f"only references within the schema are followed, and {reference[:100]!r} is not in it")
        target = self._places.schemas[address]
        for part in fragment.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                self._refuse(where, f"there is nothing at {reference[:100]!r}")
        return target

    def _followed(self, option: Any, where: str) -> Any:
        """What stands behind ``option`` if it is nothing but a reference."""
        seen: set[str] = set()
        while isinstance(option, dict) and "$ref" in option and not option.keys() & KEYWORDS.keys() - {"$ref"}:
            if option["$ref"] in seen:
                self._refuse(where, "it refers to itself")
            seen.add(option["$ref"])
            option = self._resolve(option, where)
        return option


class Places:
    """Where references of a schema lead to."""

    def __init__(self, root: Any) -> None:
        self.schemas: dict[str, Any] = {"": root}  # by '$id', and by '$id#$anchor'
        self.bases: dict[int, str] = {}  # what references are relative to, by the ids of the schemas they are in
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
