"""Constraints on the answer, in the formats of OpenAI (``response_format``) and vLLM
(``structured_outputs``).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from cllm.errors import BadRequest
from cllm.server.body import Body
from cllm.serving.answer import SchedulingOptions
from cllm.serving.service import Service
from cllm.text.grammar import FREE, CheckedGrammar, Constraint


class JsonSchema(Body):
    """With ``strict``, a keyword that cannot be enforced is rejected.

    Clients of llama-server send no ``name``.
    """

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """``schema`` and ``strict`` outside of ``json_schema`` are llama-server's form, also with the
    type json_object.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @pydantic.model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("'json_schema' is required with the type 'json_schema'")
        return self

    def constraint(self) -> Constraint | None:
        if self.type == "text":
            return None
        if self.type == "json_schema" and self.json_schema:
            return Constraint(
                "json_schema", self.json_schema.schema_, strict=self.json_schema.strict is True
            )
        return (
            Constraint("json_object")
            if self.schema_ is None
            else Constraint("json_schema", self.schema_, strict=self.strict is True)
        )


class StructuredOutputs(Body):
    """vLLM's structured outputs. ``disable_fallback``, ``disable_any_whitespace`` and
    ``whitespace_pattern`` have no effect: there is one backend, and whitespace is always limited.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: Literal[False] | None = None
    structural_tag: None = None

    def constraints(self) -> dict[str, Constraint]:
        """Return the constraints by field name."""
        return make_constraints(
            "structured_outputs.",
            json=self.json_,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
        ) | (
            {"structured_outputs.json_object": Constraint("json_object")}
            if self.json_object
            else {}
        )


class ConstrainedBody(Body):
    """Fields that constrain the answer. ``guided_*`` are vLLM's names until 0.12, which clients
    still send. Those without a prefix are llama-server's and SGLang's.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar_: Annotated[str | None, Field(alias="grammar")] = None
    ebnf: str | None = None

    async def grammar(self, service: Service, scheduling: SchedulingOptions) -> CheckedGrammar:
        """Return the constraint on the answer. Raises BadRequest if there is more than one or it
        cannot be enforced, and EngineError if too many grammars are being checked.
        """
        constraints = make_constraints(
            "guided_",
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        ) | make_constraints(
            "",
            json_schema=self.json_schema,
            regex=self.regex,
            grammar=self.grammar_,
            ebnf=self.ebnf,
        )
        if self.structured_outputs is not None:
            constraints |= self.structured_outputs.constraints()
        if self.response_format is not None and (constraint := self.response_format.constraint()):
            constraints["response_format"] = constraint
        if not constraints:
            return FREE
        if len(constraints) > 1:
            first, second = [*constraints][:2]
            message = (
                f"'{first}' and '{second}' cannot be combined: only one constraint is allowed."
            )
            raise BadRequest(message, param=second, code="invalid_value")
        ((param, constraint),) = constraints.items()
        return await service.grammar(constraint, param, scheduling)


def make_constraints(prefix: str, **fields: Any) -> dict[str, Constraint]:
    """Return the constraints of the fields that are not None, by prefixed name.

    Raises BadRequest for invalid JSON.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given.keys() & {"json", "json_schema"}:
        try:
            given[name] = json.loads(given[name]) if isinstance(given[name], str) else given[name]
        except (ValueError, RecursionError):
            message = f"Invalid '{prefix}{name}': it is not JSON."
            raise BadRequest(message, param=prefix + name, code="invalid_value") from None
    kinds: dict[str, Literal["json_schema", "regex", "choice", "grammar"]] = {
        "json": "json_schema",
        "json_schema": "json_schema",
        "regex": "regex",
        "choice": "choice",
        "grammar": "grammar",
        "ebnf": "grammar",
    }
    return {
        prefix + name: Constraint(kinds[name], value, strict=kinds[name] != "json_schema")
        for name, value in given.items()
    }
