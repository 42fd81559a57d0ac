"""Servers to be measured: cLLM and llama-server, each started on a free port and gone at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from cllm.bench.load import Outcome, Target, run_load
from cllm.bench.workload import Task
from cllm.errors import StartupError

START_TIMEOUT = 180.0  # seconds
LLAMA_SERVER = Path(".tools/peers/build/bin/llama-server")  # where benchmarks/build_peers.py puts it


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[object], health: str, *, keep_alive: bool = True) -> Iterator[Target]:
    """Start ``command``, whose "PORT" is replaced, wait until ``health`` answers 200, and end it with SIGTERM."""
    port = free_port()
    words = [str(word).replace("PORT", str(port)) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not answers(url + health):
            if process.poll() is not None or time.monotonic() > deadline:
                raise StartupError(f"{' '.join(words)} does not start")
            time.sleep(0.05)
        yield Target(url, timeout=1800.0, keep_alive=keep_alive)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310  # our own
            return bool(response.status == 200)
    except OSError:
        return False


def cllm(model: Path | None, *flags: object) -> contextlib.AbstractContextManager[Target]:
    """cLLM with ``flags`` of ``cllm serve``; without a model the built-in one."""
    command = [
        sys.executable,
        "-m",
        "cllm",
        "serve",
        *([model] if model else []),
        "--port",
        "PORT",
        "--model.name",
        "m",
        *flags,
    ]
    return running(command, "/ready")


def llama_server(model: Path, *flags: object) -> contextlib.AbstractContextManager[Target]:
    """llama-server with ``flags``; a connection for each request, because it loses some that are kept."""
    threads = os.cpu_count()
    return running(
        [LLAMA_SERVER, "-m", model, "--port", "PORT", "--no-webui", "-t", threads, *flags], "/health", keep_alive=False
    )


def load(
    target: Target, tasks: Sequence[Task], concurrency: int, *, api_key: str | None = None, may_fail: bool = False
) -> Outcome:
    """Send ``tasks``, so many at a time; nothing is warmed up here. A failure ends the benchmark unless it may be."""
    target = msgspec.structs.replace(target, api_key=api_key)
    outcome = run_load(target, tasks, concurrency=concurrency, warmup=0, progress=lambda _: None)
    if not may_fail and (failed := failures(outcome)):
        raise StartupError(f"{len(failed)} of {len(tasks)} requests failed: {failed[0]}")
    return outcome


def mean_ttft(outcome: Outcome) -> float:
    return sum(answer.first - answer.sent for answer in outcome.answers) / len(outcome.answers)


def failures(outcome: Outcome) -> list[str]:
    return [f"{answer.failure}: {answer.detail}" for answer in outcome.answers if answer.failure]
