"""Fences around control tokens that a user has written, so that only the chat template can write
control tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from cllm.core.segments import Segment

if TYPE_CHECKING:  # which imports more than a process that only renders needs
    from cllm.core.vocabulary import VocabularyFacts

# Unicode noncharacters, which text interchange never contains. OPEN and CLOSE fence control tokens
# that a user has written. CUT marks where the field that a prompt continues begins and ends.
OPEN, CLOSE, CUT = "\ufdd0", "\ufdd1", "\ufdd2"
MARKS = re.compile(f"[{OPEN}{CLOSE}{CUT}]")
MAX_DEPTH = 64  # characters; the endings of longer tokens are alternatives without a common prefix


class Fences:
    """Fences the control tokens of one vocabulary before rendering, and splits rendered text at the
    fences.
    """

    def __init__(self, vocabulary: VocabularyFacts) -> None:
        tokens = vocabulary.control_tokens
        self._whole = re.compile(f"({prefix_tree_pattern(tokens)})")
        self._beginnings = {token[:end] for token in tokens for end in range(1, len(token))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._begins_blank = any(text.isspace() for text in self._beginnings)
        self._begin = vocabulary.special_texts.get("bos_token", "")

    def enclose(self, value: Any) -> Any:
        """Return ``value`` with fences around the control tokens that its texts spell out."""
        if isinstance(value, str):
            return self._enclose_text(replace_marks(value, "\ufffd"))
        if isinstance(value, list):
            return [self.enclose(item) for item in value]
        if isinstance(value, dict):
            return {self.enclose(key): self.enclose(item) for key, item in value.items()}
        return value

    def _enclose_text(self, text: str) -> str:
        """Fence control tokens, the leftmost and longest ones, and a beginning of one at the text's
        end that the next text could complete.
        """
        parts = self._whole.split(text)  # plain texts and control tokens take turns
        ends: list[int] = []
        for at in self._find_beginnings(text):
            ends = ends or list(accumulate(map(len, parts)))
            i = bisect_right(ends, at)
            if i % 2 == 0:  # not within a control token
                parts[i:] = [text[ends[i] - len(parts[i]) : at], text[at:], ""]
                break
        if len(parts) == 1:
            return text
        fenced = [OPEN] * (2 * len(parts) - 1)
        fenced[::4], fenced[2::4] = parts[::2], parts[1::2]
        fenced[3::4] = [CLOSE] * (len(parts) // 2)
        return "".join(fenced)

    def _find_beginnings(self, text: str) -> Iterable[int]:
        """Yield where ``text`` ends with the beginning of a control token and white space."""
        end = len(text.rstrip())
        stop = len(text) if self._begins_blank else end
        for at in range(max(0, end - self._longest), stop):
            if text[at : max(at + 1, end)] in self._beginnings:
                yield at

    def split(self, text: str, *, add_special: bool = True) -> list[Segment]:
        """Return the segments of rendered text. Text between fences is plain text."""
        first, *others = text.split(OPEN)
        add_special = add_special and not (self._begin and first.startswith(self._begin))
        segments = [Segment(first, add_special, parse_special=True)]
        for part in others:
            fenced, _, rest = part.partition(CLOSE)
            segments.append(Segment(fenced))
            if rest:
                segments.append(Segment(rest, parse_special=True))
        return segments


def remove_fences(text: str) -> str:
    """Return rendered text without fences, for people to read."""
    return replace_marks(text, "")


def replace_marks(text: str, substitute: str) -> str:
    for mark in (OPEN, CLOSE, CUT):  # much faster than one regular expression
        text = text.replace(mark, substitute)
    return text


def prefix_tree_pattern(texts: Iterable[str], depth: int = 0) -> str:
    """Return a pattern for the longest of ``texts`` that begins at a place.

    Texts with the same beginning share it, so that a place costs a few steps, however many texts
    there are.
    """
    endings: dict[str, list[str]] = {}
    for text in texts:
        endings.setdefault(text[:1], []).append(text[1:])
    is_optional = endings.pop("", None) is not None
    if depth == MAX_DEPTH:
        rests = sorted((a + rest for a in endings for rest in endings[a]), key=len, reverse=True)
        options = [re.escape(rest) for rest in rests]
    else:
        options = [
            re.escape(first) + prefix_tree_pattern(endings[first], depth + 1)
            for first in sorted(endings)
        ]
    if not options:
        return "" if is_optional else "(?!)"
    if len(options) == 1 and not is_optional:
        return options[0]
    return f"(?:{'|'.join(options)})" + "?" * is_optional
