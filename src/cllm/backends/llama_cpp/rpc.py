"""llama.cpp's RPC backend, which computes on other machines of a private network.

A worker offers devices of its machine, and serves one engine at a time. The connection is neither
encrypted nor authenticated, so workers listen on private addresses only. If a worker is lost,
libllama aborts the engine process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp import library  # noqa: F401  # checks the version, and starts llama.cpp
from cllm.backends.llama_cpp.devices import device_handle, list_gpus
from cllm.backends.llama_cpp.variants import bind
from cllm.errors import StartupError, describe_os_error
from cllm.http_client import is_private

log = logging.getLogger("cllm.llama_cpp")

OPTION = "backend.llama_cpp.rpc"
BUILD = "this build of llama.cpp has no RPC backend; it needs -DGGML_RPC=ON"
DANGER = "RPC is neither encrypted nor authenticated, and whoever reaches it can run code there"
ANSWER_SECONDS = 5.0  # for a worker's first answer
# The protocol of the llama.cpp that library.py requires, see ggml-rpc.h and ggml-rpc.cpp.
MAJOR_VERSION = 7
HELLO = struct.pack("<BQ24x", 14, 24)  # the command, the size of what follows, no capabilities
HELLO_ANSWER = struct.Struct("<QBBB25x")  # the size of what follows, the protocol's version


class Address(str):
    """The address of a worker: an IPv4 address of a private network and a port."""

    __slots__ = ()

    @property
    def parts(self) -> tuple[str, int]:
        host, port = self.split(":")
        return host, int(port)


def resolve(address: str, option: str = OPTION) -> Address:
    """Return the address of a worker, whose host may be a name. ``option`` is where it comes from.

    Raises StartupError for a malformed, unknown or public address.
    """
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[\w.-]+:\d{1,5}", address) or not 0 < int(port) < 65536:
        raise StartupError(f"{option} must be an address such as 10.0.0.5:50052, not {address}")
    try:
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise StartupError(f"{option}: {host} is not known: {describe_os_error(error)}") from None
    addresses = {str(where[0]) for *_, where in found}
    for one in addresses:
        if not is_private(one):
            raise StartupError(f"{option}: {one} is not in a private network; {DANGER}")
    return Address(f"{min(addresses)}:{port}")


@cache  # llama.cpp keeps the devices of a process
def add_worker(address: str) -> None:
    """Let llama.cpp use the devices of a worker.

    Raises StartupError if it does not answer, or this build has no RPC.
    """
    resolved = resolve(address)
    check_build(OPTION)
    log.warning("%s: %s", resolved, DANGER)
    greet(resolved)  # libllama would abort the process
    functions = lib._lib  # noqa: SLF001  # these functions have no binding
    add = find_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    if not (devices := add(resolved.encode())):
        raise StartupError(f"{OPTION}: the worker at {resolved} has no devices")
    bind(functions, "ggml_backend_register", None, ctypes.c_void_p)(devices)


def check_build(who: str) -> None:
    """Raise StartupError if this build of llama.cpp has no RPC backend."""
    if not lib.llama_supports_rpc():
        raise StartupError(f"{who}: {BUILD}")


def find_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function of the RPC backend, which libllama itself does not export."""
    functions, pointer, text = lib._lib, ctypes.c_void_p, ctypes.c_char_p  # noqa: SLF001
    backend = bind(functions, "ggml_backend_reg_by_name", pointer, text)(b"RPC")
    find = bind(functions, "ggml_backend_reg_get_proc_address", pointer, pointer, text)
    return ctypes.CFUNCTYPE(result, *arguments)(find(backend, name.encode()))


def greet(address: Address) -> None:
    """Raise StartupError unless a worker of our version is at ``address``, and serves no other
    engine.
    """
    here = f"{OPTION}: {address}"
    try:
        with socket.create_connection(address.parts, ANSWER_SECONDS) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(HELLO)
            answer = b""
            while len(answer) < HELLO_ANSWER.size:
                if not (received := connection.recv(HELLO_ANSWER.size - len(answer))):
                    raise StartupError(f"{here} is not an RPC worker of this version of llama.cpp")
                answer += received
    except TimeoutError:
        raise StartupError(
            f"{here} does not answer; a worker serves only one engine at a time"
        ) from None
    except OSError as error:
        raise StartupError(f"{here} cannot be reached: {describe_os_error(error)}") from None
    size, major, *_ = HELLO_ANSWER.unpack(answer)
    if size != HELLO_ANSWER.size - 8 or major != MAJOR_VERSION:
        raise StartupError(f"{here} is not an RPC worker of this version of llama.cpp")


def serve(
    address: str, devices: list[str], num_threads: int, cache_folder: Path | None = None
) -> None:
    """Serve ``devices`` of this machine, by default the GPUs or else the CPU, until a signal ends
    the process.

    ``num_threads`` compute if the device is the CPU. ``cache_folder`` keeps weights that engines
    have sent. Raises StartupError if the worker cannot start.
    """
    resolved = resolve(address, "--address")
    check_build("cllm rpc-worker")
    names = devices or [gpu.name for gpu in list_gpus()] or ["CPU"]
    handles = [device_handle(name) for name in names]
    with socket.socket() as probe:  # libllama would not say why it cannot listen
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(resolved.parts)
        except OSError as error:
            raise StartupError(f"cannot listen on {resolved}: {describe_os_error(error)}") from None
    if cache_folder is not None:
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    log.warning("%s: %s", resolved, DANGER)
    sys.stderr.write(f"cllm: lending {', '.join(names)} at {resolved}\n")
    with Path(os.devnull).open("wb") as nowhere:  # libllama prints a line for each connection
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    for number in (signal.SIGINT, signal.SIGTERM):  # Python's handlers would wait for libllama
        signal.signal(number, signal.SIG_DFL)
    start = find_function(
        "ggml_backend_rpc_start_server",
        None,
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p),
    )
    folder = None if cache_folder is None else os.fsencode(cache_folder)
    array = (ctypes.c_void_p * len(handles))(*handles)
    start(resolved.encode(), folder, num_threads, len(handles), array)
    raise StartupError(f"the worker on {resolved} has ended")
