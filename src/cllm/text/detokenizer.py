"""Convert token ids to text, one at a time, at constant cost."""

from __future__ import annotations

import codecs

from cllm.core.vocabulary import Pieces

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Converts the tokens of one sequence.

    A character split over tokens is returned with its last token. Bytes that are not UTF-8 become
    U+FFFD.
    """

    def __init__(self, pieces: Pieces) -> None:
        """``pieces`` has the bytes of each token id."""
        self._pieces = pieces
        self._decoder = _utf8("replace")
        self._is_open = False  # whether a character is incomplete

    def feed(self, token: int) -> str:
        """Return the text that ``token`` completes, possibly none."""
        piece = self._pieces[token]
        if not self._is_open:
            try:
                return piece.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(piece)
        self._is_open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return the rest of the text, at the end: an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", True)
