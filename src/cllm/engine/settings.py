"""From the settings of a person to the parameters of an engine."""

from __future__ import annotations

from pathlib import Path

from cllm.config import Settings
from cllm.engine.build import EngineParams
from cllm.models.gguf import GgufHeader, read_header
from cllm.models.memory import kv_budget


def engine_params(settings: Settings, path: Path | None) -> EngineParams:
    """Parameters for the model at ``path`` (None for the fake backend), after looking at its header.

    Raises StartupError if the file is no model or the memory is not enough.
    """
    llama = settings.backend.llama_cpp
    header = read_header(path) if path is not None else None
    return EngineParams(
        backend=settings.backend.name,
        path=str(path or ""),
        context_length=settings.model.max_context_length,
        max_num_seqs=settings.scheduler.max_num_seqs,
        max_num_batched_tokens=max(settings.scheduler.max_num_batched_tokens, settings.scheduler.max_num_seqs + 1),
        layout=settings.kv.layout,
        kv_memory=_kv_memory(settings, header) if header is not None else 0,
        n_threads=llama.n_threads,
        n_gpu_layers=llama.n_gpu_layers,
        use_mmap=llama.use_mmap,
        use_mlock=llama.use_mlock,
    )


def _kv_memory(settings: Settings, header: GgufHeader) -> int:
    wanted = settings.kv.max_memory_mb
    return kv_budget(header, wanted * 1_000_000 if wanted else None, settings.model.max_context_length, on_gpu=False)
