"""Read the ``response_format`` of ``LLM`` and ``AsyncLLM``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, get_origin

from cllm.errors import BadRequest
from cllm.text.grammar import Constraint

PARAM = "response_format"
FORMS = (
    "a pydantic model or another type, a JSON schema (a dictionary), a regular expression (text or "
    "a compiled pattern), or a list of texts to choose from"
)


class AnswerFormat(NamedTuple):
    """The form that an answer's text must have. ``parse`` returns the value of a finished text."""

    constraint: Constraint
    parse: Callable[[str], Any] | None = None

    @classmethod
    def of(cls, value: Any) -> AnswerFormat:
        """Raises BadRequest, naming response_format, for a value in none of the FORMS."""
        match value:
            case str():
                return cls(Constraint("regex", value))
            case re.Pattern():
                if not isinstance(value.pattern, str) or value.flags & ~re.UNICODE:
                    raise invalid("write flags into the expression, as in (?i)")
                return cls(Constraint("regex", value.pattern))
            case list() | tuple():
                return cls(Constraint("choice", list(value)))
            case {"type": "text"}:
                raise invalid("leave it out for free text")
            case {"type": "json_object"}:
                return cls(Constraint("json_object"), json.loads)
            case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
                is_strict = rest.get("strict") is True
                return cls(Constraint("json_schema", schema, is_strict), json.loads)
            case dict():
                return cls(Constraint("json_schema", value), json.loads)
        if isinstance(value, type) or get_origin(value) is not None:
            return cls.of_type(value)
        raise invalid(f"it must be {FORMS}")

    @classmethod
    def of_type(cls, kind: Any) -> AnswerFormat:
        """Return the format of a type that pydantic knows.

        Keywords that cannot be enforced are left out, because pydantic checks the value anyway.
        """
        from pydantic import PydanticUserError, TypeAdapter

        try:
            adapter = TypeAdapter(kind)
            schema = adapter.json_schema()
        except PydanticUserError as error:
            raise invalid(f"pydantic has no JSON schema for it: {str(error)[:200]}") from None
        return cls(Constraint("json_schema", schema, strict=False), adapter.validate_json)


def invalid(why: str) -> BadRequest:
    return BadRequest(f"Invalid '{PARAM}': {why}.", param=PARAM, code="invalid_value")
