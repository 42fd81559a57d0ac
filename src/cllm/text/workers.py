"""Process clients' input in child processes that can be killed, because it may take unlimited time
and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from typing import Any

from cllm.environment import child_environment
from cllm.errors import EngineError
from cllm.observe.cpu_time import read_cpu_seconds
from cllm.text.worker import HEAD, Reply, encode_frame

# A process that uses no CPU time for this many seconds counts as stopped. Where CPU time cannot be
# read, this limits the time until it answers. A starting process gets longer, because it may read
# files slowly.
STALL_LIMIT = 10.0
START_LIMIT = 60.0
KILLED = (-9, -15)  # SIGKILL and SIGTERM: killed from outside, or by us because it was stopped

log = logging.getLogger("cllm.text")


class Workers:
    """Processes that are started when needed, and reused. Each gets one question at a time; one
    that does not answer is killed.
    """

    def __init__(
        self, prepare: str, make_argument: Callable[[], bytes], num: int, cpu_limit: float
    ) -> None:
        """Start at most ``num`` processes. ``prepare`` names a function, as module:function. Each
        process calls it with the JSON that ``make_argument`` returns. It returns the Work
        (worker.py) that answers questions.

        This process does not import that function, which saves memory. ``make_argument`` runs in
        another thread. A question may take ``cpu_limit`` seconds of CPU time.
        """
        self._name, _, function = prepare.partition(":")
        self._command = ("-m", "cllm.text.worker", self._name, function, str(cpu_limit))
        self._make_argument = make_argument
        self._num = num
        self._free = asyncio.Semaphore(num)
        self._take_lock = asyncio.Lock()
        self._idle: list[Process] = []
        self._timeouts: set[asyncio.Timeout] = set()  # timeouts of busy processes
        self._ending: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start a process before the first question, if possible.

        A question asked meanwhile waits for that process.
        """
        with contextlib.suppress(EngineError):
            async with self._free:
                self._idle.append(await self._take())

    async def ask(self, question: bytes) -> Reply | None:
        """Return the reply to ``question``, which is JSON; None if it took too much time or memory,
        or crashed.

        If the process was stopped or killed from outside, another one gets the question, once.
        Raises EngineError if that one does not answer either, or if no process is available.
        """
        async with self._free:
            for _ in range(2):
                process = await self._take()
                answer = await self._exchange(process, question, STALL_LIMIT)
                if answer is not None:
                    self._idle.append(process)
                    return Reply(*json.loads(answer))
                self._check_open()
                if await process.wait() not in KILLED:
                    log.warning("%s used too much time or memory and was killed", self._name)
                    return None
                log.warning("%s was stopped or killed; starting another process", self._name)
        raise EngineError(f"The process of {self._name} does not answer; please retry.")

    def end_idle(self) -> None:
        """End the idle processes. The next question starts a new one."""
        while self._idle:
            self._end(self._idle.pop())

    async def close(self) -> None:
        """End all processes. Waiting callers get an EngineError."""
        self._is_closed = True
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(0)
        for _ in range(self._num):
            await self._free.acquire()
        for _ in range(self._num):
            self._free.release()
        self.end_idle()
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("The server is shutting down.")

    async def _take(self) -> Process:
        """Return an idle process, or start one."""
        async with self._take_lock:
            self._check_open()
            while self._idle:
                process = self._idle.pop()
                if is_alive(process):
                    return process
                self._end(process)  # it died while idle
            return await self._launch()

    async def _launch(self) -> Process:
        argument = await asyncio.to_thread(self._make_argument)
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # do not import from the current folder
                *self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment(),
                start_new_session=True,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except OSError as error:
            raise EngineError(
                f"The process of {self._name} does not start: {error.strerror}."
            ) from None
        except asyncio.CancelledError:  # uvloop leaks the process if its start is cancelled
            self._keep(self._end_once_started(starting))
            raise
        if await self._exchange(process, argument, START_LIMIT) is None:
            self._check_open()
            raise EngineError(f"The process of {self._name} does not start.")
        return process

    async def _exchange(
        self, process: Process, question: bytes, stall_limit: float
    ) -> bytes | None:
        """Return the answer, or None if there is none.

        Without an answer, or if cancelled, kill the process.
        """
        assert process.stdin
        assert process.stdout
        answer = None
        timeout = asyncio.timeout(0 if self._is_closed else None)
        self._timeouts.add(timeout)
        watch = asyncio.create_task(expire_if_stalled(timeout, process.pid, stall_limit))
        try:
            async with timeout:
                process.stdin.write(encode_frame(question))
                size = int.from_bytes(await process.stdout.readexactly(HEAD), "little")
                answer = await process.stdout.readexactly(size)
        except (OSError, EOFError, RuntimeError):
            # uvloop raises RuntimeError if the pipe is closed
            pass
        finally:
            watch.cancel()
            self._timeouts.discard(timeout)
            if answer is None:
                self._end(process)
        return answer

    def _end(self, process: Process) -> None:
        # killing an ended process would take its exit status from the event loop
        if is_alive(process):
            process.kill()
        self._keep(process.communicate())  # reads the remaining output, and waits

    async def _end_once_started(self, starting: asyncio.Future[Process]) -> None:
        with contextlib.suppress(OSError):
            self._end(await starting)

    def _keep(self, ending: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def is_alive(process: Process) -> bool:
    return process.returncode is None and process.stdout is not None and not process.stdout.at_eof()


async def expire_if_stalled(answer_timeout: asyncio.Timeout, pid: int, limit: float) -> None:
    """Let ``answer_timeout`` expire once the process has used no CPU time for ``limit`` seconds."""
    before = read_cpu_seconds(pid)
    await asyncio.sleep(limit)
    while (now := read_cpu_seconds(pid)) > before:
        before = now
        await asyncio.sleep(limit)
    if not answer_timeout.expired():
        answer_timeout.reschedule(0)
