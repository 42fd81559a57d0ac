"""Builds an engine. Only this module chooses between implementations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cllm.backends.base import Backend, Vocabulary
from cllm.core.model_info import ModelInfo
from cllm.engine.disk import DiskCache, DiskTier
from cllm.engine.draft_model import DraftModel
from cllm.engine.embeddings import Embeddings
from cllm.engine.engine import Engine
from cllm.engine.grammars import Grammars
from cllm.engine.layout import LayoutChange, layout_of
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.kv_cache.layouts import LayoutChooser
from cllm.kv_cache.ledger import Ledger
from cllm.kv_cache.tiers import Tiers
from cllm.models.memory import kv_budget, ram_cache_budget
from cllm.sampling.pipeline import Sampler
from cllm.scheduler.policy import make_policy
from cllm.scheduler.scheduler import Scheduler, SchedulerParams
from cllm.scheduler.speculation import PromptLookup, Speculation

if TYPE_CHECKING:
    from cllm.backends.llama_cpp.backend import LlamaCppParams

MAX_DRAFTED_SEQS = 4  # a draft model is worth its time only while few sequences run


def fitted(params: EngineParams) -> EngineParams:
    """Return ``params`` with kv_memory and ram_cache_bytes set to a share of the machine's memory
    if they are not set.

    Call it before the weights are loaded. Without ``weight_bytes`` it changes and checks nothing.
    Raises StartupError if the memory is too small.
    """
    if not params.weight_bytes:
        return params
    weights, on_gpu = params.weight_bytes, uses_gpu(params)
    kv_memory = kv_budget(
        weights, params.kv_bytes_per_token, params.kv_memory, params.context_length, on_gpu=on_gpu
    )
    ram_cache = params.ram_cache_bytes
    if ram_cache is None:
        ram_cache = ram_cache_budget(weights, kv_memory)
    return msgspec.structs.replace(
        params, weight_bytes=0, kv_memory=kv_memory, ram_cache_bytes=ram_cache
    )


def build_backend(
    params: EngineParams,
    progress: Callable[[float], None] | None = None,
    on_abort: Callable[[str], None] = lambda _: None,
) -> Backend:
    """Load the model. Raises StartupError if it cannot be loaded.

    progress: called with the fraction loaded. The first call means that the file has not crashed
    this process, so another process may read the vocabulary. on_abort: called with the reason just
    before the load aborts the process.
    """
    if params.backend == "fake":
        from cllm.backends.fake.backend import Costs, FakeBackend

        return FakeBackend(
            context_length=params.context_length or 1024,
            max_num_seqs=params.max_num_seqs,
            max_num_batched_tokens=params.max_num_batched_tokens,
            costs=Costs(step=0.005, row=0.0005, token=0.0001),
        )
    with loadable():
        from cllm.backends.llama_cpp.backend import LlamaCppBackend
        from cllm.backends.llama_cpp.library import aborts

    with aborts(on_abort):
        return LlamaCppBackend(Path(params.path), llama_cpp_params(params), progress)


def llama_cpp_params(params: EngineParams) -> LlamaCppParams:
    """Return the parameters for the llama.cpp backend."""
    with loadable():
        from cllm.backends.llama_cpp.backend import LlamaCppParams

    return LlamaCppParams(
        context_length=params.context_length,
        max_num_seqs=params.max_num_seqs,
        max_num_batched_tokens=params.max_num_batched_tokens,
        layout=params.layout,
        kv_type=params.kv_type,
        kv_memory=params.kv_memory,
        n_threads=params.n_threads,
        n_threads_batch=params.n_threads_batch,
        n_ubatch=params.n_ubatch,
        n_gpu_layers=params.n_gpu_layers,
        on_gpu=uses_gpu(params),
        kv_bytes_per_token=params.kv_bytes_per_token,
        use_mmap=params.use_mmap,
        use_mlock=params.use_mlock,
    )


@contextmanager
def loadable() -> Iterator[None]:
    """Raise StartupError if llama.cpp is missing or cannot be loaded."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        raise StartupError(f"llama.cpp cannot be loaded ({error}): cllm doctor says more") from None


def uses_gpu(params: EngineParams) -> bool:
    """Return whether the weights will be on a GPU."""
    with loadable():
        from cllm.backends.llama_cpp.library import supports_gpu_offload

    return params.n_gpu_layers != 0 and supports_gpu_offload()


def build_engine(
    backend: Backend, params: EngineParams, clock: Callable[[], float] = time.monotonic
) -> Engine:
    """Build an engine. Raises StartupError if the policy or the draft model cannot be loaded."""
    info = backend.info
    tiers = Tiers(
        params.ram_cache_bytes or 0,
        params.disk_cache_bytes,
        info.state_bytes_per_token,
        info.state_bytes,
    )
    ledger = Ledger(info.num_cells, info.context_length, info.max_num_seqs, layout_of(info), tiers)
    scheduler = Scheduler(
        ledger,
        SchedulerParams(
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_num_samples=info.max_num_samples,
            tile=info.tile,
            target_itl=params.target_itl,
        ),
        info.end_tokens,
        make_policy(params.policy, params.weights),
        build_speculation(params, info),
    )
    embeddings = Embeddings(backend, scheduler, clock)
    grammars = Grammars(
        lambda: backend.vocabulary.grammar_tokenizer(info.end_tokens), scheduler, embeddings
    )
    layout = disk = None
    if info.can_change_layout:
        chooser = LayoutChooser(info.layout_seconds, info.kv_bytes_per_token, params.target_itl)
        layout = LayoutChange(chooser, backend, scheduler, clock)
    if params.disk_cache:
        files = DiskCache(Path(params.disk_cache).expanduser(), info.fingerprint)
        disk = DiskTier(files, backend, scheduler, clock)
    return Engine(
        backend,
        scheduler,
        Sampler(info.end_tokens),
        clock,
        grammars,
        embeddings,
        layout,
        disk,
        check=params.check,
    )


def build_speculation(params: EngineParams, info: ModelInfo) -> Speculation | None:
    """Return the speculation, or None if it is off or the model cannot undo rejected draft
    tokens.
    """
    if params.speculation == "off" or not info.can_trim:
        return None
    drafter = (
        build_draft_model(params, info) if params.speculation == "draft_model" else PromptLookup()
    )
    return Speculation(drafter, params.max_draft_tokens, info.max_num_samples)


def build_draft_model(params: EngineParams, info: ModelInfo) -> DraftModel:
    """Load the draft model.

    Raises StartupError if it cannot be loaded, has another vocabulary, or cannot undo rejected
    draft tokens.
    """
    if not params.draft_path:
        raise StartupError(
            "scheduler.speculation is draft_model, but model.draft_path names no model"
        )
    draft_params = msgspec.structs.replace(
        params,
        path=params.draft_path,
        context_length=info.context_length,
        max_num_seqs=min(MAX_DRAFTED_SEQS, info.max_num_seqs),
        layout="partitioned",
        kv_memory=1 << 62,
        kv_type="f16",
        kv_bytes_per_token=0,
    )
    backend = build_backend(draft_params)
    if (
        params.backend != "fake"
        and build_vocabulary(params).pieces != build_vocabulary(draft_params).pieces
    ):
        raise StartupError(
            f"model.draft_path: {params.draft_path} has another vocabulary than the model"
        )
    if not backend.info.can_trim:
        raise StartupError(
            f"model.draft_path: {params.draft_path} cannot take wrong guesses back (recurrent "
            f"state)"
        )
    return DraftModel(backend)


def build_vocabulary(
    params: EngineParams, before_reading: Callable[[], object] = lambda: None
) -> Vocabulary:
    """Load only the vocabulary, without weights. Raises StartupError if the file cannot be read.

    before_reading: called after all imports, before the file is read; a damaged file may abort the
    process.
    """
    if params.backend == "fake":
        from cllm.backends.fake.vocabulary import FakeVocabulary

        return FakeVocabulary()
    with loadable():
        from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary

    before_reading()
    return LlamaVocabulary.load(Path(params.path))
