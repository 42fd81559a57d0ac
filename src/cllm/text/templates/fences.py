"""Fences around control tokens that a user has written, so that only the chat template can write
control tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ahocorasick_rs import AhoCorasick, Implementation, MatchKind

from cllm.core.segments import Segment

if TYPE_CHECKING:  # this imports more than a process that only renders needs
    from cllm.core.vocabulary import VocabularyFacts

# Unicode noncharacters, which text interchange never contains. OPEN and CLOSE fence control tokens
# that a user has written. CUT marks where the field that a prompt continues begins and ends. BREAK
# is within a mark that the template must not find. BOUNDARY is where later prompts may differ.
OPEN, CLOSE, CUT, BREAK, BOUNDARY = ALL_MARKS = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
MARKS = re.compile(f"[{''.join(ALL_MARKS)}]")
MARK_OF_ESCAPE = {f"\\u{ord(mark):x}": mark for mark in ALL_MARKS}
ESCAPES = re.compile(r"\\(?:ufdd[0-4]|.)")
WINDOW = 4096  # characters in which a control token is looked for
SURROGATES = re.compile("[\ud800-\udfff]")  # not text; they are rejected after rendering


class Fenced(str):
    """Text whose representation keeps its fences, for templates that print dictionaries."""

    __slots__ = ()

    def __repr__(self) -> str:
        return restore_marks(super().__repr__())


class Fences:
    """Fences the control tokens of one vocabulary before rendering, and splits rendered text at the
    fences.
    """

    def __init__(self, vocabulary: VocabularyFacts) -> None:
        tokens = vocabulary.control_tokens
        self._fenced = {token: f"{OPEN}{token}{CLOSE}" for token in tokens}
        self._whole = AhoCorasick(
            tokens, matchkind=MatchKind.LeftmostLongest, implementation=Implementation.DFA
        )
        self._beginnings = {token[:end] for token in tokens for end in range(1, len(token))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._begins_blank = any(text.isspace() for text in self._beginnings)
        self._begin = vocabulary.special_texts.get("bos_token", "")

    def enclose(self, value: Any) -> Any:
        """Return ``value`` with fences around the control tokens that its texts spell out."""
        if isinstance(value, str):
            text = self._enclose_text(replace_marks(value, "\ufffd"))
            return Fenced(text) if OPEN in text else text
        if isinstance(value, list):
            return [self.enclose(item) for item in value]
        if isinstance(value, dict):
            return {self.enclose(key): self.enclose(item) for key, item in value.items()}
        return value

    def _enclose_text(self, text: str) -> str:
        """Fence control tokens, the leftmost and longest ones, and the beginning of one at the end
        of the text, which the next text could complete.

        Each token has its own fences, because templates split texts at control tokens.
        """
        parts, end = [], 0  # plain texts and fenced control tokens take turns
        for plain in SURROGATES.split(text):
            for token in self._whole.find_matches_as_strings(plain):
                begin = text.find(token, end)  # no other token lies before it
                parts.append(text[end:begin])
                parts.append(self._fenced[token])
                end = begin + len(token)
        parts.append(text[end:])
        ends: list[int] = []
        for at in self._find_beginnings(text):
            ends = ends or list(accumulate(len(p) - 2 * (i % 2) for i, p in enumerate(parts)))
            i = bisect_right(ends, at)
            if i % 2 == 0:  # not within a control token
                parts[i:] = [text[ends[i] - len(parts[i]) : at], OPEN, text[at:], CLOSE]
                break
        return "".join(parts)

    def _find_beginnings(self, text: str) -> Iterable[int]:
        """Yield each position from which ``text`` is the beginning of a control token, with white
        space after it.
        """
        end = len(text.rstrip())
        stop = len(text) if self._begins_blank else end
        for at in range(max(0, end - self._longest), stop):
            if text[at : max(at + 1, end)] in self._beginnings:
                yield at

    def find_control_token(self, text: str, end: int) -> int:
        """Return where the last control token of the template begins that begins at ``end`` or not
        long before; 0 if there is none.
        """
        first = max(0, end - WINDOW)
        window = SURROGATES.sub("?", text[first : end + self._longest + 1])
        found = 0
        for _, begin, _ in self._whole.find_matches_as_indexes(window):
            if first + begin <= end and not self._is_fenced(text, first + begin):
                found = first + begin
        return found

    def _is_fenced(self, text: str, at: int) -> bool:
        """Return whether the control token at ``at`` is within fences, possibly as a part of the
        beginning of another one.
        """
        before = text[max(0, at - self._longest - 1) : at]
        return before.rfind(OPEN) > before.rfind(CLOSE)

    def split_at_boundaries(self, text: str) -> list[list[Segment]]:
        """Return the segments of each part of rendered text. A part ends at each BOUNDARY."""
        first, *others = text.split(BOUNDARY)
        return [self.split(first), *(self.split(part, add_special=False) for part in others)]

    def split(self, text: str, *, add_special: bool = True) -> list[Segment]:
        """Return the segments of rendered text. Text between fences is plain text."""
        first, *others = text.replace(BREAK, "").split(OPEN)
        begin, *rest = first.split(CLOSE)
        add_special = add_special and not (self._begin and begin.startswith(self._begin))
        segments = [Segment(begin, add_special, parse_special=True)]
        segments += (Segment(part, parse_special=True) for part in rest if part)
        fenced: list[str] = []  # adjacent ones become one segment
        for part in others:
            plain, *rest = part.split(CLOSE) if CLOSE in part else self._split_cut(part)
            fenced.append(plain)
            if any(rest):
                segments.append(Segment("".join(fenced)))
                segments += (Segment(part, parse_special=True) for part in rest if part)
                fenced.clear()
        if fenced:
            segments.append(Segment("".join(fenced)))
        return segments

    def _split_cut(self, part: str) -> tuple[str, str]:
        """Split ``part`` into the plain text and the rest.

        The template has split a text at a control token, and has left out the token and its closing
        fence.
        """
        ends = range(min(len(part), self._longest + 1), 0, -1)
        end = next((e for e in ends if part[:e] in self._fenced or part[:e] in self._beginnings), 0)
        return part[:end], part[end:]


def remove_fences(text: str) -> str:
    """Return rendered text without fences, for people to read."""
    return replace_marks(text, "")


def replace_marks(text: str, substitute: str) -> str:
    for mark in ALL_MARKS:  # much faster than one regular expression
        text = text.replace(mark, substitute)
    return text


def restore_marks(literal: str) -> str:
    """Return ``literal``, of Python or JSON, with marks in place of their escapes."""
    return ESCAPES.sub(lambda match: MARK_OF_ESCAPE.get(match[0], match[0]), literal)
