"""The facts about a model's vocabulary that need no tokenizer: the bytes and names of its tokens,
and its templates.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import sub
from typing import Protocol, Self

import msgspec


@dataclass(slots=True)
class Pieces:
    """The bytes that each token id adds to a text.

    They are kept in one string: a list of 150,000 bytes objects takes five times the memory.

    ``data`` has the bytes of all tokens, and ``offsets`` the beginning of each and the end of the
    last. ``marks`` has the bytes of tokens that have none in ``data``.
    """

    data: bytes
    offsets: array[int] | memoryview[int]
    marks: Mapping[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, pieces: Iterable[bytes]) -> Self:
        offsets, parts = array("I", [0]), []
        for piece in pieces:
            parts.append(piece)
            offsets.append(offsets[-1] + len(piece))
        return cls(b"".join(parts), offsets)

    def with_marks(self, marks: Mapping[int, bytes]) -> Pieces:
        """Return these pieces with the bytes of ``marks`` for tokens that have none."""
        return Pieces(self.data, self.offsets, marks)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, token: int) -> bytes:
        offsets = self.offsets
        return self.data[offsets[token] : offsets[token + 1]] or self.marks.get(token, b"")

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    @property
    def longest(self) -> int:
        """The number of bytes of the longest piece."""
        return max(map(sub, self.offsets[1:], self.offsets), default=0)

    def find(self, part: bytes) -> list[int]:
        """Return the ids of the tokens that contain ``part``, which is not empty, in order."""
        tokens: list[int] = []
        data, offsets, token = self.data, self.offsets, 0
        place = data.find(part)
        while place >= 0:
            token = bisect_right(offsets, place, token) - 1
            following = place + 1
            if place + len(part) <= offsets[token + 1]:
                tokens.append(token)
                following = offsets[token + 1]
            place = data.find(part, following)
        return tokens


class VocabularyFacts(Protocol):
    """The properties of a vocabulary."""

    @property
    def size(self) -> int: ...

    @property
    def pieces(self) -> Pieces:
        """The bytes that each token id adds to the text; control tokens add none."""
        ...

    @property
    def control_tokens(self) -> list[str]:
        """The texts that become one control token when special tokens are parsed, longest first."""
        ...

    @property
    def infill_tokens(self) -> tuple[int, int, int] | None:
        """The tokens that mark the prefix, the suffix and the middle to be written; None if the
        model has none.
        """
        ...

    @property
    def repository_tokens(self) -> tuple[int, int] | None:
        """The tokens before the name of a repository and before each of its files; None if the
        model has none.
        """
        ...

    @property
    def special_tokens(self) -> dict[int, str]:
        """The names of tokens that mean more than their text, by id.

        A grammar allows them only by name.
        """
        ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def tool_template(self) -> str | None:
        """The template for chats with tools, if the model has one besides ``chat_template``."""
        ...

    @property
    def special_texts(self) -> dict[str, str]:
        """The variables that templates use: ``bos_token``, ``eos_token``."""
        ...

    @property
    def rerank_template(self) -> str | None:
        """The template of a reranker's input, with {query} and {document}; None if it uses
        ``pair_tokens`` instead.
        """
        ...

    @property
    def pair_tokens(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens before, between and after the two texts of a pair."""
        ...


class VocabularyTable(msgspec.Struct, frozen=True, dict=True):
    """The properties of a vocabulary, in a form that can be sent to another process."""

    size: int
    piece_data: bytes
    piece_offsets: bytes  # unsigned 32-bit integers
    control_tokens: list[str]
    infill_tokens: tuple[int, int, int] | None
    repository_tokens: tuple[int, int] | None
    special_tokens: dict[int, str]
    chat_template: str | None
    special_texts: dict[str, str]
    rerank_template: str | None
    pair_tokens: tuple[list[int], list[int], list[int]]
    tool_template: str | None = None

    @classmethod
    def of(cls, vocabulary: VocabularyFacts) -> Self:
        pieces = vocabulary.pieces
        return cls(
            size=vocabulary.size,
            piece_data=pieces.data,
            piece_offsets=pieces.offsets.tobytes(),
            control_tokens=vocabulary.control_tokens,
            infill_tokens=vocabulary.infill_tokens,
            repository_tokens=vocabulary.repository_tokens,
            special_tokens=vocabulary.special_tokens,
            chat_template=vocabulary.chat_template,
            special_texts=vocabulary.special_texts,
            rerank_template=vocabulary.rerank_template,
            pair_tokens=vocabulary.pair_tokens,
            tool_template=vocabulary.tool_template,
        )

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.piece_data, memoryview(self.piece_offsets).cast("I"))

    @property
    def has_template(self) -> bool:
        return bool(self.chat_template or self.tool_template)

    @cached_property
    def longest_piece(self) -> int:
        """The number of bytes of the longest text of a token."""
        return max(self.pieces.longest, *map(len, self.control_tokens), 0)

    def find_text(self, token: int) -> bytes:
        """Return the bytes of a token id of the vocabulary; for a control token, its name."""
        return self.pieces[token] or self.special_tokens.get(token, "").encode()
