"""Starts the servers to measure, each on a free port, and ends them with all their processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from cllm.bench.load.client import Endpoint, Outcome, run_stages
from cllm.bench.load.dialects import Api
from cllm.bench.load.workload import Group, Task
from cllm.bench.programs import last_line, run_program
from cllm.errors import StartupError
from cllm.http_client import read_local
from cllm.observe.cpu_time import list_process_tree

START_TIMEOUT = 180.0  # seconds
STOP_TIMEOUT = 20.0
REQUEST_TIMEOUT = 14400.0  # seconds; a very long prompt beside others takes an hour on two cores
MODEL = "m"  # the model's name in all requests


class RunningServer(Endpoint, frozen=True):
    """A running server, and the seconds from its start until it was ready."""

    start_s: float = 0.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[object],
    health: str,
    *,
    port: int | None = None,
    keep_alive: bool = True,
    api: Api = "openai",
    environment: Mapping[str, str] = {},
) -> Iterator[RunningServer]:
    """Start ``command`` with its "PORT" replaced, and yield the server when ``health`` answers 200.

    SIGTERM ends it afterwards. Raises StartupError if it does not start.
    """
    port = port or free_port()
    arguments = [str(word).replace("PORT", str(port)) for word in command]
    begun = time.perf_counter()
    # The user's settings would affect some of the compared servers and not the others.
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CLLM_", "LLAMA_ARG_"))
    }
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            arguments,
            env={**ours, **environment},
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            while not is_answering(url + health):
                if process.poll() is not None or time.perf_counter() - begun > START_TIMEOUT:
                    errors.seek(0)
                    reason = last_line(errors.read(), "it says nothing")
                    raise StartupError(f"{Path(arguments[0]).name} does not start: {reason}")
                time.sleep(0.01)
            start_s = time.perf_counter() - begun
            yield RunningServer(
                url,
                timeout=REQUEST_TIMEOUT,
                keep_alive=keep_alive,
                api=api,
                pid=process.pid,
                start_s=start_s,
            )
        finally:
            try:
                process.terminate()
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also after a second Ctrl-C
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def is_answering(url: str) -> bool:
    try:
        read_local(url, timeout=5)
    except OSError:
        return False
    return True


def cllm(
    model: Path | None,
    *flags: object,
    name: str | None = MODEL,
    environment: Mapping[str, str] = {},
) -> contextlib.AbstractContextManager[RunningServer]:
    """Start cLLM with ``flags`` of ``cllm serve``. Without a model, it serves the built-in one.

    Requests call the model ``name``. None means the name that cLLM derives from the file.
    """
    named = ["--model.name", name] if name else []
    command = [sys.executable, "-m", "cllm", "serve", *([model] if model else [])]
    command += ["--port", "PORT", *named, *map(str, flags)]
    return running(command, "/ready", environment=environment)


def llama_server(
    model: Path, *flags: object, program: Path
) -> contextlib.AbstractContextManager[RunningServer]:
    """Start llama-server with ``flags``.

    Each request opens a connection, because it drops some kept-alive ones.
    """
    return running(
        [program, "-m", model, "--port", "PORT", "--no-webui", *flags],
        "/health",
        keep_alive=False,
    )


@contextlib.contextmanager
def ollama(
    program: Path, model: Path, threads: int, num_seqs: int, context: int
) -> Iterator[RunningServer]:
    """Start a separate ``ollama serve`` that knows only this model, as MODEL in a temporary folder.

    Raises StartupError.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        environment = {
            "OLLAMA_HOST": f"127.0.0.1:{port}",
            "OLLAMA_MODELS": folder,
            "OLLAMA_NUM_PARALLEL": str(num_seqs),
            "OLLAMA_KEEP_ALIVE": "-1",
        }
        modelfile = Path(folder, "Modelfile")
        modelfile.write_text(
            f"FROM {model.absolute()}\nPARAMETER num_ctx {context}\nPARAMETER num_thread "
            f"{threads}\n"
        )
        with running(
            [program, "serve"], "/api/version", port=port, api="ollama", environment=environment
        ) as server:
            command = [str(program), "create", MODEL, "-f", str(modelfile)]
            run_program("ollama create", command, env=os.environ | environment)
            yield server


@contextlib.contextmanager
def example_server(
    script: Path, model: Path, threads: int, unified: bool, num_seqs: int, context: int
) -> Iterator[RunningServer]:
    """Start llama-cpp-python's example server with the libraries in the folder of ``script``."""
    port = free_port()
    options = {
        "path": str(model.absolute()),
        "alias": MODEL,
        "n_ctx": num_seqs * context,
        "n_seq_max": num_seqs,
        "n_batch": 512,
        "n_ubatch": 512,
        "threads": threads,
        "threads_batch": threads,
        "kv_unified": unified,
        "store_logits": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_bytes(msgspec.json.encode({"server": {"port": port}, "model": options}))
        libraries = dict.fromkeys(("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB"), str(script.parent))
        with running(
            [sys.executable, script, "-C", config], "/healthz", port=port, environment=libraries
        ) as server:
            yield server


def memory_mb(pid: int) -> float | None:
    """Return the proportional set size of a process and its descendants in MB, or None if there is
    no /proc.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        return None
    total = 0
    for member in list_process_tree(pid):
        with contextlib.suppress(OSError):  # the process has ended
            count = re.search(
                r"^Pss: +(\d+) kB", Path(f"/proc/{member}/smaps_rollup").read_text(), re.MULTILINE
            )
            total += int(count[1]) if count else 0
    return total * 1024 / 1e6


def load(
    target: Endpoint, tasks: Sequence[Task], concurrency: int, *, may_fail: bool = False
) -> Outcome:
    """Send ``tasks``, ``concurrency`` at a time, without warm-up.

    Raises StartupError if one fails and may not.
    """
    outcome = run_stages(target, [[Group(tasks=tasks, clients=concurrency)]])
    if not may_fail and (failed := failures(outcome)):
        raise StartupError(f"{len(failed)} of {len(tasks)} requests failed: {failed[0]}")
    return outcome


def failures(outcome: Outcome) -> list[str]:
    return [f"{answer.failure}: {answer.detail}" for answer in outcome.answers if answer.failure]
