"""Loads models with llama.cpp; see ``registry.Loader``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cllm.backends.params import BackendParams, ModelSize
from cllm.errors import StartupError
from cllm.models.gguf import check_kv_type, compute_kv_bytes_per_token, read_header

if TYPE_CHECKING:
    from cllm.backends.base import Backend, Vocabulary
    from cllm.models.hub import Progress


def resolve(
    name: str | None, quantization: str | None = None, progress: Progress | None = None
) -> Path:
    from cllm.models import catalog  # the engine process does not need it

    return catalog.resolve(name, quantization, progress)


def measure(params: BackendParams, *, check_tokens: bool = False) -> ModelSize:
    header = read_header(Path(params.path), check_tokens=check_tokens)
    check_kv_type(header, params.kv_type)
    return ModelSize(
        # the parts of a split file have about the same size
        header.tensor_bytes * header.split_count,
        compute_kv_bytes_per_token(header, params.kv_type) or 0,
    )


def measure_gpus(params: BackendParams) -> int | None:
    with loadable():
        from cllm.backends.llama_cpp import backend, placement

    if not backend.uses_gpu(params):
        return None
    return sum(gpu.num_free_bytes for gpu in placement.chosen_gpus(backend.options_of(params)))


def load(
    params: BackendParams,
    progress: Callable[[float], None] | None = None,
    on_abort: Callable[[str], None] = lambda _: None,
) -> Backend:
    with loadable():
        from cllm.backends.llama_cpp.backend import LlamaCppBackend
        from cllm.backends.llama_cpp.library import aborts

    def report_abort(why: str) -> None:
        on_abort(f"{params.path} is damaged, or llama.cpp does not support it: {why}")

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
