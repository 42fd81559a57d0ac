"""The parameters of an engine."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cllm.backends.params import BackendParams
from cllm.backends.registry import BACKENDS


class EngineParams(BackendParams, frozen=True, kw_only=True):
    """All parameters of an engine, sent to the engine process.

    Sizes are in tokens, memory in bytes. ``backend`` is one of BACKENDS. ``weight_bytes`` is the
    size of the model's weights; 0 skips the check of kv_memory against the machine's memory. With
    the check, kv_memory 0 and ram_cache_bytes None mean a share of that memory
    (``build.fit_memory``). The engine may take ``max_bytes`` of it, 0 if there are no other models.
    Without ``has_kv_cache``, none of it is for keys and values, nor for prefixes outside of them.
    ``resident_bytes`` is the memory that an earlier engine with the same sizes took once it was
    ready; if it is set, only that is checked.

    ``target_itl`` and ``prefill_share`` are explained at SchedulerParams; prefill_share None
    depends on the device. ``draft_backend``, one of BACKENDS, computes the draft model with
    ``draft_options``; "" means the model's backend with its options. ``cores_file`` is the file of
    ``SharedCores``, for engines that may use the same cores at the same time; "" if there are no
    others. ``chat_template`` replaces the model's own templates unless it is "". With ``check``,
    the engine verifies the conservation laws after every step, and raises exceptions that it
    otherwise survives.
    """

    backend: str = BACKENDS[0]
    weight_bytes: int = 0
    has_kv_cache: bool = True
    max_bytes: int = 0
    resident_bytes: int = 0
    ram_cache_bytes: int | None = 0
    disk_cache: str = ""
    disk_cache_bytes: int = 0
    target_itl: float | None = None
    prefill_share: float | None = None
    policy: str = "fair"
    weights: dict[str, float] = msgspec.field(default_factory=dict)
    speculation: str = "auto"
    draft_path: str = ""
    draft_backend: str = ""
    draft_options: dict[str, Any] = msgspec.field(default_factory=dict)
    max_draft_tokens: int = 8
    cores_file: str = ""
    check: bool = False
    log_level: str = "warning"
    log_format: Literal["console", "json"] = "console"
    chat_template: str = ""
