"""Servers that benchmarks start are stopped at the end, whatever the reason for the end."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PATIENCE

from cllm.bench.servers import is_answering, memory_mb, running
from cllm.errors import StartupError
from cllm.observe.cpu_time import read_cpu_seconds

# A server whose child does not end by itself.
SERVER = (
    "import http.server, subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(600)']);"
    "http.server.HTTPServer(('127.0.0.1', PORT), "
    "http.server.SimpleHTTPRequestHandler).serve_forever()"
)
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "overload.py"
linux = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc")


def family(pid: int) -> list[str]:
    """Return the states of the processes in the group of ``pid``. An ended one may still wait for
    its parent.
    """
    stats = [
        path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat")
    ]
    return [fields[0] for fields in stats if fields[2] == str(pid) and fields[0] != "Z"]


def wait_until_gone(pid: int) -> None:
    """Wait for the end of the killed processes."""
    deadline = time.monotonic() + PATIENCE
    while family(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert family(pid) == []


@linux
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_nothing_is_left(error: type[BaseException] | None) -> None:
    """Children of the server are stopped too."""
    pids = []
    try:
        with running([sys.executable, "-c", SERVER], "/") as server:
            pids.append(server.pid)
            assert len(family(server.pid)) == 2
            assert 0 < server.start_s < 60
            assert memory_mb(server.pid) > 1
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt) as raised:
        assert type(raised) is error
    wait_until_gone(pids[0])
    assert read_cpu_seconds(pids[0]) == 0


@pytest.mark.slow
@linux
def test_terminated_benchmark_stops_its_server() -> None:
    benchmark = subprocess.Popen([sys.executable, BENCHMARK, "--mock"], stdout=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{benchmark.pid}/task/{benchmark.pid}/children")
        command: list[str] = []
        while "--port" not in command:
            time.sleep(0.05)
            pids = children.read_text().split()
            command = Path(f"/proc/{pids[0]}/cmdline").read_text().split("\0") if pids else []
        while not is_answering(f"http://127.0.0.1:{command[command.index('--port') + 1]}/ready"):
            assert benchmark.poll() is None
            time.sleep(0.05)
        benchmark.terminate()
        assert benchmark.wait(PATIENCE) == 128 + signal.SIGTERM
        wait_until_gone(int(pids[0]))
    finally:
        benchmark.kill()


def test_failed_start_gives_one_line() -> None:
    with (
        pytest.raises(StartupError, match="does not start"),
        running([sys.executable, "-c", "1"], "/"),
    ):
        pass


@linux
def test_process_memory_and_cpu_time_are_read() -> None:
    before = memory_mb(os.getpid())
    block = mmap.mmap(-1, 50_000_000)  # the heap may have memory that was used before
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    assert 45 < memory_mb(os.getpid()) - before < 60
    block.close()
    assert read_cpu_seconds(os.getpid()) > 0
