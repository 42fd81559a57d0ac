"""The API process's end: starts the engine process, hands it requests, gives tokens out, starts it again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable

import msgspec

from cllm.backends.base import ModelInfo
from cllm.core.output import Stats
from cllm.core.request import Request
from cllm.engine.build import EngineParams
from cllm.engine.engine import Abort, Add, Close, Explain
from cllm.errors import EngineError, StartupError
from cllm.process.backlog import Backlog, QueueLimits
from cllm.process.flights import Flights, Stream
from cllm.process.messages import LENGTH, Explained, Failed, FromChild, Loading, Ready, Stepped, frame
from cllm.process.results import ResultCache
from cllm.scheduler.trace import Explanation

log = logging.getLogger("cllm.process")

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0  # seconds between a death and the next start
CLOSE_TIMEOUT = 5.0
USUAL_LOAD_SECONDS = 5.0  # of a model, until that is known


def engine_environment() -> dict[str, str]:
    """Ours, and a word to glibc: big blocks of memory in big pages, where the system leaves that to programs.

    A KV cache is laid out six times as fast then.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables += (":" if tunables else "") + "glibc.malloc.hugetlb=1"
    return os.environ | {"GLIBC_TUNABLES": tunables}


class EngineClient:
    """Owns the engine process.

    ``info`` is set once the engine has been ready; ``ready`` tells whether it is now; ``stats`` is its last word.
    """

    def __init__(
        self,
        params: EngineParams,
        on_loading: Callable[[float], None] | None = None,
        limits: QueueLimits | None = None,
        results: ResultCache | None = None,
    ) -> None:
        """``limits``: of the queue; none by default. ``results``: to be kept; none by default."""
        self.info: ModelInfo | None = None
        self.ready = False
        self.stats = Stats()
        self.num_restarts = 0
        self.pid: int | None = None
        self._params = params
        self._on_loading = on_loading
        backlog = Backlog(limits or QueueLimits(), params.policy, params.weights)
        self._flights = Flights(backlog, ResultCache() if results is None else results)
        self._asked: deque[asyncio.Future[Explanation]] = deque()  # answered in this order
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = False
        self._spawned = time.monotonic()
        self._load_seconds = USUAL_LOAD_SECONDS

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises StartupError if it cannot load the model."""
        await self._spawn()
        self._watch = asyncio.create_task(self._serve_and_restart())

    async def _spawn(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # not what lies in the current folder
            "-m",
            "cllm.process.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 22,
            env=engine_environment(),
            start_new_session=True,  # signals to our process group are for us: running streams may finish
        )
        self._process, self.pid = process, process.pid
        self._spawned = time.monotonic()
        self._write(frame(self._params))
        try:
            while True:
                message = await self._read(process)
                if isinstance(message, Ready):
                    break
                if isinstance(message, Failed):
                    raise StartupError(message.reason)
                if isinstance(message, Loading) and self._on_loading:
                    self._on_loading(message.share)
                if message is None:
                    raise StartupError(
                        f"the engine died while it loaded the model ({await describe_exit(process)}): try cllm doctor"
                    )
        except BaseException:
            await stop(process)
            raise
        self.info = message.info
        self.stats = Stats(num_seq_ids=message.info.max_num_seqs, num_cells=message.info.num_cells)
        self._load_seconds = time.monotonic() - self._spawned
        self.ready = True

    def seconds_until_ready(self) -> float:
        """As it took the last time; 0 if it is ready."""
        return 0.0 if self.ready else max(1.0, self._load_seconds - (time.monotonic() - self._spawned))

    async def _read(self, process: asyncio.subprocess.Process) -> FromChild | None:
        assert process.stdout is not None
        try:
            head = await process.stdout.readexactly(LENGTH.size)
            body = await process.stdout.readexactly(LENGTH.unpack(head)[0])
        except asyncio.IncompleteReadError:
            return None
        return _decoder.decode(body)

    async def _serve_and_restart(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            process = self._process
            assert process is not None
            try:
                while (message := await self._read(process)) is not None:
                    if isinstance(message, Stepped):
                        backoff = FIRST_BACKOFF
                        self._dispatch(message)
                    elif isinstance(message, Explained):
                        answer(self._asked.popleft(), message.explanation)
            except Exception:  # whatever it is, nobody may wait for ever
                log.exception("what the engine said was not understood")
                await stop(process)
            self.ready = False
            if self._closing:
                return
            cause = await describe_exit(process)
            log.error("the engine died (%s) with %d requests; starting it again", cause, len(self._flights))
            died = EngineError(f"The engine died ({cause}) and is being started again; please retry.")
            self.end_all(died)
            while self._asked:
                answer(self._asked.popleft(), died)
            while not self.ready:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF)
                try:
                    await self._spawn()
                except (StartupError, OSError) as error:
                    log.error("the engine does not start: %s; next try in %.1f s", error, backoff)
            self.num_restarts += 1
            log.warning("the engine is ready again")

    def _dispatch(self, message: Stepped) -> None:
        self.stats = message.stats
        self._flights.backlog.observe(message.stats)
        now = time.monotonic()
        for output in message.outputs:
            self._flights.put(output, now)

    def end_all(self, error: EngineError) -> None:
        """End every stream with ``error``."""
        self.stats = msgspec.structs.replace(
            self.stats,
            num_running=0,
            num_waiting=0,
            num_seq_ids_in_use=0,
            num_cells_held=0,
            num_cells_idle=0,
            num_waiting_tokens=0,
            waiting_seconds=0.0,
        )
        self._flights.fail(error)

    def check_room(self, request: Request) -> None:
        """Raise QueueFull if ``request`` would be refused now, were it not for others that share its result."""
        self._flights.backlog.admit([request], self.stats.num_seq_ids)

    def submit(self, requests: list[Request]) -> Stream:
        """Hand requests to the engine, or find their results. ``close_stream`` must follow.

        Raises QueueFull if the queue is full, and EngineError if there is no engine.
        """
        self._check_ready()
        stream, new = self._flights.board(requests, self.stats.num_seq_ids)
        if new:
            self._write(b"".join(frame(Add(request)) for request in new))
        return stream

    def stop(self, stream: Stream, request_id: str, index: int) -> None:
        """End one of a request's sequences in the engine's next step; it has said all that was asked for."""
        name = self._flights.stop(stream, request_id, index)
        if name is not None and self.ready:
            self._write(frame(Abort(name, index)))

    def close_stream(self, stream: Stream) -> None:
        """Forget the stream's requests; those that have not finished, and that nobody else reads, are aborted."""
        for name in self._flights.leave(stream):
            if self.ready:
                self._write(frame(Abort(name)))

    async def explain(self, num_steps: int) -> Explanation:
        """The last ``num_steps`` steps, who runs, who waits and why. Raises EngineError if there is no engine."""
        self._check_ready()
        future: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._write(frame(Explain(num_steps)))
        return await future

    def _check_ready(self) -> None:
        if not self.ready:
            raise EngineError("The engine is not ready; please retry.")

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # a dead engine is noticed by the reader
            self._process.stdin.write(data)

    async def close(self) -> None:
        """End the engine process; it is gone when this returns."""
        self._closing = True
        if self._watch is not None and self._watch.done() is False and not self.ready:
            self._watch.cancel()
        if self._process is not None and self._process.returncode is None:
            self._write(frame(Close()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT)
            await stop(self._process)
        if self._watch is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch


_decoder: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)


def answer(asked: asyncio.Future[Explanation], explanation: Explanation | EngineError) -> None:
    """Tell who asked, unless he has gone away."""
    if asked.done():
        return
    if isinstance(explanation, EngineError):
        asked.set_exception(explanation)
    else:
        asked.set_result(explanation)


async def stop(process: asyncio.subprocess.Process) -> None:
    """Kill a process that still runs, and wait for its end."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def describe_exit(process: asyncio.subprocess.Process) -> str:
    """How a process ended, in words."""
    code = await process.wait()
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"
