"""What an engine is made from."""

from __future__ import annotations

import msgspec


class EngineParams(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine needs to know, all of it; crosses the process border.

    backend: "llama_cpp" or "fake". path: the GGUF file. Sizes in tokens, memory in bytes; kv_bytes_per_token 0 means
    unknown. weight_bytes: of the model; 0 if kv_memory is not to be compared with the memory that there is. If it is, a
    kv_memory of 0 and a ram_cache_bytes of None stand for a share of that (``build.fitted``). check verifies the
    conservation laws after every step, and raises the exceptions that an engine otherwise survives.
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
