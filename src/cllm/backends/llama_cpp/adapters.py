"""The LoRA adapters of a model: loaded from files, and set for a context."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.library import last_error
from cllm.backends.llama_cpp.variants import bind
from cllm.core.request import Adapters
from cllm.errors import EngineError, StartupError
from cllm.models.gguf import TENSOR_TYPES, read_header

TYPE_NUMBERS = {name: number for number, (name, *_) in TENSOR_TYPES.items()}


class LoadedAdapters:
    """Adapters by name. llama.cpp frees them with the model."""

    def __init__(self, model: Any, files: Mapping[str, str]) -> None:
        """Raises StartupError for a file that is not an adapter of this model."""
        self._model = model
        self._loaded: dict[str, Any] = {}
        self._in_use: Adapters = ()
        for name, path in files.items():
            self.load(name, path)

    def load(self, name: str, path: str) -> None:
        """Load one more adapter. Raises StartupError for a file that is not one of this model."""
        if Path(path).is_dir():
            raise StartupError(
                f"the adapter {name}: {path} is a folder, and llama.cpp needs a GGUF file, which "
                "its convert_lora_to_gguf.py makes from the folder"
            )
        if not Path(path).is_file():
            raise StartupError(f"the adapter {name}: there is no file {path}")
        if fault := find_fault(Path(path)):
            raise StartupError(f"the adapter {name} cannot be loaded from {path}: {fault}")
        adapter = lib.llama_adapter_lora_init(self._model, path.encode())
        if not adapter:
            reason = last_error("no reason given")
            raise StartupError(f"the adapter {name} cannot be loaded from {path}: {reason}")
        self._loaded[name] = adapter

    def reset(self) -> None:
        """Note that there is another context, which uses none."""
        self._in_use = ()

    def use(self, context: Any, adapters: Adapters) -> None:
        """Compute with ``adapters`` from now on. Raises EngineError.

        A change makes llama.cpp build its graphs anew in the next decode.
        """
        if adapters == self._in_use:
            return
        if unknown := [name for name, _ in adapters if name not in self._loaded]:
            raise EngineError(f"there is no adapter {unknown[0]}")
        count = len(adapters)
        handles = (ctypes.POINTER(ctypes.c_void_p) * count)(
            *(self._loaded[name] for name, _ in adapters)
        )
        scales = (ctypes.c_float * count)(*(scale for _, scale in adapters))
        self._in_use = ()  # if the call fails, unknown
        if code := lib.llama_set_adapters_lora(context, handles, count, scales):
            raise EngineError(f"llama_set_adapters_lora returned {code}")
        self._in_use = adapters


def find_fault(path: Path) -> str:
    """Return why an adapter would compute nonsense, which llama.cpp does not check, or "". All of
    its data is read.
    """
    try:
        header = read_header(path)
    except StartupError as error:
        return str(error)
    if header.metadata.get("general.type") != "adapter":
        return ""  # llama.cpp refuses it
    alpha = header.metadata.get("adapter.lora.alpha")
    if isinstance(alpha, float) and not math.isfinite(alpha):
        return f"adapter.lora.alpha is {alpha}"
    is_valid = bind(
        lib._lib,  # noqa: SLF001  # ctypes' handle, which also finds the functions of ggml
        *("ggml_validate_row_data", ctypes.c_bool),
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
    )
    data = np.memmap(path, np.uint8, "r")
    for tensor in header.tensors:
        if not tensor.num_bytes:
            return f"the tensor {tensor.name} is empty"
        at = data[header.data_offset + tensor.offset :].ctypes.data
        if not is_valid(TYPE_NUMBERS[tensor.type], at, tensor.num_bytes):
            return f"the tensor {tensor.name} has numbers that are not finite"
    return ""
