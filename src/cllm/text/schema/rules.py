"""Write schemas, reduced by json_schema.py, as Lark rules.

Strings and multiples are left to llguidance.

llguidance compiles whole schemas too. But it does not limit the digits of numbers, which some
models never stop writing, and numbers beyond 2^53 are not exact: see
docs/decisions/005-own-schema-compiler.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from typing import Any

from cllm.text.schema.alternatives import (
    BOUNDS,
    IN_PLACE,
    Alternative,
    Alternatives,
    constants,
    join_options,
    merge,
    merge_options,
    of_any_type,
    own_alternatives,
    property_schema,
    with_option,
)
from cllm.text.schema.exclusion import Exclusion
from cllm.text.schema.finite_values import Schema, add_ends
from cllm.text.schema.json_schema import enforceable, invalid_schema
from cllm.text.schema.lark import (
    Rules,
    explain_error,
    find_term_fault,
    json_leaf,
    search_matcher,
    search_term,
    text_term,
)
from cllm.text.schema.number_terms import allowed_constants, number_terminal, read_bounds

MAX_ALTERNATIVES = 10_000  # limit of the product of composed alternatives
EXACT = 2**53  # llguidance computes multiples in floating point
# without the decimal point: llguidance has a state for each remainder, and limits states
MAX_MULTIPLE = 4000
WHY_NOTHING = "its parts exclude each other or are 'false'"
COMMA, COLON = "/, ?/", "/: ?/"  # at most one space, or a model could write them forever
CHUNK = 1000  # characters of a long string
CHARACTER = r'/[^"\\\x00-\x1f\x7f]|\\["\\\/bfnrt]|\\u00(?:[01][0-9a-fA-F]|7[fF])/'  # in a string
NAME = r'/[^"\\\x00-\x1f\x7f]*/'  # of a property, without escapes


def json_rule(schema: Any, rules: Rules, param: str, unenforced: set[str] | None = None) -> str:
    """Add a rule for the JSON values that ``schema`` allows to ``rules``, and return its name.

    Keywords that cannot be enforced are left out and added to ``unenforced``; if that is None, they
    are refused. Raises BadRequest for refused keywords, for an invalid schema, and for one that
    allows no value.
    """
    search_matcher.cache_clear()  # or the time would show which patterns other tenants use
    writer = SchemaRules(enforceable(schema, param, unenforced), rules, param, unenforced)
    if writer.start is None:
        raise invalid_schema(param, "", f"it allows no value: {writer.why_nothing or WHY_NOTHING}")
    return writer.start


class SchemaRules:
    """Writes the rules of one schema."""

    def __init__(
        self, schema: dict[str, Any], rules: Rules, param: str, unenforced: set[str] | None
    ) -> None:
        definitions = schema.get("$defs", {})
        self._definitions = {
            f"#/$defs/{name}": definition for name, definition in definitions.items()
        }
        self._ended = add_ends(definitions)
        self._rules = rules
        self._param = param
        self._unenforced = unenforced
        self._terms: dict[str, str | None] = {}
        # names of rules that are being written, and whether they were used
        self._open: dict[str, bool] = {}
        self._exclusion = Exclusion(lambda part: [*self._resolve(self._alternatives(part))])
        self._resolving: set[str] = set()  # the references on the way to the current one
        self._num_alternatives = 0
        self.why_nothing = ""  # the first reason why a part allows no value
        self.start = self.term({key: value for key, value in schema.items() if key != "$defs"})

    def term(self, schema: Schema) -> str | None:
        """Return the name of a rule for the values that ``schema`` allows; None if there are none.

        Raises BadRequest if no finite value satisfies the schema.
        """
        key = json.dumps(schema)
        if key not in self._terms:
            name = self._terms[key] = self._rules.reserve()
            self._open[name] = False
            alternatives = self._exclusive(of_any_type(self._alternatives(schema)))
            terms = [self._write(alternative) for alternative in alternatives]
            options = [term for term in terms if term is not None]
            is_used = self._open.pop(name)
            if options:
                self._rules.define(name, " | ".join(options))
            elif is_used:
                raise invalid_schema(self._param, "", "no finite value satisfies it")
            else:
                self._terms[key] = None
        term = self._terms[key]
        if term in self._open:
            self._open[term] = True
        return term

    def _cannot(self, keyword: str, why: str) -> None:
        """Leave ``keyword`` out, or refuse the schema."""
        if self._unenforced is None:
            raise invalid_schema(self._param, "", f"'{keyword}' cannot be enforced: {why}")
        self._unenforced.add(keyword)

    def _nothing(self, why: str) -> str | None:
        """Remember the reason, and return None."""
        self.why_nothing = self.why_nothing or why
        return None

    # --- from a schema to its alternatives -------------------------------------------------------

    def _alternatives(self, schema: Schema) -> Alternatives:
        if isinstance(schema, bool):
            return None if schema else []
        alternatives: Alternatives = None
        own = (
            "properties"
            if "properties" in schema
            else next((key for key in schema if key not in IN_PLACE), "")
        )
        # their order sets the order of properties in the text
        for keyword, value in schema.items():
            if keyword == own:
                alternatives = self._both(alternatives, own_alternatives(schema))
            match keyword:
                case "const" | "enum":
                    alternatives = self._both(
                        alternatives, constants(value if keyword == "enum" else [value])
                    )
                case "allOf":
                    for part in value:
                        alternatives = self._both(alternatives, self._alternatives(part))
                case "anyOf" | "oneOf":
                    options = [self._alternatives(option) for option in value]
                    if keyword == "oneOf" and len(options) > 1:
                        options = [
                            with_option(option, id(value), i) for i, option in enumerate(options)
                        ]
                    alternatives = self._both(alternatives, join_options(options))
                case "$ref" if value in self._ended:
                    alternatives = self._both(alternatives, [{"$ref": value}])
                case "$ref":
                    self._nothing("no finite value satisfies a '$ref' in it")
                    alternatives = []
        return alternatives

    def _resolve(self, alternatives: Alternatives) -> Iterator[Alternative]:
        """Yield alternatives without references. Raises BadRequest if one leads to itself, with no
        property and no item between.
        """
        for alternative in of_any_type(alternatives):
            name = alternative.get("$ref")
            if name is None:
                yield alternative
                continue
            if name in self._resolving:
                raise invalid_schema(self._param, "", "a '$ref' leads to itself without an end")
            self._resolving.add(name)
            resolved = [*self._resolve(self._alternatives(self._definitions[name]))]
            self._resolving.remove(name)
            for part in resolved:
                if (options := merge_options(alternative, part)) is not None:
                    yield part | options

    def _both(self, first: Alternatives, second: Alternatives) -> Alternatives:
        """Return alternatives for the values that both allow."""
        if first is None or second is None:
            return second if first is None else first
        combined = []
        for one, other in product(self._resolve(first), self._resolve(second)):
            self._num_alternatives += 1
            if self._num_alternatives > MAX_ALTERNATIVES:
                why = f"its compositions have more than {MAX_ALTERNATIVES} alternatives"
                raise invalid_schema(self._param, "", why)
            if (both := merge(one, other)) is not None:
                combined.append(both)
        return combined

    def _exclusive(self, alternatives: list[Alternative]) -> list[Alternative]:
        """Return ``alternatives``, made to exclude each other where they belong to different
        options of a ``oneOf``.
        """
        if sum("options" in alternative for alternative in alternatives) < 2:
            return alternatives
        separate = self._exclusion.separate([*self._resolve(alternatives)])
        if separate is None:
            why = (
                "its options must exclude each other by type, by the values of a required property "
                "or by what they require"
            )
            self._cannot("oneOf", why)
        return alternatives if separate is None else separate

    # --- from an alternative to a term -----------------------------------------------------------

    def _write(self, alternative: Alternative) -> str | None:
        if "$ref" in alternative:
            return self.term(self._definitions[alternative["$ref"]])
        match alternative["type"]:
            case "null":
                return '"null"'
            case "boolean":
                return self._literals(alternative.get("in", [True, False]))
            case "string":
                return self._string(alternative)
            case "array":
                return self._array(alternative)
            case "object":
                return self._object(alternative)
        return self._number(alternative)

    def _literals(self, values: list[Any]) -> str | None:
        texts = [text_term(json.dumps(value, ensure_ascii=False)) for value in values]
        return self._rules.terminal(" | ".join(texts)) if texts else None

    def _string(self, alternative: Alternative) -> str | None:
        parts = alternative["parts"]
        if "in" in alternative and not parts:
            return self._literals(alternative["in"])
        if (
            "in" not in alternative
            and len(parts) == 1
            and parts[0].keys() <= {"minLength", "maxLength"}
        ):
            low, high = parts[0].get("minLength", 0), parts[0].get("maxLength", 0)
            if low <= CHUNK < high:
                return self._long_string(low, high)
        leaf = {"type": "string"} | ({"enum": alternative["in"]} if "in" in alternative else {})
        return self._leaf(
            leaf | (parts[0] if len(parts) == 1 else {"allOf": parts} if parts else {}), "pattern"
        )

    def _long_string(self, low: int, high: int) -> str:
        """Return a term in chunks: llguidance has some states for each counted character of a
        piece, and limits them.

        A chunk ends only when it is full or the string ends, because the lexer takes as much as it
        can.
        """
        num_more, rest = divmod(high - CHUNK, CHUNK)
        first = self._rules.terminal(rf'"\"" {CHARACTER}{{{low},{CHUNK}}}')
        more = (
            f"({self._rules.terminal(f'{CHARACTER}{{1,{CHUNK}}}')}){{0,{num_more}}}"
            if num_more
            else ""
        )
        last = f"({self._rules.terminal(f'{CHARACTER}{{1,{rest}}}')})?" if rest else ""
        return rf'{first} {more} {last} "\""'

    def _leaf(self, leaf: dict[str, Any], keyword: str) -> str | None:
        """Return a rule for a leaf, without ``keyword`` if llguidance cannot compile it; None if it
        allows nothing.
        """
        term = json_leaf(leaf)
        if self._rules.careful and len(leaf) > 1 and (fault := find_term_fault(term)):
            if "Unsatisfiable" in fault:
                return self._nothing(explain_error(fault))
            self._cannot(keyword, explain_error(fault))
            parts = [
                {key: value for key, value in part.items() if key != keyword}
                for part in leaf.get("allOf", ())
            ]
            leaf = {key: value for key, value in leaf.items() if key not in (keyword, "allOf")}
            return self._leaf(leaf | ({"allOf": parts} if any(parts) else {}), "")
        return self._rules.rule(term)

    def _number(self, alternative: Alternative) -> str | None:
        integer = alternative["type"] == "integer"
        if "in" in alternative:
            return self._literals(allowed_constants(alternative))
        low, high = read_bounds(alternative)
        steps = [step for step in alternative["multipleOf"] or () if not (integer and step == 1)]
        if math.prod(as_integer(step) for step in steps) > MAX_MULTIPLE:
            self._cannot("multipleOf", f"it is above {MAX_MULTIPLE}, or together they are")
            steps = []
        if not steps:
            body = number_terminal(low, high, integer=integer)
            if body is None:
                return self._nothing("its 'minimum' is above its 'maximum'")
            return self._rules.terminal(body)
        limits = {
            key: max(-EXACT, min(EXACT, alternative[key]))
            for key in BOUNDS
            if alternative[key] is not None
        }
        leaf = {"type": alternative["type"], "minimum": -EXACT, "maximum": EXACT, **limits}
        return self._leaf(leaf | {"allOf": [{"multipleOf": step} for step in steps]}, "multipleOf")

    def _array(self, alternative: Alternative) -> str | None:
        low, high = alternative["minItems"], alternative["maxItems"]
        first: list[str] = []
        for schema in alternative["prefixItems"]:
            if len(first) == high or (term := self.term(schema)) is None:
                high = len(first)
                break
            first.append(term)
        item = None if len(first) == high else self.term(alternative["items"])
        if item is None:
            high = len(first)
        if low > high:
            return self._nothing(f"'minItems' is {low}, but there can be at most {high} items")
        tail = separated_items(item, low - len(first), high - len(first), is_first=not first)
        for i, term in reversed([*enumerate(first)]):
            tail = f"{COMMA if i else ''} {term} {tail}"
            tail = tail if i < low else f"({tail})?"
        return f'"[" {tail} "]"'

    def _object(self, alternative: Alternative) -> str | None:
        required = alternative["required"]
        names = [*dict.fromkeys([*alternative["properties"], *required])]
        members: list[tuple[str, bool]] = []  # a rule for a property, and whether it is required
        for name in names:
            if (value := self.term(property_schema(alternative, name))) is not None:
                key = text_term(json.dumps(name, ensure_ascii=False))
                members.append((self._rules.rule(f"{key} {COLON} {value}"), name in required))
            elif name in required:
                return self._nothing(f"the required property {name[:40]!r} can have no value")
        low = max(alternative["minProperties"] - len(required), 0)
        high = alternative["maxProperties"] - len(required)
        if high <= 0:
            members = [member for member in members if member[1]]
        other = self._other_property(alternative, names) if high > 0 else None
        num_optional = sum(not is_required for _, is_required in members)
        if high < 0 or (low and not num_optional and not other):
            return self._nothing("it requires more properties than there can be")
        most = math.inf if other else num_optional  # optional properties that are possible
        high = min(high, most)
        if low > 1 or (num_optional and (low or high < most)):
            if low == 1 and not other and high in (1, most):
                return self._one_optional(members, at_least_one=True, at_most_one=high == 1)
            if not (low or other) and high == 1:
                return self._one_optional(members, at_least_one=False, at_most_one=True)
            why = (
                "beside optional properties at most one can be asked for, where others are "
                "forbidden"
            )
            self._cannot("minProperties" if low else "maxProperties", why)
            low, high = 0, math.inf
        return f'"{{" {self._members(members, other, low, high)} "}}"'

    def _one_optional(
        self, members: list[tuple[str, bool]], *, at_least_one: bool, at_most_one: bool
    ) -> str:
        """Return a term for an object with at least or at most one of the optional properties."""
        options = (
            []
            if at_least_one
            else [self._members([member for member in members if member[1]], None, 0, 0)]
        )
        for i, (_, is_required) in enumerate(members):
            if not is_required:  # the first optional property that is present
                kept = [
                    (member, needed or i == j)
                    for j, (member, needed) in enumerate(members)
                    if needed or j == i or (j > i and not at_most_one)
                ]
                options.append(self._members(kept, None, 0, 0))
        return f'"{{" ({" | ".join(map(self._rules.rule, options))}) "}}"'

    def _other_property(self, alternative: Alternative, names: list[str]) -> str | None:
        """Return a rule for a property that is not named; None if none is allowed."""
        patterns = {
            search_term(pattern): schema
            for pattern, schema in alternative["patternProperties"].items()
        }
        for pattern in [
            pattern for pattern in patterns if self._rules.careful and find_term_fault(pattern)
        ]:
            self._cannot("patternProperties", explain_error(find_term_fault(pattern)))
            del patterns[pattern]
        excluded = [text_term(name) for name in names]
        options = []
        for pattern, schema in patterns.items():
            if (value := self.term(schema)) is not None:
                others = [other for other in patterns if other != pattern]
                options.append(f"{self._name([pattern], excluded + others)} {COLON} {value}")
        if (value := self.term(alternative["additionalProperties"])) is not None:
            options.append(f"{self._name([], [*excluded, *patterns])} {COLON} {value}")
        return self._rules.rule(" | ".join(options)) if options else None

    def _name(self, wanted: list[str], excluded: list[str]) -> str:
        if not wanted and not excluded:
            return self._rules.rule(json_leaf({"type": "string"}))
        limits = [NAME, *wanted, *(f"~{term}" for term in excluded)]
        return self._rules.terminal(rf'"\"" ({" & ".join(limits)}) "\""')

    def _members(
        self, members: list[tuple[str, bool]], other: str | None, low: int, high: float
    ) -> str:
        """Return a term for members in their order, followed by ``low`` to ``high`` other
        properties.
        """
        begin = separated_items(other, low, high, is_first=True)  # if no member precedes
        follow = separated_items(other, low, high, is_first=False)
        num_leading = next(
            (i for i, (_, is_required) in enumerate(members) if is_required), len(members)
        )
        for i, (member, is_required) in reversed([*enumerate(members)]):
            if is_required:
                begin, follow = f"{member} {follow}", f"{COMMA} {member} {follow}"
                continue
            rest = self._rules.rule(follow) if follow else ""
            if i < num_leading:
                begin = self._rules.rule(
                    f"{member} {rest} | {begin}" if begin else f"({member} {rest})?"
                )
            follow = f"({COMMA} {member})? {rest}"
        return begin


def separated_items(item: str | None, low: int, high: float, *, is_first: bool) -> str:
    """Return a term for ``low`` to ``high`` items with commas between them and, unless
    ``is_first``, in front.
    """
    if item is None or high <= 0:
        return ""
    if not is_first:
        return repeat(f"{COMMA} {item}", low, high)
    tail = f"{item} {repeat(f'{COMMA} {item}', low - 1, high - 1)}"
    return tail if low > 0 else f"({tail})?"


def repeat(term: str, low: int, high: float) -> str:
    low = max(low, 0)
    if high == math.inf:
        return f"({term}){{{low},}}" if low else f"({term})*"
    return f"({term}){{{low},{high}}}" if high else ""


def as_integer(step: Any) -> int:
    """Return a number without its decimal point, such as 25 for 0.25."""
    number = Fraction(str(step))
    while number.denominator > 1:
        number *= 10
    return number.numerator
