"""Loads the weights of a GGUF file with llama.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.library import check_pointer, log_lines
from cllm.backends.llama_cpp.placement import Placement, can_reorder_weights
from cllm.errors import StartupError

if TYPE_CHECKING:
    from cllm.backends.llama_cpp.options import Options

WEIGHTS_FOLLOW = b"load_tensors: loading model tensors"  # logged before the first progress report


def load_weights(
    path: Path,
    options: Options,
    kv_type: str,
    progress: Callable[[float], None] | None,
    *,
    head: bool = False,
) -> Any:
    """Return the model of a file, with its draft ``head`` if wanted; ``progress`` receives the
    loaded share, 0 to 1.

    Raises StartupError, also for encoders, and what ``progress`` raises.
    """
    placement = Placement(options, kv_type)
    c_params = lib.llama_model_default_params()
    c_params.n_gpu_layers = options.n_gpu_layers
    placement.apply(c_params)
    c_params.load_mtp = head
    c_params.use_extra_bufts = can_reorder_weights(path)
    c_params.load_mode = {
        (True, False): lib.LLAMA_LOAD_MODE_MMAP,
        (True, True): lib.LLAMA_LOAD_MODE_MMAP_MLOCK,
        (False, True): lib.LLAMA_LOAD_MODE_MLOCK,
        (False, False): lib.LLAMA_LOAD_MODE_NONE,
    }[options.use_mmap, options.use_mlock]

    failed: list[BaseException] = []

    def report(share: float, _: ctypes.c_void_p) -> bool:
        try:
            if progress and not failed:
                progress(share)
        except BaseException as error:  # noqa: BLE001  # raised when the load has ended; ctypes would swallow it
            failed.append(error)
        return not failed

    # a local name keeps it alive during the load
    callback = lib.llama_progress_callback(report)
    c_params.progress_callback = callback

    def listen(line: bytes) -> None:
        if line.startswith(WEIGHTS_FOLLOW):
            report(0.0, ctypes.c_void_p())

    with log_lines(listen):
        model = lib.llama_model_load_from_file(str(path).encode(), c_params)
    if failed:
        if model:
            lib.llama_model_free(model)
        raise failed[0]
    check_pointer(model, f"cannot load {path}")
    check_architecture(model, path)
    return model


def check_architecture(model: Any, path: Path) -> None:
    if lib.llama_model_has_encoder(model) or not lib.llama_model_has_decoder(model):
        raise StartupError(
            f"{path} is an encoder model ({describe(model)}), which does not generate text"
        )


def describe(model: Any) -> str:
    """Return llama.cpp's description: the architecture, size and type of weights."""
    buffer = ctypes.create_string_buffer(256)
    lib.llama_model_desc(model, buffer, 256)
    return buffer.value.decode("utf-8", "replace")
