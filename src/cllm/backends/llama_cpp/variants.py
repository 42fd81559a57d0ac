"""The CPU kernels of a build that has them in several variants, one library for each generation of
CPUs, such as libggml-cpu-haswell.so. The wheels that `make wheels` builds are such builds.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from cllm.errors import StartupError

# Values of ggml_backend_dev_type: CPUs, GPUs with their own memory, integrated GPUs
CPU, GPU_TYPES = 0, (1, 2)
FILE_NAME = re.compile(r"(?:lib)?ggml-cpu-(.+)\.(?:so|dylib|dll)$")


class Symbol(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def load_backends(library: ctypes.CDLL, folder: Path) -> None:
    """Load the variant that suits this CPU best, and GPU backends, from ``folder``. A build that
    contains its kernels stays as it is.

    Raises StartupError, with the loader's reason, if no variant can be loaded.
    """
    try:
        find = _bind_find(library)
        load = bind(library, "ggml_backend_load_all_from_path", None, ctypes.c_char_p)
    except AttributeError:  # some loaders do not find symbols of a library's dependencies
        return
    if find(CPU):
        return
    load(os.fsencode(folder))  # without a folder, ggml would search the current one
    if not find(CPU):
        raise StartupError(
            f"llama.cpp cannot load its CPU kernels: {_explain(folder)}; reinstall "
            "llama-cpp-python, or build it for this machine (docs/install.md)"
        )


def find_kernels(library: ctypes.CDLL) -> Path | None:
    """Return the file that has the CPU kernels in use; None if the system does not say."""
    if sys.platform == "win32":
        return None
    symbol = Symbol()
    try:
        device = _bind_find(library)(CPU)
        pointer = ctypes.POINTER(Symbol)
        locate = bind(ctypes.CDLL(None), "dladdr", ctypes.c_int, ctypes.c_void_p, pointer)
    except AttributeError:
        return None
    return Path(os.fsdecode(symbol.file)) if locate(device, ctypes.byref(symbol)) else None


def switch_own_kernels(kernels: Path | None, *, on: bool) -> None:
    """Turn cLLM's kernels in the file on or off; a build without them stays as it is."""
    if functions := load_own_kernels(kernels):
        functions.cllm_kernels_enable(on)


def name_own_kernels(kernels: Path | None) -> str:
    """Return the instructions that cLLM's kernels in the file use, such as AVX2; "" if llama.cpp's
    own kernels compute everything.
    """
    functions = load_own_kernels(kernels)
    name = bind(functions, "cllm_kernels", ctypes.c_char_p)() if functions else None
    return name.decode() if name else ""


def load_own_kernels(kernels: Path | None) -> ctypes.CDLL | None:
    """Return the library if native/ was compiled into it. It is loaded already."""
    library = ctypes.CDLL(str(kernels)) if kernels is not None else None
    return library if hasattr(library, "cllm_kernels_enable") else None


def name_variant(kernels: Path | None) -> str:
    """Return the variant's name, such as haswell; "" if the build has only one."""
    match = FILE_NAME.match(kernels.name) if kernels is not None else None
    return match[1] if match else ""


def bind(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return a function of the library, with its types. Raises AttributeError."""
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return cast("Callable[..., Any]", function)


def _bind_find(library: ctypes.CDLL) -> Callable[..., Any]:
    return bind(library, "ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)


def _explain(folder: Path) -> str:
    """Return why no variant was loaded. ggml does not say it."""
    files = sorted(folder.glob("*ggml-cpu*"))
    for file in files:
        try:
            ctypes.CDLL(str(file))
        except OSError as error:
            return str(error)
    return f"{folder} has none for this CPU" if files else f"{folder} has none"
