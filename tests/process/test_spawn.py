"""How messages of the engine process are read from its pipe."""

import asyncio
import itertools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import PATIENCE
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.commands import Add
from cllm.process import messages
from cllm.process.messages import Failed, Loading, frame
from cllm.process.spawn import EngineProcess, spawn


class Process:
    """Counts how often it is killed."""

    def __init__(self):
        self.kills = 0
        self.returncode: int | None = None

    def kill(self):
        self.kills += 1


@given(st.lists(st.integers(0, 200), max_size=8), st.lists(st.integers(0, 400), max_size=6))
def test_messages_are_decoded_however_bytes_are_split(lengths, cuts):
    """Each once, in order."""
    messages = [Failed("x" * length) for length in lengths]
    data = b"".join(map(frame, messages))
    taken = []
    child = EngineProcess(Process(), taken.append)
    at = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(at):
        child.data_received(data[start:end])
    assert taken == messages


@pytest.mark.parametrize("rest", [b"", frame(Loading(0.3))])
def test_unreadable_message_kills_engine(rest):
    """Later messages are ignored, and earlier ones are not handled twice."""
    taken = []

    def take(message):
        taken.append(message.share)
        if message.share == 0.2:
            raise KeyError("unknown")

    process = Process()
    child = EngineProcess(process, take)
    child.data_received(frame(Loading(0.1)) + frame(Loading(0.2)) + rest)
    child.data_received(frame(Loading(0.4)))
    assert (taken, process.kills) == ([0.1, 0.2], 1)


def test_engine_end_is_noticed_while_asyncio_threads_are_busy():
    free = threading.Event()
    program = [sys.executable, "-c", "raise SystemExit(3)"]
    launched = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def run():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        loop.run_in_executor(None, free.wait, PATIENCE)
        child = await spawn(print, launched)
        try:
            await asyncio.wait_for(child.ended.wait(), PATIENCE / 2)
        finally:
            free.set()
        assert child.describe_end() == "exit code 3"

    asyncio.run(run())


def test_messages_docstring_names_module_of_commands():
    path = "/".join(Add.__module__.split(".")[1:]) + ".py"
    assert f"then commands ({path})" in messages.__doc__
