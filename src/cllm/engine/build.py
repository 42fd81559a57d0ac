"""Puts an engine together. The only place that chooses between implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from cllm.backends.base import Backend, Vocabulary
from cllm.engine.engine import Engine
from cllm.errors import StartupError
from cllm.kv_cache.ledger import Ledger
from cllm.sampling.pipeline import Sampler
from cllm.scheduler.scheduler import Scheduler


class EngineParams(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine needs to know, all of it; crosses the process border.

    backend: "llama_cpp" or "fake". path: the GGUF file. Sizes in tokens, memory in bytes; kv_bytes_per_token 0 means
    unknown. check verifies the conservation laws after every step.
    """

    backend: str = "llama_cpp"
    path: str = ""
    context_length: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    layout: str = "partitioned"
    kv_memory: int = 1 << 31
    n_threads: int | None = None
    n_gpu_layers: int = 99
    use_mmap: bool = True
    use_mlock: bool = False
    kv_bytes_per_token: int = 0
    check: bool = False
    log_level: str = "warning"


def build_backend(params: EngineParams, progress: Callable[[float], None] | None = None) -> Backend:
    """Raises StartupError if the model cannot be loaded."""
    if params.backend == "fake":
        from cllm.backends.fake import Costs, FakeBackend

        return FakeBackend(
            context_length=params.context_length or 1024,
            max_num_seqs=params.max_num_seqs,
            max_num_batched_tokens=params.max_num_batched_tokens,
            costs=Costs(step=0.005, row=0.0005, token=0.0001),
        )
    with loadable():
        from cllm.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppParams

    llama_params = LlamaCppParams(
        context_length=params.context_length,
        max_num_seqs=params.max_num_seqs,
        max_num_batched_tokens=params.max_num_batched_tokens,
        unified=params.layout == "unified",
        kv_memory=params.kv_memory,
        n_threads=params.n_threads,
        n_gpu_layers=params.n_gpu_layers,
        kv_bytes_per_token=params.kv_bytes_per_token,
        use_mmap=params.use_mmap,
        use_mlock=params.use_mlock,
    )
    return LlamaCppBackend(Path(params.path), llama_params, progress)


@contextmanager
def loadable() -> Iterator[None]:
    """Turn a llama.cpp that is missing or does not load into a StartupError."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        raise StartupError(f"llama.cpp cannot be loaded ({error}): cllm doctor says more") from None


def uses_gpu(params: EngineParams) -> bool:
    """True if the weights will lie on a GPU."""
    with loadable():
        from cllm.backends.llama_cpp.library import supports_gpu_offload

    return params.n_gpu_layers != 0 and supports_gpu_offload()


def build_engine(backend: Backend, *, check: bool = False) -> Engine:
    info = backend.info
    ledger = Ledger(info.num_cells, info.context_length, info.max_num_seqs, can_trim=info.can_trim)
    scheduler = Scheduler(ledger, info.max_num_batched_tokens, info.end_tokens)
    return Engine(backend, scheduler, Sampler(), check=check)


def build_vocabulary(params: EngineParams) -> Vocabulary:
    """The vocabulary alone, without weights. Raises StartupError if the file cannot be read."""
    if params.backend == "fake":
        from cllm.backends.fake import FakeVocabulary

        return FakeVocabulary()
    with loadable():
        from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary

    return LlamaVocabulary(Path(params.path))
