"""The API process's end: starts the engine process, hands it requests, gives tokens out, starts it again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable

import msgspec

from cllm.backends.base import ModelInfo
from cllm.core.output import Stats, TokenOutput
from cllm.core.request import Request
from cllm.engine.build import EngineParams
from cllm.engine.engine import Abort, Add, Close
from cllm.errors import CLLMError, EngineError, StartupError
from cllm.process.messages import LENGTH, Failed, FromChild, Loading, Ready, Stepped, frame

log = logging.getLogger("cllm.process")

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0  # seconds between a death and the next start
CLOSE_TIMEOUT = 5.0


class Stream:
    """The tokens of some requests on their way to one reader."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self._going = {request.request_id: request.params.n for request in requests}
        self._outputs: list[TokenOutput] = []
        self._error: CLLMError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: TokenOutput) -> None:
        if output.finish:
            self._going[output.request_id] -= 1
        self._outputs.append(output)
        self._wake()

    def has_finished(self, request: Request) -> bool:
        return self._going[request.request_id] == 0

    def fail(self, error: CLLMError) -> None:
        """Let the reader have ``error`` after the outputs that have come."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[TokenOutput]:
        """All outputs since the last call, at least one. Raises what ``fail`` was given."""
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs


class EngineClient:
    """Owns the engine process.

    ``info`` is set once the engine has been ready; ``ready`` tells whether it is now; ``stats`` is its last word.
    """

    def __init__(self, params: EngineParams, on_loading: Callable[[float], None] | None = None) -> None:
        self.info: ModelInfo | None = None
        self.ready = False
        self.stats = Stats()
        self.num_restarts = 0
        self.pid: int | None = None
        self._params = params
        self._on_loading = on_loading
        self._streams: dict[str, Stream] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = False

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
            start_new_session=True,  # signals to our process group are for us: running streams may finish
        )
        self._process, self.pid = process, process.pid
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
        self.ready = True

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
            while (message := await self._read(process)) is not None:
                if isinstance(message, Stepped):
                    backoff = FIRST_BACKOFF
                    self._dispatch(message)
            self.ready = False
            if self._closing:
                return
            cause = await describe_exit(process)
            log.error("the engine died (%s) with %d requests; starting it again", cause, len(self._streams))
            self.end_all(EngineError(f"The engine died ({cause}) and is being started again; please retry."))
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
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)

    def end_all(self, error: EngineError) -> None:
        """End every stream with ``error``."""
        self.stats = msgspec.structs.replace(
            self.stats, num_running=0, num_waiting=0, num_seq_ids_in_use=0, num_cells_held=0, num_cells_idle=0
        )
        streams, self._streams = self._streams, {}
        for stream in set(streams.values()):
            stream.fail(error)

    def submit(self, requests: list[Request]) -> Stream:
        """Hand requests to the engine. Raises EngineError if there is none. ``close_stream`` must follow."""
        if not self.ready:
            raise EngineError("The engine is not ready; please retry.")
        frames = b"".join(frame(Add(request)) for request in requests)
        stream = Stream(requests)
        for request in requests:
            self._streams[request.request_id] = stream
        self._write(frames)
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences, in the engine's next step."""
        if self.ready:
            self._write(frame(Abort(request_id, index)))

    def close_stream(self, stream: Stream) -> None:
        """Forget the stream's requests; those that have not finished are aborted."""
        for request in stream.requests:
            if self._streams.pop(request.request_id, None) is not None and not stream.has_finished(request):
                self.abort(request.request_id)

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
