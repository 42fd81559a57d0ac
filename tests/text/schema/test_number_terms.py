"""Grammar terminals for numbers, compared with arithmetic."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_texts import BYTES

from cllm.sampling.grammar import Grammar
from cllm.text.schema.number_terms import Bound, number_terminal

decimals = (
    st.decimals(-1000, 1000, places=3)
    | st.integers(-1200, 1200).map(Decimal)
    | st.integers(-5, 5).map(Decimal)
)
bounds = st.none() | st.builds(Bound, decimals, st.booleans())


def matches(terminal: str | None, text: str) -> bool:
    if terminal is None:
        return False
    matcher = Grammar(f"start: N\nN: {terminal}", BYTES).matcher()._at()
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


def lies_within(value: Decimal, low: Bound | None, high: Bound | None) -> bool:
    above = low is None or value > low.value or (value == low.value and not low.strict)
    return above and (
        high is None or value < high.value or (value == high.value and not high.strict)
    )


@given(bounds, bounds, st.lists(decimals, min_size=1, max_size=12), st.booleans())
def test_terminal_matches_exactly_the_numbers_within_the_bounds(low, high, values, integer) -> None:
    terminal = number_terminal(low, high, integer=integer)
    around = [
        bound.value + Decimal(step)
        for bound in (low, high)
        if bound
        for step in ("-1", "-0.0001", "0", "0.1")
    ]
    for value in [*values, *around]:
        expected = lies_within(value, low, high) and (
            not integer or value == value.to_integral_value()
        )
        text = f"{value:f}".rstrip("0").rstrip(".") if "." in f"{value:f}" else f"{value:f}"
        assert matches(terminal, text) == expected, text
        if not integer and "." in text:
            assert matches(terminal, text + "00") == expected


@pytest.mark.parametrize(
    ("text", "integer", "number"),
    [
        ("9" * 20, True, True),
        ("-" + "9" * 20, True, True),
        ("1" + "0" * 20, False, False),
        ("0." + "1" * 17, False, True),
        ("0." + "1" * 18, False, False),
        ("1e5", False, True),
        ("-1.5E-300", False, True),
        ("1e1000", False, False),
        ("01", False, False),
        ("1.", False, False),
        (".5", False, False),
        ("+1", False, False),
    ],
)
def test_number_of_digits_is_limited(text: str, integer: bool, number: bool) -> None:
    assert matches(number_terminal(None, None, integer=True), text) == integer
    assert matches(number_terminal(None, None, integer=False), text) == number


def test_bounds_with_more_digits_widen_the_digit_limit() -> None:
    """The limit therefore never excludes an integer within the bounds."""
    low, high = Bound(Decimal(10**29)), Bound(Decimal(10**30 + 7))
    terminal = number_terminal(low, high, integer=True)
    assert all(matches(terminal, str(value)) for value in (10**29, 10**30 - 1, 10**30 + 7))
    assert not any(matches(terminal, str(value)) for value in (10**29 - 1, 10**30 + 8, 10**31))
    fine = number_terminal(Bound(Decimal("0." + "0" * 24 + "1")), None, integer=False)
    assert matches(fine, "0." + "0" * 24 + "1")
    assert not matches(fine, "0." + "0" * 25 + "1")


def test_64_bit_integers_are_covered() -> None:
    terminal = number_terminal(Bound(Decimal(0)), Bound(Decimal(2**64 - 1)), integer=True)
    assert matches(terminal, str(2**64 - 1))
    assert not matches(terminal, str(2**64))


def test_terms_of_large_bounds_are_limited_in_size() -> None:
    """A bound of a thousand digits takes a few hundred kilobytes at most, and compiles."""
    terminal = number_terminal(None, Bound(Decimal(10**308)), integer=False)
    assert terminal is not None
    assert len(terminal) < 200_000
    assert matches(terminal, "1" * 308)
    assert re.search(r"\{1,17\}", terminal)
