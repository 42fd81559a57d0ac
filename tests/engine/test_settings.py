"""The parameters of an engine, from a user's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cllm.backends.params import BackendParams, ModelSize
from cllm.config.settings import Settings
from cllm.engine import settings as module
from cllm.engine.settings import make_engine_params
from cllm.errors import StartupError


def settings(**sections: dict[str, Any]) -> Settings:
    return Settings.model_validate(sections)


class SizedLoader:
    """A backend whose models have files of 1,000 bytes and 20 bytes of KV cache for a token."""

    def __init__(self) -> None:
        self.measured: list[tuple[BackendParams, bool]] = []

    def measure(self, params: BackendParams, *, check_tokens: bool = False) -> ModelSize:
        self.measured.append((params, check_tokens))
        return ModelSize(1000, 20)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> SizedLoader:
    sized = SizedLoader()
    monkeypatch.setattr(module, "import_loader", lambda name: sized)
    monkeypatch.setattr(module.catalog, "resolve", lambda name: Path("/models") / name)
    return sized


def test_each_setting_reaches_its_parameter(loader: SizedLoader) -> None:
    """All values differ, so that two that are swapped are seen."""
    params = make_engine_params(
        settings(
            model={"max_context_length": 4096, "draft_path": "small"},
            backend={"name": "llama_cpp"},
            scheduler={
                "max_num_seqs": 5,
                "max_num_batched_tokens": 77,
                "target_itl_ms": 250.0,
                "policy": "fcfs",
                "weights": {"a": 2.0},
                "speculation": "off",
                "max_draft_tokens": 3,
            },
            kv={
                "layout": "unified",
                "type": "q8_0",
                "max_memory_mb": 11,
                "ram_cache_mb": 12,
                "disk_cache": "/cache",
                "disk_cache_mb": 13,
            },
            log={"level": "debug"},
        ),
        Path("/models/large"),
        check_tokens=True,
    )
    assert params.backend == "llama_cpp"
    assert params.options == Settings().backend.model_dump()["llama_cpp"] != {}
    assert params.path == "/models/large"
    assert (params.draft_path, params.draft_backend) == ("/models/small", "llama_cpp")
    assert params.draft_options == params.options
    assert (params.context_length, params.max_num_seqs, params.max_num_batched_tokens) == (
        4096,
        5,
        77,
    )
    assert (params.layout, params.kv_type, params.log_level) == ("unified", "q8_0", "debug")
    assert (params.policy, params.weights, params.speculation) == ("fcfs", {"a": 2.0}, "off")
    assert (params.target_itl, params.max_draft_tokens) == (0.25, 3)
    assert (params.weight_bytes, params.kv_bytes_per_token) == (1000, 20)
    assert (params.kv_memory, params.ram_cache_bytes) == (11_000_000, 12_000_000)
    assert (params.disk_cache, params.disk_cache_bytes) == ("/cache", 13_000_000)
    assert [check for _, check in loader.measured] == [True]
    assert loader.measured[0][0].path == "/models/large"


def test_memory_that_is_not_set_is_left_to_the_machine(loader: SizedLoader) -> None:
    params = make_engine_params(settings(kv={"disk_cache_mb": 5}), Path("large"))
    assert params.kv_memory == 0
    assert params.ram_cache_bytes is None
    assert (params.disk_cache, params.disk_cache_bytes) == ("", 0), "no folder, no cache"
    assert [check for _, check in loader.measured] == [False]


def test_ram_cache_of_0_is_not_the_default(loader: SizedLoader) -> None:
    assert make_engine_params(settings(kv={"ram_cache_mb": 0}), Path("large")).ram_cache_bytes == 0


def test_latency_target_depends_on_the_machine(loader: SizedLoader) -> None:
    unset = settings(scheduler={"target_itl_ms": None})
    assert make_engine_params(unset, Path("large")).target_itl is None


def test_draft_model_that_needs_no_file_keeps_its_name(loader: SizedLoader) -> None:
    drafted = settings(model={"draft_path": "as-it-is"}, backend={"name": "fake"})
    assert make_engine_params(drafted, None).draft_path == "as-it-is"
    assert make_engine_params(settings(), Path("large")).draft_path == ""


def test_backend_without_a_file() -> None:
    params = make_engine_params(settings(backend={"name": "fake"}, kv={"max_memory_mb": 11}), None)
    assert (params.backend, params.path, params.weight_bytes) == ("fake", "", 0)


@pytest.mark.parametrize(("num_tokens", "fits"), [(7, False), (8, True)])
def test_step_must_have_a_token_for_each_sequence(num_tokens: int, fits: bool) -> None:
    sizes = settings(
        backend={"name": "fake"},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": num_tokens},
    )
    if fits:
        assert make_engine_params(sizes, None).max_num_batched_tokens == num_tokens
    else:
        with pytest.raises(StartupError, match=r"max_num_batched_tokens \(7\).*max_num_seqs \(8\)"):
            make_engine_params(sizes, None)
