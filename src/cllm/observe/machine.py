"""The use of the machine: its memory and its GPUs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from cllm.environment import MemoryUse

DRM = Path("/sys/class/drm")  # Linux's folder of GPUs

log = logging.getLogger("cllm.machine")


class GpuUse(NamedTuple):
    """A GPU: the share of the time in which it computes, 0 to 1, and its memory. None means that
    its driver does not say.
    """

    name: str
    busy: float | None
    memory: MemoryUse | None


class MachineUse(NamedTuple):
    """The use of the RAM, None if the system does not say, and that of each GPU that tells."""

    memory: MemoryUse | None = None
    gpus: tuple[GpuUse, ...] = ()


UNKNOWN = MachineUse()


def list_gpus() -> tuple[GpuUse, ...]:
    """Return the present use of the GPUs. This may take milliseconds."""
    return *read_nvidia(), *read_amd()


@cache
def load_nvml() -> Any:
    """Return NVIDIA's library for Python (nvidia-ml-py), ready for use; None if it or the driver is
    not installed.
    """
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.debug("no GPU of NVIDIA can be watched: %s", error)
        return None
    return nvml


def read_nvidia() -> Iterator[GpuUse]:
    """Yield NVIDIA's GPUs. Their driver averages the use over up to a second."""
    if (nvml := load_nvml()) is None:
        return
    with contextlib.suppress(nvml.NVMLError):
        for number in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(number)
            busy = memory = None
            with contextlib.suppress(nvml.NVMLError):  # such as a part of a GPU (MIG)
                busy = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
            with contextlib.suppress(nvml.NVMLError):
                found = nvml.nvmlDeviceGetMemoryInfo(device)
                memory = MemoryUse(int(found.used), int(found.total))
            yield GpuUse(f"nvidia{number}", busy, memory)


def read_amd() -> Iterator[GpuUse]:
    """Yield the GPUs of the driver amdgpu."""
    for path in sorted(DRM.glob("card*/device/gpu_busy_percent")):
        folder = path.parent
        busy = read_number(path)
        used = read_number(folder / "mem_info_vram_used")
        total = read_number(folder / "mem_info_vram_total")
        memory = None if used is None or not total else MemoryUse(used, total)
        yield GpuUse(folder.parent.name, None if busy is None else busy / 100, memory)


def read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a GPU that sleeps
        return None
