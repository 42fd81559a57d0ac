"""The LoRA adapters of a model: loaded from files, and set for a context."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.library import last_error
from cllm.core.request import Adapters
from cllm.errors import EngineError, StartupError


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
        if not Path(path).is_file():
            raise StartupError(f"the adapter {name}: there is no file {path}")
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
