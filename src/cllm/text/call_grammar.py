"""A form and the declared tools to a grammar in llguidance's Lark: what a text must look like to be calls, and how
reasoning comes before what a grammar binds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cllm.errors import BadRequest
from cllm.text.arguments import types_of
from cllm.text.form import Form, any_of
from cllm.text.lark import Rules, text_term
from cllm.text.schema_rules import json_rule

Schemas = Mapping[str, dict[str, Any]]

MAX_DEPTH = 16  # of a schema that is spelled out here
PLACES = re.compile(r"\$(name|word|ordinal|arguments|keywords|pairs|key|value)")
KNOWN_KEYWORDS = {"type", "properties", "required", "items", "enum", "description", "title", "default", "examples"} | {
    "additionalProperties",
    "$schema",
}


class CallGrammar:
    """Writes grammars for one form over one vocabulary."""

    def __init__(self, form: Form, control_tokens: Mapping[str, int]) -> None:
        """``control_tokens``: the ids of those that the form's marks may be."""
        self._form = form
        self._control = control_tokens
        self._marks = re.compile(f"({any_of(set(control_tokens))})")
        self._rules = Rules()

    def write(
        self,
        tools: Mapping[str, dict[str, Any]],
        answer: str,
        *,
        calls: bool,
        free: bool = False,
        parallel: bool,
        thinks: bool,
        inside: bool,
        begun: bool = False,
    ) -> str:
        """The grammar of a message.

        answer: the grammar of its text, "" if there must be none. calls: whether it may be calls of ``tools`` instead.
        free: it is any text, but the calls in it are bound; this is for those whose arguments are JSON.
        thinks, inside: it may begin with reasoning, or begins in the middle of it; begun: in the middle of its text.
        It is not compiled yet. Raises BadRequest (tools) for a schema that cannot be enforced.
        """
        self._rules = Rules()
        header = self._form.header
        options = []
        if answer:
            options.append((self._text(header.final) + " " if header else "") + "@answer")
        if free:
            options.append(self._text_with_calls(tools, parallel=parallel, begun=begun))
        elif calls:
            options.append(self._calls(tools, parallel=parallel))
        thoughts = self._thoughts(inside=inside) + " " if thinks or inside else ""
        lark = f"start: {thoughts}({' | '.join(options)})\n{self._rules}"
        if not answer:
            return lark
        parts = json.loads(answer)["grammars"] if answer.lstrip().startswith("{") else [{"lark_grammar": answer}]
        return json.dumps({"grammars": [{"lark_grammar": lark}, parts[0] | {"name": "answer"}, *parts[1:]]})

    def _json(self, schema: Any) -> str:
        return json_rule(schema, self._rules, "tools")

    def _text(self, text: str) -> str:
        """Terms for a text, in which there may be control tokens."""
        parts = [part for part in self._marks.split(text) if part] if self._control else [text]
        return " ".join(
            f"<[{self._control[part]}]>" if part in self._control else text_term(part) for part in parts if part
        )

    def _until(self, mark: str) -> str:
        """Any text and then, for the first time, ``mark``."""
        if mark in self._control:
            return self._rules.rule("/(?s:.*)/") + " " + self._text(mark)
        return self._rules.rule("/(?s:.*)/", f"[suffix={text_term(mark)}]")

    def _thoughts(self, *, inside: bool) -> str:
        form = self._form
        if form.header:
            begin = f'{self._text("<|channel|>")} "analysis" {self._text(form.header.close)}'
            return f'({begin} {self._until(form.header.end[0])} {self._text(form.header.open[0])} "assistant")?'
        assert form.reasoning
        space = self._rules.rule(r"/[ \n]{1,4}/")
        if inside:
            return f"{self._until(form.reasoning.close)} {space}?"
        return f"({self._text(form.reasoning.open)} {self._until(form.reasoning.close)} {space}?)?"

    def _text_with_calls(self, tools: Schemas, *, parallel: bool, begun: bool) -> str:
        calls, header, anything = self._form.calls, self._form.header, self._rules.rule("/(?s:.*)/")
        assert calls
        if header:
            begin, close = self._text("<|channel|>"), self._text(header.close)
            said = f'{begin} ("final" | "commentary") {close} {anything}'
            call, then = self._calls(tools, parallel=False), self._text(header.end[0] + header.open[0] + "assistant")
            return f"{anything} ({then} {call})?" if begun else f"{call} | {said} ({then} {call})?"
        if calls.bare:  # what begins like an object or a list is a call
            said = self._rules.rule(r"/(?s:[ \n]*[^ \n{\[].*)?/")
            return f"{self._calls(tools, parallel=parallel)} | {said}"
        opening = calls.begin or calls.write
        mark = next(mark for mark in (*calls.open, *calls.skip) if opening.startswith(mark))
        rest = {"begin" if calls.begin else "write": opening.removeprefix(mark)}
        self._form = msgspec.structs.replace(self._form, calls=msgspec.structs.replace(calls, **rest))
        call = f"{self._until(mark)} {self._calls(tools, parallel=parallel and bool(calls.begin))}"
        return f"({call})* {anything}" if parallel else f"{call} | {anything}"

    def _calls(self, tools: Schemas, *, parallel: bool) -> str:
        calls = self._form.calls
        assert calls
        options = [self._rules.rule(self._call(name, schema)) for name, schema in tools.items()]
        call = self._rules.rule(" | ".join(options))
        further = f" ({self._text(calls.between)} {call})*" if parallel and not self._form.header else ""
        return f"{self._text(calls.begin)} {call}{further} {self._text(calls.end)}"

    def _call(self, name: str, schema: dict[str, Any]) -> str:
        assert self._form.calls
        terms = []
        for i, part in enumerate(PLACES.split(self._form.calls.write)):
            match part if i % 2 else "":
                case "name":
                    terms.append(self._text(json.dumps(name)))
                case "word":
                    terms.append(self._text(name))
                case "ordinal":
                    terms.append("/[0-9]/")
                case "arguments":
                    terms.append(self._bare(schema) if self._form.calls.quote else self._json(schema))
                case "keywords":
                    terms.append(self._members(schema, "=", ", ", self._json))
                case "pairs":
                    terms += self._pairs(schema)
                case _:
                    terms.append(self._text(part))
        return " ".join(filter(None, terms))

    def _pairs(self, schema: dict[str, Any]) -> list[str]:
        assert self._form.calls
        tags = self._form.calls.tags
        assert tags
        before, _, after = self._form.calls.pair.partition("$value")
        end = "\n" * tags.trim + tags.value_close
        rest = after.removeprefix(end)
        terms = []
        for key, inner, is_required in properties_of(schema):
            types = types_of(inner)
            if types == {"string"} and "enum" not in inner:
                check_keywords(inner)
                value = self._until(end)
            elif "enum" in inner and types == {"string"}:
                value = f"({' | '.join(self._text(option) for option in inner['enum'])}) {self._text(end)}"
            else:
                if "string" in types or not types:
                    raise not_enforceable(f"the type of '{key}' must be one, and stated")
                value = f"{self._json(inner)} {self._text(end)}"
            is_string = "true" if types == {"string"} else "false"
            opening = before.replace("$key", key).replace("$string", is_string)
            pair = f"{self._text(opening)} {value} {self._text(rest)}"
            terms.append(pair if is_required else f"({pair})?")
        return terms

    def _bare(self, schema: dict[str, Any], depth: int = 0) -> str:
        """A value with bare keys, and strings in marks of their own."""
        assert self._form.calls
        quote = self._form.calls.quote
        types = types_of(schema)
        if depth > MAX_DEPTH or len(types) != 1:
            raise not_enforceable("every value must have one type")
        match types.pop():
            case "string" if "enum" in schema:
                options = " | ".join(self._text(option) for option in schema["enum"])
                return f"{self._text(quote)} ({options}) {self._text(quote)}"
            case "string":
                check_keywords(schema)
                return f"{self._text(quote)} {self._until(quote)}"
            case "array":
                check_keywords(schema)
                item = self._rules.rule(self._bare(schema.get("items", {}), depth + 1))
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object":
                members = self._members(schema, ":", ",", lambda inner: self._bare(inner, depth + 1))
                return f'"{{" {members} "}}"'
        return self._json(schema)

    def _members(self, schema: dict[str, Any], equals: str, comma: str, value: Callable[[dict[str, Any]], str]) -> str:
        """The properties of an object, the required ones first, and of the others any in their order."""
        required: list[str] = []
        optional: list[str] = []
        for key, inner, is_required in properties_of(schema):
            member = f"{self._text(key + equals)} {value(inner)}"
            (required if is_required else optional).append(self._rules.rule(member))
        between = f" {text_term(comma)} "
        # from the last to the first: what may follow a property, and what may stand where none has been
        follow, begin = '""', '""'
        for member in reversed(optional):
            begin = self._rules.rule(f"{member} {follow} | {begin}")
            follow = self._rules.rule(f"{between}{member} {follow} | {follow}")
        return f"{between.join(required)} {follow}" if required else begin


def properties_of(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Name, schema and whether it is required. Raises BadRequest for objects that are more than their properties."""
    check_keywords(schema)
    required = schema.get("required", [])
    return [(key, inner, key in required) for key, inner in schema.get("properties", {}).items()]


def check_keywords(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise not_enforceable("a schema must be an object")
    if others := schema.keys() - KNOWN_KEYWORDS:
        raise not_enforceable(f"'{min(others)[:40]}' is not supported")


def not_enforceable(why: str) -> BadRequest:
    message = f"Invalid 'tools': a call cannot be forced with this schema, as this model writes calls: {why}."
    return BadRequest(message, param="tools", code="unsupported_schema")
