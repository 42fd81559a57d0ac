"""Where weights are, and scaled positions."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import write_tiny_model

from cllm import LLM
from cllm.backends.llama_cpp import placement
from cllm.backends.llama_cpp.devices import Device
from cllm.backends.llama_cpp.options import Options
from cllm.core.params import SamplingParams
from cllm.errors import StartupError

pytestmark = pytest.mark.llama

QUESTION = "What is 27 plus 45?"
GPUS = [Device(f"CUDA{i}", "a card", 10 * (i + 1), 100) for i in range(3)]


def answer(**options: object) -> tuple[str, LLM]:
    llm = LLM(
        kv_max_memory_mb=100,
        **{f"backend_llama_cpp_{name}": value for name, value in options.items()},
    )
    found = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0))
    return found.text, llm


def test_tensors_on_another_device_compute_the_same() -> None:
    """In plain CPU buffers, llama.cpp does not copy them in another order."""
    for overrides in (r"blk\..*=CPU", r"ffn_down=cpu, token_embd\.weight=CPU"):
        text, llm = answer(override_tensors=overrides)
        assert text == "72"
        llm.close()


def test_expert_tensors_of_the_first_layers_are_matched() -> None:
    pattern = re.compile(placement.format_expert_pattern(3))
    names = [f"blk.{i}.ffn_{kind}_exps.weight" for i in range(5) for kind in ("up", "gate", "down")]
    assert [name for name in names if pattern.search(name)] == names[:9]
    assert pattern.search("blk.2.ffn_gate_up_chexps.weight")
    assert not pattern.search("blk.12.ffn_up_exps.weight")
    assert not pattern.search("blk.1.ffn_up.weight")
    text, llm = answer(cpu_moe_layers=2)  # a model without experts is not changed
    assert text == "72"
    llm.close()


def test_scaled_positions_allow_a_longer_context() -> None:
    """The states on disk of models with other positions are others."""
    text, llm = answer(rope_scaling="yarn", rope_scale=2)
    info = llm.info
    assert text == "72"
    assert info.context_length == 2 * 4096
    llm.close()
    plain, llm = answer()
    assert plain == "72"
    assert llm.info.context_length == 4096
    assert llm.info.fingerprint != info.fingerprint
    llm.close()


def test_base_frequency_changes_what_is_computed() -> None:
    """So it reaches llama.cpp; the same in the context for embeddings."""
    vectors = []
    for base in (None, 1000.0):
        llm = LLM(kv_max_memory_mb=100, backend_llama_cpp_rope_freq_base=base)
        vectors.append(llm.embed([QUESTION])[0])
        llm.close()
    first, second = vectors
    assert not np.allclose(first, second, atol=1e-3)


@pytest.mark.parametrize("flash", ["on", "off"])
def test_flash_attention_can_be_chosen(flash) -> None:
    text, llm = answer(flash_attention=flash)
    assert text == "72"
    llm.close()


@pytest.mark.parametrize(
    ("options", "kv_type", "message"),
    [
        ({"split": "tensor"}, "f16", "backend.llama_cpp.split needs a GPU"),
        ({"tensor_split": "3,1"}, "f16", "backend.llama_cpp.tensor_split needs a GPU"),
        ({"devices": "CUDA0"}, "f16", "backend.llama_cpp.devices needs a GPU"),
        ({"flash_attention": "off"}, "q8_0", "kv.type q8_0 needs"),
        ({"rope_scale": 2, "rope_scaling": "none"}, "f16", "rope_scale needs"),
        ({"override_tensors": "blk"}, "f16", "override_tensors must be patterns"),
        ({"override_tensors": "(=CPU"}, "f16", "override_tensors must be patterns"),
        ({"override_tensors": "blk=CUDA7"}, "f16", "llama.cpp has no device CUDA7"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(options, kv_type, message) -> None:
    with pytest.raises(StartupError, match=re.escape(message)):
        placement.Placement(Options(**options), kv_type)


@pytest.mark.parametrize(
    ("options", "kv_type", "message"),
    [
        ({"split": "tensor"}, "q8_0", "split tensor needs kv.type f16, not q8_0"),
        ({"split": "tensor", "flash_attention": "off"}, "f16", "flash_attention"),
    ],
)
def test_conflicts_on_gpus_are_refused(options, kv_type, message) -> None:
    with pytest.raises(StartupError, match=message):
        placement.check(Options(**options), kv_type, has_gpu=True)


def test_chosen_gpus_are_those_that_hold_weights() -> None:
    def chosen(**options: object) -> list[str]:
        return [gpu.name for gpu in placement.chosen_gpus(Options(**options), GPUS)]

    assert chosen() == ["CUDA0", "CUDA1", "CUDA2"]
    assert chosen(devices="CUDA2, CUDA0") == ["CUDA2", "CUDA0"]
    assert chosen(split="none") == ["CUDA0"]
    assert chosen(split="none", main_gpu=1, devices="CUDA2,CUDA0") == ["CUDA0"]
    with pytest.raises(StartupError, match=r"there is no GPU CUDA5; .*CUDA0, CUDA1"):
        chosen(devices="CUDA5")
    with pytest.raises(StartupError, match="main_gpu is 3 of 3 GPUs"):
        chosen(split="none", main_gpu=3)


@pytest.mark.parametrize("text", ["", "x", "1,-1", "0,0", "nan", ",".join("1" * 99)])
def test_faulty_shares_are_refused(text) -> None:
    with pytest.raises(StartupError, match="tensor_split must be up to"):
        placement.read_shares(text)


def test_shares_are_passed_on() -> None:
    shares = placement.read_shares("3, 1")
    assert list(shares)[:3] == [3, 1, 0]
    c_params = SimpleNamespace()
    placed = placement.Placement(Options(), "f16")
    placed.apply(c_params)
    assert vars(c_params) == {"split_mode": 1, "main_gpu": 0}


@pytest.mark.parametrize(
    ("kind", "info", "expected"),
    [
        ("qwen35", "AMX_INT8 = 1", False),
        ("qwen35", "", True),
        ("deepseek2", "AMX_INT8 = 1", False),
        ("deci", "AMX_INT8 = 1", True),
    ],
)
def test_without_own_kernels_amx_computes_no_products_with_a_third_axis(
    tmp_path, monkeypatch, kind, info, expected
) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_model(kind, path)
    monkeypatch.setattr(placement, "own_kernels", lambda: None)
    monkeypatch.setattr(placement, "system_info", lambda: info)
    assert placement.can_reorder_weights(path) == expected
