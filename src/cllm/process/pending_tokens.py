"""Texts that the API process lets its engines tokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from cllm.core.segments import Segment, count_characters
from cllm.errors import CLLMError, EngineError
from cllm.process.futures import resolve
from cllm.process.member import Member
from cllm.process.messages import Abandon, Tokenize, Tokenized, frame
from cllm.process.tokenizing import LONG

MAX_DEATHS_ALONE = 2  # a text gets an error after this many deaths of engines that had only it
MAX_WAITING_CHARACTERS = 64_000_000  # of all texts that wait to be tokenized


class PendingTokens:
    """The tokens of ``texts``, as far as they have arrived; ``future`` gets them all.

    The texts have ``num_characters``. ``member`` tokenizes them, and ``is_sent`` says whether it
    has got them.
    """

    def __init__(self, texts: list[list[Segment]], num_characters: int, member: Member) -> None:
        self.texts = texts
        self.num_deaths_alone = 0  # deaths of engines that had nothing else to do
        self.num_characters = num_characters
        self.future: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()
        self.member = member
        self.begin()

    def begin(self) -> None:
        """Discard the tokens that have arrived, because an engine starts again with these texts."""
        self.is_sent = False
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
    """All texts that wait to be tokenized, which are ``pending`` by their numbers.

    After a death that texts may have caused, the next engine gets these texts one after the other,
    and nothing else meanwhile. So a text that kills engines is identified with certainty.
    """

    def __init__(self, members: list[Member], on_separated: Callable[[Member], None]) -> None:
        """``on_separated`` is called when the texts that an engine had to tokenize alone are
        done.
        """
        self.pending: dict[int, PendingTokens] = {}
        self._members = members
        self._on_separated = on_separated
        self._suspects: set[int] = set()  # numbers of texts
        self._numbers = count()

    async def tokenize(self, texts: list[list[Segment]]) -> list[list[int]]:
        """Return the token ids of each text.

        Raises EngineError if the text kills engines, and for long texts if too many characters wait
        already.
        """
        size = count_characters(texts)
        others = [pending.num_characters for pending in self.pending.values()]
        if size > LONG and others and sum(others) + size > MAX_WAITING_CHARACTERS:
            message = "Too many long texts are waiting to be tokenized; please retry."
            raise EngineError(message, reason="large")
        number = next(self._numbers)
        pending = self.pending[number] = PendingTokens(texts, size, self._find_member())
        try:
            self._send_to(pending.member)
            return await pending.future
        finally:
            self._remove(number)

    def _remove(self, number: int) -> None:
        """Forget a text whose caller has its tokens, or no longer waits for them."""
        pending = self.pending.pop(number)
        member = pending.member
        if pending.future.cancelled() and pending.is_sent:
            member.write(frame(Abandon(number)))
        if number in self._suspects:
            self._suspects.remove(number)
            self._send_to(member)
            if not self.is_separating(member):
                self._on_separated(member)

    def _find_member(self) -> Member:
        """Return the engine that has the least to tokenize, if possible one that is ready."""

        def count_waiting(member: Member) -> int:
            return sum([one.num_characters for _, one in self._list_pending(member)])

        if len(self._members) == 1:
            return self._members[0]
        ready = [member for member in self._members if member.ready]
        return min(ready or self._members, key=count_waiting)

    def _list_pending(self, member: Member) -> list[tuple[int, PendingTokens]]:
        """Return the texts of an engine that have no answer yet, with their numbers."""
        return [
            (number, one)
            for number, one in self.pending.items()
            if one.member is member and not one.future.done()
        ]

    def _send_to(self, member: Member) -> None:
        """Let an engine that is ready tokenize its texts: the first suspect, if there is one."""
        if not member.ready:
            return
        texts = self._list_pending(member)
        suspects = [each for each in texts if each[0] in self._suspects]
        for number, pending in suspects[:1] or texts:
            if not pending.is_sent:
                pending.is_sent = True
                member.write(frame(Tokenize(number, pending.texts)))

    def has(self, member: Member) -> bool:
        """Return whether an engine has texts to tokenize, or will get them."""
        return bool(self._list_pending(member))

    def is_separating(self, member: Member) -> bool:
        """Return whether an engine has to tokenize texts while it does nothing else."""
        return any(self.pending[number].member is member for number in self._suspects)

    def put(self, message: Tokenized) -> None:
        """Take the tokens of a text, if they are still needed."""
        if (pending := self.pending.get(message.number)) is not None:
            pending.put(message)

    def resend(self, member: Member) -> None:
        """Send an engine that has become ready the texts that wait for it, and those that wait for
        engines that are not ready, except suspects.
        """
        for number, pending in self.pending.items():
            if not (pending.member.ready or number in self._suspects):
                pending.member = member
        self._send_to(member)

    def record_death(self, member: Member, *, is_own_fault: bool) -> bool:
        """Note that an engine has died, and return whether it had texts. With ``is_own_fault``, the
        texts may have caused the death, and wait for the next engine.
        """
        texts = self._list_pending(member)
        sent = [pending for _, pending in texts if pending.is_sent]
        if is_own_fault:
            self._suspects.update(number for number, pending in texts if pending.is_sent)
        for pending in sent:
            pending.begin()
        if is_own_fault and len(sent) == 1 and not member.num_requests:
            sent[0].num_deaths_alone += 1
            if sent[0].num_deaths_alone >= MAX_DEATHS_ALONE:
                reason = "The engine died repeatedly while it tokenized this text."
                resolve(sent[0].future, EngineError(reason))
        for number, pending in texts:
            target = self._find_member()
            if target.ready and number not in self._suspects:
                pending.member = target
                self._send_to(target)
        return bool(sent)

    def fail(self, error: CLLMError, member: Member | None = None) -> None:
        """End all texts, or those that wait for one engine, with ``error``."""
        for pending in self.pending.values():
            if member in (None, pending.member):
                resolve(pending.future, error)
