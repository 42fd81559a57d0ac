"""Commands whose standard streams are closed, full or have lost their reader."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from cllm.cli.streams import LossyFile

pytestmark = pytest.mark.slow  # each starts processes

FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110


def shell(redirections: str, *arguments: str) -> list[str]:
    """Return a command that runs cLLM with its streams redirected by a shell."""
    return ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "cllm", *arguments]


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_command_works_with_closed_streams(closed: str) -> None:
    done = subprocess.run(
        shell(closed, "config", "show"), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert ("port" in done.stdout) == (closed == "2>&-")


def test_closed_streams_cause_no_warning_about_unclosed_files() -> None:
    done = subprocess.run(
        shell("<&- >&-", "config", "show"),
        stderr=-1,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "always::ResourceWarning"},
    )
    assert (done.returncode, done.stderr) == (0, "")


@FULL
@pytest.mark.parametrize("command", [("config", "show"), ("--help",), ("nonsense",)])
def test_full_stdout_gives_one_line(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        shell(">/dev/full", *command), stderr=-1, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("cllm: ")


def test_closed_pipe_ends_the_command_silently() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "cllm", "config", "show"],
        stdout=write,
        stderr=-1,
        timeout=120,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("redirections", ["<&- >&- 2>&-", pytest.param("2>/dev/full", marks=FULL)])
def test_server_serves_with_closed_streams(redirections: str) -> None:
    """It answers, and no file or socket gets the number of a stream."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = ("serve", "--backend.name", "fake", "--port", str(port))
    process = subprocess.Popen(shell(redirections, *arguments), stdout=-1, stderr=-1)
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer:
                    assert answer.status == 200
                    break
            except OSError:  # 503 too
                time.sleep(0.05)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_messages_are_dropped_while_nobody_reads_a_pipe_that_does_not_block() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with LossyFile(write, "wb", closefd=False) as file:
        data = bytes(1 << 20)  # more than a pipe takes
        assert 0 < file.write(data) < len(data)
        assert file.write(b"more") == 4  # 0 would be tried again for ever
    os.close(read)
    os.close(write)
