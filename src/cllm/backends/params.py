"""The parameters of a backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class BackendParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to load a model. Sizes are in tokens, memory in bytes.

    ``path`` is the model's file, or "". If ``context_length`` is None, the model and the memory
    decide. ``max_num_seqs`` is a limit; a backend may choose fewer. ``layout`` and ``kv_type`` are
    the settings kv.layout and kv.type. ``kv_bytes_per_token`` 0 means unknown. The backend should
    keep what it needs for taking back ``max_taken_back`` tokens (see ModelInfo), and draft tokens
    with the model's own head if ``draft_head``. ``options`` has
    all fields of the backend's ``options.py``, or none for the defaults. ``adapters`` maps the
    names of LoRA adapters to their files.
    """

    path: str = ""
    context_length: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    layout: str = "auto"
    kv_type: str = "f16"
    kv_memory: int = 1 << 31
    kv_bytes_per_token: int = 0
    max_taken_back: int = 0
    draft_head: bool = False
    options: dict[str, Any] = {}
    adapters: dict[str, str] = {}


class ModelSize(NamedTuple):
    """Bytes of a model's weights, and of one token's keys and values (0 if unknown). Encoders have
    no KV cache.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    has_kv_cache: bool = True


class SingleGpu(NamedTuple):
    """A GPU, with ``num_free_bytes`` of free memory. A process whose environment sets ``variable``
    to ``value`` sees no other GPU.
    """

    variable: str
    value: str
    num_free_bytes: int
