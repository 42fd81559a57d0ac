"""Converts a user's settings to the parameters of an engine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cllm.config import Settings
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.models.catalog import resolve
from cllm.models.gguf import check_kv_type, kv_bytes_per_token, read_header


def engine_params(
    settings: Settings, path: Path | None, *, check_tokens: bool = False
) -> EngineParams:
    """Return the parameters for the model at ``path`` (None for the fake backend), after reading
    its header.

    check_tokens: as in ``read_header``, for a caller whose own process loads the model and must
    survive a damaged file. Raises StartupError if the file is not a model or sizes contradict each
    other. ``build.fitted`` checks the memory later, in the process that loads the model: only
    llama.cpp can detect a GPU, and importing it would delay the start.
    """
    llama, scheduler = settings.backend.llama_cpp, settings.scheduler
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise StartupError(
            f"scheduler.max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must not be "
            f"below "
            f"scheduler.max_num_seqs ({scheduler.max_num_seqs})"
        )
    params = EngineParams(
        backend=settings.backend.name,
        path=str(path or ""),
        context_length=settings.model.max_context_length,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        layout=settings.kv.layout,
        kv_type=settings.kv.type,
        n_threads=llama.n_threads,
        n_threads_batch=llama.n_threads_batch,
        n_ubatch=llama.n_ubatch,
        n_gpu_layers=llama.n_gpu_layers,
        use_mmap=llama.use_mmap,
        use_mlock=llama.use_mlock,
        target_itl=None if scheduler.target_itl_ms is None else scheduler.target_itl_ms / 1000,
        policy=scheduler.policy,
        weights=scheduler.weights,
        speculation=scheduler.speculation,
        max_draft_tokens=scheduler.max_draft_tokens,
        draft_path=str(resolve(settings.model.draft_path)) if settings.model.draft_path else "",
        log_level=settings.log.level,
    )
    if path is None:
        return params
    header, kv = read_header(path, check_tokens=check_tokens), settings.kv
    check_kv_type(header, kv.type)
    return msgspec.structs.replace(
        params,
        # the parts of a split file have about the same size
        weight_bytes=header.tensor_bytes * header.split_count,
        kv_bytes_per_token=kv_bytes_per_token(header, kv.type) or 0,
        kv_memory=(kv.max_memory_mb or 0) * 1_000_000,
        ram_cache_bytes=None if kv.ram_cache_mb is None else kv.ram_cache_mb * 1_000_000,
        disk_cache=kv.disk_cache or "",
        disk_cache_bytes=kv.disk_cache_mb * 1_000_000 if kv.disk_cache else 0,
    )
