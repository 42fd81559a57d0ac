"""Stop strings: the text ends before the first one, and is shown as early as possible."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.text.stop_strings import StopStrings

texts = st.text("ab\n", max_size=24)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple)
cuts = st.lists(st.integers(0, 24), max_size=8)


def split(text: str, cuts: list[int]) -> list[str]:
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(at)]


def run(stops: tuple[str, ...], portions: list[str]) -> tuple[str, bool]:
    """Return what is shown of a text that arrives in portions, and whether it was stopped."""
    stop_strings, shown = StopStrings(stops), ""
    for portion in portions:
        text, stopped = stop_strings.feed(portion)
        shown += text
        if stopped:
            return shown, True
    return shown + stop_strings.flush(), False


def naive(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """Search character by character, and end where the first stop string is complete."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(stops, texts, cuts)
def test_shown_text_does_not_depend_on_the_portions(stops, texts, cuts):
    """It is that of a naive search in the whole text."""
    assert run(stops, split(texts, cuts)) == naive(stops, texts)


@pytest.mark.parametrize(
    ("stops", "text"),
    [(("abc", "b"), "abc"), (("abcd", "bc", "c"), "xabcd"), (("a\n\nb", "\n"), "a\n\nb")],
)
def test_stop_string_within_another_stops_the_same_in_any_portions(stops, text):
    assert run(stops, [text]) == run(stops, list(text)) == naive(stops, text)


@given(stops, texts, cuts)
def test_included_stop_string_ends_the_text(stops, text, cuts):
    shown, stopped = run(stops, split(text, cuts))
    including = StopStrings(stops, include=True)
    whole, has_ended = "", False
    for portion in split(text, cuts):
        if not has_ended:
            piece, has_ended = including.feed(portion)
            whole += piece
    assert has_ended == stopped
    if stopped:
        assert whole == shown + including.matched
        assert including.matched in stops


@given(stops, texts, cuts)
def test_stop_string_is_never_shown(stops, text, cuts):
    shown, _ = run(stops, split(text, cuts))
    assert not any(stop in shown for stop in stops)


@given(stops, texts, cuts)
def test_only_a_possible_start_of_a_stop_string_is_held_back(stops, text, cuts):
    stop_strings, shown, seen = StopStrings(stops), "", ""
    for portion in split(text, cuts):
        delta, stopped = stop_strings.feed(portion)
        if stopped:
            return
        shown, seen = shown + delta, seen + portion
        held = seen.removeprefix(shown)
        assert shown + held == seen
        ends = [seen[i:] for i in range(len(seen) + 1)]
        assert held == next(
            end for end in ends if not end or any(s.startswith(end) and s != end for s in stops)
        )


def test_without_stop_strings_nothing_is_held_back():
    assert run((), ["a", "", "b"]) == ("ab", False)
    assert StopStrings(()).feed("a") == ("a", False)


@pytest.mark.parametrize(
    ("stops", "portions", "expected"),
    [
        (("\n\n",), ["one\n", "\ntwo"], ("one", True)),
        (("\n\n",), ["one\n", "two\n"], ("one\ntwo\n", False)),
        (("END",), ["the EN", "EN", "D"], ("the EN", True)),
        (("aab",), ["a", "a", "a", "b", "c"], ("a", True)),
        (("x",), ["x"], ("", True)),
        (("👍🏽",), ["a👍", "🏽b"], ("a", True)),
    ],
)
def test_stop_string_across_portions_is_found(stops, portions, expected):
    """Text that only resembles one is shown."""
    assert run(stops, portions) == expected


def test_flush_returns_the_held_back_text_once():
    stop_strings = StopStrings(("stop",))
    assert stop_strings.feed("st") == ("", False)
    assert [stop_strings.flush(), stop_strings.flush()] == ["st", ""]


def test_found_stop_string_is_reported():
    """The longer of two that end together; None until one is found."""
    stops = StopStrings(("b", "ab", "c"))
    assert stops.feed("xa") == ("x", False)
    assert stops.matched == ""
    assert stops.feed("bc") == ("", True)
    assert stops.matched == "ab"
