"""The GPUs that llama.cpp can use."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from typing import NamedTuple

from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp import library  # noqa: F401  # checks the version, and starts llama.cpp
from cllm.backends.llama_cpp.variants import GPU_TYPES, bind
from cllm.errors import StartupError


class Device(NamedTuple):
    """A GPU, with the free and the total bytes of its memory. For an integrated GPU, this is the
    RAM that it may use.
    """

    name: str
    description: str
    num_free_bytes: int
    num_bytes: int


def list_gpus() -> list[Device]:
    """Return the GPUs; an empty list if this build of llama.cpp cannot list them."""
    try:
        return [*_list_gpus(lib._lib)]  # noqa: SLF001  # these functions have no binding
    except AttributeError:  # some loaders do not find symbols of a library's dependencies
        return []


def _list_gpus(functions: ctypes.CDLL) -> Iterator[Device]:
    text = ctypes.c_char_p
    count = bind(functions, "ggml_backend_dev_count", ctypes.c_size_t)
    get = bind(functions, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = bind(functions, "ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    name = bind(functions, "ggml_backend_dev_name", text, ctypes.c_void_p)
    describe = bind(functions, "ggml_backend_dev_description", text, ctypes.c_void_p)
    pointer = ctypes.POINTER(ctypes.c_size_t)
    measure = bind(functions, "ggml_backend_dev_memory", None, ctypes.c_void_p, pointer, pointer)
    for index in range(count()):
        device = get(index)
        if kind(device) in GPU_TYPES:
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            measure(device, ctypes.byref(free), ctypes.byref(total))
            names = name(device).decode(), describe(device).decode()
            yield Device(*names, free.value, total.value)


def device_handle(name: str) -> int:
    """Return llama.cpp's pointer to a device. Raises StartupError if there is none of this name."""
    find = bind(lib._lib, "ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p)  # noqa: SLF001
    handle: int | None = find(name.encode())
    if not handle:
        raise StartupError(f"llama.cpp has no device {name}")
    return handle


if __name__ == "__main__":
    json.dump([[gpu.name, gpu.num_free_bytes] for gpu in list_gpus()], sys.stdout)
