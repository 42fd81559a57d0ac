"""Token ids to text, one at a time, at constant cost."""

from __future__ import annotations

import codecs

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence. A character split over tokens comes out with its last one; bytes that are no UTF-8
    come out as U+FFFD."""

    def __init__(self, pieces: list[bytes]) -> None:
        """``pieces``: the bytes of each token id."""
        self._pieces = pieces
        self._decode = _utf8("replace").decode

    def feed(self, token: int) -> str:
        """The text that ``token`` completes, possibly none."""
        return self._decode(self._pieces[token])

    def flush(self) -> str:
        """What is left at the end: an incomplete character becomes U+FFFD."""
        return self._decode(b"", True)
