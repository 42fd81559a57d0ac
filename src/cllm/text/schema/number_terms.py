"""JSON numbers as Lark terminals, with a limited number of digits, so that no number goes on
forever.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any, NamedTuple

INTEGER_DIGITS, DECIMALS, EXPONENT_DIGITS = 20, 17, 3  # at most, unless a bound has more

ANY_FRACTION = r"(\.[0-9]+)?"


class Bound(NamedTuple):
    """The end of a range. If ``strict``, the value itself is excluded."""

    value: Decimal
    strict: bool = False

    @property
    def digits(self) -> tuple[str, str]:
        """The digits before and after the decimal point, without the sign and trailing zeros after
        the point.
        """
        before, _, after = f"{self.value.copy_abs():f}".partition(".")
        return before, after.rstrip("0")


def read_bounds(schema: dict[str, Any]) -> tuple[Bound | None, Bound | None]:
    """Return the narrowest lower and upper bound of a schema, None where it has none."""
    return (
        narrower_bound(max, schema["minimum"], schema["exclusiveMinimum"]),
        narrower_bound(min, schema["maximum"], schema["exclusiveMaximum"]),
    )


def narrower_bound(better: Callable[..., Any], inclusive: Any, strict: Any) -> Bound | None:
    """Return the narrower of two bounds: of equal ones the strict one, else the one that ``better``
    selects.
    """
    if strict is not None and (inclusive is None or better(inclusive, strict) == strict):
        return Bound(Decimal(str(strict)), strict=True)
    return None if inclusive is None else Bound(Decimal(str(inclusive)))


def allowed_constants(schema: dict[str, Any]) -> list[Any]:
    """Return those of a schema's constants ("in") that its other keywords allow."""
    low, high = read_bounds(schema)
    integer, steps = schema["type"] == "integer", schema["multipleOf"] or ()
    return [
        value
        for value in schema["in"]
        if not (integer and value != int(value))
        and lies_within(Decimal(str(value)), low, high)
        and all(Fraction(str(value)) % Fraction(str(step)) == 0 for step in steps)
    ]


def lies_within(value: Decimal, low: Bound | None, high: Bound | None) -> bool:
    above = low is None or value > low.value or (value == low.value and not low.strict)
    return above and (
        high is None or value < high.value or (value == high.value and not high.strict)
    )


def number_terminal(low: Bound | None, high: Bound | None, *, integer: bool) -> str | None:
    """Return the body of a terminal for the numbers from ``low`` to ``high``; None if there are
    none.

    With a bound, numbers are written without an exponent.
    """
    if integer:
        low = low and Bound(next_integer(low, ROUND_CEILING, 1))
        high = high and Bound(next_integer(high, ROUND_FLOOR, -1))
    if (
        low
        and high
        and (low.value > high.value or (low.value == high.value and (low.strict or high.strict)))
    ):
        return None
    lengths = [tuple(map(len, bound.digits)) for bound in (low, high) if bound]
    form = rf"(0|[1-9][0-9]{{0,{max([INTEGER_DIGITS, *(before for before, _ in lengths)]) - 1}}})"
    if not integer:
        form += rf"(\.[0-9]{{1,{max([DECIMALS, *(after for _, after in lengths)])}}})?"
    if not lengths:
        return f"/-?{form}/" if integer else rf"/-?{form}([eE][+-]?[0-9]{{1,{EXPONENT_DIGITS}}})?/"
    options = []
    if high is None or high.value > 0 or high == Bound(Decimal(0)):
        options.append(unsigned(form, low, high))
    if low is None or low.value < 0:
        options.append(f'"-" {unsigned(form, high and negative(high), low and negative(low))}')
    return " | ".join(options)


def next_integer(bound: Bound, rounding: str, step: int) -> Decimal:
    """Return the first integer within ``bound``."""
    value = bound.value.to_integral_value(rounding)
    return Decimal(int(value) + step) if bound.strict and value == bound.value else value


def negative(bound: Bound) -> Bound:
    return Bound(bound.value.copy_negate(), bound.strict)


def unsigned(form: str, low: Bound | None, high: Bound | None) -> str:
    """Return a term for numbers without a sign, of ``form``, from ``low`` to ``high``, which is not
    negative.
    """
    limits = [f"/{form}/"]
    if low and (low.value > 0 or low == Bound(Decimal(0), strict=True)):
        limits.append(f"/{at_least(low)}/")
    if high:
        limits.append(f"/{at_most(high)}/")
    return f"({' & '.join(limits)})"


def at_least(low: Bound) -> str:
    """Return a regular expression for numbers without a sign from ``low`` on."""
    before, after = low.digits
    options = [f"[1-9][0-9]{{{len(before)},}}{ANY_FRACTION}"]
    for i, digit in enumerate(before):
        if digit < "9":
            options.append(
                f"{before[:i]}[{int(digit) + 1}-9][0-9]{{{len(before) - i - 1}}}{ANY_FRACTION}"
            )
    rest = "[0-9]*[1-9][0-9]*" if low.strict else "[0-9]*"
    if after or low.strict:
        more = [
            f"{after[:i]}[{int(digit) + 1}-9][0-9]*" for i, digit in enumerate(after) if digit < "9"
        ]
        options.append(rf"{before}\.({'|'.join([*more, after + rest])})")
    else:
        options.append(before + ANY_FRACTION)
    return "|".join(options)


def at_most(high: Bound) -> str:
    """Return a regular expression for numbers without a sign up to ``high``."""
    before, after = high.digits
    options = [f"(0|[1-9][0-9]{{0,{len(before) - 2}}}){ANY_FRACTION}"] if len(before) > 1 else []
    for i, digit in enumerate(before):
        least = 1 if i == 0 and len(before) > 1 else 0
        if int(digit) > least:
            options.append(
                f"{before[:i]}[{least}-{int(digit) - 1}]"
                f"[0-9]{{{len(before) - i - 1}}}{ANY_FRACTION}"
            )
    less = [
        f"{after[:i]}[0-{int(digit) - 1}][0-9]*" for i, digit in enumerate(after) if digit > "0"
    ]
    less += [after[:i] for i in range(1, len(after))]
    less += [] if high.strict else [f"{after}0*" if after else "0+"]
    if after or not high.strict:
        options.append(rf"{before}(\.({'|'.join(less)}))?")
    return "|".join(options)
