"""Work on what clients send, in processes of their own: it can take for ever and all memory there is, so whoever does
it must be able to be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import Any

from cllm.environment import child_environment
from cllm.errors import EngineError
from cllm.text.worker import HEAD, Reply, Work, frame

START_LIMIT = 60.0  # seconds until a process is ready, on a machine that is busy with something else

log = logging.getLogger("cllm.text")


class Workers:
    """Processes that are started when they are needed, and kept. One question at a time goes to each; one that does
    not answer it is ended.
    """

    def __init__(
        self, prepare: Callable[[Any], Work], begin: Callable[[], bytes], num: int, cpu_limit: float, wall_limit: float
    ) -> None:
        """Each of at most ``num`` imports ``prepare`` and calls it with the JSON of ``begin``, asked in another thread.

        The limits are seconds for one question: of the processor; and until there is an answer.
        """
        self._name = prepare.__module__
        self._command = ("-m", "cllm.text.worker", self._name, prepare.__qualname__, str(cpu_limit))
        self._begin = begin
        self._num = num
        self._wall_limit = wall_limit
        self._free = asyncio.Semaphore(num)
        self._take_lock = asyncio.Lock()
        self._idle: list[Process] = []
        self._clocks: set[asyncio.Timeout] = set()  # of those that are busy
        self._ending: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Have a process ready before there is a question, if it can be; who asks meanwhile gets that one."""
        with contextlib.suppress(EngineError):
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
        for clock in self._clocks:
            if not clock.expired():
                clock.reschedule(0)
        for _ in range(self._num):
            await self._free.acquire()
        for _ in range(self._num):
            self._free.release()
        while self._idle:
            self._end(self._idle.pop())
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("The server is shutting down.")

    async def _take(self) -> Process:
        """One that waits for a question."""
        async with self._take_lock:
            self._check_open()
            while self._idle:
                process = self._idle.pop()
                if is_alive(process):
                    return process
                self._end(process)  # it has died meanwhile, whatever of
            return await self._launch()

    async def _launch(self) -> Process:
        begin = await asyncio.to_thread(self._begin)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # not what lies in the current folder
                *self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(f"The process of {self._name} does not start: {error.strerror}.") from None
        if await self._exchange(process, begin, START_LIMIT) is None:
            self._check_open()
            raise EngineError(f"The process of {self._name} does not start.")
        return process

    async def _exchange(self, process: Process, question: bytes, seconds: float) -> bytes | None:
        """The answer; or None, and the process is ended, as it is if the caller does not wait."""
        assert process.stdin
        assert process.stdout
        answer = None
        clock = asyncio.timeout(0 if self._is_closed else seconds)
        self._clocks.add(clock)
        try:
            async with clock:
                process.stdin.write(frame(question))
                size = int.from_bytes(await process.stdout.readexactly(HEAD), "little")
                answer = await process.stdout.readexactly(size)
        except (OSError, EOFError, RuntimeError):  # RuntimeError: what uvloop says of a pipe that is closed
            pass
        finally:
            self._clocks.discard(clock)
            if answer is None:
                self._end(process)
        return answer

    def _end(self, process: Process) -> None:
        if is_alive(process):  # to kill one that has ended would take the news of it from the event loop
            process.kill()
        task = asyncio.create_task(process.communicate())  # reads what is left, and waits
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def is_alive(process: Process) -> bool:
    return process.returncode is None and process.stdout is not None and not process.stdout.at_eof()
