"""The engine process as its parent sees it: started, read, written to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import cast

import msgspec

from cllm.process.messages import LENGTH, FromChild

log = logging.getLogger("cllm.process")

_decode = msgspec.msgpack.Decoder[FromChild](FromChild).decode


def engine_environment() -> dict[str, str]:
    """Ours, and a word to glibc: big blocks of memory in big pages, where the system leaves that to programs.

    A KV cache is laid out six times as fast then, and a row of logits read in three quarters of the time.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables += (":" if tunables else "") + "glibc.malloc.hugetlb=1"
    return os.environ | {"GLIBC_TUNABLES": tunables}


async def spawn(take: Callable[[FromChild], None]) -> EngineProcess:
    """Start an engine process; ``take`` is called with each of its messages."""
    _, process = await asyncio.get_running_loop().subprocess_exec(
        lambda: EngineProcess(take),
        sys.executable,
        "-P",  # not what lies in the current folder
        "-m",
        "cllm.process.child",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,
        env=engine_environment(),
        start_new_session=True,  # signals to our process group are for us: running streams may finish
    )
    return process


class EngineProcess(asyncio.SubprocessProtocol):
    """Messages are taken where their bytes arrive, without a task that would have to be woken for them.

    ``ended`` is set when the process has, and all it said has been taken.
    """

    transport: asyncio.SubprocessTransport

    def __init__(self, take: Callable[[FromChild], None]) -> None:
        self.ended = asyncio.Event()
        self._take = take
        self._rest = b""
        self._is_understood = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.SubprocessTransport", transport)

    @property
    def pid(self) -> int:
        return self.transport.get_pid()

    def write(self, data: bytes) -> None:
        pipe = cast("asyncio.WriteTransport", self.transport.get_pipe_transport(0))
        with contextlib.suppress(ConnectionError, RuntimeError):  # a dead engine is noticed by its end
            pipe.write(data)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if not self._is_understood:
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
        except Exception:  # whatever it is, nobody may wait for ever
            log.exception("what the engine said was not understood")
            self._is_understood = False
            self._kill()
        self._rest = data[at:]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self.transport.close()

    async def stop(self) -> None:
        """Kill it if it still runs, and wait for its end."""
        self._kill()
        await self.ended.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.transport.kill()

    def describe_end(self) -> str:
        """How it ended, in words."""
        code = self.transport.get_returncode()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit code {code}"
