"""Compute how much memory there is for a model and its KV cache."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cllm.environment import MemoryUse, list_control_groups
from cllm.errors import StartupError
from cllm.models.gguf import format_size

USUAL_KV_BYTES = 4 << 30
GPU_SHARE = 0.8  # the rest is for llama.cpp's work buffers on the GPUs
USUAL_RAM_CACHE_BYTES = 4 << 30
COMPUTE_BYTES = 300 << 20  # the library's work buffers and the two processes, roughly
EMBEDDING_CELLS = 1024  # that backends allocate for the first texts to embed; more for long texts
MIN_CONTEXT = 256
VM_STATISTICS = Path("/proc/vmstat")
OWN_STATUS = Path("/proc/self/status")
NO_LIMIT = 1 << 60  # version 1 writes a number near 2 ** 63 if there is no limit


class GroupFiles(NamedTuple):
    """The files of a control group with its limit and its used memory, and the prefix of the lines
    about cached files in its statistics.
    """

    limit: str
    used: str
    cached: tuple[str, str]


VERSION_1 = GroupFiles(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file ", "total_inactive_file "),
)
VERSION_2 = GroupFiles("memory.max", "memory.current", ("active_file ", "inactive_file "))


def measure_memory_use() -> MemoryUse | None:
    """Return the use of the machine's memory or, if that is nearer to its limit, of a control group
    of this process, without cached files; None if the system does not say.
    """
    with suppress(OSError, ValueError, KeyError, IndexError):
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {line[0]: int(line[1]) * 1024 for line in lines}
        total = sizes["MemTotal:"]
        machine = MemoryUse(total - sizes["MemAvailable:"], total)
        return max([machine, *_measure_groups()], key=lambda use: use.share)
    return None


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


def measure_room(max_bytes: int) -> int | None:
    """Return the available memory, but at most ``max_bytes`` unless that is 0."""
    available = measure_available_bytes()
    if not max_bytes:
        return available
    return max_bytes if available is None else min(available, max_bytes)


def count_oom_kills() -> int:
    """Return how many processes the system has ended so far because memory ran out; 0 if it does
    not say.
    """
    with suppress(OSError, ValueError):
        for line in VM_STATISTICS.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def measure_resident_bytes() -> int:
    """Return the memory of this process that the system cannot free, without cached files; 0 if it
    does not say.
    """
    with suppress(OSError, ValueError):
        fields = dict(line.split(":") for line in OWN_STATUS.read_text().splitlines())
        kinds = ("RssAnon", "RssShmem")
        return sum(int(fields[kind].split()[0]) * 1024 for kind in kinds if kind in fields)
    return 0


def check_room_again(resident_bytes: int) -> None:
    """Raise StartupError if an engine that takes ``resident_bytes``, as an earlier one did, does
    not fit into the memory. What this process has already counts as available.

    The estimates of a first start are not used, because they would count the API process twice.
    """
    available = measure_available_bytes()
    if available is None:
        return
    available += measure_resident_bytes()
    if resident_bytes > available:
        raise StartupError(
            f"not enough memory: the engine took {format_size(resident_bytes)} before, but "
            f"{format_size(available)} are available"
        )


def _read_physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _measure_container_room() -> int | None:
    """Return what is left of the memory of this process's control group and of the groups above
    it; None if none has a limit.
    """
    return min((use.num_bytes - use.num_used for use in _measure_groups()), default=None)


def _measure_groups() -> list[MemoryUse]:
    """Return the use of the memory of the control groups of this process that have a limit."""
    uses = (
        _measure_group(folder, VERSION_1 if version == 1 else VERSION_2)
        for folder, version in list_control_groups("memory")
    )
    return [use for use in uses if use is not None]


def _measure_group(group: Path, files: GroupFiles) -> MemoryUse | None:
    try:
        limit = (group / files.limit).read_text().strip()
        used = int((group / files.used).read_text())
        lines = (group / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    # Cached files, such as this model's, count as used, but are released as soon as memory is
    # needed.
    used -= sum(int(line.split()[1]) for line in lines if line.startswith(files.cached))
    if limit == "max" or not 0 < (num_bytes := int(limit)) < NO_LIMIT:
        return None
    return MemoryUse(min(max(0, used), num_bytes), num_bytes)


def compute_kv_budget(
    weight_bytes: int,
    bytes_per_token: int,
    wanted_bytes: int,
    context_length: int | None,
    *,
    gpu_bytes: int | None = None,
    draft_weight_bytes: int = 0,
    copied_bytes: int = 0,
    max_bytes: int = 0,
) -> int:
    """Return the bytes for the KV cache: ``wanted_bytes``, or if 0, half of what the weights leave
    of the RAM, 4 GiB at most, or GPU_SHARE of what they leave on GPUs.

    The keys and values of a token take ``bytes_per_token``, 0 if unknown. ``gpu_bytes`` are free on
    the GPUs that will hold the weights; it is 0 if unknown, and None without GPUs. A draft model
    has weights of ``draft_weight_bytes``, and a KV cache of half the size; without
    ``wanted_bytes``, both divide the memory for one. See ``weigh`` for ``copied_bytes``. Where
    other models leave some memory, ``max_bytes`` is what they leave for everything; 0 means what is
    free, and on GPUs the KV cache then has no other limit.

    Raises StartupError with the sizes if the models, or one sequence of ``context_length`` tokens,
    do not fit into the RAM. On GPUs nothing is checked: only llama.cpp knows how many layers are
    there.
    """
    available = measure_room(max_bytes)
    weight_bytes += draft_weight_bytes
    if gpu_bytes is not None:
        left = gpu_bytes - weigh(weight_bytes, 0, bytes_per_token)
        # if not all layers are there, as before
        usual = int(left * GPU_SHARE) if left > 0 else USUAL_KV_BYTES
        if max_bytes:
            usual = min(usual, USUAL_KV_BYTES)
        return wanted_bytes or (usual * 2 // 3 if draft_weight_bytes else usual)
    if available is None:
        return wanted_bytes or USUAL_KV_BYTES
    without_kv = weigh(weight_bytes, 0, bytes_per_token, copied_bytes if max_bytes else 0)
    one_sequence = bytes_per_token * (context_length or MIN_CONTEXT)
    need = without_kv + (wanted_bytes or one_sequence)
    models = ""
    if draft_weight_bytes:
        need += (wanted_bytes or one_sequence) // 2
        models = " of both models"
    if need > available:
        tokens = "" if wanted_bytes else f" of {context_length or MIN_CONTEXT} tokens"
        cure = "lower kv.max_memory_mb" if wanted_bytes else "lower model.max_context_length"
        if without_kv > available or not (wanted_bytes or context_length):
            cure = "use a smaller model or quantization"
        raise StartupError(
            f"not enough memory: {format_size(need)} are needed (weights{models} "
            f"{format_size(weight_bytes)}, KV cache{tokens}{models} "
            f"{format_size(need - without_kv)}, work buffers and processes about "
            f"{format_size(without_kv - weight_bytes)}), "
            f"but {format_size(available)} are available: {cure}"
        )
    usual = min(USUAL_KV_BYTES, (available - without_kv) // 2)
    if draft_weight_bytes:
        usual = usual * 2 // 3
    return wanted_bytes or max(one_sequence, usual)


def compute_ram_cache_budget(taken_bytes: int, max_bytes: int = 0) -> int:
    """Return the bytes for prefixes outside of the KV cache, if all else takes ``taken_bytes``: a
    quarter of the remaining memory, 4 GiB at most. See ``compute_kv_budget`` for ``max_bytes``.
    """
    available = measure_room(max_bytes)
    if available is None:
        return 0
    return max(0, min(USUAL_RAM_CACHE_BYTES, (available - taken_bytes) // 4))


def weigh(weight_bytes: int, kv_bytes: int, bytes_per_token: int, copied_bytes: int = 0) -> int:
    """Return the bytes that a model takes: weights, KV cache, work buffers and processes.

    A cell for embeddings takes ``bytes_per_token``. ``copied_bytes`` are those of weights that the
    backend's library has in RAM twice. While memory is short, the system frees the files' pages
    with these weights, so they count only for models that share a limit.
    """
    embedding_bytes = EMBEDDING_CELLS * bytes_per_token
    return weight_bytes + copied_bytes + kv_bytes + embedding_bytes + COMPUTE_BYTES


def read_resident_bytes(pid: int | None) -> int:
    """Return the memory that a process has; 0 if the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
