"""Work on what clients send, in processes of their own: it can take for ever and all memory there is, so whoever does
it must be able to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Any

from cllm.errors import EngineError
from cllm.text.worker import LENGTH, Reply, Work, frame

START_LIMIT = 60.0  # seconds until a process is ready, on a machine that is busy with something else
INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "TZ", "SYSTEMROOT", "TMPDIR")

log = logging.getLogger("cllm.text")


class Workers:
    """Processes that are started when they are needed, and kept. One question at a time goes to each; one that does
    not answer it is ended.
    """

    def __init__(
        self,
        prepare: Callable[[Any], Work],
        begin: Callable[[], bytes],
        max_processes: int,
        cpu_limit: float,
        wall_limit: float,
    ) -> None:
        """Each process imports ``prepare`` and calls it with the JSON of ``begin``, which another thread calls here.

        The limits are seconds for one question: of the processor; and until there is an answer.
        """
        self._name = prepare.__module__
        self._arguments = ("-m", "cllm.text.worker", self._name, prepare.__qualname__, str(cpu_limit))
        self._begin = begin
        self._max_processes = max_processes
        self._wall_limit = wall_limit
        self._free = asyncio.Semaphore(max_processes)
        self._living: set[Process] = set()  # that have not been killed
        self._idle: list[Process] = []
        self._ending: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Have a process ready before there is a question. Raises EngineError."""
        async with self._free:
            self._idle.append(await self._take())

    async def ask(self, question: bytes) -> Reply | None:
        """What the work makes of ``question``, which is JSON; None if it took too much time or memory, or died.

        Raises EngineError if there is no process to ask.
        """
        async with self._free:
            process = await self._take()
            answer = await self._exchange(process, question, self._wall_limit)
            if answer is not None:
                self._idle.append(process)
                return Reply(*json.loads(answer))
        self._check_open()
        log.warning("%s took too much time or memory, and was ended", self._name)
        return None

    async def close(self) -> None:
        """End all processes; who waits for one gets an EngineError."""
        self._is_closed = True
        while self._idle:
            self._end(self._idle.pop())
        for process in [*self._living]:
            self._kill(process)
        for _ in range(self._max_processes):  # each comes back when its process has ended
            await self._free.acquire()
        for _ in range(self._max_processes):
            self._free.release()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("The server is shutting down.")

    async def _take(self) -> Process:
        """One that waits for a question."""
        self._check_open()
        while self._idle:
            process = self._idle.pop()
            if is_alive(process):
                return process
            self._end(process)  # it has died meanwhile, whatever of
        begin = await asyncio.to_thread(self._begin)
        with contextlib.suppress(OSError):
            process = await launch(self._arguments)
            self._living.add(process)
            if self._is_closed:  # while it was launched
                self._kill(process)
            if await self._exchange(process, begin, START_LIMIT) is not None:
                return process
        self._check_open()
        raise EngineError(f"The process of {self._name} does not start.")

    async def _exchange(self, process: Process, question: bytes, seconds: float) -> bytes | None:
        """The answer; or None, and the process is ended, as it is if the caller does not wait."""
        assert process.stdin
        assert process.stdout
        answer = None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.write(frame(question))
                head = await process.stdout.readexactly(LENGTH.size)
                answer = await process.stdout.readexactly(LENGTH.unpack(head)[0])
        except (OSError, EOFError, RuntimeError):  # RuntimeError: what uvloop says of a pipe that is closed
            pass
        finally:
            if answer is None or self._is_closed:
                answer = None
                self._end(process)
        return answer

    def _kill(self, process: Process) -> None:
        """Once: asyncio's warn of a process whose end they learn on the way."""
        if process in self._living:
            self._living.discard(process)
            if is_alive(process):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    def _end(self, process: Process) -> None:
        self._kill(process)
        task = asyncio.create_task(process.communicate())  # reads what is left, and waits
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


async def launch(arguments: tuple[str, ...]) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # not what lies in the current folder
        *arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: os.environ[name] for name in INHERITED if name in os.environ},
        start_new_session=True,
    )


def is_alive(process: Process) -> bool:
    return process.returncode is None and process.stdout is not None and not process.stdout.at_eof()
