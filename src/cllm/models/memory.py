"""Compute how much memory there is for a model and its KV cache."""

from __future__ import annotations

import os
from pathlib import Path

from cllm.errors import StartupError
from cllm.models.gguf import format_size

USUAL_KV_BYTES = 4 << 30
USUAL_RAM_CACHE_BYTES = 4 << 30
COMPUTE_BYTES = 300 << 20  # llama.cpp's work buffers and the two processes, roughly
MIN_CONTEXT = 256


def measure_available_bytes() -> int | None:
    """Return the memory available without swapping, within the container's limit; None if the
    system does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return _read_physical_bytes()
    available = next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )
    limit = _measure_container_room()
    return available if limit is None or available is None else min(available, limit)


def _read_physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _measure_container_room() -> int | None:
    """Return what is left of the control group's memory (version 2); None if there is no limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    # Cached files, such as this model's, count as used, but are released as soon as memory is
    # needed.
    used -= sum(
        int(line.split()[1])
        for line in lines
        if line.startswith(("active_file ", "inactive_file "))
    )
    return None if limit == "max" else max(0, int(limit) - max(0, used))


def compute_kv_budget(
    weight_bytes: int,
    bytes_per_token: int,
    wanted_bytes: int,
    context_length: int | None,
    *,
    on_gpu: bool,
) -> int:
    """Return the bytes for the KV cache: ``wanted_bytes``, or if 0, half of what the weights leave,
    4 GiB at most.

    bytes_per_token: of keys and values; 0 if unknown. Raises StartupError with the sizes if the
    model, or one sequence of ``context_length`` tokens, does not fit. With ``on_gpu`` nothing is
    checked: only llama.cpp knows that memory.
    """
    available = measure_available_bytes()
    if on_gpu or available is None:
        return wanted_bytes or USUAL_KV_BYTES
    without_kv = weight_bytes + COMPUTE_BYTES
    one_sequence = bytes_per_token * (context_length or MIN_CONTEXT)
    need = without_kv + (wanted_bytes or one_sequence)
    if need > available:
        tokens = "" if wanted_bytes else f" of {context_length or MIN_CONTEXT} tokens"
        cure = "lower kv.max_memory_mb" if wanted_bytes else "lower model.max_context_length"
        if without_kv > available or not (wanted_bytes or context_length):
            cure = "use a smaller model or quantization"
        raise StartupError(
            f"not enough memory: {format_size(need)} are needed (weights "
            f"{format_size(weight_bytes)}, KV cache{tokens} "
            f"{format_size(need - without_kv)}, work buffers and processes about "
            f"{format_size(COMPUTE_BYTES)}), "
            f"but {format_size(available)} are available: {cure}"
        )
    return wanted_bytes or max(one_sequence, min(USUAL_KV_BYTES, (available - without_kv) // 2))


def compute_ram_cache_budget(weight_bytes: int, kv_bytes: int) -> int:
    """Return the bytes for prefixes outside of the KV cache: a quarter of the remaining memory, 4
    GiB at most.
    """
    available = measure_available_bytes()
    if available is None:
        return 0
    left = available - weight_bytes - COMPUTE_BYTES - kv_bytes
    return max(0, min(USUAL_RAM_CACHE_BYTES, left // 4))
