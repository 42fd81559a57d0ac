"""The child's ends of the pipes: frames, commands and the output that libraries print."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import pytest
from conftest import PATIENCE

from cllm.core.output import EmbeddingOutput, Stats
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.segments import Segment
from cllm.engine.commands import Abort, Add, Command
from cllm.engine.params import EngineParams
from cllm.observe.cpu_time import decoding
from cllm.private_files import remove_shared_file
from cllm.process import child
from cllm.process.child import PipeInbox, PipeOutbox, claim_stdout, read_frame, write_all
from cllm.process.messages import (
    LENGTH,
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
from cllm.process.step_record import SIZE, StepRecord, create_file

DECODER = msgspec.msgpack.Decoder(FromChild)


def test_frames_are_read_one_by_one_until_the_end() -> None:
    stream = io.BytesIO(frame(Loading(0.5)) + frame(Failed("no room")))
    assert DECODER.decode(read_frame(stream) or b"") == Loading(0.5)
    assert DECODER.decode(read_frame(stream) or b"") == Failed("no room")
    assert read_frame(stream) is None


@pytest.mark.parametrize("size", [0, 1, 3])
def test_stream_that_ends_within_a_length_has_no_frame(size: int) -> None:
    assert read_frame(io.BytesIO(LENGTH.pack(8)[:size])) is None


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, int]]:
    """The end to read from, and the descriptor to write to, which the test may close."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream:
        yield stream, writing
        with contextlib.suppress(OSError):
            os.close(writing)


def test_message_that_is_written_in_parts_arrives_whole(
    pipe: tuple[BinaryIO, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, descriptor = pipe
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: write(to, data[:7]))
    write_all(descriptor, frame(Failed("x" * 100)))
    assert DECODER.decode(read_frame(stream) or b"") == Failed("x" * 100)


def test_message_larger_than_the_pipe_arrives_whole(pipe: tuple[BinaryIO, int]) -> None:
    stream, descriptor = pipe
    message = Failed("x" * 3_000_000)
    sender = threading.Thread(target=write_all, args=(descriptor, frame(message)))
    sender.start()
    assert DECODER.decode(read_frame(stream) or b"") == message
    sender.join(PATIENCE)


def test_outbox_sends_one_message_for_a_step(pipe: tuple[BinaryIO, int]) -> None:
    stream, descriptor = pipe
    outbox, stats = PipeOutbox(descriptor), Stats()
    outbox.send([], stats)
    stats = msgspec.structs.replace(stats, decode_cpu_seconds=decoding.seconds)
    outbox.send_message(EmbeddingOutput("E", [b"1234"]))
    assert DECODER.decode(read_frame(stream) or b"") == Stepped([], stats)
    assert DECODER.decode(read_frame(stream) or b"") == EmbeddingOutput("E", [b"1234"])


# --- commands -----------------------------------------------------------------------------------


class Exits:
    """Records the argument of ``os._exit`` and returns, so the first code counts."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.called = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.called.set()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    recorded = Exits()
    monkeypatch.setattr(child.os, "_exit", recorded)
    return recorded


def make_inbox(stdin: BinaryIO) -> PipeInbox:
    path = create_file()
    record = StepRecord(path)
    remove_shared_file(path)
    return PipeInbox(stdin, record, 0)


def wait_for(inbox: PipeInbox, count: int) -> list[Command]:
    """Drain without blocking until ``count`` commands have come."""
    commands: list[Command] = []
    ends = time.monotonic() + PATIENCE
    while len(commands) < count and time.monotonic() < ends:
        commands += inbox.drain(block=False)
        time.sleep(0.001)
    return commands


def test_commands_come_in_order_and_none_is_lost(pipe: tuple[BinaryIO, int], exits: Exits) -> None:
    stream, descriptor = pipe
    inbox = make_inbox(stream)
    assert inbox.drain(block=False) == []
    sent = [Add(Request("A", [1, 2], SamplingParams())), *(Abort("A", i) for i in range(5))]
    os.write(descriptor, b"".join(map(frame, sent)))
    commands = inbox.drain(block=True)
    assert commands, "waits for one at least"
    os.write(descriptor, frame(Abort("B")))
    commands += wait_for(inbox, len(sent) + 1 - len(commands))
    assert commands == [*sent, Abort("B")]
    assert inbox.drain(block=False) == []
    os.close(descriptor)
    assert exits.called.wait(PATIENCE), "so that the reader does not outlive the test"


def test_texts_to_tokenize_do_not_reach_the_engine(exits: Exits) -> None:
    asked = Tokenize(1, [[Segment("a", parse_special=True)]])
    inbox = make_inbox(io.BytesIO(frame(asked) + frame(Abort("A"))))
    assert exits.called.wait(PATIENCE)
    assert inbox.drain(block=False) == [Abort("A")]
    assert inbox.texts.take(long=False) == asked


def test_parent_sees_how_much_was_read(exits: Exits) -> None:
    """Also what has no other effect."""
    data = frame(Abort("A")) + frame(Tokenize(1, [])) + frame(Ping())
    inbox = make_inbox(io.BytesIO(data))
    assert exits.called.wait(PATIENCE)
    assert inbox.record.num_read == len(data)
    assert inbox.drain(block=False) == [Abort("A")]


def test_end_of_stdin_ends_the_process(exits: Exits) -> None:
    make_inbox(io.BytesIO(frame(Abort("A"))))
    assert exits.called.wait(PATIENCE)
    assert exits.codes[0] == 0


def test_command_that_cannot_be_decoded_ends_the_process(
    exits: Exits, caplog: pytest.LogCaptureFixture
) -> None:
    make_inbox(io.BytesIO(frame(["no", "command"])))
    assert exits.called.wait(PATIENCE)
    assert exits.codes[0] == 1
    assert "cannot decode a command" in caplog.text


# --- processes ----------------------------------------------------------------------------------


def test_what_libraries_print_goes_to_stderr() -> None:
    """Frames have stdout for themselves."""
    program = f"""
import os
from cllm.process.child import {claim_stdout.__name__}
private = claim_stdout()
os.write(1, b"printed")
os.write(private, b"frames")
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, timeout=PATIENCE
    )
    assert process.stdout == b"frames"
    assert process.stderr.endswith(b"printed")


def read_after_loading(stream: BinaryIO) -> object:
    """Return the first message that does not tell how far the model is loaded."""
    while isinstance(message := DECODER.decode(read_frame(stream) or b""), Loading):
        pass
    return message


def start(params: EngineParams | None, folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "cllm.process.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    if params is not None:
        (folder / "step").write_bytes(bytes(SIZE))
        process.stdin.write(frame(Start(params, str(folder / "step"))))
        process.stdin.flush()
    return process


def test_engine_answers_until_stdin_ends(tmp_path: Path) -> None:
    process = start(EngineParams(backend="fake", context_length=64, max_num_seqs=2), tmp_path)
    message = read_after_loading(process.stdout)
    assert isinstance(message, Ready)
    assert (message.info.context_length, message.info.max_num_seqs) == (64, 2)
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    process.stdin.write(frame(Add(Request("A", [5], params))))
    process.stdin.flush()
    tokens: list[int] = []
    while len(tokens) < 2:
        stepped = DECODER.decode(read_frame(process.stdout) or b"")
        tokens += [output.token for output in stepped.outputs]
    assert tokens == [6, 7]
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_engine_that_cannot_start_says_why_and_exits_with_2(tmp_path: Path) -> None:
    process = start(EngineParams(backend="fake", policy="no.such:Policy"), tmp_path)
    message = read_after_loading(process.stdout)
    assert isinstance(message, Failed)
    assert "no.such" in message.reason
    process.wait(PATIENCE)  # with stdin still open, because its end ends the process too
    process.communicate()
    assert process.returncode == 2


@pytest.mark.slow
def test_engine_without_parameters_ends(tmp_path: Path) -> None:
    process = start(None, tmp_path)
    assert process.communicate(timeout=PATIENCE)[0] == b""
    assert process.returncode == 0
