"""Fences around control tokens that a user has written, so that only the chat template can write
control tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cllm.core.segments import Segment

if TYPE_CHECKING:  # which imports more than a process that only renders needs
    from cllm.core.vocabulary import VocabularyFacts

# Unicode noncharacters, which text interchange never contains. OPEN and CLOSE fence control tokens
# that a user has written. CUT marks where the field that a prompt continues begins and ends.
OPEN, CLOSE, CUT = "\ufdd0", "\ufdd1", "\ufdd2"
MARKS = re.compile(f"[{OPEN}{CLOSE}{CUT}]")


class Fences:
    """Fences the control tokens of one vocabulary before rendering, and splits rendered text at the
    fences.
    """

    def __init__(self, vocabulary: VocabularyFacts) -> None:
        self._control = control_pattern(vocabulary.control_tokens)
        self._begin = vocabulary.special_texts.get("bos_token", "")

    def enclose(self, value: Any) -> Any:
        """Return ``value`` with fences around the control tokens that its texts spell out."""
        if isinstance(value, str):
            return self._control.sub(f"{OPEN}\\g<0>{CLOSE}", MARKS.sub("\ufffd", value))
        if isinstance(value, list):
            return [self.enclose(item) for item in value]
        if isinstance(value, dict):
            return {self.enclose(key): self.enclose(item) for key, item in value.items()}
        return value

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
    for mark in (OPEN, CLOSE, CUT):  # much faster than one regular expression
        text = text.replace(mark, "")
    return text


def control_pattern(control_tokens: list[str]) -> re.Pattern[str]:
    """Return a pattern for control tokens, and for beginnings of them at a text's end that the next
    could complete.
    """
    beginnings = {token[:length] for token in control_tokens for length in range(1, len(token))}
    whole = "|".join(map(re.escape, control_tokens))
    partial = "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True)))
    return re.compile(f"{whole}|(?:{partial})\\s*\\Z" if control_tokens else r"(?!)")
