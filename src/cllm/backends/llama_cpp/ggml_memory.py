"""The system's and ggml's functions for paged memory, which have no bindings, and ggml's private
structures, of the version that library.py requires.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from cllm.errors import EngineError

PAGE = mmap.PAGESIZE

# positions of pointers in ggml's private structures, see ggml-backend-impl.h
BUFT_GET_NAME, BUFT_ALLOC = 0, 1
BUFFER_GET_BASE, BUFFER_INIT, BUFFER_SET, BUFFER_CLEAR = 1, 2, 4, 9
BUFFER_CONTEXT, BUFFER_SIZE = 12, 13

Pointer = ctypes.c_void_p
Alloc = ctypes.CFUNCTYPE(Pointer, Pointer, ctypes.c_size_t)
GetName = ctypes.CFUNCTYPE(ctypes.c_char_p, Pointer)
GetBase = ctypes.CFUNCTYPE(Pointer, Pointer)
InitTensor = ctypes.CFUNCTYPE(ctypes.c_int, Pointer, Pointer)
SetTensor = ctypes.CFUNCTYPE(None, Pointer, Pointer, Pointer, ctypes.c_size_t, ctypes.c_size_t)
Clear = ctypes.CFUNCTYPE(None, Pointer, ctypes.c_uint8)
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
PUNCH_HOLE, KEEP_SIZE = 2, 1
FAILED = ctypes.c_void_p(-1).value


class Tensor(ctypes.Structure):
    """ggml_tensor of ggml.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", Pointer),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", Pointer * 10),
        ("view_src", Pointer),
        ("view_offs", ctypes.c_size_t),
        ("data", Pointer),
        ("name", ctypes.c_char * 64),
    )


def do_nothing(*_: object) -> None:
    pass


def max_mappings() -> int:
    """Return how many mappings the system allows a process to have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65530


def punch(file: int, begin: int, size: int) -> None:
    """Free the pages of a part of ``file``; it reads as zeros afterwards."""
    if libc.fallocate(file, PUNCH_HOLE | KEEP_SIZE, begin, size):
        raise EngineError(f"cannot free memory of the KV cache: {os.strerror(ctypes.get_errno())}")


def is_supported() -> bool:
    """Return whether this system has what PagedMemory needs, and ggml's structures are as known."""
    return ggml is not None


def _load_libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    size, offset = ctypes.c_size_t, ctypes.c_int64
    library.mmap.argtypes = (Pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, offset)
    library.mmap.restype = Pointer
    library.munmap.argtypes = (Pointer, size)
    library.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, offset, offset)
    return library


def _load_ggml() -> Any:
    """Return ggml's functions; None if its structures are not those of ggml-backend-impl.h."""
    library = lib._lib  # noqa: SLF001  # these functions have no binding
    try:
        library.ggml_backend_cpu_buffer_type.restype = Pointer
        library.ggml_backend_cpu_buffer_from_ptr.restype = Pointer
        library.ggml_backend_cpu_buffer_from_ptr.argtypes = (Pointer, ctypes.c_size_t)
        library.ggml_backend_buffer_free.argtypes = (Pointer,)
        library.ggml_backend_buffer_free.restype = None
    except AttributeError:
        return None
    buffer_type = library.ggml_backend_cpu_buffer_type()
    functions = (Pointer * 6).from_address(buffer_type)
    if GetName(functions[BUFT_GET_NAME] or 0)(buffer_type) != b"CPU":
        return None
    memory = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    buffer = library.ggml_backend_cpu_buffer_from_ptr(address, PAGE)
    fields = (Pointer * 14).from_address(buffer)
    is_known = fields[BUFFER_CONTEXT] == address and fields[BUFFER_SIZE] == PAGE
    is_known = is_known and GetBase(fields[BUFFER_GET_BASE] or 0)(buffer) == address
    library.ggml_backend_buffer_free(buffer)
    return library if is_known else None


libc: Any = None
ggml: Any = None
if sys.platform == "linux" and sys.maxsize > 1 << 32:
    libc = _load_libc()
    ggml = _load_ggml()
