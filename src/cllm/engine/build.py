"""Builds an engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cllm.backends.base import Backend, Vocabulary
from cllm.backends.registry import import_loader
from cllm.core.drafter import Drafter
from cllm.core.model_info import CHECKPOINT_SHARE, ModelInfo
from cllm.core.vocabulary import Pieces
from cllm.engine.disk import DiskTier
from cllm.engine.draft_model import DraftModel
from cllm.engine.embeddings import Embeddings
from cllm.engine.engine import Engine
from cllm.engine.grammars import Grammars
from cllm.engine.params import EngineParams
from cllm.engine.snapshot_files import SnapshotFiles
from cllm.errors import StartupError
from cllm.kv_cache.cache import KVCache
from cllm.kv_cache.checkpoints import Checkpoints
from cllm.kv_cache.layouts import make_layout
from cllm.kv_cache.snapshots import Snapshots
from cllm.models.memory import (
    COMPUTE_BYTES,
    check_room_again,
    compute_kv_budget,
    compute_ram_cache_budget,
    weigh,
)
from cllm.sampling.pipeline import Sampler
from cllm.scheduler.params import SchedulerParams
from cllm.scheduler.policy import make_policy
from cllm.scheduler.prompt_lookup import PromptLookup
from cllm.scheduler.scheduler import Scheduler
from cllm.scheduler.speculation import Speculation

log = logging.getLogger("cllm.engine")

SHORT_PREFIX = 256  # tokens

# On GPUs, prompts are computed in every step, because they hardly lengthen a step that decodes.
CPU_PREFILL_SHARE = 0.75
MAX_DRAFTED_SEQS = 4  # a draft model saves time only while few sequences run
# Tokens in the largest step of a draft model: all sequences wait while it computes a new prompt.
MAX_DRAFT_BATCH = 256
DRAFT_KV_TYPE = "f16"


def fit_memory(params: EngineParams) -> EngineParams:
    """Return ``params`` with memory sizes that fit this machine.

    If kv_memory and ram_cache_bytes are not set, they become a share of the machine's memory.
    max_bytes becomes the memory that the engine takes, 0 if that is unknown. Call this before the
    weights are loaded. Without ``weight_bytes``, nothing is checked. With ``resident_bytes``, the
    sizes are those of an earlier engine, and only ``resident_bytes`` are checked. Raises
    StartupError if the memory is too small.
    """
    if not params.weight_bytes:
        return msgspec.structs.replace(params, max_bytes=0)
    if params.resident_bytes:
        check_room_again(params.resident_bytes)
        return msgspec.structs.replace(params, weight_bytes=0)
    loader, draft_weights, per_token = import_loader(params.backend), 0, params.kv_bytes_per_token
    copied = params.weight_bytes * loader.COPIED_SHARE
    if params.speculation == "draft_model" and params.draft_path:
        draft_params = make_draft_params(params)
        draft_loader = import_loader(draft_params.backend)
        draft = draft_loader.measure(draft_params)
        draft_weights = draft.weight_bytes if draft else 0
        copied += draft_weights * draft_loader.COPIED_SHARE
    gpu_bytes = loader.measure_gpus(params)
    in_ram = gpu_bytes is None
    copied_bytes = int(copied) * in_ram
    kv_memory = compute_kv_budget(
        params.weight_bytes,
        per_token,
        params.kv_memory,
        params.context_length,
        gpu_bytes=gpu_bytes,
        draft_weight_bytes=draft_weights,
        copied_bytes=copied_bytes,
        max_bytes=params.max_bytes,
    )
    weights = params.weight_bytes + draft_weights
    kv_bytes = (kv_memory + (kv_memory // 2 if draft_weights else 0)) * params.has_kv_cache
    size = weigh(weights, kv_bytes, per_token, copied_bytes)
    ram_cache = params.ram_cache_bytes if params.has_kv_cache else 0
    if ram_cache is None:
        taken = size if params.max_bytes else size - copied_bytes
        ram_cache = compute_ram_cache_budget(taken if in_ram else COMPUTE_BYTES, params.max_bytes)
    return msgspec.structs.replace(
        params,
        weight_bytes=0,
        kv_memory=kv_memory,
        ram_cache_bytes=ram_cache,
        max_bytes=size + ram_cache * in_ram,
    )


def build_backend(
    params: EngineParams,
    progress: Callable[[float], None] | None = None,
    on_abort: Callable[[str], None] = lambda _: None,
) -> Backend:
    """Load the model, see ``Loader.load``. Raises StartupError if it cannot be loaded."""
    if params.speculation != "off":
        head = params.speculation in ("auto", "mtp")
        params = msgspec.structs.replace(
            params, max_taken_back=params.max_draft_tokens, draft_head=head
        )
    return import_loader(params.backend).load(params, progress, on_abort)


def build_engine(
    backend: Backend, params: EngineParams, clock: Callable[[], float] = time.monotonic
) -> Engine:
    """Build an engine. Raises StartupError if the policy or the draft model cannot be loaded."""
    info = backend.info
    snapshots = Snapshots(
        params.ram_cache_bytes or 0,
        params.disk_cache_bytes,
        info.state_bytes_per_token,
        info.state_bytes,
    )
    num_states = info.max_num_seqs * (1 + (info.max_taken_back or 0))
    kv_bytes = info.num_cells * info.state_bytes_per_token + num_states * info.checkpoint_bytes
    checkpoint_bytes = int(min(kv_bytes, params.kv_memory) * CHECKPOINT_SHARE)
    checkpoints = Checkpoints(checkpoint_bytes, info.checkpoint_bytes)
    layout = make_layout(info)
    kv_cache = KVCache(
        info.num_cells, info.context_length, info.max_num_seqs, layout, snapshots, checkpoints
    )
    scheduler = Scheduler(
        kv_cache,
        SchedulerParams(
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_num_samples=info.max_num_samples,
            row_seconds=info.row_seconds,
            target_itl=params.target_itl,
            prefill_share=params.prefill_share or (1.0 if info.on_gpu else CPU_PREFILL_SHARE),
            weights=params.weights,
        ),
        info.end_tokens,
        make_policy(params.policy, params.weights),
        build_speculation(params, backend),
    )
    embeddings = Embeddings(backend, scheduler, clock)
    grammars = Grammars(
        lambda: backend.vocabulary.grammar_tokenizer(info.end_tokens), scheduler, embeddings
    )
    disk = None
    if params.disk_cache:
        files = SnapshotFiles(Path(params.disk_cache).expanduser(), info.fingerprint)
        disk = scheduler.sequences.disk = DiskTier(files, backend, scheduler, clock)
        warn_about_ram(snapshots)
    return Engine(
        backend,
        scheduler,
        Sampler(info.end_tokens),
        clock,
        grammars,
        embeddings,
        disk,
        check=params.check,
        weights=params.weights,
    )


def build_speculation(params: EngineParams, backend: Backend) -> Speculation | None:
    """Return the speculation, or None if it is off or the model cannot take back rejected draft
    tokens.

    Raises StartupError if a draft model cannot be loaded, or if ``mtp`` is set and the model does
    not draft with a head of its own.
    """
    info = backend.info
    if params.speculation == "mtp" and backend.drafter is None:
        raise StartupError(
            "scheduler.speculation is mtp, but the model has no MTP head that cLLM can use"
        )
    if params.speculation == "off" or info.max_taken_back == 0:
        return None
    drafters: list[Drafter] = []
    if params.speculation in ("auto", "prompt_lookup"):
        drafters.append(PromptLookup())
    if params.speculation == "draft_model":
        drafters.append(build_draft_model(params, info))
    if backend.drafter is not None:
        drafters.append(backend.drafter)
    count, needs_neighbours = params.max_draft_tokens, False
    if info.max_taken_back is not None:
        count = min(count, info.max_taken_back)
        needs_neighbours = info.layout != "unified"
    return Speculation(drafters, count, info.max_num_samples, needs_neighbours=needs_neighbours)


def build_draft_model(params: EngineParams, info: ModelInfo) -> DraftModel:
    """Load the draft model.

    Raises StartupError if it cannot be loaded or has another vocabulary.
    """
    if not params.draft_path:
        raise StartupError("scheduler.speculation is draft_model, but model.draft_path is not set")
    num_seqs = min(MAX_DRAFTED_SEQS, info.max_num_seqs)
    draft_params = msgspec.structs.replace(
        make_draft_params(params),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=min(MAX_DRAFT_BATCH, params.max_num_batched_tokens),
    )
    size = import_loader(draft_params.backend).measure(draft_params)
    num_bytes = size.kv_bytes_per_token if size else 0
    # sequences for which half of the model's own memory does not last get no drafts
    kv_memory, layout = params.kv_memory // 2, "auto"
    context_length: int | None = info.context_length
    if num_bytes:
        context_length = min(info.context_length, kv_memory // (num_seqs * num_bytes))
    elif size:  # the backend measures it; with this layout, no sequence outgrows the memory
        context_length, layout = None, "partitioned"
    draft_params = msgspec.structs.replace(
        draft_params,
        context_length=context_length,
        layout=layout,
        kv_memory=kv_memory,
        kv_bytes_per_token=num_bytes,
    )
    backend = build_backend(draft_params)
    if not are_compatible(build_vocabulary(params).pieces, backend.vocabulary.pieces):
        raise StartupError(
            f"model.draft_path: {params.draft_path} must have the same vocabulary as the model"
        )
    return DraftModel(backend)


def make_draft_params(params: EngineParams) -> EngineParams:
    """Return the parameters of the draft model, with the sizes of the model."""
    return msgspec.structs.replace(
        params,
        backend=params.draft_backend or params.backend,
        options=params.draft_options if params.draft_backend else params.options,
        path=params.draft_path,
        adapters={},
        kv_type=DRAFT_KV_TYPE,
        speculation="off",
    )


def are_compatible(pieces: Pieces, others: Pieces) -> bool:
    """Return whether two vocabularies have the same tokens. One may have bytes for ids that the
    other leaves empty: control tokens, and unused ones.
    """
    return pieces == others or (
        len(pieces) == len(others)
        and all(
            not one or not other or one == other for one, other in zip(pieces, others, strict=True)
        )
    )


def build_vocabulary(params: EngineParams) -> Vocabulary:
    """Load only the vocabulary, without weights. Raises StartupError if it cannot be read."""
    return import_loader(params.backend).load_vocabulary(params)


def warn_about_ram(snapshots: Snapshots) -> None:
    """Warn if prefixes cannot reach the disk, because they pass through RAM that is too small."""
    if snapshots.ram_bytes < snapshots.compute_size(SHORT_PREFIX):
        log.warning(
            "kv.disk_cache stores %s, because prefixes get there through RAM; raise "
            "kv.ram_cache_mb, which is %.0f",
            "nothing" if snapshots.ram_bytes < snapshots.compute_size(1) else "only short prefixes",
            snapshots.ram_bytes / 1e6,
        )
