"""The parameters of an engine."""

from __future__ import annotations

import msgspec


class EngineParams(msgspec.Struct, frozen=True, kw_only=True):
    """All parameters of an engine, sent to the engine process.

    backend: "llama_cpp" or "fake". path: the GGUF file. Sizes are in tokens, memory in bytes;
    kv_bytes_per_token 0 means unknown. weight_bytes: size of the model's weights; 0 skips the check
    of kv_memory against the machine's memory. With the check, kv_memory 0 and ram_cache_bytes None
    mean a share of that memory (``build.fitted``). check: verify the conservation laws after every
    step, and raise the exceptions that an engine otherwise survives.
    """

    backend: str = "llama_cpp"
    path: str = ""
    context_length: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    layout: str = "auto"
    kv_type: str = "f16"
    weight_bytes: int = 0
    kv_memory: int = 1 << 31
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_ubatch: int = 512
    n_gpu_layers: int = 99
    use_mmap: bool = True
    use_mlock: bool = False
    kv_bytes_per_token: int = 0
    ram_cache_bytes: int | None = 0
    disk_cache: str = ""
    disk_cache_bytes: int = 0
    target_itl: float | None = 1.0
    policy: str = "fair"
    weights: dict[str, float] = {}
    speculation: str = "prompt_lookup"
    draft_path: str = ""
    max_draft_tokens: int = 8
    check: bool = False
    log_level: str = "warning"
