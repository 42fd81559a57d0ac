"""Find the tokens of each piece of shown text, and the places of a prompt's tokens in its text, for
requests with logprobs.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from cllm.core.output import Logprobs
from cllm.core.vocabulary import VocabularyTable

BLANKS = re.compile(rb"\s*")
LOOK_AHEAD = 64  # bytes of a text that its tokens may lack at one place


class TokenLogprob(NamedTuple):
    """A sampled token and its logprobs.

    Its text begins at the character ``at`` of the answer.

    A token that contains only a part of a character begins where that character begins.
    """

    token: int
    at: int
    logprobs: Logprobs


class Alignment:
    """Holds tokens back until the first character of their text is shown, because stop strings hold
    text back.

    So the returned tokens spell the shown text. A stop string may have cut off a part of the last
    one. Tokens after the cut are never returned.
    """

    def __init__(self) -> None:
        self._held: deque[TokenLogprob] = deque()
        self._num_read = 0  # characters of all tokens
        self._num_shown = 0

    def add(self, token: int, text: str, logprobs: Logprobs | None) -> None:
        """Add ``token``, which completed ``text`` (possibly empty).

        Without logprobs it is not reported.
        """
        if logprobs is not None:
            self._held.append(TokenLogprob(token, self._num_read, logprobs))
        self._num_read += len(text)

    def shown(self, text: str, *, is_all: bool) -> list[TokenLogprob]:
        """Return the tokens that begin in ``text``, which is shown now. If ``is_all``, return all
        held tokens.
        """
        self._num_shown += len(text)
        token_logprobs = []
        while self._held and (is_all or self._held[0].at < self._num_shown):
            token_logprobs.append(self._held.popleft())
        return token_logprobs


def find_offsets(vocabulary: VocabularyTable, tokens: list[int], text: str | None) -> list[int]:
    """Return the positions in a prompt's text, in characters, at which its tokens begin.

    ``text`` was tokenized, with control tokens written out. If it is None, the prompt's text is
    that of its tokens, and control tokens have none.

    A token that contains only a part of a character begins where that character begins.
    """
    if text is None:
        pieces = [vocabulary.pieces[token] for token in tokens]
        data = b"".join(pieces)
        places = [0, *accumulate(map(len, pieces))][: len(tokens)]
    else:
        data = text.encode("utf-8", "replace")
        places = list(find_places(vocabulary, tokens, data))
    characters = [*list_characters(data), len(data.decode("utf-8", "replace"))]
    return [characters[place] for place in places]


def find_places(vocabulary: VocabularyTable, tokens: list[int], data: bytes) -> Iterator[int]:
    """Yield the position in ``data``, a text in UTF-8, at which each of its tokens begins.

    Tokenizers add control tokens and a space at the beginning, and drop white space beside control
    tokens.
    """
    at = 0
    for token in tokens:
        piece = vocabulary.find_text(token)
        is_control = not vocabulary.pieces[token]
        if data.startswith(piece, at):
            start, length = at, len(piece)
        elif piece[:1] == b" " and data.startswith(piece[1:], at):  # the space was added
            start, length = at, len(piece) - 1
        elif data.startswith(piece, after := end_of_blanks(data, at)):
            start, length = after, len(piece)
        else:
            begin = -1 if is_control else data.find(piece, at, at + len(piece) + LOOK_AHEAD)
            start, length = (begin, len(piece)) if begin >= 0 else (at, 0)
        yield start
        at = start + length


def end_of_blanks(data: bytes, at: int) -> int:
    match = BLANKS.match(data, at)
    return match.end() if match else at


def list_characters(data: bytes) -> Iterator[int]:
    """Yield, for each byte of ``data``, the index of its character in the text."""
    decoder, count = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for i in range(len(data)):
        count += len(decoder.decode(data[i : i + 1]))
        yield count if decoder.getstate()[0] else count - 1
