"""Texts of DRY's sequence breakers, to token ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.vocabulary import Pieces
from cllm.errors import BadRequest
from cllm.text.dry_breakers import MAX_BREAKERS, MAX_LENGTH, DryBreakers

PIECES = [
    b"\n",
    b"a\n\nb",
    b"",
    b":",
    b"**",
    b"a:",
    b"\xff",
    b"\xe2\x82",
    "€".encode(),
    b"ab",
    b"b",
]


def breakers(pieces: list[bytes]) -> DryBreakers:
    return DryBreakers(lambda: Pieces.of(pieces))


def test_default_breakers_find_the_tokens_that_contain_them():
    """Some of the texts may occur in no token."""
    assert breakers(PIECES).ids(None) == (0, 1, 3, 4, 5)
    assert breakers(PIECES).ids(()) == ()


@given(st.lists(st.binary(max_size=4), max_size=20), st.text("ab\n€", min_size=1, max_size=3))
def test_breaker_finds_exactly_the_tokens_that_contain_it(pieces, text):
    """Tokens that spell it only together do not count. A breaker in no token is a bad request."""
    expected = tuple(i for i, piece in enumerate(pieces) if text.encode() in piece)
    if expected:
        assert breakers(pieces).ids((text,)) == expected
    else:
        with pytest.raises(BadRequest, match="no token"):
            breakers(pieces).ids((text,))


@pytest.mark.parametrize("texts", [("",), ("a" * (MAX_LENGTH + 1),), ("a",) * (MAX_BREAKERS + 1)])
def test_number_and_length_of_breakers_are_limited(texts):
    with pytest.raises(BadRequest) as refused:
        breakers(PIECES).ids(texts)
    assert refused.value.param == "dry_sequence_breakers"
