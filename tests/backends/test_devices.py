"""The GPUs that llama.cpp can use, and what their memory means for the KV cache."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from cllm.backends.llama_cpp.options import Options
from cllm.backends.params import ModelSize
from cllm.engine.build import fit_memory
from cllm.engine.params import EngineParams
from cllm.models import memory

GB = 1_000_000_000
CPU, GPU, INTEGRATED, ACCELERATOR = range(4)

pytestmark = pytest.mark.llama


@pytest.fixture
def devices():
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from cllm.backends.llama_cpp import devices

    return devices


class Function:
    """A function of a library; its types are set from outside."""

    def __init__(self, call: Callable) -> None:
        self.call = call

    def __call__(self, *arguments: object) -> object:
        return self.call(*arguments)


def library_with(*kinds: int) -> SimpleNamespace:
    """Return a stand-in for the library on a machine with one device of each kind."""

    def measure(device, free, total) -> None:
        free._obj.value, total._obj.value = device * GB, 100 * GB

    calls = {
        "count": lambda: len(kinds),
        "get": lambda index: index,
        "type": lambda device: kinds[device],
        "name": lambda device: b"CUDA%d" % device,
        "description": lambda device: b"a card",
        "memory": measure,
    }
    return SimpleNamespace(
        **{f"ggml_backend_dev_{name}": Function(call) for name, call in calls.items()}
    )


def use(monkeypatch, devices, library) -> None:
    monkeypatch.setattr(devices, "lib", SimpleNamespace(_lib=library))


def test_gpus_are_listed_with_their_memory(monkeypatch, devices) -> None:
    """Not the CPU, nor what accelerates it."""
    use(monkeypatch, devices, library_with(CPU, GPU, ACCELERATOR, INTEGRATED))
    assert devices.list_gpus() == [
        ("CUDA1", "a card", GB, 100 * GB),
        ("CUDA3", "a card", 3 * GB, 100 * GB),
    ]


def test_library_without_these_functions_has_no_gpus(monkeypatch, devices) -> None:
    use(monkeypatch, devices, SimpleNamespace())
    assert devices.list_gpus() == []


def test_this_build_can_be_asked(devices) -> None:
    """It has a CPU, and the real functions take and return what the stand-ins do."""
    count = devices.bind(devices.lib._lib, "ggml_backend_dev_count", ctypes.c_size_t)
    assert count() >= 1
    assert all(gpu.name and gpu.num_free_bytes <= gpu.num_bytes for gpu in devices.list_gpus())


@pytest.mark.parametrize(("layers", "free"), [(99, 60), (0, None)])
def test_kv_cache_takes_the_memory_of_the_gpus(monkeypatch, devices, layers, free) -> None:
    """Of both together, if layers are there; and the RAM then has room for prefixes."""
    from cllm.backends.llama_cpp import backend, loader

    use(monkeypatch, devices, library_with(*[CPU] * 10, *[GPU] * 2, *[CPU] * 27, GPU))
    monkeypatch.setattr(backend, "supports_gpu_offload", lambda: True)
    monkeypatch.setattr(loader, "measure", lambda params: ModelSize(20 * GB, 100_000))
    monkeypatch.setattr(memory, "measure_available_bytes", lambda: 30 * GB)
    params = EngineParams(
        path="m.gguf",
        options=Options(n_gpu_layers=layers).model_dump(),
        weight_bytes=20 * GB,
        kv_bytes_per_token=100_000,
        kv_memory=0,
        ram_cache_bytes=None,
    )
    fitted = fit_memory(params)
    if free is None:
        assert fitted.kv_memory == memory.USUAL_KV_BYTES
        assert fitted.ram_cache_bytes < 2 * GB
    else:
        left = free * GB - memory.weigh(20 * GB, 0, 100_000)
        assert fitted.kv_memory == int(left * memory.GPU_SHARE)
        assert fitted.ram_cache_bytes == memory.USUAL_RAM_CACHE_BYTES
