"""Translates the options for devices, weights and scaled positions to llama.cpp's parameters."""

from __future__ import annotations

import ctypes
import math
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_cpp import llama_cpp as lib

from cllm.backends.llama_cpp.devices import Device, device_handle, list_gpus
from cllm.backends.llama_cpp.library import own_kernels, system_info
from cllm.backends.llama_cpp.rpc import add_worker
from cllm.backends.llama_cpp.variants import bind
from cllm.errors import StartupError
from cllm.models.gguf import read_header
from cllm.models.sequence_memory import has_recurrent_layers

if TYPE_CHECKING:
    from cllm.backends.llama_cpp.options import Options

SECTION = "backend.llama_cpp"
SPLIT_MODES = {
    "none": lib.LLAMA_SPLIT_MODE_NONE,
    "layer": lib.LLAMA_SPLIT_MODE_LAYER,
    "tensor": lib.LLAMA_SPLIT_MODE_TENSOR,
}
ROPE_TYPES = {
    "auto": lib.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    "none": lib.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": lib.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": lib.LLAMA_ROPE_SCALING_TYPE_YARN,
}
FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
NUMA = {
    "distribute": lib.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": lib.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": lib.GGML_NUMA_STRATEGY_NUMACTL,
}
EXPERTS = r"blk\.({layers})\.ffn_(up|down|gate|gate_up)_(ch|)exps"


class Override(ctypes.Structure):
    """llama_model_tensor_buft_override: tensors whose names match are in buffers of this type."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def chosen_gpus(options: Options, gpus: list[Device] | None = None) -> list[Device]:
    """Return the GPUs that will hold weights. Raises StartupError for names of others."""
    gpus = list_all_gpus(options) if gpus is None else gpus
    if options.devices is not None:
        named = [find_gpu(name, gpus) for name in options.devices.split(",")]
        gpus = [gpu for gpu in named if gpu is not None]
    if options.split == "none" and gpus:
        if options.main_gpu >= len(gpus):
            raise StartupError(f"{SECTION}.main_gpu is {options.main_gpu} of {len(gpus)} GPUs")
        return [gpus[options.main_gpu]]
    return gpus


def list_all_gpus(options: Options) -> list[Device]:
    """Return the GPUs of this machine and of RPC workers.

    Raises StartupError if an RPC worker cannot be used.
    """
    for address in split_list(options.rpc or ""):
        add_worker(address)
    return list_gpus()


def find_gpu(name: str, gpus: list[Device]) -> Device:
    for gpu in gpus:
        if gpu.name == name.strip():
            return gpu
    there = ", ".join(gpu.name for gpu in gpus) or "none"
    raise StartupError(f"{SECTION}.devices: there is no GPU {name.strip()}; llama.cpp has {there}")


def check(options: Options, kv_type: str, *, has_gpu: bool) -> None:
    """Raise StartupError if this build or the other settings do not allow the options."""
    if not has_gpu:
        for name, usual in (("split", "layer"), ("tensor_split", None), ("devices", None)):
            if getattr(options, name) != usual:
                raise StartupError(
                    f"{SECTION}.{name} needs a GPU, and this build of llama.cpp finds none"
                )
    if options.split == "tensor" and options.flash_attention == "off":
        raise StartupError(f"{SECTION}.split tensor needs {SECTION}.flash_attention")
    if options.split == "tensor" and kv_type != "f16":
        raise StartupError(f"{SECTION}.split tensor needs kv.type f16, not {kv_type}")
    if kv_type != "f16" and options.flash_attention == "off":
        raise StartupError(f"kv.type {kv_type} needs {SECTION}.flash_attention")
    if options.rope_scale != 1 and options.rope_scaling == "none":
        raise StartupError(f"{SECTION}.rope_scale needs {SECTION}.rope_scaling linear or yarn")


class Placement:
    """Sets the parameters with which a model is loaded. Keep it until the model is loaded."""

    def __init__(self, options: Options, kv_type: str) -> None:
        """Raises StartupError if the options contradict each other, or name what is not there."""
        gpus = list_all_gpus(options)
        check(options, kv_type, has_gpu=bool(gpus))
        self._options = options
        self._shares = read_shares(options.tensor_split)
        self._devices: Any = None
        if options.devices is not None:
            named = [find_gpu(name, gpus) for name in split_list(options.devices)]
            handles = [device_handle(gpu.name) for gpu in named]
            self._devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        overrides = read_overrides(options.override_tensors)
        if options.cpu_moe_layers:
            overrides.insert(0, (format_expert_pattern(options.cpu_moe_layers), "CPU"))
        entries = [Override(pattern.encode(), buffer_type(device)) for pattern, device in overrides]
        self._overrides: Any = (Override * (len(entries) + 1))(*entries) if entries else None

    def apply(self, c_params: Any) -> None:
        """Set ``c_params``, and how memory is used on machines with several NUMA nodes."""
        c_params.split_mode = SPLIT_MODES[self._options.split]
        c_params.main_gpu = self._options.main_gpu
        if self._shares is not None:
            c_params.tensor_split = self._shares
        if self._devices is not None:
            c_params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        if self._overrides is not None:
            c_params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
        if self._options.numa != "off":
            init_numa(self._options.numa)


def can_reorder_weights(path: Path) -> bool:
    """Return whether llama.cpp may keep the weights of ``path`` in another order, for AMX.

    Its products with AMX are wrong, or it aborts, if there is a third axis: of the input for
    sequences, as in recurrent layers, or of the weights for heads, as with compressed keys. Builds
    with cLLM's kernels give it neither.
    """
    is_safe = hasattr(own_kernels(), "cllm_joins_sequences")
    if is_safe or "AMX_INT8 = 1" not in system_info():
        return True
    try:
        header = read_header(path)
        compressed = header.get_number("attention.kv_lora_rank") is not None
        return not (compressed or has_recurrent_layers(header))
    except StartupError:  # llama.cpp will say what is wrong
        return True


def scale_positions(options: Options, trained: int, c_params: Any) -> None:
    """Set how a context scales positions. The model was trained for ``trained`` tokens."""
    c_params.rope_scaling_type = ROPE_TYPES[options.rope_scaling]
    if options.rope_scale != 1:
        c_params.rope_freq_scale = 1 / options.rope_scale
    if options.rope_freq_base is not None:
        c_params.rope_freq_base = options.rope_freq_base
    if options.rope_scaling == "yarn":
        c_params.yarn_orig_ctx = options.yarn_original_context or trained


def scaled_length(options: Options, trained: int) -> int:
    """Return how long a context the model can use with scaled positions."""
    original = options.yarn_original_context or trained
    return max(trained, int(original * options.rope_scale))


def describe_positions(options: Options) -> str:
    """Return the part of the fingerprint that says how positions are scaled; "" for the
    defaults.
    """
    own = (
        options.rope_scaling,
        options.rope_scale,
        options.rope_freq_base,
        options.yarn_original_context,
    )
    return "" if own == ("auto", 1.0, None, None) else f" rope {own}"


@cache  # llama.cpp keeps the first strategy of a process
def init_numa(strategy: str) -> None:
    lib.llama_numa_init(NUMA[strategy])


def split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def read_shares(text: str | None) -> Any:
    """Return the shares of the GPUs as llama.cpp reads them. Raises StartupError."""
    if text is None:
        return None
    size = int(lib.llama_max_devices())
    try:
        shares = [float(part) for part in split_list(text)]
    except ValueError:
        shares = []
    valid = all(math.isfinite(share) and share >= 0 for share in shares) and sum(shares) > 0
    if not valid or len(shares) > size:
        raise StartupError(f"{SECTION}.tensor_split must be up to {size} numbers such as 3,1")
    return (ctypes.c_float * size)(*shares)


def format_expert_pattern(num_layers: int) -> str:
    """Return the pattern of the expert tensors of the first layers."""
    return EXPERTS.format(layers="|".join(map(str, range(num_layers))))


def read_overrides(text: str | None) -> list[tuple[str, str]]:
    """Return pairs of a pattern and a device. Raises StartupError."""
    overrides = []
    for part in split_list(text or ""):
        pattern, _, device = part.rpartition("=")
        try:
            re.compile(pattern)
        except re.error:
            pattern = ""
        if not pattern:
            raise StartupError(
                f"{SECTION}.override_tensors must be patterns and devices such as "
                r"blk\.[0-3]\.ffn_.*=CPU"
            )
        overrides.append((pattern, device))
    return overrides


def buffer_type(device: str) -> int:
    """Return the type of buffers in the memory of a device. Raises StartupError."""
    functions = lib._lib  # noqa: SLF001
    kind: int
    if device.upper() == "CPU":
        kind = bind(functions, "ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    else:
        find = bind(functions, "ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
        kind = find(device_handle(device))
    return kind
