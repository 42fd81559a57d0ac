"""The declaration of a sampling parameter."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, get_args, get_type_hints

import msgspec

from cllm.errors import BadRequest

KINDS = {int: "an integer", float: "a number", bool: "true or false"}


class Parameter(msgspec.Struct, frozen=True):
    """The properties that a field of SamplingParams declares besides its name, type and default.

    The checks, the request bodies, the configuration and the flags follow from it.

    ``help`` explains its values. ``bounds`` are the least and the largest number, or None for any
    value of the type. The request bodies of ``dialects`` have it as a number, true or false; some
    of them call it by another of its ``names``. A parameter whose form differs between dialects,
    such as ``stop``, is a field of their bodies instead.

    The server uses ``default`` for requests without it, if that is not the default of
    SamplingParams; it needs ``bounds``. Operators can then set ``sampling.<name>``, and ``cllm
    chat`` and ``cllm generate`` have a flag. ``find_parameters`` sets the other fields.
    """

    help: str
    bounds: tuple[float, float] | None = None
    dialects: tuple[str, ...] = ()
    names: Mapping[str, str] = {}
    default: float | None = None
    name: str = ""
    type: Any = float
    is_optional: bool = False

    def name_in(self, dialect: str) -> str:
        return self.names.get(dialect, self.name)

    def check(self, value: Any) -> None:
        """Raise BadRequest for a value that is out of bounds or has the wrong type."""
        if value is None and self.is_optional:
            return
        kind = value.__class__
        is_right = (
            isinstance(value, int | float) and kind is not bool
            if self.type is float
            else kind is self.type
        )
        if not is_right:
            message = (
                f"Invalid '{self.name}': it must be {KINDS[self.type]}, not {repr(value)[:40]}."
            )
            raise BadRequest(message, param=self.name)
        if self.bounds is not None:
            check_bounds(self.name, value, *self.bounds)


def find_parameters(params: type) -> dict[str, Parameter]:
    """Return the fields of ``params`` whose type is Annotated with a Parameter, by name."""
    parameters = {}
    for name, hint in get_type_hints(params, include_extras=True).items():
        for parameter in getattr(hint, "__metadata__", ()):
            kinds = get_args(hint.__origin__) or (hint.__origin__,)
            parameters[name] = msgspec.structs.replace(
                parameter, name=name, type=kinds[0], is_optional=NoneType in kinds
            )
    return parameters


def check_bounds(
    field: str, value: float, low: float, high: float, what: str = "the value"
) -> None:
    """Raise BadRequest unless ``value`` is a number and ``low <= value <= high``; NaN is never
    within.
    """
    try:
        if low <= value <= high:
            return
    except TypeError:
        shown = repr(value)[:40]
        raise BadRequest(
            f"Invalid '{field}': {what} must be a number, not {shown}.", param=field
        ) from None
    code = "integer_above_max_value" if value > high else "integer_below_min_value"
    if isinstance(value, float):
        code = code.replace("integer", "decimal")
    shown = str(value) if abs(value) < 1e20 or value != value else "that"  # noqa: PLR0124  # NaN
    raise BadRequest(
        f"Invalid '{field}': {what} must be between {low} and {high}, not {shown}.",
        param=field,
        code=code,
    )
