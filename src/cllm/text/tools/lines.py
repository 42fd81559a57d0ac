"""Follows the lines of a text that arrives in pieces."""

from __future__ import annotations

import re

FENCE = re.compile(r" {0,3}(?:```|~~~)")
MAX_LINE = 8  # characters of a line that are kept, enough for a fence


class Lines:
    """Says whether a line that begins after the text so far is outside of code blocks."""

    def __init__(self) -> None:
        self._is_code = False
        self._line = ""  # the beginning of the last line

    def add(self, text: str) -> None:
        """Take in the next piece of the text."""
        first, *others = text.split("\n")
        self._line += first[: MAX_LINE - len(self._line)]
        for line in others:
            self._is_code ^= self._is_fence
            self._line = line[:MAX_LINE]

    @property
    def _is_fence(self) -> bool:
        return FENCE.match(self._line) is not None

    @property
    def is_outside_code(self) -> bool:
        """Whether the next line is no code."""
        return self._is_code == self._is_fence
