"""Finds the GPUs of this machine, whether or not llama.cpp can use them."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 20  # seconds
PCI = Path("/sys/bus/pci/devices")
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
DISPLAY = "0x03"  # the class of PCI devices
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,driver_version",
    "--format=csv,noheader",
)
BACKENDS = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "vulkan"}
SWITCHES = {"cuda": "GGML_CUDA", "rocm": "GGML_HIP", "vulkan": "GGML_VULKAN"}


class MachineGpu(NamedTuple):
    """A GPU. ``driver`` is its kernel driver, "" if none is loaded."""

    vendor: str
    description: str
    driver: str

    def __str__(self) -> str:
        return f"{self.description}, {self.driver or 'no driver'}"


def find_machine_gpus() -> list[MachineGpu]:
    """Return the GPUs that NVIDIA's tool and the PCI bus show, or the GPU of an Apple chip. Virtual
    displays do not count.
    """
    if platform.system() == "Darwin":
        apple = platform.machine() == "arm64"
        return [MachineGpu("Apple", "Apple GPU", "Metal")] if apple else []
    gpus = [*_read_pci()]
    if named := _run(NVIDIA_SMI):
        gpus = [gpu for gpu in gpus if gpu.vendor != "NVIDIA"]
        for line in named:
            name, memory, version = (part.strip() for part in line.rsplit(",", 2))
            gpus.append(MachineGpu("NVIDIA", f"{name} ({memory})", f"driver {version}"))
    return gpus


def suggest_gpu_build(gpus: list[MachineGpu], used: tuple[str, ...]) -> str:
    """Return how to use a GPU that this build of llama.cpp does not use; "" if there is none.
    llama.cpp sees the GPUs ``used``.
    """
    if used or not gpus:
        return ""
    gpu = next((gpu for gpu in gpus if gpu.vendor != "Intel"), gpus[0])
    if not gpu.driver:
        return f"{gpu.description}: install the driver of {gpu.vendor}, and start again"
    if gpu.vendor == "Apple":
        return "this build of llama.cpp has no Metal; reinstall llama-cpp-python from source"
    backend = BACKENDS[gpu.vendor]
    return (
        f"this build of llama.cpp does not use {gpu.description}; a build with "
        f"-D{SWITCHES[backend]}=ON does (docs/install.md#gpus)"
    )


def _read_pci() -> list[MachineGpu]:
    gpus = []
    for device in sorted(PCI.glob("*")):
        try:
            vendor = VENDORS.get((device / "vendor").read_text().strip())
            if vendor is None or not (device / "class").read_text().startswith(DISPLAY):
                continue
            number = (device / "device").read_text().strip()
        except OSError:
            continue
        link = device / "driver"
        driver = link.resolve().name if link.exists() else ""
        gpus.append(MachineGpu(vendor, f"{vendor} GPU (PCI {device.name}, {number})", driver))
    return gpus


def _run(command: tuple[str, ...]) -> list[str]:
    """Return the lines that a program prints; none if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()
