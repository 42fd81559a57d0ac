"""Find the tokens of each piece of shown text, for requests with logprobs."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from cllm.core.output import Logprobs


class TokenLogprob(NamedTuple):
    """A sampled token and its logprobs.

    ``at``: the index of the answer's character at which its text begins.

    A token that contains only a part of a character begins where that character begins.
    """

    token: int
    at: int
    logprobs: Logprobs


class Alignment:
    """Holds tokens back until the first character of their text is shown, because stop strings hold
    text back.

    So the returned tokens spell the text that was shown, except for what a stop string cut off from
    the last one. Tokens after the cut are never returned.
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
        """Return the tokens that begin in ``text``, which is shown now.

        ``is_all``: return all tokens held back.
        """
        self._num_shown += len(text)
        token_logprobs = []
        while self._held and (is_all or self._held[0].at < self._num_shown):
            token_logprobs.append(self._held.popleft())
        return token_logprobs
