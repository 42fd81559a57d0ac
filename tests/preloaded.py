"""Starts ``cllm`` as users do, in a process of its own, but forks this process from one that has
imported the modules: the imports take most of the CPU time of a start.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

MODULES = ("cllm.__main__", "cllm.cli.serve", "cllm.server.app")
MOST = 1 << 20  # bytes of arguments and environment
PATIENCE = 600.0  # seconds


class Process:
    """A running ``cllm``, with what tests need of ``subprocess.Popen``."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdin: int = 0,
        stdout: int = 1,
        stderr: int = 2,
    ) -> None:
        """``stdin``, ``stdout``, ``stderr``: file descriptors; by default those of the tests."""
        self.returncode: int | None = None
        self._reports, reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        task = json.dumps([arguments, {**environment}, str(Path.cwd())]).encode()
        with reports:
            socket.send_fds(connect(), [task], [reports.fileno(), stdin, stdout, stderr])
        self.pid = int(self._reports.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises TimeoutError."""
        if self.returncode is None:
            self._reports.settimeout(timeout)
            self.returncode = int(self._reports.recv(100))
            self._reports.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(BlockingIOError):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(*arguments: object, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a ``cllm`` that ends by itself, with ``text`` on stdin and more variables in its
    environment.
    """
    words = [str(argument) for argument in arguments]
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+")) for _ in range(3)]
        files[0].write(text)
        files[0].seek(0)
        descriptors = [file.fileno() for file in files]
        code = Process(words, {**os.environ, **environment}, *descriptors).wait(PATIENCE)
        for file in files:
            file.seek(0)
        return subprocess.CompletedProcess(words, code, files[1].read(), files[2].read())


@cache
def connect() -> socket.socket:
    """Start the process that forks the others, and return the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


def fork_for_each_task(connection: socket.socket) -> None:
    """Fork a process for each task that arrives, until the other end is closed. Return in each of
    these processes when it has become the command.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the reporting processes end
    while True:
        task, descriptors, _, _ = socket.recv_fds(connection, MOST, 4)
        if not task:
            sys.exit()
        if not os.fork():
            break
        for descriptor in descriptors:
            os.close(descriptor)
    connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reports, *streams = descriptors
    if pid := os.fork():
        for descriptor in streams:
            os.close(descriptor)
        report(pid, socket.socket(fileno=reports))
    os.close(reports)
    arguments, environment, folder = json.loads(task)
    become(arguments, environment, folder, streams)


def report(pid: int, reports: socket.socket) -> None:
    """Send the number of a process, and its exit code when it has ended."""
    reports.send(str(pid).encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):  # the test has ended
        reports.send(str(code).encode())
    os._exit(0)


def become(
    arguments: list[str], environment: dict[str, str], folder: str, streams: list[int]
) -> None:
    """Give this process what the command would have been started with."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["cllm", *arguments]


if __name__ == "__main__":
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    fork_for_each_task(socket.socket(fileno=int(sys.argv[1])))

    from cllm.__main__ import main

    main()
