"""Bytes of tokens to text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.vocabulary import Pieces
from cllm.text.detokenizer import Detokenizer

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=20)
cuts = st.lists(st.integers(0, 80), max_size=12)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(at)]


def deltas(pieces: list[bytes]) -> list[str]:
    """Return what each of the tokens 0, 1, 2, ... with these pieces completes, and what is left at
    the end.
    """
    detokenizer = Detokenizer(Pieces.of(pieces))
    return [*map(detokenizer.feed, range(len(pieces))), detokenizer.flush()]


@given(texts, cuts)
def test_deltas_add_up_to_the_text(text, cuts):
    """However its bytes are split over tokens. No delta has a broken character."""
    parts = deltas(split(text.encode(), cuts))
    assert "".join(parts) == text
    assert parts[-1] == ""
    assert "\ufffd" not in "".join(parts)


@given(texts, cuts)
def test_character_is_shown_with_its_last_byte(text, cuts):
    shown, seen = "", b""
    pieces = split(text.encode(), cuts)
    for piece, delta in zip(pieces, deltas(pieces), strict=False):
        shown, seen = shown + delta, seen + piece
        assert shown == seen.decode(errors="ignore")


@given(st.binary(max_size=30), cuts)
def test_invalid_utf_8_becomes_replacement_characters(data, cuts):
    """The same ones however the bytes are split."""
    assert "".join(deltas(split(data, cuts))) == data.decode(errors="replace")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xf0\x9f", b"\x91", b"\x8d"], ["", "", "👍", ""]),
        ([b"a\xe2\x82", b"", b"\xacb"], ["a", "", "€b", ""]),
        ([b"\xe2\x82", b"a"], ["", "\ufffda", ""]),
        ([b"a", b"\xe2\x82"], ["a", "", "\ufffd"]),
        ([b"\x80", b"\xff"], ["\ufffd", "\ufffd", ""]),
        ([b"\xed\xa0\x80"], ["\ufffd\ufffd\ufffd", ""]),
    ],
)
def test_broken_character_is_replaced_as_soon_as_it_is_certain(pieces, expected):
    """A split character waits for its last token."""
    assert deltas(pieces) == expected


def test_repeated_token_gives_its_piece_each_time():
    """A token without a piece gives nothing."""
    detokenizer = Detokenizer([b"ha", b"", b" "])
    assert [detokenizer.feed(token) for token in (0, 2, 0, 1, 0)] == ["ha", " ", "ha", "", "ha"]
