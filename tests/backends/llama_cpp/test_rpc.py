"""RPC workers, without a build that has RPC; tests/server/test_rpc_workers.py needs one."""

from __future__ import annotations

import ctypes
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cllm.backends.llama_cpp import library, placement, rpc
from cllm.backends.llama_cpp.options import Options
from cllm.errors import StartupError

pytestmark = pytest.mark.llama

VERSION = struct.pack("<QBBB25x", 28, 7, 0, 0)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    rpc.add_worker.cache_clear()
    yield
    rpc.add_worker.cache_clear()


@contextmanager
def worker(answer: bytes | None = VERSION) -> Iterator[str]:
    """Answer connections with ``answer``; None accepts none, like a worker that serves another
    engine.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        thread = threading.Thread(target=run, daemon=True)
        if answer is not None:
            thread.start()
        yield f"127.0.0.1:{port}"
        if answer is not None:
            thread.join()


def test_workers_need_a_build_with_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.lib, "llama_supports_rpc", lambda: False)
    with pytest.raises(StartupError, match=r"rpc: this build of llama\.cpp has no RPC backend"):
        placement.Placement(Options(rpc="127.0.0.1:50052"), "f16")
    with pytest.raises(StartupError, match="rpc-worker: this build"):
        rpc.serve("127.0.0.1:50052", [], 1)


@pytest.mark.parametrize(
    "address", ["nonsense", "10.0.0.5", "10.0.0.5:", "10.0.0.5:70000", "[::1]:1", "a b:1"]
)
def test_malformed_addresses_are_refused(address) -> None:
    with pytest.raises(StartupError, match="must be an address such as"):
        rpc.resolve(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8:1", "0.0.0.0:1", "172.32.0.1:1", "224.0.0.1:1", "192.0.2.1:1"]
)
def test_public_addresses_are_refused(address) -> None:
    with pytest.raises(StartupError, match="not in a private network"):
        rpc.resolve(address)
    with pytest.raises(StartupError, match="not in a private network"):
        rpc.serve(address, [], 1)


def test_name_with_a_public_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(None, None, None, "", (one, 1)) for one in ("10.0.0.5", "1.1.1.1")]
    monkeypatch.setattr(rpc.socket, "getaddrinfo", lambda *_: found)
    with pytest.raises(StartupError, match=r"1\.1\.1\.1 is not in a private network"):
        rpc.resolve("worker.example:50052")
    monkeypatch.setattr(rpc.socket, "getaddrinfo", lambda *_: found[:1])
    assert rpc.resolve("worker.example:50052").parts == ("10.0.0.5", 50052)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "is not an RPC worker of this version"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "is not an RPC worker"),
        (struct.pack("<QBBB25x", 28, 6, 0, 0), "is not an RPC worker of this version"),
        (None, "does not answer; a worker serves only one engine"),
    ],
)
def test_failed_greeting_is_one_line(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, message: str
) -> None:
    """libllama would abort the process."""
    monkeypatch.setattr(rpc.lib, "llama_supports_rpc", lambda: True)
    if answer is None:
        monkeypatch.setattr(rpc, "ANSWER_SECONDS", 0.1)
    with worker(answer) as address, pytest.raises(StartupError, match=message) as failure:
        rpc.add_worker(address)
    assert address in str(failure.value)
    assert "\n" not in str(failure.value)


def test_unreachable_worker_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc.lib, "llama_supports_rpc", lambda: True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(StartupError, match=f"127.0.0.1:{port} cannot be reached: "):
        rpc.add_worker(f"127.0.0.1:{port}")


def test_workers_are_registered_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With stand-ins for llama.cpp's functions."""
    registered: list[object] = []
    num_devices = 1

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
    def add(address: bytes) -> int:
        return 7 * num_devices

    functions = {
        "ggml_backend_reg_by_name": lambda name: name,
        "ggml_backend_reg_get_proc_address": lambda backend, name: (
            ctypes.cast(add, ctypes.c_void_p).value
        ),
        "ggml_backend_register": registered.append,
    }
    monkeypatch.setattr(rpc, "bind", lambda _, name, *types: functions[name])
    monkeypatch.setattr(rpc.lib, "llama_supports_rpc", lambda: True)
    with worker() as address:
        rpc.add_worker(address)
    assert registered == [7]
    assert re.search(f"{address}: RPC is neither encrypted nor authenticated", caplog.text)
    num_devices = 0
    with worker() as address, pytest.raises(StartupError, match="has no devices"):
        rpc.add_worker(address)


@pytest.mark.parametrize(
    ("reason", "is_lost"),
    [
        ("ggml-rpc.cpp:566: Remote RPC server crashed or returned malformed response", True),
        ("ggml-rpc.cpp:547: Failed to connect to 10.0.0.5:50052", True),
        ("ggml-rpc.cpp:498: GGML_ASSERT(queue.push(ev->msg)) failed", False),
        ("llama-context.cpp:12: Remote RPC server crashed", False),
    ],
)
def test_lost_worker_is_told_from_other_aborts(reason: str, is_lost: bool) -> None:
    """Only then no request is suspected."""
    assert library.is_worker_lost(reason) == is_lost
