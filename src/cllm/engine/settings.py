"""Converts a user's settings to the parameters of an engine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cllm.backends.registry import AUTO, choose_backend, import_loader
from cllm.config.settings import Settings
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.models import catalog
from cllm.models.catalog import check_sha256
from cllm.models.hub import Progress
from cllm.models.template_file import read_template


def resolve_model(settings: Settings, progress: Progress | None = None) -> Path | None:
    """Return the file or the folder of the model, see ``Loader.resolve``."""
    model, backend = settings.model, settings.backend.name
    resolve = catalog.resolve if backend == AUTO else import_loader(backend).resolve
    return resolve(model.path, model.quantization, progress)


def make_engine_params(
    settings: Settings, path: Path | None, *, check_tokens: bool = False
) -> EngineParams:
    """Return the parameters for the model at ``path`` (None if the backend needs no file), after
    reading its headers.

    ``check_tokens`` is passed to ``gguf.read_header``; set it if the caller's own process loads the
    model and must survive a damaged file. Raises StartupError if the file is not a model or sizes
    contradict each other. ``build.fit_memory`` checks the memory later, in the process that loads
    the model: only the backend's library can detect a GPU, and importing it would delay the start.
    """
    backend, scheduler, kv = settings.backend, settings.scheduler, settings.kv
    name, draft = choose_backend(backend.name, path), settings.model.draft_path
    loader, draft_backend = import_loader(name), ""
    if draft and path is not None:
        found = catalog.resolve(draft)
        # that of its own files, whatever computes the model
        draft, draft_backend = str(found), choose_backend(AUTO, found)
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise StartupError(
            f"scheduler.max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must be at "
            f"least scheduler.max_num_seqs ({scheduler.max_num_seqs})"
        )
    params = EngineParams(
        backend=name,
        options=backend.model_dump().get(name, {}),
        path=str(path or ""),
        context_length=settings.model.max_context_length,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        layout=kv.layout,
        kv_type=kv.type,
        target_itl=None if scheduler.target_itl_ms is None else scheduler.target_itl_ms / 1000,
        prefill_share=scheduler.prefill_share,
        policy=scheduler.policy,
        weights=dict(scheduler.weights),  # a copy, because the weights change with the accounts
        speculation=scheduler.speculation,
        max_draft_tokens=scheduler.max_draft_tokens,
        draft_path=draft or "",
        draft_backend=draft_backend,
        draft_options=backend.model_dump().get(draft_backend, {}),
        log_level=settings.log.level,
        log_format=settings.log.format,
        chat_template=read_template(settings.model.chat_template_file),
    )
    if settings.model.sha256 is not None and path is not None:
        check_sha256(path, settings.model.sha256)
    size = loader.measure(params, check_tokens=check_tokens)
    if size is None:
        return params
    return msgspec.structs.replace(
        params,
        weight_bytes=size.weight_bytes,
        has_kv_cache=size.has_kv_cache,
        kv_bytes_per_token=size.kv_bytes_per_token,
        kv_memory=(kv.max_memory_mb or 0) * 1_000_000,
        ram_cache_bytes=None if kv.ram_cache_mb is None else kv.ram_cache_mb * 1_000_000,
        disk_cache=kv.disk_cache or "",
        disk_cache_bytes=kv.disk_cache_mb * 1_000_000 if kv.disk_cache else 0,
    )
