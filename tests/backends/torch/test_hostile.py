"""Checkpoints that are damaged, or that ask for the impossible: always one line, never a crash."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from checkpoints import Tensor, pack_tensors, write_checkpoint, write_word_tokenizer
from conftest import repeat
from hypothesis import given, settings

from cllm.backends.params import BackendParams
from cllm.backends.torch.loader import load, load_vocabulary, measure
from cllm.backends.torch.options import Options
from cllm.core.batch import Batch, Chunk, Row
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError, StartupError
from cllm.models.checkpoint import read_checkpoint

torch = pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
pytestmark = pytest.mark.torch

DECODER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "eos_token_id": 2,
}
ENCODER: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
BASES = {"llama": DECODER, "bert": ENCODER}


def list_shapes(kind: str) -> dict[str, list[int]]:
    if kind == "bert":
        shapes = {
            "embeddings.word_embeddings.weight": [50, 16],
            "embeddings.position_embeddings.weight": [64, 16],
            "embeddings.token_type_embeddings.weight": [2, 16],
        }
        norms, matrices = ["embeddings.LayerNorm"], dict[str, list[int]]()
        for layer in ("encoder.layer.0.", "encoder.layer.1."):
            norms += [f"{layer}attention.output.LayerNorm", f"{layer}output.LayerNorm"]
            attention = ("self.query", "self.key", "self.value", "output.dense")
            matrices |= {f"{layer}attention.{name}": [16, 16] for name in attention}
            matrices |= {f"{layer}intermediate.dense": [24, 16], f"{layer}output.dense": [16, 24]}
        for name in norms:
            shapes |= {f"{name}.weight": [16], f"{name}.bias": [16]}
        for name, shape in matrices.items():
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return shapes
    shapes = {"model.embed_tokens.weight": [50, 16], "model.norm.weight": [16]}
    shapes["lm_head.weight"] = [50, 16]
    for layer in ("model.layers.0.", "model.layers.1."):
        for name, shape in (
            ("input_layernorm", [16]),
            ("post_attention_layernorm", [16]),
            ("self_attn.q_proj", [16, 16]),
            ("self_attn.k_proj", [8, 16]),
            ("self_attn.v_proj", [8, 16]),
            ("self_attn.o_proj", [16, 16]),
            ("mlp.gate_proj", [24, 16]),
            ("mlp.up_proj", [24, 16]),
            ("mlp.down_proj", [16, 24]),
        ):
            shapes[f"{layer}{name}.weight"] = shape
    return shapes


def make_tensors(kind: str) -> dict[str, Tensor]:
    random = np.random.default_rng(1)
    return {
        name: ("F32", shape, random.normal(0, 0.3, shape).astype(np.float32).tobytes())
        for name, shape in list_shapes(kind).items()
    }


def write(folder: Path, kind: str, tensors: dict[str, Tensor], **changes: Any) -> Path:
    config = BASES[kind] | changes
    write_checkpoint(folder, tensors, config={k: v for k, v in config.items() if v != "missing"})
    write_word_tokenizer(folder, 50)
    return folder


def use(folder: Path) -> None:
    """Do what a server does with a model: measure it, read its vocabulary, load it, and compute.

    Raises StartupError.
    """
    options = Options(device="cpu", n_threads=1, dtype="float32").model_dump()
    sizes = {"max_num_seqs": 2, "kv_memory": 1 << 22}
    params = BackendParams(path=str(folder), options=options, **sizes)
    size = measure(params)
    assert 0 < size.weight_bytes < 1 << 20
    load_vocabulary(params)
    backend = load(params)
    tokens = [5, 6, 7]
    backend.embed([Chunk(tokens, 0, 3)])
    if backend.info.generates:
        seq = Sequence(Request("A", [0], SamplingParams()), 0, 0, 64)
        seq.seq_id, seq.tokens = 0, tokens
        backend.forward(Batch([Row(seq, 0, 3, 1)], []))
    backend.close()


def refuse(folder: Path) -> str:
    """Return the line with which a checkpoint is refused."""
    with pytest.raises(StartupError) as caught:
        use(folder)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 1000
    return line


def test_checkpoints_are_whole_without_damage(tmp_path) -> None:
    for kind in BASES:
        use(write(tmp_path / kind, kind, make_tensors(kind)))


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("llama", {"model_type": ["llama"]}, "does not know the architecture"),
        ("llama", {"model_type": "missing"}, "does not know the architecture"),
        ("llama", {"model_type": "qwen99"}, "does not know the architecture 'qwen99'"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("llama", {"num_attention_heads": 3}, "not a multiple of num_attention_heads"),
        ("llama", {"num_attention_heads": "2"}, "num_attention_heads is '2'"),
        ("llama", {"hidden_size": "missing"}, "hidden_size is None"),
        ("llama", {"hidden_size": -16}, "hidden_size is -16"),
        ("llama", {"hidden_size": 32}, "has the shape"),
        ("llama", {"head_dim": 7}, "7 of the 7 dimensions of a head rotate"),
        ("llama", {"head_dim": 1 << 20}, "head_dim is 1048576"),
        ("llama", {"vocab_size": 10**9}, "vocab_size is 1000000000"),
        ("llama", {"vocab_size": 10**6}, "vocab_size is 1000000, but no tensor has so many rows"),
        ("llama", {"vocab_size": 40}, "the model has only 40 tokens"),
        ("llama", {"vocab_size": True}, "vocab_size is True"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
        ("llama", {"num_hidden_layers": 900}, "has no tensor model.layers.2."),
        ("llama", {"num_hidden_layers": 1.5}, "num_hidden_layers is 1.5"),
        ("llama", {"num_key_value_heads": 2}, "has the shape"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act is ['silu']"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ("llama", {"rope_theta": 10**400}, "rope_theta is 1000000"),
        ("llama", {"rope_theta": 0}, "rope_theta is 0"),
        ("llama", {"rope_parameters": 5}, "rope_parameters is 5"),
        ("llama", {"rope_scaling": {"rope_type": {}}}, "rope_type is {}"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor is 0"),
        ("llama", {"rope_theta": 1, "rope_scaling": {"rope_type": "yarn"}}, "are impossible"),
        ("llama", {"layer_types": [["full_attention"]] * 2}, "layer_types is"),
        ("llama", {"logits_scaling": 0}, "logits_scaling is 0"),
        ("llama", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar is -4"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "are quantized (fp8)"),
        ("bert", {"quantization_config": {"quant_method": "gptq"}}, "are quantized (gptq)"),
        ("bert", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("bert", {"hidden_act": {}}, "hidden_act is {}"),
        ("bert", {"layer_norm_eps": "x"}, "layer_norm_eps is 'x'"),
        ("bert", {"max_position_embeddings": 10**9}, "has the shape"),
        ("bert", {"type_vocab_size": 3}, "has the shape"),
        ("bert", {"vocab_size": None}, "vocab_size is None"),
    ],
)
def test_impossible_configuration_is_refused(tmp_path, kind, changes, words) -> None:
    assert words in refuse(write(tmp_path, kind, make_tensors(kind), **changes))


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, kind, value) -> None:
    for part in ("1.weight", "output.dense.bias", "norm.weight", "v_proj.weight", "lm_head.weight"):
        tensors = make_tensors(kind)
        names = [name for name in tensors if name.endswith(part)]
        for name in names:
            dtype, shape, data = tensors[name]
            tensors[name] = dtype, shape, np.float32(value).tobytes() + data[4:]
        if names:
            line = refuse(write(tmp_path / part, kind, tensors))
            assert "numbers that are not finite" in line


def test_quantized_tensors_and_large_values_are_refused(tmp_path) -> None:
    tensors = make_tensors("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    _, shape, data = tensors[name]
    tensors[name] = "F8_E4M3", shape, data[: len(data) // 4]
    assert "up_proj.weight is F8_E4M3" in refuse(write(tmp_path / "fp8", "llama", tensors))


def test_file_that_becomes_shorter_while_it_is_loaded_is_refused(tmp_path) -> None:
    from cllm.backends.torch.weights import Weights

    checkpoint = read_checkpoint(write(tmp_path, "llama", make_tensors("llama")))
    name, last = max(checkpoint.tensors.items(), key=lambda item: item[1].end)
    with last.file.open("r+b") as file:
        file.truncate(last.end - 1)
    weights = Weights(checkpoint, torch.float32, torch.device("cpu"))
    with pytest.raises(StartupError, match=r"model\.safetensors was shortened"):
        weights.read(name)


NUMBERS = [0, -1, 1, 2, 7, 10**6, 10**30, 0.5, -1e300, 10**400]
VALUES = st.sampled_from(
    [*NUMBERS, "missing", None, True, "", "x", [], [1], {}, {"a": 1}, float("nan"), float("inf")]
)
KEYS = {
    "llama": [
        *DECODER,
        *("head_dim", "rope_parameters", "rope_scaling", "sliding_window", "layer_types"),
        *("num_experts", "num_experts_per_tok", "tie_word_embeddings", "partial_rotary_factor"),
        *("attention_multiplier", "residual_multiplier", "embedding_multiplier"),
        *("final_logit_softcapping", "no_rope_layers", "text_config", "hidden_activation"),
        *("use_sliding_window", "max_window_layers", "logits_scaling"),
    ],
    "bert": [*ENCODER, "pad_token_id", "id2label", "layer_norm_eps", "position_embedding_type"],
}
ROPES = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "llama3", "yarn", "longrope", "dynamic", "default"])},
    optional=dict.fromkeys(
        (
            *("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor"),
            *("high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            *("short_factor", "long_factor", "attention_factor", "truncate"),
        ),
        VALUES,
    ),
)


def check_outcome(folder: Path) -> None:
    """A damaged checkpoint is refused with one line, or it computes something."""
    try:
        use(folder)
    except StartupError as error:
        assert "\n" not in str(error)
    except EngineError as error:  # while it computes: the server goes on
        assert "\n" not in str(error)


@settings(max_examples=repeat(400, 60))
@given(data=st.data())
def test_random_damage_of_the_configuration(data, tmp_path_factory) -> None:
    kind = data.draw(st.sampled_from([*BASES]))
    changes = data.draw(st.dictionaries(st.sampled_from(KEYS[kind]), VALUES, max_size=3))
    if kind == "llama" and data.draw(st.booleans()):
        changes["rope_parameters"] = data.draw(ROPES)
    folder = tmp_path_factory.mktemp("damaged")
    check_outcome(write(folder, kind, make_tensors(kind), **changes))
    shutil.rmtree(folder)


@settings(max_examples=repeat(300, 40))
@given(data=st.data())
def test_random_damage_of_the_weights(data, tmp_path_factory) -> None:
    """Other shapes and types, missing tensors, changed and missing bytes."""
    kind = data.draw(st.sampled_from([*BASES]))
    tensors = make_tensors(kind)
    name = data.draw(st.sampled_from([*tensors]))
    dtype, shape, content = tensors[name]
    match data.draw(st.sampled_from(["drop", "shape", "type", "bytes"])):
        case "drop":
            del tensors[name]
        case "shape":
            shape = data.draw(st.sampled_from([[len(content) // 4], shape[::-1], [1, *shape]]))
            tensors[name] = dtype, shape, content
        case "type":
            dtype = data.draw(st.sampled_from(["F16", "BF16", "F64", "I32", "BOOL", "F8_E5M2"]))
            tensors[name] = dtype, shape, content
        case _:
            tensors[name] = dtype, shape, data.draw(st.binary(min_size=4)).ljust(4) + content[4:]
    folder = tmp_path_factory.mktemp("damaged")
    write(folder, kind, tensors)
    file = folder / "model.safetensors"
    packed = bytearray(pack_tensors(tensors))
    for _ in range(data.draw(st.integers(0, 2))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(packed[: data.draw(st.sampled_from([None, None, 7, 100, -3]))])
    check_outcome(folder)
    shutil.rmtree(folder)


def test_server_ends_with_code_2_and_one_line(tmp_path) -> None:
    """The engine's process finds this fault, after the server has begun to start."""
    tensors = make_tensors("llama")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    folder = write(tmp_path / "model", "llama", tensors)
    done = subprocess.run(
        [sys.executable, "-m", "cllm", "serve", str(folder), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "has no tensor model.layers.1.mlp.up_proj.weight" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
