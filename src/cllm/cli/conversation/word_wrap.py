"""Wraps the text typed at the prompt, between words."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.utils import get_cwidth


class WordWrap(Processor):
    """Begins a new row before a word that does not fit on the row. Each row has a prompt before it,
    which takes ``indent`` columns.
    """

    def __init__(self, indent: int) -> None:
        self._indent = indent

    def apply_transformation(self, given: TransformationInput) -> Transformation:
        text = "".join(fragment[1] for fragment in given.fragments)
        gaps = find_gaps(text, given.width - self._indent)
        if not gaps:
            return Transformation(given.fragments)
        fragments: list[Any] = []
        at = 0
        for style, part, *handler in given.fragments:
            for char in part:
                if gap := gaps.get(at):
                    fragments.append(("", " " * gap))
                fragments.append((style, char, *handler))
                at += 1

        starts = list(gaps)
        shifts = list(accumulate(gaps.values(), initial=0))  # before each of them, and at the end

        def to_display(position: int) -> int:
            return position + shifts[bisect_right(starts, position)]

        def to_source(position: int) -> int:
            shown = bisect_right(starts, position, key=to_display)  # words that begin before that
            source = position - shifts[shown]
            return min(source, starts[shown]) if shown < len(starts) else source

        return Transformation(fragments, to_display, to_source)


def find_gaps(text: str, width: int) -> dict[int, int]:
    """Return the columns to leave empty: a mapping from the positions of words that do not fit on
    their row to the number of columns that are left there. Words longer than a row are broken.
    """
    gaps = {}
    column = start = 0
    for word in text.split(" "):
        size = get_cwidth(word)
        if column and size <= width < column + size:
            gaps[start] = width - column
            column = 0
        for char in f"{word} ":
            columns = get_cwidth(char)
            column = columns if column + columns > width else column + columns
        start += len(word) + 1
        column %= max(1, width)
    return {start: gap for start, gap in gaps.items() if gap}
