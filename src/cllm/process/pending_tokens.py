"""Texts that the API process lets its engines tokenize."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from cllm.core.segments import Segment, count_characters
from cllm.errors import CLLMError, EngineError
from cllm.process.messages import Abandon, Tokenize, Tokenized, frame
from cllm.process.tokenizing import LONG

if TYPE_CHECKING:
    from cllm.process.member import Member

T = TypeVar("T")

MAX_DEATHS_OF_TEXT = 3  # of engines that had to tokenize a text, before it gets an error
MAX_WAITING_CHARACTERS = 64_000_000  # of all texts that wait to be tokenized


class PendingTokens:
    """The tokens of ``texts``, as far as they have arrived; ``future`` gets them all.

    ``num_characters``: of the texts. ``home``: the engine that tokenizes them.
    """

    def __init__(self, texts: list[list[Segment]], num_characters: int) -> None:
        self.texts = texts
        self.num_deaths = 0  # of engines that had to tokenize them
        self.num_characters = num_characters
        self.future: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()
        self.home: Member | None = None
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


class Texts:
    """All texts that wait to be tokenized. ``pending``: by their numbers."""

    def __init__(self, members: list[Member]) -> None:
        self.pending: dict[int, PendingTokens] = {}
        self._members = members
        self._numbers = count()

    async def tokenize(self, texts: list[list[Segment]]) -> list[list[int]]:
        """Return the token ids of each text.

        Raises EngineError if several engines die meanwhile, and for long texts if too many
        characters wait already.
        """
        size = count_characters(texts)
        others = [pending.num_characters for pending in self.pending.values()]
        if size > LONG and others and sum(others) + size > MAX_WAITING_CHARACTERS:
            message = "Too many long texts are waiting to be tokenized; please retry."
            raise EngineError(message, reason="large")
        number = next(self._numbers)
        pending = self.pending[number] = PendingTokens(texts, size)
        try:
            self._send(number, self._find_member())
            return await pending.future
        finally:
            del self.pending[number]
            if pending.future.cancelled() and pending.home is not None:
                pending.home.write(frame(Abandon(number)))

    def _find_member(self) -> Member:
        """Return the engine that has the least to tokenize; one that is ready, if any is."""

        def count_waiting(member: Member) -> int:
            texts = self.pending.values()
            return sum([one.num_characters for one in texts if one.home is member])

        if len(self._members) == 1:
            return self._members[0]
        ready = [member for member in self._members if member.ready]
        return min(ready or self._members, key=count_waiting)

    def _send(self, number: int, member: Member) -> None:
        """Let an engine tokenize a text; the next one if it is not ready."""
        pending = self.pending[number]
        pending.home = member
        pending.begin()
        member.write(frame(Tokenize(number, pending.texts)))

    def has(self, member: Member) -> bool:
        """Return whether an engine has texts to tokenize, or will get them."""
        return any(one.home is member for one in self.pending.values())

    def put(self, message: Tokenized) -> None:
        """Take the tokens of a text, if they are still needed."""
        if (pending := self.pending.get(message.number)) is not None:
            pending.put(message)

    def resend(self, member: Member) -> None:
        """Give an engine that has become ready what waits for it, and what waits for engines that
        are not ready, except texts that may have been the cause of their deaths.
        """
        for number, pending in [*self.pending.items()]:
            home = pending.home
            if home is not member and home is not None and (home.ready or pending.num_deaths):
                continue
            if pending.num_deaths < MAX_DEATHS_OF_TEXT:
                self._send(number, member)
            else:
                reason = "The engine died repeatedly while it tokenized this text."
                resolve(pending.future, EngineError(reason))

    def record_death(self, member: Member, *, is_own_fault: bool) -> bool:
        """Note that an engine has died, and return whether it had texts. With ``is_own_fault``,
        they may have been the cause, and wait for the next engine.
        """
        own = [number for number, one in self.pending.items() if one.home is member]
        for number in own:
            self.pending[number].num_deaths += is_own_fault
            target = self._find_member()
            if target.ready and not self.pending[number].num_deaths:
                self._send(number, target)
        return bool(own)

    def fail(self, error: CLLMError, home: Member | None = None) -> None:
        """End all texts, or those that wait for one engine, with ``error``."""
        for pending in self.pending.values():
            if home is None or pending.home is home:
                resolve(pending.future, error)


def resolve(future: asyncio.Future[T], answer: T | CLLMError) -> None:
    """Set the result or the exception of ``future``, unless its caller has been cancelled."""
    if future.done():
        return
    if isinstance(answer, CLLMError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
