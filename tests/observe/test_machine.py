"""The use of memory and GPUs, with stand-ins for drivers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from cllm.environment import MemoryUse
from cllm.observe import machine
from cllm.observe.exposition import render
from cllm.observe.machine import GpuUse, MachineUse, list_gpus, load_nvml
from cllm.observe.server_metrics import ServerMetrics


class FakeNvmlError(Exception):
    pass


def make_nvml(*busy: int | None, has_driver: bool = True) -> SimpleNamespace:
    """Return a stand-in for NVIDIA's library, whose GPUs are ``busy`` for this percentage of the
    time; None stands for one that does not say.
    """

    def init() -> None:
        if not has_driver:
            raise FakeNvmlError("Driver Not Loaded")

    def get_rates(device: int) -> SimpleNamespace:
        if busy[device] is None:
            raise FakeNvmlError("Not Supported")
        return SimpleNamespace(gpu=busy[device])

    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(busy),
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetUtilizationRates=get_rates,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=6, total=24),
    )


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "DRM", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    load_nvml.cache_clear()
    yield tmp_path
    load_nvml.cache_clear()


def use_nvml(monkeypatch, library):
    monkeypatch.setitem(sys.modules, "pynvml", library)


def test_nvidia_library_tells_use_and_memory(monkeypatch):
    use_nvml(monkeypatch, make_nvml(40, None))
    assert list_gpus() == (
        GpuUse("nvidia0", 0.4, MemoryUse(6, 24)),
        GpuUse("nvidia1", None, MemoryUse(6, 24)),
    )


def test_no_library_or_no_driver_is_no_gpu(monkeypatch):
    assert list_gpus() == ()
    load_nvml.cache_clear()
    use_nvml(monkeypatch, make_nvml(40, has_driver=False))
    assert list_gpus() == ()


def test_amdgpu_tells_use_and_memory_in_files(no_gpus):
    for name, files in {
        "card0": {"gpu_busy_percent": "75", "mem_info_vram_used": "2", "mem_info_vram_total": "8"},
        "card1": {"gpu_busy_percent": "broken"},
        "card2": {},  # another driver
    }.items():
        folder = no_gpus / name / "device"
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(f"{text}\n")
    assert list_gpus() == (
        GpuUse("card0", 0.75, MemoryUse(2, 8)),
        GpuUse("card1", None, None),
    )


def test_page_of_metrics_has_what_is_known():
    gpus = (GpuUse("nvidia0", 0.4, MemoryUse(6, 24)), GpuUse("card1", None, None))
    metrics = ServerMetrics()
    page = render([metrics.update({}, 0, (), MachineUse(MemoryUse(3, 4), gpus))]).decode()
    assert "\ncllm:machine_memory_used_bytes 3.0\n" in page
    assert "\ncllm:machine_memory_bytes 4.0\n" in page
    assert '\ncllm:gpu_busy_ratio{gpu="nvidia0"} 0.4\n' in page
    assert '\ncllm:gpu_memory_used_bytes{gpu="nvidia0"} 6.0\n' in page
    assert "card1" not in page
    nothing = render([metrics.update({}, 0)]).decode()
    assert "cllm:machine" not in nothing
    assert "cllm:gpu" not in nothing
