"""Grammars of clients are checked in a process of its own, which can be ended if one takes too long or too much."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import pydantic_core

from cllm.core.params import MAX_LEXER_STATES
from cllm.errors import BadRequest, EngineError
from cllm.text import grammar
from cllm.text.call_grammar import BoundMessage, Tool
from cllm.text.grammar import Checked, Constraint, Special, invalid
from cllm.text.worker import Reply, refusal, to_json
from cllm.text.workers import Workers

CPU_LIMIT = 1.0  # seconds of CPU time for one grammar
MAX_SIZE = 400_000  # bytes of a constraint
MAX_WAITING = 64  # grammars to be checked at once
MAX_KNOWN, MAX_KNOWN_SIZE = 1024, 8_000_000  # grammars that are remembered, and their characters


class GrammarProcess(Workers):
    """Checks one grammar at a time, and remembers what came of it."""

    def __init__(self, special: Callable[[], Special], observe: Callable[[float | None], None]) -> None:
        """``special`` is asked in another thread; ``observe`` is told the seconds of each check, None for one that had
        been done before.
        """

        def begin() -> bytes:
            size, tokens = special()
            return to_json([size, [*tokens.items()], MAX_LEXER_STATES])

        super().__init__(grammar.prepare, begin, 1, CPU_LIMIT)
        self._observe = observe
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[bytes, Reply] = OrderedDict()
        self._known_size = 0

    async def check(self, constraint: Constraint, param: str) -> Checked:
        """The grammar for the engine. Raises BadRequest for what cannot be enforced; EngineError if too many ask, or if
        the process is stopped or killed.
        """
        try:
            question = pydantic_core.to_json((constraint, param))
        except ValueError:
            raise invalid(param, "it is nested too deeply, or has a lone surrogate") from None
        if len(question) > MAX_SIZE:
            raise invalid(param, f"it is larger than {MAX_SIZE} bytes")
        reply = self._known.get(question)
        if reply is not None:
            self._known.move_to_end(question)
            self._observe(None)
        else:
            if self._num_waiting >= MAX_WAITING:
                raise EngineError("Too many grammars are being checked; please retry.", 1.0)
            self._num_waiting += 1
            try:
                async with self._turn:
                    reply = self._known.get(question) or await self._checked(question, param)
            finally:
                self._num_waiting -= 1
            self._remember(question, reply)
        grammar, unenforced = json.loads(reply.get())
        return Checked(grammar, tuple(unenforced))

    async def bind(self, message: BoundMessage) -> Checked:
        """The grammar of a chat's message. Raises what ``check`` raises, naming tools.

        A message that is free but for its calls is never refused for the sake of functions that are not strict: if
        their schemas cannot be enforced within the limits, only the names are, or nothing.
        """
        attempts = [message]
        if message.is_loose:
            tools = {name: tool if tool.strict else Tool({}) for name, tool in message.tools.items()}
            attempts.append(msgspec.structs.replace(message, tools=tools, names_only=True))
        for attempt in attempts:
            try:
                return await self.check(Constraint("message", msgspec.to_builtins(attempt)), "tools")
            except (BadRequest, EngineError):
                if not message.is_loose or any(tool.strict for tool in message.tools.values()):
                    raise
        return Checked("", ("tools",))

    def _remember(self, question: bytes, reply: Reply) -> None:
        self._forget(question)
        self._known[question] = reply
        self._known_size += size_of(question, reply)
        while len(self._known) > MAX_KNOWN or self._known_size > MAX_KNOWN_SIZE:
            self._forget(next(iter(self._known)))

    def _forget(self, question: bytes) -> None:
        reply = self._known.pop(question, None)
        if reply is not None:
            self._known_size -= size_of(question, reply)

    async def _checked(self, question: bytes, param: str) -> Reply:
        begun = time.monotonic()
        reply = await self.ask(question)
        if reply is None:
            return refusal(invalid(param, "it is too complex"))
        self._observe(time.monotonic() - begun)
        return reply


def size_of(question: bytes, reply: Reply) -> int:
    return len(question) + len(reply.text) + len(reply.error)
