"""Texts to tokenize, in segments: control tokens are recognized in some of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain
from typing import NamedTuple, Protocol


class Segment(NamedTuple):
    """A part of a text; the other fields are arguments of ``Tokenizer.tokenize``."""

    text: str
    add_special: bool = False
    parse_special: bool = False


class Tokenizer(Protocol):
    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of ``text``.

        ``add_special`` adds the model's begin and end tokens. ``parse_special`` recognizes control
        tokens in the text.
        """
        ...


def count_characters(texts: Iterable[Iterable[Segment]]) -> int:
    """Return the number of characters of all texts."""
    return sum(len(segment.text) for text in texts for segment in text)


def tokenize_segments(tokenizer: Tokenizer, segments: Iterable[Segment]) -> list[int]:
    """Return the token ids of a text."""
    tokens: list[int] = []
    for text, add_special, parse_special in segments:
        tokens += tokenizer.tokenize(text, add_special=add_special, parse_special=parse_special)
    return tokens


class TokenizedChat(NamedTuple):
    """The prompt of a conversation. Later prompts are expected to agree with it up to one of the
    ``boundaries``, numbers of tokens.
    """

    tokens: list[int]
    boundaries: tuple[int, ...] = ()


def join_parts(parts: Iterable[list[int]]) -> TokenizedChat:
    """Return a prompt whose parts have been tokenized; boundaries lie between them."""
    listed = [*parts]
    *boundaries, _ = accumulate(map(len, listed))
    return TokenizedChat([*chain.from_iterable(listed)], tuple(boundaries))
