"""Check clients' grammars in a child process, which is killed if one takes too much time or
memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

import msgspec
import pydantic_core

from cllm.core.params import MAX_LEXER_STATES
from cllm.errors import BadRequest, EngineError
from cllm.text.grammar import CheckedGrammar, Constraint, Special, invalid
from cllm.text.tools.call_grammar import BoundMessage, CallableTool
from cllm.text.worker import Reply, describe_refusal, to_json
from cllm.text.workers import Workers

PREPARE = "cllm.text.grammar:prepare"
CPU_LIMIT = 1.0  # seconds of CPU time for one grammar
MAX_SIZE = 400_000  # bytes of a constraint
MAX_WAITING = 64  # grammars waiting for a check, or being checked
PATIENCE = 2.0  # seconds that a message waits for its turn, if a grammar is not essential
MAX_KNOWN, MAX_KNOWN_SIZE = 1024, 8_000_000  # remembered grammars, and their total characters


class GrammarProcess(Workers):
    """Checks one grammar at a time, and remembers the results separately for each cache salt.

    Otherwise the time of a check would show whether other tenants use the grammar.
    """

    def __init__(
        self, special: Callable[[], Special], observe: Callable[[float | None], None]
    ) -> None:
        """``special`` is called in another thread. ``observe`` gets the seconds of each check, or
        None for a remembered result.
        """

        def begin() -> bytes:
            size, tokens = special()
            return to_json([size, [*tokens.items()], MAX_LEXER_STATES])

        super().__init__(PREPARE, begin, 1, CPU_LIMIT)
        self._observe = observe
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        # keyed by the hash of salt and question, so that large questions take no space from results
        self._known: OrderedDict[bytes, Reply] = OrderedDict()
        self._known_size = 0

    async def check(
        self, constraint: Constraint, param: str, salt: str = "", patience: float | None = None
    ) -> CheckedGrammar:
        """Return the grammar for the engine.

        Raises BadRequest for constraints that cannot be enforced; EngineError if too many checks
        wait, if this one waits longer than ``patience`` seconds for its turn, or if the process is
        stopped or killed.
        """
        try:
            question = pydantic_core.to_json((constraint, param))
        except ValueError:
            raise invalid(param, "it is nested too deeply, or has a lone surrogate") from None
        if len(question) > MAX_SIZE:
            raise invalid(param, f"it is larger than {MAX_SIZE} bytes")
        key = hashlib.sha256(pydantic_core.to_json(salt) + question).digest()
        reply = self._known.get(key)
        if reply is not None:
            self._known.move_to_end(key)
            self._observe(None)
        else:
            async with self._in_turn(patience):
                reply = self._known.get(key) or await self._ask(question, param)
            if not reply.is_ours:
                self._remember(key, reply)
        grammar, unenforced = json.loads(reply.get())
        return CheckedGrammar(grammar, tuple(unenforced))

    async def bind(self, message: BoundMessage, salt: str = "") -> CheckedGrammar:
        """Return the grammar of a chat's message. Raises what ``check`` raises, naming tools.

        Functions that are not strict never cause a free message to be rejected. If their schemas
        cannot be enforced within the limits, only their names are enforced, or nothing.
        """
        attempts = [message]
        enforced = {name: tool for name, tool in message.tools.items() if message.enforces(tool)}
        if message.is_loose:
            tools = dict.fromkeys(message.tools, CallableTool({})) | enforced
            attempts.append(msgspec.structs.replace(message, tools=tools, names_only=True))
        is_needed = bool(enforced) or not message.is_loose
        deadline = time.monotonic() + PATIENCE
        for attempt in attempts:
            patience = None if is_needed else deadline - time.monotonic()
            try:
                return await self.check(
                    Constraint("message", msgspec.to_builtins(attempt)), "tools", salt, patience
                )
            except (BadRequest, EngineError):
                if is_needed and attempt is attempts[-1]:
                    raise
        return CheckedGrammar("", ("tools",))

    @contextlib.asynccontextmanager
    async def _in_turn(self, patience: float | None) -> AsyncIterator[None]:
        """Wait until this grammar may be checked.

        Raises EngineError if too many wait, or after ``patience`` seconds.
        """
        too_many = EngineError("Too many grammars are being checked; please retry.", 1.0)
        if self._num_waiting >= MAX_WAITING:
            raise too_many
        self._num_waiting += 1
        try:
            try:
                async with asyncio.timeout(patience):
                    await self._turn.acquire()
            except TimeoutError:
                raise too_many from None
            try:
                yield
            finally:
                self._turn.release()
        finally:
            self._num_waiting -= 1

    def _remember(self, key: bytes, reply: Reply) -> None:
        self._forget(key)
        self._known[key] = reply
        self._known_size += entry_size(key, reply)
        while len(self._known) > MAX_KNOWN or self._known_size > MAX_KNOWN_SIZE:
            self._forget(next(iter(self._known)))

    def _forget(self, key: bytes) -> None:
        reply = self._known.pop(key, None)
        if reply is not None:
            self._known_size -= entry_size(key, reply)

    async def _ask(self, question: bytes, param: str) -> Reply:
        begun = time.monotonic()
        reply = await self.ask(question)
        if reply is None:
            return describe_refusal(invalid(param, "it is too complex"))
        self._observe(time.monotonic() - begun)
        return reply


def entry_size(key: bytes, reply: Reply) -> int:
    return len(key) + len(reply.text) + len(reply.error)
