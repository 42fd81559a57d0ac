"""Write a call's arguments as terms of a grammar, in the formats of all model families."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from cllm.errors import BadRequest
from cllm.text.schema.json_schema import ASSERTIONS
from cllm.text.schema.lark import Rules, text_term
from cllm.text.schema.rules import json_rule
from cllm.text.tools.argument_readers import list_types
from cllm.text.tools.model_family import Calls, one_of_texts

MAX_DEPTH = 16  # of a schema that is written out here
SPACE = r"[ \t\n]{0,8}"  # where a model may write more or less white space
# keywords that are enforced in families that do not write JSON
HANDLED = {"type", "properties", "required", "items", "enum", "additionalProperties"}


class LarkTerms:
    """Writes Lark terms for texts that may contain control tokens."""

    def __init__(self, rules: Rules, control: Mapping[str, int]) -> None:
        """``control`` maps the text of each control token that texts may contain to its id."""
        self.rules = rules
        self._control = control
        self._marks = re.compile(f"({one_of_texts(set(control))})")

    def parts(self, text: str) -> list[str | int]:
        """Split ``text`` into plain texts and ids of control tokens."""
        return [self._control.get(part, part) for part in self._marks.split(text) if part]

    def behind_control(self, text: str) -> tuple[int | None, str]:
        """Return the last control token in ``text`` (or None), and the text after it."""
        *_, last = [None, *self._marks.finditer(text)]
        return (self._control[last[0]], text[last.end() :]) if last else (None, text)

    def ids(self, texts: Iterable[str]) -> set[int]:
        """Return the ids of those ``texts`` that are control tokens."""
        return {self._control[text] for text in texts if text in self._control}

    def one_of(self, ids: Collection[int | None]) -> str:
        """Return a term for one of these tokens; "" if there are none."""
        ordered = sorted(i for i in ids if i is not None)
        first = [i for i in ordered if i - 1 not in ids]
        last = [i for i in ordered if i + 1 not in ids]
        return (
            f"<[{','.join(f'{a}-{b}' for a, b in zip(first, last, strict=True))}]>"
            if ordered
            else ""
        )

    def first_part(self, text: str) -> tuple[str, str]:
        """Return the first word or control token of ``text``, and the rest."""
        text = text.lstrip()
        word = self._marks.match(text) or re.match(r"\S+?(?=\s|$)", text)
        assert word, "something follows the arguments of families without JSON"
        return word[0], text[word.end() :]

    def text(self, text: str) -> str:
        """Return a term for exactly ``text``."""
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else text_term(part) for part in self.parts(text)
        )

    def loose(self, text: str) -> str:
        """Return a term for ``text`` as models write it: where it has white space, there may be
        more or less.
        """
        return " ".join(
            f"<[{part}]>"
            if isinstance(part, int)
            else self.rules.terminal(f"/{loose_regex(part)}/")
            if part.strip()
            else f"(/{SPACE.replace('0', '1')}/)?"
            for part in self.parts(text)
        )

    def until(self, mark: str) -> str:
        """Return a term for text through the first ``mark``. If the mark contains a control token,
        the term ends with the mark's part from that token on.
        """
        control, rest = self.behind_control(mark)
        if control is not None:
            return f"{self.rules.rule('/(?s:.*)/')} <[{control}]> {self.text(rest)}"
        return self.rules.rule("/(?s:.*)/", f"[suffix={text_term(mark)}]")


def loose_regex(text: str) -> str:
    """Return a regular expression for ``text`` as models write it: with or without white space in
    JSON brackets.
    """
    spaced = re.sub(r"(?<=[\[{])|(?=[\]}])", " ", text)
    return "".join(
        SPACE
        if part.isspace()
        else re.sub(r"[^\w<>\"'=,:;-]", lambda match: rf"\x{{{ord(match[0]):x}}}", part)
        for part in re.split(r"(\s+)", spaced)
    )


class ArgumentGrammar:
    """Writes terms for the arguments of one function's calls."""

    def __init__(
        self, calls: Calls, terms: LarkTerms, schema: dict[str, Any], unenforced: set[str] | None
    ) -> None:
        """Keywords that cannot be enforced are added to ``unenforced``; if it is None, they are
        refused.
        """
        self._calls = calls
        self._terms = terms
        self._rules = terms.rules
        self._schema = schema
        self._unenforced = unenforced

    def term(self, place: str) -> str | None:
        """Return the term for $arguments, $keywords or $pairs; None if any text is allowed there.

        Raises BadRequest (tools) for schemas that cannot be enforced.
        """
        if self._calls.writes_json:
            return self._json(self._schema)
        is_free = self._unenforced is not None and not names_all_properties(self._schema)
        if is_free and self._unenforced is not None and restricts_members(self._schema):
            self._unenforced.add("parameters")
        match place:
            case "keywords":
                return (
                    self._any_keywords()
                    if is_free
                    else self._members(self._schema, "=", ", ", self._json)
                )
            case "pairs":
                return None if is_free else self._pairs()
        return self._any_bare_object() if is_free else self._bare(self._schema)

    def _cannot(self, keyword: str, why: str) -> None:
        if self._unenforced is None:
            message = (
                f"Invalid 'tools': the format in which this model writes calls cannot enforce "
                f"this schema: {why}."
            )
            raise BadRequest(message, param="tools", code="unsupported_schema")
        self._unenforced.add(keyword)

    def _json(self, schema: Any) -> str:
        definitions = {
            key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema
        }
        schema = definitions | schema if isinstance(schema, dict) else schema
        return json_rule(schema, self._rules, "tools", self._unenforced)

    def _pairs(self) -> str:
        """Return a term for keys and values between tags.

        A value that may be a string ends only with its tag.
        """
        tags = self._calls.tags
        assert tags
        before, _, after = self._calls.pair.partition("$value")
        end = "\n" * tags.trim + tags.value_close
        rest = after.removeprefix(end)
        required: list[str] = []
        optional: list[str] = []
        for key, inner, is_required in self._properties(self._schema):
            types = list_types(inner)
            if types == {"string"} and "enum" in inner:
                options = " | ".join(self._terms.text(str(option)) for option in inner["enum"])
                value = f"({options}) {self._terms.text(end)}"
            elif types and "string" not in types:
                value = f"{self._json(inner)} {self._terms.text(end)}"
            else:
                self._check(inner)
                if types != {"string"}:
                    self._cannot("type", f"the type of '{key[:40]}' must be a single type")
                value = self._terms.until(end)
            may_be = [] if types == {"string"} else ["false"]
            may_be += ["true"] if not types or "string" in types else []
            openings = dict.fromkeys(
                before.replace("$key", key).replace("$string", is_string) for is_string in may_be
            )
            pair = (
                f"({' | '.join(map(self._terms.text, openings))}) {value} {self._terms.text(rest)}"
            )
            (required if is_required else optional).append(self._rules.rule(pair))
        return self._interleave(required, optional)

    def _bare(self, schema: Any, depth: int = 0) -> str:
        """Return a term for a value with bare keys, and with strings enclosed in the family's
        mark.
        """
        quote = self._calls.quote
        types = list_types(schema)
        if depth > MAX_DEPTH or len(types) != 1:
            self._check(schema)
            self._cannot("type", "every value must have one type")
            return self._any_bare()
        match types.pop():
            case "string" if "enum" in schema:
                options = " | ".join(self._terms.text(str(option)) for option in schema["enum"])
                return f"{self._terms.text(quote)} ({options}) {self._terms.text(quote)}"
            case "string":
                self._check(schema)
                return f"{self._terms.text(quote)} {self._terms.until(quote)}"
            case "array":
                self._check(schema)
                item = self._rules.rule(self._bare(schema.get("items", {}), depth + 1))
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object" if "properties" in schema:
                members = self._members(
                    schema, ":", ",", lambda inner: self._bare(inner, depth + 1)
                )
                return f'"{{" {members} "}}"'
            case "object":
                self._check(schema)
                return self._any_bare_object()
        return self._json(schema)

    def _any_bare(self) -> str:
        string = f"{self._terms.text(self._calls.quote)} {self._terms.until(self._calls.quote)}"
        scalar = self._json({"type": ["null", "boolean", "number"]})
        return f"({string} | {scalar} | {self._any_bare_object()})"

    def _any_bare_object(self) -> str:
        """Return a term for objects and lists with any contents: only brackets and strings must be
        closed.
        """
        inside = self._rules.rule(r"/[^{}\[\]<]+/")
        quoted = f"{self._terms.text(self._calls.quote)} {self._terms.until(self._calls.quote)}"
        name = self._rules.reserve()
        self._rules.define(
            name,
            f'"{{" ({inside} | {quoted} | {name})* "}}" | "[" ({inside} | {quoted} | {name})* "]"',
        )
        return name

    def _any_keywords(self) -> str:
        """Return a term for any text in which strings and brackets are closed."""
        inside, name = (
            r"""/[^"'()\[\]{}]+/ | /"(?s:[^"\\]|\\.)*"/ | /'(?s:[^'\\]|\\.)*'/""",
            self._rules.reserve(),
        )
        nested = " | ".join(f'"{begin}" {name} "{end}"' for begin, end in ("()", "[]", "{}"))
        self._rules.define(name, f"({inside} | {nested})*")
        return name

    def _members(
        self, schema: dict[str, Any], equals: str, comma: str, value: Callable[[Any], str]
    ) -> str:
        """Return a term for the properties of an object."""
        required: list[str] = []
        optional: list[str] = []
        for key, inner, is_required in self._properties(schema):
            member = f"{self._terms.text(key + equals)} {value(inner)}"
            (required if is_required else optional).append(self._rules.rule(member))
        return self._interleave(required, optional, text_term(comma))

    def _interleave(self, required: list[str], optional: list[str], comma: str = "") -> str:
        """Return a term for the required members in their order, with optional ones anywhere
        between them.
        """
        if not optional:
            return f" {comma} ".join(required)
        other = self._rules.rule(" | ".join(optional))
        further = f"({comma} {other})*"
        if not required:
            return f"({other} {further})?"
        return f"({other} {comma})* {f' {further} {comma} '.join(required)} {further}"

    def _properties(self, schema: dict[str, Any]) -> list[tuple[str, Any, bool]]:
        """Return the name and schema of each property, and whether it is required."""
        self._check(schema)
        required = schema.get("required") or []
        return [
            (key, inner, key in required) for key, inner in (schema.get("properties") or {}).items()
        ]

    def _check(self, schema: Any) -> None:
        if isinstance(schema, dict):
            for keyword in sorted((schema.keys() & ASSERTIONS) - HANDLED):
                self._cannot(keyword, f"'{keyword[:40]}' is not supported")


def names_all_properties(schema: dict[str, Any]) -> bool:
    """Whether an object's schema only lists the properties that it may have."""
    is_list = not (schema.keys() & ASSERTIONS) - {
        "type",
        "properties",
        "required",
        "additionalProperties",
    }
    return is_list and schema.get("additionalProperties", "properties" not in schema) is False


def restricts_members(schema: dict[str, Any]) -> bool:
    return any(schema[keyword] is not True for keyword in (schema.keys() & ASSERTIONS) - {"type"})
