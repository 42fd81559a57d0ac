"""What a text must follow, in the words of clients, to the grammar that the engine enforces."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from cllm.errors import BadRequest

LIMITS = LLParserLimits(verbose_errors=False)
# At most one space where JSON allows any number: a model must not be able to write blanks for ever.
WHITESPACE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}


class Constraint(msgspec.Struct, frozen=True):
    """kind json_object has no value; json_schema: a schema (dict or bool); regex: a pattern that the whole text
    matches; choice: a list of texts; grammar: Lark or GBNF.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None


def json_term(schema: dict[str, Any] | bool, param: str) -> str:
    """A term of Lark for the JSON values that ``schema`` allows. Raises BadRequest for what cannot be enforced."""
    if not isinstance(schema, (dict, bool)):
        raise BadRequest(f"Invalid '{param}': a JSON schema is an object or a boolean.", param=param)
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return "%json " + json.dumps({**schema, "x-guidance": WHITESPACE})


def to_lark(constraint: Constraint, param: str) -> str:
    """The grammar as Lark, not compiled yet. Raises BadRequest, naming ``param``."""
    value = constraint.value
    match constraint.kind:
        case "json_object":
            return f"start: {json_term({'type': 'object'}, param)}"
        case "json_schema":
            return f"start: {json_term(value, param)}"
        case "regex":
            return f"start: {regex_term(value)}"
        case "choice":
            return "start: " + " | ".join(json.dumps(text) for text in value)
        case "grammar":
            try:
                return any_to_lark(value)
            except Exception as error:  # noqa: BLE001  # it raises that very class
                raise BadRequest(f"Invalid '{param}': {error}", param=param, code="invalid_grammar") from None


def regex_term(pattern: str) -> str:
    return "/" + pattern.replace("/", "\\/").replace("\n", "\\n") + "/"


def compile_grammar(constraint: Constraint, param: str) -> str:
    """The grammar as Lark that llguidance takes. Raises BadRequest, naming ``param``."""
    lark = to_lark(constraint, param)
    failed, messages = LLMatcher.validate_grammar_with_warnings(lark, limits=LIMITS)
    if failed:
        raise BadRequest(f"Invalid '{param}': {messages[0][:300]}", param=param, code="invalid_grammar")
    return lark
