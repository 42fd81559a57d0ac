"""Loads libllama: checks its version, handles its log and its aborts, and reports facts about this
build.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# An abort inside libllama would start gdb for a backtrace where gdb is installed; the engine must
# die quickly instead.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import llama_cpp
from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.variants import (
    GPU_TYPES,
    bind,
    find_kernels,
    load_backends,
    load_own_kernels,
    name_own_kernels,
    name_variant,
    switch_own_kernels,
)
from cllm.errors import WORKER_LOST_STATUS, StartupError
from cllm.observe.cpu_time import decoding

log = logging.getLogger("cllm.llama_cpp")

TESTED_VERSION = "0.3.36"
# texts of aborts in ggml-rpc.cpp that another process has caused
WORKER_LOST = ("Remote RPC server crashed", "Failed to connect", "RPC handshake failed")
LOG_LEVEL_INFO = 2
LOG_LEVEL_WARNING = 3
LOG_LEVEL_ERROR = 4

# The structs are passed by value and change between releases, so another version would corrupt
# memory.
if llama_cpp.__version__ != TESTED_VERSION:
    raise StartupError(
        f"llama-cpp-python {llama_cpp.__version__} is installed, but cLLM requires "
        f"{TESTED_VERSION}: "
        f"pip install llama-cpp-python=={TESTED_VERSION}"
    )

FOLDER = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib")

recent_errors: deque[str] = deque(maxlen=20)
"""The last warnings and errors that libllama logged, one line each."""


_listeners: list[Callable[[bytes], None]] = []
_abort_handlers: list[Callable[[str], None]] = []


def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    for listen in _listeners:
        listen(text)
    if level in (LOG_LEVEL_WARNING, LOG_LEVEL_ERROR):
        recent_errors.append(text.decode("utf-8", "replace").strip())
    # Lower levels are hundreds of lines per model; higher ones continue lines that may not have
    # been shown.
    if LOG_LEVEL_INFO <= level <= LOG_LEVEL_ERROR and log.isEnabledFor(logging.DEBUG):
        log.debug("%s", text.decode("utf-8", "replace").rstrip())


def _abort(message: bytes) -> None:
    """Called by libllama just before it aborts the process, in any thread."""
    # without the folder of its sources
    reason = re.sub(r"^\S*/", "", message.decode("utf-8", "replace").strip())
    for handle in _abort_handlers:
        handle(reason)
    if is_worker_lost(reason):
        log.critical("an RPC worker was lost; the engine ends")
        logging.shutdown()
        os._exit(WORKER_LOST_STATUS)
    log.critical("llama.cpp aborts: %s", reason)
    logging.shutdown()


def is_worker_lost(reason: str) -> bool:
    """Return whether libllama aborts because of ``reason`` if it has lost an RPC worker."""
    return reason.startswith("ggml-rpc.cpp:") and any(text in reason for text in WORKER_LOST)


# kept alive here, because libllama has only the pointer
_log_callback = lib.llama_log_callback(_log)
_abort_callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(_abort)
# some loaders do not find symbols of a library's dependencies
with contextlib.suppress(AttributeError):
    lib._lib.ggml_set_abort_callback(_abort_callback)  # noqa: SLF001  # it has no binding
lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
load_backends(lib._lib, FOLDER)  # noqa: SLF001  # these functions have no binding
lib.llama_backend_init()
lib.llama_decode = decoding.timing(lib.llama_decode)


@contextlib.contextmanager
def log_lines(listen: Callable[[bytes], None]) -> Iterator[None]:
    """Call ``listen`` with every line that libllama logs inside the ``with`` block."""
    _listeners.append(listen)
    try:
        yield
    finally:
        _listeners.remove(listen)


@contextlib.contextmanager
def aborts(handle: Callable[[str], None]) -> Iterator[None]:
    """Call ``handle`` with the reason if libllama is about to abort this process inside the
    ``with`` block.
    """
    _abort_handlers.append(handle)
    try:
        yield
    finally:
        _abort_handlers.remove(handle)


def system_info() -> str:
    """Return the CPU features and libraries that this build of llama.cpp uses, in its own words."""
    return str(lib.llama_print_system_info().decode().strip())


class Compiled(NamedTuple):
    """How the CPU kernels were compiled: the compiler's signature and switches; "" if they were not
    recorded.
    """

    compiler: str
    switches: str


def compiled() -> Compiled:
    """Return how the CPU kernels of this build were compiled, as recorded in their library file."""
    kernels = find_kernels(lib._lib)  # noqa: SLF001
    for path in [kernels] if kernels is not None else sorted(FOLDER.glob("*ggml-cpu*")):
        data = path.read_bytes()
        if signed := re.search(rb"(GCC: \([^)\0]*\) [\d.]+|clang version [\d.]+)", data):
            switches = re.search(rb"GNU C\+\+\d+ [^\0]*", data)  # only with -frecord-gcc-switches
            return Compiled(signed[0].decode(), switches[0].decode() if switches else "")
    return Compiled("", "")


def cpu_variant() -> str:
    """Return which variant of the CPU kernels is in use, such as haswell; "" if the build has only
    one.
    """
    return name_variant(find_kernels(lib._lib))  # noqa: SLF001


def use_own_kernels(*, on: bool) -> None:
    """Turn cLLM's kernels (native/) on or off for this process, if this build has them."""
    switch_own_kernels(find_kernels(lib._lib), on=on)  # noqa: SLF001


def attention_kernel() -> str:
    """Return the instructions that cLLM's attention kernel uses, such as AVX2; "" if llama.cpp's
    own computes.
    """
    return name_own_kernels(find_kernels(lib._lib))  # noqa: SLF001


def own_kernels() -> ctypes.CDLL | None:
    """Return the library that has cLLM's kernels; None if this build is without them."""
    return load_own_kernels(find_kernels(lib._lib))  # noqa: SLF001


def supports_gpu_offload() -> bool:
    """Return whether this build of llama.cpp can use a GPU of this machine."""
    if not lib.llama_supports_rpc():
        return bool(lib.llama_supports_gpu_offload())
    # a build with RPC says that it can use a GPU even if there is none
    find = bind(lib._lib, "ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)  # noqa: SLF001
    return any(find(kind) for kind in GPU_TYPES)


def read_metadata(model: Any, key: str) -> str | None:
    """Return a value of the model's metadata as text, None if there is none."""
    buffer = ctypes.create_string_buffer(256)
    length = lib.llama_model_meta_val_str(model, key.encode(), buffer, 256)
    return buffer.value.decode("utf-8", "replace") if length >= 0 else None


def last_error(default: str) -> str:
    """Return the last logged error that names a cause, else the last warning or error, else
    ``default``.

    Each is returned once: a later failure has other causes.
    """
    lines = [*recent_errors]
    recent_errors.clear()
    for line in reversed(lines):
        _, _, cause = line.partition("error loading model: ")
        if cause:
            return cause.removeprefix("error loading model architecture: ").removeprefix(
                "error loading model hyperparameters: "
            )
    return lines[-1] if lines else default


def check_pointer(pointer: Any, what: str) -> Any:
    """Return the pointer. Raises StartupError, with libllama's own reason, if it is NULL."""
    if not pointer:
        raise StartupError(f"{what}: {last_error('llama.cpp gave no reason')}")
    return pointer
