"""Which tokens a piece of shown text consists of: for those who ask for logprobs."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from cllm.core.output import Logprobs


class ToldToken(NamedTuple):
    """A sampled token and its logprobs. ``at``: the character of the answer at which its text begins.

    A token that only holds a part of a character begins where that character does.
    """

    token: int
    at: int
    logprobs: Logprobs


class Alignment:
    """Holds tokens back until the first character of their text is shown, as stop strings hold text back.

    So the tokens that were given out spell the text that was shown, but for what a stop string cut off the last one;
    those that lie behind the cut are never given out.
    """

    def __init__(self) -> None:
        self._held: deque[ToldToken] = deque()
        self._num_read = 0  # characters of all tokens
        self._num_shown = 0

    def add(self, token: int, text: str, logprobs: Logprobs | None) -> None:
        """``token`` completed ``text``, which may be none; without logprobs it is not told."""
        if logprobs is not None:
            self._held.append(ToldToken(token, self._num_read, logprobs))
        self._num_read += len(text)

    def shown(self, text: str, *, is_all: bool) -> list[ToldToken]:
        """``text`` is shown now: the tokens that begin in it. ``is_all``: and all that is held, for nothing follows."""
        self._num_shown += len(text)
        told = []
        while self._held and (is_all or self._held[0].at < self._num_shown):
            told.append(self._held.popleft())
        return told
