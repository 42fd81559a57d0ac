"""A GGUF file in the form of a checkpoint: its tensors under the names that the decoder reads, and
its metadata as the entries of a config.json.

What the tensors contain is what llama.cpp's conversion/ writes and its src/models/ expect.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cllm.backends.torch.architecture import (
    FAMILIES,
    FULL,
    SLIDING,
    USUAL_NAMES,
    Architecture,
    read_architecture,
)
from cllm.errors import ModelFileError
from cllm.models.checkpoint import Checkpoint, StoredTensor, read_checkpoint
from cllm.models.file_start import compute_fingerprint
from cllm.models.gguf import TOKENS, GgufHeader, Value
from cllm.models.model_file import read_parts

MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
}
"""By the architectures of GGUF files, how a config.json names them."""
INTERLEAVED = ("llama", "smollm3", "granite")
"""The architectures that rotate neighbouring dimensions: in each head's queries and keys, row i of
the first half is followed by row i of the second one.
"""
TYPES = {
    *("F32", "F16", "BF16", "F64"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("TQ1_0", "TQ2_0", "MXFP4", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS"),
}
"""Those that the package gguf dequantizes, and those that PyTorch has."""
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""By their names in a config.json, the keys of GGUF files after the architecture's name."""
TOP = {"token_embd": "model.embed_tokens", "output": "lm_head"}
STEMS = {
    "attn_norm": "attention_norm",
    "attn_q": "query",
    "attn_k": "key",
    "attn_v": "value",
    "attn_q_norm": "query_norm",
    "attn_k_norm": "key_norm",
    "attn_output": "attention_out",
    "post_attention_norm": "attention_post_norm",
    "ffn_norm": "mlp_norm",
    "post_ffw_norm": "mlp_post_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "ffn_gate_inp": "router",
}
PHI3_STEMS = {"attn_qkv": "query_key_value", "ffn_up": "gate_up"}
EXPERTS = {
    "ffn_gate_exps": "expert_gate",
    "ffn_up_exps": "expert_up",
    "ffn_down_exps": "expert_down",
}
"""By GGUF's names of a layer's tensors, the decoder's names (USUAL_NAMES)."""
FREQUENCIES = "rope_freqs.weight"
FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
POOLINGS = {1: "mean", 2: "cls", 3: "last"}
LARGEST_GEMMA3 = 62  # layers; only this model scales its queries by another size than a head's
MAX_FACTORS = 4096


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """A model in a GGUF file, or in several; ``folder`` is the first one.

    ``num_heads`` has the tensors whose rows are INTERLEAVED, and how many heads they are for.
    """

    num_heads: Mapping[str, int] = field(default_factory=dict)

    @property
    def config_path(self) -> Path:
        return self.folder

    @property
    def name(self) -> str:
        return self.folder.stem

    @cached_property
    def fingerprint(self) -> str:
        files = {self.folder, *(tensor.file for tensor in self.tensors.values())}
        return " ".join(compute_fingerprint(file) for file in sorted(files))


def read_model(path: Path, *, check_tokens: bool = False) -> Checkpoint:
    """Return the checkpoint in a folder, or a GGUF file in the form of one. Only headers are read,
    see ``read_header`` for ``check_tokens``.

    Raises ModelFileError if it is damaged or of an unknown architecture.
    """
    return read_gguf(path, check_tokens) if path.is_file() else read_checkpoint(path)


def describe_decoder(checkpoint: Checkpoint, context_length: int | None) -> Architecture:
    """Return the model's architecture, see ``read_architecture``."""
    where = str(checkpoint.config_path)
    architecture = read_architecture(checkpoint.text_config, where, context_length)
    if not isinstance(checkpoint, GgufCheckpoint):
        return architecture
    family = dataclasses.replace(architecture.family, norm_offset=0.0)  # the tensors include it
    return dataclasses.replace(architecture, family=family)


def read_gguf(path: Path, check_tokens: bool) -> GgufCheckpoint:
    """Read the headers of a GGUF file and of its other parts.

    Raises ModelFileError for what is not a model, and for unknown architectures, tensors and types.
    """
    parts = read_parts(path, check_tokens=check_tokens)
    header = parts[0]
    if header.architecture not in MODEL_TYPES:
        raise ModelFileError(
            f"{path}: the torch backend does not know the architecture "
            f"{header.architecture[:80]!r} in GGUF files, only {', '.join(MODEL_TYPES)}: use "
            "backend.name llama_cpp",
            path,
        )
    stored = dict(list_tensors(parts))
    config = make_config(header, stored)
    tensors = dict(rename_tensors(header, stored, config["model_type"]))
    num_heads: dict[str, Any] = {}
    if header.architecture in INTERLEAVED:
        heads = config.get("num_attention_heads")
        kinds = {"q_proj": heads, "k_proj": config.get("num_key_value_heads", heads)}
        num_heads = {
            name: kinds[kind] for name in tensors if (kind := name.split(".")[-2]) in kinds
        }
    pooling = header.get_number("pooling_type")
    return GgufCheckpoint(
        folder=path,
        config=config,
        generation={},
        tensors=tensors,
        pooling=POOLINGS.get(pooling) if isinstance(pooling, int) else None,
        num_heads=num_heads,
    )


def list_tensors(parts: list[GgufHeader]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the names and places of all tensors; shapes are in PyTorch's order."""
    for part in parts:
        for tensor in part.tensors:
            if tensor.type not in TYPES:
                raise ModelFileError(
                    f"{part.path}: the tensor {tensor.name} is {tensor.type}, which the torch "
                    "backend cannot read: use backend.name llama_cpp",
                    part.path,
                )
            begin = part.data_offset + tensor.offset
            end = begin + tensor.num_bytes
            shape = tuple(reversed(tensor.shape))
            yield tensor.name, StoredTensor(part.path, tensor.type, shape, begin, end)


def rename_tensors(
    header: GgufHeader, stored: Mapping[str, StoredTensor], model_type: str
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors under the names that the decoder reads. Those of all experts of a layer
    are divided.
    """
    names = USUAL_NAMES | dict(FAMILIES[model_type].names)
    stems = STEMS | (PHI3_STEMS if header.architecture == "phi3" else {})
    top = TOP | {"output_norm": f"model.{names['final_norm']}"}
    for name, tensor in stored.items():
        match re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name):
            case None:
                raise unknown_tensor(header, name)
            case found:
                layer, stem, end = found.groups()
        if layer is None and stem in top:
            yield f"{top[stem]}.{end}", tensor
        elif layer is not None and stem in stems:
            yield f"model.layers.{layer}.{names[stems[stem]]}.{end}", tensor
        elif layer is not None and stem in EXPERTS and len(tensor.shape) == 3:
            prefix, module = f"model.layers.{layer}.{names['experts']}", names[EXPERTS[stem]]
            for i, expert in enumerate(divide(tensor)):
                yield f"{prefix}.{i}.{module}.{end}", expert
        elif name not in (FREQUENCIES, *FACTORS.values()):
            raise unknown_tensor(header, name)


def unknown_tensor(header: GgufHeader, name: str) -> ModelFileError:
    return ModelFileError(
        f"{header.path}: the torch backend does not know the tensor {name} of "
        f"{header.architecture} models: use backend.name llama_cpp",
        header.path,
    )


def divide(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Yield the parts of a tensor along its first dimension."""
    count, *rest = tensor.shape
    size = (tensor.end - tensor.begin) // max(1, count)
    for begin in range(tensor.begin, tensor.begin + size * count, size or 1):
        yield StoredTensor(tensor.file, tensor.dtype, tuple(rest), begin, begin + size)


def make_config(header: GgufHeader, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return what the metadata says, as the entries of a config.json. Nothing is checked."""
    kind = header.architecture
    found = {name: as_number(header.get_number(key)) for name, key in KEYS.items()}
    config: dict[str, Any] = {name: value for name, value in found.items() if value}  # 0 is none
    config.setdefault("rope_theta", 10_000.0)
    config |= {
        "model_type": MODEL_TYPES[kind],
        "vocab_size": header.array_lengths.get(TOKENS),
        "tie_word_embeddings": "output.weight" not in stored,
        "norm_topk_prob": True,
        "hidden_act": "gelu_pytorch_tanh" if kind == "gemma3" else "silu",
        "rope_scaling": read_scaling(header, stored),
        # a decoder's is True
        "use_bidirectional_attention": header.get_number("attention.causal") is False,
    }
    hidden, heads, layers = (
        config.get(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    if kind == "llama" and config.get("num_experts"):
        config["model_type"] = "mixtral"
    if kind == "smollm3":
        config["no_rope_layer_interval"] = 4
    if kind == "gemma3":
        pattern = header.get_number("attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            config["layer_types"] = [SLIDING if slides else FULL for slides in pattern]
        elif pattern:
            config["sliding_window_pattern"] = pattern
        if layers == LARGEST_GEMMA3 and isinstance(hidden, int) and isinstance(heads, int):
            config["query_pre_attn_scalar"] = hidden // heads
    size = config.get("head_dim")
    if size is None and isinstance(hidden, int) and isinstance(heads, int):
        size = hidden // heads
    rotated = header.get_number("rope.dimension_count")
    if isinstance(rotated, int) and isinstance(size, int) and rotated != size > 0:
        config["partial_rotary_factor"] = (rotated + 0.5) / size  # the product is rounded down
    if header.get_number("attention.value_length") not in (None, size):
        raise ModelFileError(
            f"{header.path}: keys and values of different sizes, which the torch backend cannot "
            "compute: use backend.name llama_cpp",
            header.path,
        )
    return config


def as_number(value: Value | None) -> Value | None:
    """Return the number that all layers have, if they have the same."""
    if isinstance(value, tuple) and len({*value}) == 1:
        return value[0]
    return value


def read_scaling(header: GgufHeader, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return how positions are scaled, as rope_scaling in a config.json.

    Files have the results of Llama 3's scaling, a factor for each frequency, as those of LongRoPE.
    """
    kind = header.get_number("rope.scaling.type")
    by = header.get_number("rope.scaling.factor") or header.get_number("rope.scale_linear")
    factor = float(by) if isinstance(by, int | float) and kind != "none" and by else 1.0
    original = header.get_number("rope.scaling.original_context_length")
    length = {"original_max_position_embeddings": original} if original else {}
    more = header.get_number("rope.scaling.attn_factor")
    attention = float(more) if isinstance(more, int | float) else 1.0
    places = dict.fromkeys(FACTORS, FREQUENCIES) if FREQUENCIES in stored else FACTORS
    if {*places.values()} <= stored.keys():
        factors = {
            name: [each * factor for each in read_factors(stored[place])]
            for name, place in places.items()
        }
        return {"rope_type": "longrope", "attention_factor": attention} | factors | length
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor} | length
        for name in ("beta_fast", "beta_slow"):
            if value := header.get_number(f"rope.scaling.yarn_{name}"):
                scaling[name] = value
        return scaling
    return {"rope_type": "linear", "factor": factor} if factor != 1 else {}


def read_factors(tensor: StoredTensor) -> tuple[float, ...]:
    size = tensor.end - tensor.begin
    if tensor.dtype != "F32" or size > 4 * MAX_FACTORS:
        raise ModelFileError(
            f"{tensor.file}: the factors of positions are {size} bytes of {tensor.dtype}",
            tensor.file,
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        return struct.unpack(f"<{size // 4}f", file.read(size))
