"""Servers started as users start them: ``cllm serve`` in a process of its own, on a free loopback
port.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import preloaded
import pytest
from conftest import BUILTIN_BACKENDS, PATIENCE

from cllm.observe.cpu_time import read_cpu_seconds

# A fake server that computes 4 at a time and lets 8 wait; its context has room for streams of
# minutes.
NARROW = [
    "--backend.name",
    "fake",
    "--max-num-seqs",
    "4",
    "--scheduler.max-queue-requests",
    "8",
    "--context",
    "32768",
]


class Server:
    """A running ``cllm serve``; ``log`` is its output so far."""

    def __init__(
        self,
        *arguments: str,
        max_files: int | None = None,
        program: Iterable[str] = (),
        command: Iterable[str] = ("serve",),
        stdin: int | None = None,
        port: int = 0,
        **environment: str,
    ) -> None:
        """``max_files``: limit of open files. ``program``: arguments of Python before ``command``,
        in place of ``-m cllm``. ``stdin``: as for subprocess.Popen. ``port``:
        where it listens; 0 is a free one.
        """
        folder = tempfile.TemporaryDirectory(prefix="cllm-test-")
        self._folder, self._log = folder, Path(folder.name) / "log"
        command = [*command, "--port", str(port), *arguments]
        is_plain = not (program or max_files or stdin)
        if not is_plain:
            command = [sys.executable, *(program or ("-m", "cllm")), *command]
        if max_files:
            command = ["sh", "-c", f'ulimit -n {max_files} && exec "$@"', "sh", *command]
        self.keys = Path(folder.name) / "keys.json"
        own = {
            "CLLM_STORAGE_FOLDER": str(Path(folder.name) / "state"),
            "CLLM_SERVER_KEYS_FILE": str(self.keys),
        }
        environment = {**os.environ, **own, **environment}
        self.process: preloaded.Process | subprocess.Popen[bytes]
        with self._log.open("wb") as log:
            if is_plain:
                self.process = preloaded.Process(command, environment, stderr=log.fileno())
            else:
                self.process = subprocess.Popen(command, stdin=stdin, stderr=log, env=environment)
        try:
            self.url = self._wait_for_url()
            self.client = httpx2.Client(base_url=self.url, timeout=PATIENCE)
        except BaseException:
            self.stop(signal.SIGKILL)
            self.forget()
            raise

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for_log(self, text: str) -> str:
        """Return the log once it contains ``text``; a thread of the server writes it."""
        end = time.monotonic() + PATIENCE
        while text not in self.log:
            assert time.monotonic() < end, f"{text!r} is not in the log:\n{self.log}"
            time.sleep(0.01)
        return self.log

    def find_lines(self, text: str) -> list[str]:
        """Return the lines of the log that contain ``text``, once there is one."""
        return [line for line in self.wait_for_log(text).splitlines() if text in line]

    @property
    def events(self) -> list[str]:
        """The lines of the log that are not about requests."""
        return [line for line in self.log.splitlines() if " cllm.request: " not in line]

    def _wait_for_url(self) -> str:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if match := re.search(r"^cLLM serves .+ at (\S+):", self.log, re.MULTILINE):
                return match[1]
            assert self.process.poll() is None, f"the server ended at once: {self.log}"
            time.sleep(0.05)
        raise TimeoutError(self.log)

    def stats(self) -> dict[str, int]:
        return self.client.get("/model/info").json()["stats"]

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum over all labels, or over those that contain ``label``."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"cllm:{name}{{") and label in line
        )

    def forget(self) -> None:
        """Remove the log."""
        self._folder.cleanup()

    def children(self, word: str) -> list[int]:
        """Return the processes of the server that have ``word`` in their command."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        pids = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        return [pid for pid in pids if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def engine_pid(self) -> int:
        (engine,) = self.children("cllm.process.child")
        return engine

    def cpu_seconds(self, *pids: int) -> float:
        """Return the CPU time of the processes ``pids`` so far; by default of the API process."""
        return sum(map(read_cpu_seconds, pids or [self.process.pid]))

    def wait_until_idle(self, timeout: float = PATIENCE) -> dict[str, int]:
        """Return the stats when nothing runs or waits."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            stats = self.stats()
            if stats["num_running"] == stats["num_waiting"] == 0:
                return stats
            time.sleep(0.01)
        raise AssertionError(f"still busy after {timeout} s: {stats}")

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout: float = PATIENCE) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        with contextlib.suppress(AttributeError):
            self.client.close()
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()


def running(*arguments: str) -> Iterator[Server]:
    """Yield a server, which must end as usual afterwards."""
    server = Server(*arguments)
    yield server
    assert server.stop() == 0, server.log
    server.forget()


@pytest.fixture(scope="session")
def fake_server() -> Iterator[Server]:
    """A server with the fake backend, whose answers count on from the prompt."""
    yield from running(
        "--backend.name",
        "fake",
        "--max-num-seqs",
        "4",
        "--context",
        "512",
        "--server.max-body-mb",
        "1",
    )


@pytest.fixture(scope="session")
def narrow_server() -> Iterator[Server]:
    """A server with the options NARROW."""
    yield from running(*NARROW)


def serving_builtin(model: Path) -> Iterator[Server]:
    """A server with the built-in model and fewer sequences than the tests want at once."""
    sizes = ("--context", "1024", "--max-num-seqs", "24")
    yield from running("--model", str(model), "--model.name", "cllm-builtin", *sizes)


@pytest.fixture(scope="session")
def llama_cpp_server(builtin_path: Path) -> Iterator[Server]:
    yield from serving_builtin(builtin_path)


@pytest.fixture(scope="session")
def torch_server(builtin_checkpoint: Path) -> Iterator[Server]:
    yield from serving_builtin(builtin_checkpoint)


@pytest.fixture(scope="session", params=BUILTIN_BACKENDS)
def builtin_server(request: pytest.FixtureRequest) -> Server:
    """The server of each backend; all files share the two."""
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture(scope="session")
def client(builtin_server: Server) -> Iterator[openai.OpenAI]:
    """The ``openai`` client of the builtin server; tests of other dialects have their own."""
    with openai.OpenAI(
        base_url=f"{builtin_server.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture(scope="session")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def starter() -> Iterator[Callable[..., Server]]:
    """Yield a function that starts servers which may fail, and end their processes afterwards."""
    servers = []

    def start(*arguments: str, **options: Any) -> Server:
        servers.append(Server(*arguments, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop(signal.SIGKILL)
        server.forget()


start_server = pytest.fixture(starter)  # for one test
start_server_once = pytest.fixture(starter, scope="module")


@pytest.fixture
def new_narrow_server(start_server: Callable[..., Server]) -> Server:
    """Like narrow_server, for a test that needs a server that has not rejected anyone yet."""
    return start_server(*NARROW)
