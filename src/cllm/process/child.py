"""The engine process: ``python -m cllm.process.child``, started by launch.py.

One thread steps the engine and is the only one that computes with libllama; others tokenize and
compile grammars. One more thread only reads stdin into queues. When stdin ends, the parent is gone,
and the process exits immediately, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import sys
import threading
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

from cllm.core.output import Stats, TokenOutput
from cllm.core.vocabulary import VocabularyTable
from cllm.engine.build import build_backend, build_engine, fit_memory
from cllm.engine.commands import Command
from cllm.engine.shared_cores import SharedCores
from cllm.errors import StartupError
from cllm.models.memory import measure_resident_bytes
from cllm.observe import log
from cllm.observe.cpu_time import decoding
from cllm.process.messages import (
    LENGTH,
    Abandon,
    Failed,
    FromChild,
    Loading,
    Ping,
    Ready,
    Start,
    Stepped,
    Tokenize,
    frame,
)
from cllm.process.step_record import StepRecord
from cllm.process.tokenizing import TokenizeQueue, start_tokenizing

Message = Command | Tokenize | Abandon | Ping
PIPE_BYTES = 1 << 20  # room for the outputs of a few thousand steps while the parent is busy


class PipeInbox:
    """Commands from stdin. Texts to tokenize go to ``texts``."""

    def __init__(self, stdin: BinaryIO, record: StepRecord, num_read: int) -> None:
        """``num_read`` bytes of stdin have already been read. After each message, ``record`` gets
        the new number.
        """
        self.texts = TokenizeQueue()
        self.record = record
        self.record.num_read = num_read
        self._stdin = stdin
        self._queue: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._decoder = msgspec.msgpack.Decoder[Message](Message)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while (body := read_frame(self._stdin)) is not None:
                self.record.num_read += LENGTH.size + len(body)
                message = self._decoder.decode(body)
                if isinstance(message, Tokenize):
                    self.texts.put(message)
                elif isinstance(message, Abandon):
                    self.texts.abandon(message.number)
                elif not isinstance(message, Ping):
                    self._queue.put(message)
        except msgspec.DecodeError:
            logging.getLogger("cllm.engine").exception(
                "cannot decode a command from the API process"
            )
            exit_now(1)
        os._exit(0)  # the parent is gone

    def drain(self, block: bool) -> list[Command]:
        if block and self._queue.empty():
            gc.collect()  # at a time when no request waits; see main
        commands = [self._queue.get()] if block else []
        while not self._queue.empty():
            commands.append(self._queue.get())
        return commands


class PipeOutbox:
    """Sends messages to the parent through a pipe. Several threads may send."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()  # a large message is written in parts

    def send(self, outputs: list[TokenOutput], stats: Stats) -> None:
        stats = msgspec.structs.replace(stats, decode_cpu_seconds=decoding.seconds)
        self.send_message(Stepped(outputs, stats))

    def send_message(self, message: FromChild) -> None:
        data = frame(message)
        with self._lock:
            write_all(self._descriptor, data)


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the body of the next frame, or None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])


def claim_stdout() -> int:
    """Return a private descriptor for frames, and redirect what libraries print to stdout to
    stderr.
    """
    private = os.dup(1)
    os.dup2(2, 1)
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(private, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return private


def write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def exit_now(status: int) -> NoReturn:
    """End the process once its log is written, whatever its threads do."""
    logging.shutdown()
    os._exit(status)


def main() -> None:
    outbox = PipeOutbox(claim_stdout())
    body = read_frame(sys.stdin.buffer)
    if body is None:
        return
    params, path = msgspec.structs.astuple(msgspec.msgpack.decode(body, type=Start))
    record = StepRecord(Path(path))
    log.configure(params.log_level, params.log_format)
    inbox = PipeInbox(sys.stdin.buffer, record, LENGTH.size + len(body))
    reported_share = -1.0

    def report_failure(reason: str) -> NoReturn:
        outbox.send_message(Failed(reason))
        exit_now(2)

    def report_progress(share: float) -> None:
        nonlocal reported_share
        if share - reported_share >= 0.01:
            reported_share = share
            outbox.send_message(Loading(share))

    try:
        params = fit_memory(params)
        backend = build_backend(params, report_progress, report_failure)
        engine = build_engine(backend, params)
        engine.use_record(record)
        if params.cores_file and not backend.info.on_gpu:
            with contextlib.suppress(OSError, ValueError):  # a smaller pipe is only slower
                engine.share_cores(SharedCores(params.cores_file))
    except StartupError as error:
        report_failure(str(error))
    gc.collect()
    gc.freeze()
    gc.disable()  # automatic collections scan all waiting requests, which would slow steps down

    start_tokenizing(inbox.texts, backend.vocabulary, outbox.send_message)
    vocabulary = VocabularyTable.of(backend.vocabulary)
    if own := params.chat_template:
        vocabulary = msgspec.structs.replace(vocabulary, chat_template=own, tool_template=None)
    params = msgspec.structs.replace(params, resident_bytes=measure_resident_bytes())
    outbox.send_message(Ready(backend.info, vocabulary, params))
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        engine.run(inbox, outbox)
    exit_now(0)  # the reader thread blocks in read()


if __name__ == "__main__":
    main()
