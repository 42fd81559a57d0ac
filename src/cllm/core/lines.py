"""Follows the lines of a text that arrives in pieces."""

from __future__ import annotations

from copy import copy

FENCES = ("```", "~~~")
MAX_LINE = 4  # characters of a line that are kept, enough for a fence


class Lines:
    """Says where marks may resume reasoning in a text: at the beginning of a line, outside of code
    blocks.
    """

    __slots__ = ("_is_code", "_line")

    def __init__(self, *, begun: bool = False) -> None:
        """``begun``: the text continues one, probably within a line."""
        self._is_code = False
        # the beginning of the last line, without white space
        self._line = "?" * MAX_LINE if begun else ""

    def add(self, text: str) -> None:
        """Take in the next piece of the text."""
        first, *others = text.split("\n")
        if len(self._line) < MAX_LINE:
            self._line = (self._line + first).lstrip()[:MAX_LINE]
        for line in others:
            self._is_code ^= self._line.startswith(FENCES)
            self._line = line.lstrip()[:MAX_LINE]

    def allow_mark(self, space: str = "") -> bool:
        """Return whether a mark after further white space would resume reasoning."""
        if "\n" in space:
            return self._is_code == self._line.startswith(FENCES)
        return not (self._line or self._is_code)

    def copy(self) -> Lines:
        return copy(self)
