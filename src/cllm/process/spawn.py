"""The parent's side of an engine process: connecting, reading, writing and ending it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from cllm.errors import WORKER_LOST_STATUS
from cllm.process.launch import ANYWHERE, Place, Popen, launch
from cllm.process.messages import LENGTH, FromChild

log = logging.getLogger("cllm.process")

OUTSIDE_SIGNALS = {
    getattr(signal, name)
    for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
}

_decode = msgspec.msgpack.Decoder[FromChild](FromChild).decode


async def spawn(
    take: Callable[[FromChild], None],
    launched: Popen[bytes] | None = None,
    place: Place = ANYWHERE,
) -> EngineProcess:
    """Connect to ``launched``, or to a new engine process at ``place``; ``take`` is called with
    each of its messages.
    """
    process = EngineProcess(launched or launch(place), take)
    connecting = asyncio.ensure_future(process.connect())
    try:
        await asyncio.shield(connecting)
    except asyncio.CancelledError:
        await connecting
        await process.stop()
        raise
    return process


class EngineProcess(asyncio.Protocol):
    """A running engine process.

    Messages are handled where their bytes arrive, because waking a task for them takes time.
    ``ended`` is set when the process has ended and all of its messages have been handled.
    ``num_sent`` is the number of bytes that were written to it.
    """

    def __init__(self, process: Popen[bytes], take: Callable[[FromChild], None]) -> None:
        self.ended = asyncio.Event()
        self.num_sent = 0
        self._process = process
        self._take = take
        self._rest = b""
        self._is_readable = True
        self._was_killed = False  # whether this object killed the process
        self._stdin: asyncio.WriteTransport | None = None
        self._reaping: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: self, self._process.stdout)
        self._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, data: bytes) -> None:
        # the end of its stdout reports a dead engine
        if self._stdin is not None and not self._stdin.is_closing():
            self._stdin.write(data)
            self.num_sent += len(data)

    def data_received(self, data: bytes) -> None:
        if not self._is_readable:
            return
        data = self._rest + data if self._rest else data
        at = 0
        try:
            while len(data) >= at + LENGTH.size:
                body = at + LENGTH.size
                end = body + LENGTH.unpack_from(data, at)[0]
                if end > len(data):
                    break
                at = end
                self._take(_decode(data[body:end]))
        except Exception:  # whatever the error is, requests must not wait forever
            log.exception("cannot decode a message from the engine process; killing it")
            self._is_readable = False
            self.kill()
        self._rest = data[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._reaping = asyncio.create_task(self._reap())

    async def _reap(self) -> None:
        # a thread of its own, because asyncio's may all be busy for seconds
        thread = ThreadPoolExecutor(1, "cllm-reaper")
        await asyncio.get_running_loop().run_in_executor(thread, self._process.wait)
        thread.shutdown(wait=False)
        if self._stdin is not None:
            self._stdin.close()
        self.ended.set()

    async def stop(self) -> None:
        """Kill the process if it still runs, and wait for its end."""
        self.kill()
        await self.ended.wait()

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self._was_killed = self._process.returncode is None
        self._process.kill()

    @property
    def was_ended_from_outside(self) -> bool:
        """Whether a person or the system ended the process with a signal, or it lost an RPC worker.
        Its own faults and this process do not count.
        """
        status = self._process.returncode
        return not self._was_killed and (-status in OUTSIDE_SIGNALS or status == WORKER_LOST_STATUS)

    def describe_end(self) -> str:
        """Return how the process ended, in words."""
        code = self._process.returncode
        if code == WORKER_LOST_STATUS:
            return "an RPC worker was lost"
        if code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit code {code}"
