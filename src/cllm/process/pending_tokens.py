"""Tokens that the API process has asked its engine for."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from cllm.core.segments import Segment
from cllm.errors import CLLMError, EngineError
from cllm.process.messages import Tokenized

T = TypeVar("T")


class PendingTokens:
    """The tokens of ``texts``, as far as they have arrived; ``future`` gets them all.

    ``num_characters``: of the texts.
    """

    def __init__(self, texts: list[list[Segment]], num_characters: int) -> None:
        self.texts = texts
        self.num_deaths = 0  # of engines that had to tokenize them
        self.num_characters = num_characters
        self.future: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()
        self.begin()

    def begin(self) -> None:
        """Forget what has arrived: another engine tokenizes the texts from the beginning."""
        self._tokens: list[list[int]] = []
        self._is_continued = False

    def put(self, message: Tokenized) -> None:
        if message.tokens is None:
            failed = EngineError("The engine failed to tokenize this text; please retry.")
            resolve(self.future, failed)
            return
        begin = 0
        if self._is_continued:
            self._tokens[-1] += message.tokens[0]
            begin = 1
        self._tokens += message.tokens[begin:]
        self._is_continued = message.more
        if not message.more:
            resolve(self.future, self._tokens)


def resolve(future: asyncio.Future[T], answer: T | CLLMError) -> None:
    """Set the result or the exception of ``future``, unless its caller has been cancelled."""
    if future.done():
        return
    if isinstance(answer, CLLMError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
