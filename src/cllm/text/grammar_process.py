"""Grammars of clients are checked in a process of its own, which can be ended if one takes too long or too much.

``python -m cllm.text.grammar_process`` is its other end: frames of a 4-byte length and MessagePack, first Special, then
constraints and the names of the fields they came in; for each the grammar, or why it is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec
import pydantic_core

from cllm.errors import BadRequest, EngineError
from cllm.text.grammar import Checker, Constraint, Special, invalid

log = logging.getLogger("cllm.text")

CPU_LIMIT = 1.0  # seconds of the processor for one grammar
TIMEOUT = 10.0  # seconds, on a machine that is busy with something else
MAX_MEMORY = 1 << 30  # bytes of the process
MAX_SIZE = 400_000  # bytes of a constraint
MAX_WAITING = 64  # grammars to be checked at once
MAX_KNOWN, MAX_KNOWN_SIZE = 1024, 8_000_000  # grammars that are remembered, and their characters


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """``error`` is what BadRequest says, with its param and code; or "", and there is a grammar."""

    grammar: str
    error: str = ""
    param: str | None = None
    code: str | None = None


class GrammarProcess:
    """Starts the process when there is something to check, and again if it had to be killed."""

    def __init__(self, special: Callable[[], Special], observe: Callable[[float | None], None]) -> None:
        """``special`` is asked in another thread, once; ``observe`` is told the seconds of each check, None for one
        that had been done before.
        """
        self._observe = observe
        self._describe = special
        self._special: Special | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._known_size = 0

    async def check(self, constraint: Constraint, param: str) -> str:
        """The grammar for the engine. Raises BadRequest for what cannot be enforced; EngineError if too many ask."""
        try:
            question = pydantic_core.to_json((constraint.kind, constraint.value, param))
        except ValueError:
            raise invalid(param, "it is nested too deeply, or has a lone surrogate") from None
        if len(question) > MAX_SIZE:
            raise invalid(param, f"it is larger than {MAX_SIZE} bytes")
        verdict = self._known.get(question)
        if verdict is not None:
            self._known.move_to_end(question)
            self._observe(None)
        else:
            if self._num_waiting >= MAX_WAITING:
                raise EngineError("Too many grammars are being checked; please retry.", 1.0)
            self._num_waiting += 1
            try:
                async with self._turn:
                    verdict = self._known.get(question) or await self._ask(question, param)
            finally:
                self._num_waiting -= 1
            self._remember(question, verdict)
        if verdict.error:
            raise BadRequest(verdict.error, param=verdict.param, code=verdict.code)
        return verdict.grammar

    def _remember(self, question: bytes, verdict: Verdict) -> None:
        self._forget(question)
        self._known[question] = verdict
        self._known_size += size_of(question, verdict)
        while len(self._known) > MAX_KNOWN or self._known_size > MAX_KNOWN_SIZE:
            self._forget(next(iter(self._known)))

    def _forget(self, question: bytes) -> None:
        verdict = self._known.pop(question, None)
        if verdict is not None:
            self._known_size -= size_of(question, verdict)

    async def _ask(self, question: bytes, param: str) -> Verdict:
        begun = time.monotonic()
        try:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            async with asyncio.timeout(TIMEOUT):
                process.stdin.write(frame(question))
                head = await process.stdout.readexactly(4)
                body = await process.stdout.readexactly(int.from_bytes(head, "little"))
        except BaseException as error:  # whoever asked may have gone away; what is answered is nobody's then
            await self.close()
            if not isinstance(error, (TimeoutError, asyncio.IncompleteReadError, ConnectionError)):
                raise
            log.warning("a grammar was refused: it takes too much time or memory to compile")
            return verdict_of(invalid(param, "it is too complex"))
        self._observe(time.monotonic() - begun)
        return msgspec.msgpack.decode(body, type=Verdict)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            if self._special is None:
                self._special = await asyncio.to_thread(self._describe)
            from cllm.text.rendering import INHERITED  # which the process itself has no use for

            command = (sys.executable, "-P", "-m", "cllm.text.grammar_process")
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env={name: os.environ[name] for name in INHERITED if name in os.environ},
            )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(frame(msgspec.msgpack.encode(self._special)))
            try:
                await self._process.stdout.readexactly(1)  # it has started, which is not on the account of a grammar
            except asyncio.IncompleteReadError:
                raise EngineError("The process that checks grammars does not start.") from None
        return self._process

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


def verdict_of(error: BadRequest) -> Verdict:
    return Verdict("", str(error), error.param, error.code)


def size_of(question: bytes, verdict: Verdict) -> int:
    return len(question) + len(verdict.grammar) + len(verdict.error)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def limit_time(seconds: float) -> None:
    """Have the system end this process after so many seconds of the processor, whatever code it is in; 0: never."""
    with contextlib.suppress(AttributeError):  # not on Windows, where only the parent's patience ends
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer

    def read() -> bytes:
        head = stdin.read(4)
        if len(head) < 4:  # the parent is gone
            sys.exit()
        return stdin.read(int.from_bytes(head, "little"))

    checker = Checker(msgspec.msgpack.decode(read(), type=Special))
    stdout.write(b"+")
    stdout.flush()
    while True:
        kind, value, param = json.loads(read())
        try:
            limit_time(CPU_LIMIT)
            verdict = Verdict(checker.check(Constraint(kind, value), param))
        except BadRequest as error:
            verdict = verdict_of(error)
        except (RecursionError, MemoryError):
            verdict = verdict_of(invalid(param, "it is too complex"))
        except UnicodeError:
            verdict = verdict_of(invalid(param, "it has a lone surrogate"))
        limit_time(0)
        stdout.write(frame(msgspec.msgpack.encode(verdict)))
        stdout.flush()


if __name__ == "__main__":
    main()
