"""The sampling parameters of request bodies, and the operator's defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field, WithJsonSchema, create_model

from cllm.config.settings import Sampling
from cllm.core.parameter import Parameter
from cllm.core.params import LARGEST, PARAMETERS, SamplingParams
from cllm.server.body import Body

Model = TypeVar("Model", bound=Body)

SCHEMA_TYPES = {int: "integer", float: "number", bool: "boolean"}


def add_sampling_fields(
    dialect: str, *, integer: Any = int, **notes: str
) -> Callable[[type[Model]], type[Model]]:
    """Return a decorator for a body: it adds a field for each sampling parameter that ``dialect``
    offers, unless the body has a field of that name.

    ``integer`` is the type of its integers. ``notes`` add to the help of parameters, by their names
    in the dialect.
    """

    def add_fields(body: type[Model]) -> type[Model]:
        fields: dict[str, Any] = {}
        for parameter in PARAMETERS.values():
            name = parameter.name_in(dialect)
            if dialect in parameter.dialects and name not in body.model_fields:
                kind: Any = integer if parameter.type is int else parameter.type
                documented = Annotated[kind, WithJsonSchema(json_schema(parameter))]
                help_text = f"{parameter.help} {notes.get(name, '')}".rstrip()
                fields[name] = (documented | None, Field(default=None, description=help_text))
        return create_model(
            body.__name__,
            __base__=body,
            __module__=body.__module__,
            __doc__=body.__doc__,
            **fields,
        )

    return add_fields


def json_schema(parameter: Parameter) -> dict[str, Any]:
    """Return the JSON schema of a parameter's values. SamplingParams checks the bounds."""
    low, high = parameter.bounds or (-LARGEST, LARGEST)
    bounds = {"minimum": low, "maximum": high}
    return {
        "type": SCHEMA_TYPES[parameter.type],
        **{name: bound for name, bound in bounds.items() if abs(bound) < LARGEST},
    }


def read_sampling_values(body: Body, dialect: str) -> dict[str, Any]:
    """Return the parameters that ``dialect`` offers, by their names in SamplingParams.

    The value of a parameter that was left out is None.
    """
    return {
        name: getattr(body, parameter.name_in(dialect))
        for name, parameter in PARAMETERS.items()
        if dialect in parameter.dialects
    }


def build_params(defaults: Sampling, values: dict[str, Any]) -> SamplingParams:
    """Return the SamplingParams of a request. A value that is None gets the default.

    Raises BadRequest for a value out of range.
    """
    wanted = {name: value for name, value in values.items() if value is not None}
    if "max_tokens" in wanted:  # a limit above any context length is valid
        wanted["max_tokens"] = min(wanted["max_tokens"], LARGEST)
    return SamplingParams(**{**dict(defaults), **wanted})
