"""Loads models with llama.cpp; see ``registry.Loader``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cllm.backends.params import BackendParams, ModelSize, SingleGpu
from cllm.environment import child_environment
from cllm.errors import StartupError
from cllm.models.sequence_memory import check_kv_type, compute_kv_bytes_per_token

if TYPE_CHECKING:
    from cllm.backends.base import Backend, Vocabulary
    from cllm.models.hub import Progress

ENCODERS = ("bert", "gemma-embedding")  # parts of the names of architectures without KV cache
COPIED_SHARE = 0.5  # in another order, for CPUs
# options that say which GPUs to use
CHOICES = (
    *("split", "tensor_split", "devices", "rpc", "main_gpu"),
    *("cpu_moe_layers", "override_tensors"),
)
# the variables that hide GPUs, by the beginning of llama.cpp's names for them
VISIBLE = {
    "CUDA": "CUDA_VISIBLE_DEVICES",
    "ROCm": "HIP_VISIBLE_DEVICES",
    "Vulkan": "GGML_VK_VISIBLE_DEVICES",
}


def resolve(
    name: str | None, quantization: str | None = None, progress: Progress | None = None
) -> Path:
    from cllm.models import catalog  # the engine process does not need it

    return catalog.resolve(name, quantization, progress, "gguf")


def measure(params: BackendParams, *, check_tokens: bool = False) -> ModelSize:
    from cllm.models.model_file import read_parts  # the engine process does not need it

    parts = read_parts(Path(params.path), check_tokens=check_tokens)
    check_kv_type(parts[0], params.kv_type)
    return ModelSize(
        sum(part.tensor_bytes for part in parts),
        compute_kv_bytes_per_token(parts[0], params.kv_type) or 0,
        not any(name in parts[0].architecture for name in ENCODERS),
    )


def measure_gpus(params: BackendParams) -> int | None:
    with loadable():
        from cllm.backends.llama_cpp import backend, placement

    if not backend.uses_gpu(params):
        return None
    return sum(gpu.num_free_bytes for gpu in placement.chosen_gpus(backend.read_options(params)))


def find_gpus(params: BackendParams) -> list[SingleGpu]:
    from cllm.backends.llama_cpp.options import Options

    options = Options(**params.options)
    is_chosen = any(
        getattr(options, name) != Options.model_fields[name].default for name in CHOICES
    )
    if is_chosen or options.n_gpu_layers == 0 or not has_gpu_library():
        return []
    gpus = []
    for number, (name, num_free_bytes) in enumerate(ask_for_gpus()):
        variable = next((one for kind, one in VISIBLE.items() if name.startswith(kind)), None)
        if variable is None:
            return []
        names = os.environ.get(variable, "").split(",")
        value = names[number] if number < len(names) and names[number] else str(number)
        gpus.append(SingleGpu(variable, value, num_free_bytes))
    return gpus


def has_gpu_library() -> bool:
    """Return whether llama.cpp was built for GPUs of which a machine may have several."""
    spec = find_spec("llama_cpp")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [
        file.name for folder in folders or () for file in (Path(folder) / "lib").glob("*ggml*")
    ]
    return any(f"ggml-{kind}" in file for file in files for kind in ("cuda", "hip", "vulkan"))


def ask_for_gpus() -> list[tuple[str, int]]:
    """Return the names and the free memory of the GPUs. Another process finds them, because what
    it loads takes memory on each GPU.
    """
    command = [sys.executable, "-P", "-m", "cllm.backends.llama_cpp.devices"]
    try:
        answer = subprocess.run(
            command, env=child_environment(), capture_output=True, timeout=60, check=True
        )
        return [(str(name), int(free)) for name, free in json.loads(answer.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []  # the engine will say what is wrong


def may_divide_cores(params: BackendParams) -> bool:
    from cllm.backends.llama_cpp.options import Options

    options = Options(**params.options)
    return options.numa == "off" and options.n_threads is None and not has_gpu_library()


def load(
    params: BackendParams,
    progress: Callable[[float], None] | None = None,
    on_abort: Callable[[str], None] = lambda _: None,
) -> Backend:
    with loadable():
        from cllm.backends.llama_cpp.backend import LlamaCppBackend
        from cllm.backends.llama_cpp.library import aborts, is_worker_lost

    def report_abort(why: str) -> None:
        if is_worker_lost(why):
            on_abort("backend.llama_cpp.rpc: a worker was lost, or has too little memory")
            return
        hint = ""
        if params.options.get("split") == "tensor":
            hint = " (many models need backend.llama_cpp.split layer)"
        on_abort(f"{params.path} is damaged, or llama.cpp does not support it{hint}: {why}")

    with aborts(report_abort):
        return LlamaCppBackend(params, progress)


def load_vocabulary(params: BackendParams) -> Vocabulary:
    with loadable():
        from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary

    return LlamaVocabulary.load(Path(params.path))


@contextmanager
def loadable() -> Iterator[None]:
    """Raise StartupError if llama.cpp is missing or cannot be loaded."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        raise StartupError(
            f"llama.cpp cannot be loaded ({error}); run cllm doctor for details"
        ) from None
