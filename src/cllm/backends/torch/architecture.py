"""What a checkpoint's config.json says about the decoder: sizes, and how it differs from Llama.

Most differences need no entry here: biases, norms of heads, further norms and a separate output
matrix are used where the checkpoint has their tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from cllm.errors import StartupError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
SLIDING, FULL = "sliding_attention", "full_attention"
MAX_LAYERS, MAX_SIZE, MAX_HEADS, MAX_HEAD_SIZE = 1000, 1 << 24, 1 << 12, 1 << 12
LARGEST = 1e30  # of the other numbers


@dataclass(frozen=True)
class Family:
    """How the models of one ``model_type`` differ from Llama.

    ``names`` maps our names of modules to those of the checkpoint, where they differ from
    USUAL_NAMES. If it is ``parallel``, attention and the feed-forward part read the same
    input, and their outputs are added. ``norm_offset`` is added to the weights of norms.
    ``scales_embeddings`` by the root of their size. ``window_key`` names the entry of the config
    that limits how far back all layers look. ``layer_norm`` means norms that subtract the mean.
    ``window_pattern`` is the distance of layers without a window, if the config does not say it.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    parallel: bool = False
    norm_offset: float = 0.0
    scales_embeddings: bool = False
    window_key: str = ""
    layer_norm: bool = False
    window_pattern: int = 0
    local_theta: float = 0.0


USUAL_NAMES = {
    "final_norm": "norm",
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_key_value": "self_attn.qkv_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "attention_out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "experts": "mlp.experts",
    "expert_gate": "gate_proj",
    "expert_up": "up_proj",
    "expert_down": "down_proj",
}
MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "experts": "block_sparse_moe.experts",
    "expert_gate": "w1",
    "expert_up": "w3",
    "expert_down": "w2",
}
PHI_NAMES = {
    "final_norm": "final_layernorm",
    "attention_out": "self_attn.dense",
    "query_norm": "self_attn.q_layernorm",
    "key_norm": "self_attn.k_layernorm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
GEMMA3_NAMES = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
GEMMA3 = Family(
    GEMMA3_NAMES, norm_offset=1.0, scales_embeddings=True, window_pattern=6, local_theta=10_000.0
)

FAMILIES = {
    "llama": Family(),
    "mistral": Family(window_key="sliding_window"),
    "mixtral": Family(MIXTRAL_NAMES, window_key="sliding_window"),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "gemma3_text": GEMMA3,
    "gemma3": GEMMA3,
    "phi": Family(PHI_NAMES, parallel=True, layer_norm=True),
    "phi3": Family(window_key="sliding_window"),
    "smollm3": Family(),
    "granite": Family(),
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the inverse frequencies of pairs of dimensions, and the factor of the
    rotated values.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class Layer:
    """``window`` is how many tokens a token sees, itself included; None means all of them.
    ``rope`` is an index of Architecture.ropes; None means no positions.
    """

    window: int | None
    rope: int | None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a backend must know of a decoder. One that ``ranks`` scores texts and has no logits."""

    model_type: str
    vocabulary_size: int
    hidden_size: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    layers: tuple[Layer, ...]
    ranks: bool = False

    @property
    def kv_size(self) -> int:
        """Numbers in the keys, and in the values, of one token in one layer."""
        return self.num_kv_heads * self.head_size


@dataclass(frozen=True, kw_only=True)
class Architecture(Shape):
    """A decoder's sizes and kinds of computation."""

    family: Family
    names: Mapping[str, str]
    num_heads: int
    inner_size: int
    expert_size: int
    norm_epsilon: float
    activation: str
    ropes: tuple[Rope, ...]
    attention_scale: float
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    logits_cap: float
    num_experts: int
    experts_per_token: int
    normalizes_experts: bool
    ties_embeddings: bool | None  # whether they are the output matrix, too; None: not said


class Config:
    """Reads entries of a config.json, whose types nobody has checked."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, name: str, what: str) -> StartupError:
        shown = repr(self.values.get(name))[:80]
        return StartupError(f"{self.where}: {name} is {shown}, {what}")

    def integer(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= most:
            raise self.fail(name, f"not a number from 1 to {most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, "not a number")
        if not abs(value) <= LARGEST:
            raise self.fail(name, f"not a number of at most {LARGEST:g}")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self.fail(name, "not a positive number")
        return value

    def check_quantization(self) -> None:
        """Raise StartupError if the weights are stored in a form that must be expanded."""
        stored = self.values.get("quantization_config")
        if stored:
            kind = stored.get("quant_method", stored) if isinstance(stored, Mapping) else stored
            raise StartupError(
                f"{self.where}: the weights are quantized ({str(kind)[:80]}), and the torch "
                "backend reads only float32, float16 and bfloat16: save them as one of these"
            )

    def choose(self, name: str, value: Any, known: Mapping[str, str]) -> str:
        """Return the entry of ``known`` that ``value`` selects."""
        if not isinstance(value, str) or value not in known:
            shown = repr(value)[:80]
            raise StartupError(f"{self.where}: {name} is {shown}, not one of {', '.join(known)}")
        return known[value]


def read_architecture(
    values: Mapping[str, Any], where: str, context_length: int | None = None
) -> Architecture:
    """Return what config.json, whose entries are ``values``, says. ``where`` names it in errors.

    ``context_length`` is the longest sequence that will be computed, which some position scalings
    depend on. Raises StartupError for an unknown or contradictory architecture.
    """
    try:
        return parse_architecture(values, where, context_length)
    except (ArithmeticError, ValueError) as error:  # in the formulas for scaled positions
        reason = str(error)[:80]
        raise StartupError(f"{where}: the numbers for positions are impossible: {reason}") from None


def refuse_unknown(model_type: Any, where: str) -> StartupError:
    return StartupError(
        f"{where}: the torch backend does not know the architecture {str(model_type)[:80]!r}, only "
        f"{', '.join(FAMILIES)}, and with transformers installed more: convert the model to GGUF "
        "for llama.cpp"
    )


def needs_transformers(values: Mapping[str, Any]) -> bool:
    """Return whether transformers, if it is installed, is to compute a decoder."""
    kind = values.get("model_type")
    return type(kind) is str and kind not in FAMILIES and find_spec("transformers") is not None


def parse_architecture(
    values: Mapping[str, Any], where: str, context_length: int | None
) -> Architecture:
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise refuse_unknown(model_type, where)
    config = Config(values, where)
    config.check_quantization()
    hidden, heads, kv_heads, head_size = read_heads(config)
    if config.number("attn_logit_softcapping", 0.0):
        raise config.fail("attn_logit_softcapping", "which the torch backend cannot compute")
    if values.get("use_bidirectional_attention"):
        raise config.fail("use_bidirectional_attention", "which is not a decoder's")
    inner = config.integer("intermediate_size", 4 * hidden)
    layers, ropes = read_layers(config, family, head_size, context_length)
    activation = values.get("hidden_act", values.get("hidden_activation", "silu"))
    num_experts = read_num_experts(config)
    return Architecture(
        model_type=str(model_type),
        family=family,
        names=USUAL_NAMES | dict(family.names),
        vocabulary_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        inner_size=inner,
        expert_size=config.integer("moe_intermediate_size", inner),
        max_positions=config.integer("max_position_embeddings", 2048, 1 << 30),
        norm_epsilon=config.positive(
            "layer_norm_eps" if family.layer_norm else "rms_norm_eps", 1e-6
        ),
        activation=config.choose("hidden_act", activation, ACTIVATIONS),
        layers=layers,
        ropes=ropes,
        attention_scale=config.number(
            "attention_multiplier",
            config.positive("query_pre_attn_scalar", float(head_size)) ** -0.5,
        ),
        embedding_scale=hidden**0.5
        if family.scales_embeddings
        else config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logits_scale=1 / config.positive("logits_scaling", 1.0),
        logits_cap=config.number("final_logit_softcapping", 0.0),
        num_experts=num_experts,
        experts_per_token=config.integer("num_experts_per_tok", 1, num_experts)
        if num_experts
        else 0,
        normalizes_experts=bool(values.get("norm_topk_prob", model_type == "mixtral")),
        ranks=read_ranks(values, where),
        ties_embeddings=None if (ties := values.get("tie_word_embeddings")) is None else bool(ties),
    )


def read_ranks(values: Mapping[str, Any], where: str) -> bool:
    """Return whether the model scores texts. Raises StartupError if it sorts them into classes."""
    if "ForSequenceClassification" not in str(values.get("architectures")):
        return False
    labels = values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else values.get("num_labels", 2)
    if count != 1:
        raise StartupError(
            f"{where}: the model is a classifier with {str(count)[:20]} labels; only those with "
            "one label, which rank documents, can be served"
        )
    return True


def read_heads(config: Config) -> tuple[int, int, int, int]:
    """Return the hidden size, the number of heads and of key-value heads, and a head's size."""
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", most=MAX_HEADS)
    if config.values.get("head_dim") is None and hidden % heads:
        raise config.fail("hidden_size", f"not a multiple of num_attention_heads, {heads}")
    head_size = config.integer("head_dim", hidden // heads, MAX_HEAD_SIZE)
    kv_heads = config.integer("num_key_value_heads", heads, MAX_HEADS)
    if heads % kv_heads:
        raise config.fail("num_attention_heads", f"not a multiple of {kv_heads} key-value heads")
    return hidden, heads, kv_heads, head_size


def read_num_experts(config: Config) -> int:
    for name in ("num_experts", "num_local_experts"):
        if config.values.get(name):
            return config.integer(name, most=4096)
    return 0


def read_layers(
    config: Config, family: Family, head_size: int, context_length: int | None
) -> tuple[tuple[Layer, ...], tuple[Rope, ...]]:
    values = config.values
    count = config.integer("num_hidden_layers", most=MAX_LAYERS)
    window = None
    if values.get("sliding_window") is not None:
        window = config.integer("sliding_window", most=1 << 30)
    kinds = values.get("layer_types")
    if kinds is None:
        kinds = [FULL] * count
        if family.window_pattern and window:
            pattern = config.integer("sliding_window_pattern", family.window_pattern)
            kinds = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
        elif family.window_key and window:
            kinds = [SLIDING] * count
        elif values.get("use_sliding_window") and window:
            first = config.integer("max_window_layers", count)
            kinds = [FULL if i < first else SLIDING for i in range(count)]
    if (
        not isinstance(kinds, list)
        or len(kinds) < count
        or not all(kind in (SLIDING, FULL) for kind in kinds)
    ):
        raise config.fail("layer_types", f"not {count} times {FULL} or {SLIDING}")
    if SLIDING in kinds and window is None:
        raise config.fail("sliding_window", "but layer_types has sliding attention")
    with_rope = values.get("no_rope_layers")
    if with_rope is None:
        with_rope = [1] * count
        interval = values.get("no_rope_layer_interval")
        if isinstance(interval, int) and interval > 0 and values.get("model_type") == "smollm3":
            with_rope = [int((i + 1) % interval != 0) for i in range(count)]
    if not isinstance(with_rope, list) or len(with_rope) < count:
        raise config.fail("no_rope_layers", f"not {count} numbers")
    ropes = {kind: read_rope(config, family, kind, head_size, context_length) for kind in {*kinds}}
    order = sorted(ropes)
    return tuple(
        Layer(window if kind == SLIDING else None, order.index(kind) if uses else None)
        for kind, uses in zip(kinds[:count], with_rope, strict=False)
    ), tuple(ropes[kind] for kind in order)


def read_rope(
    config: Config, family: Family, kind: str, head_size: int, context_length: int | None
) -> Rope:
    """Return the positions of layers of one ``kind``.

    Older checkpoints have rope_theta and rope_scaling, newer ones rope_parameters, maybe by kind.
    """
    values = config.values
    found = values.get("rope_parameters") or {}
    if isinstance(found, Mapping) and isinstance(found.get(kind), Mapping):
        found = found[kind]
    scaling = values.get("rope_scaling") or {}
    if not isinstance(found, Mapping) or not isinstance(scaling, Mapping):
        raise config.fail("rope_parameters", "not a table")
    is_local = kind == SLIDING and family.local_theta > 0
    if is_local:
        old = {"rope_theta": config.number("rope_local_base_freq", family.local_theta)}
    else:
        theta = config.number("rope_theta", 1e6 if family.local_theta else 1e4)
        old = {**scaling, "rope_theta": theta}
    rope = Config({**old, **found}, f"{config.where}: rope_parameters")
    part = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    size = int(head_size * part)
    if not 0 < size <= head_size or size % 2:
        raise StartupError(
            f"{config.where}: {size} of the {head_size} dimensions of a head rotate, which must be "
            "an even number (see head_dim and partial_rotary_factor)"
        )
    base = rope.positive("rope_theta", 1e4)
    plain = [base ** (-2 * i / size) for i in range(size // 2)]
    name = rope.values.get("rope_type", rope.values.get("type", "default"))
    trained = config.integer("max_position_embeddings", 2048, 1 << 30)
    match name:
        case "default" | "dynamic":  # the second one differs beyond the trained length only
            return Rope(tuple(plain))
        case "linear":
            factor = rope.positive("factor", 1.0)
            return Rope(tuple(each / factor for each in plain))
        case "llama3":
            return Rope(tuple(scale_like_llama3(rope, plain, trained)))
        case "yarn":
            return scale_like_yarn(rope, plain, base, trained)
        case "longrope" | "su":
            return scale_like_longrope(config, rope, plain, context_length or trained)
    raise rope.fail("rope_type", "which the torch backend does not know")


def scale_like_llama3(rope: Config, plain: list[float], trained: int) -> list[float]:
    """Low frequencies are divided by a factor, high ones kept; Llama 3.1."""
    factor = rope.positive("factor", 1.0)
    low, high = rope.positive("low_freq_factor", 1.0), rope.positive("high_freq_factor", 4.0)
    length = rope.positive("original_max_position_embeddings", float(trained))
    if low >= high:
        raise rope.fail("low_freq_factor", "not below high_freq_factor")
    scaled = []
    for each in plain:
        turns = length * each / (2 * math.pi)  # in the original context
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append(kept * each + (1 - kept) * each / factor)
    return scaled


def scale_like_yarn(rope: Config, plain: list[float], base: float, trained: int) -> Rope:
    """Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023."""
    length = rope.positive("original_max_position_embeddings", float(trained))
    factor = rope.positive("factor", trained / length)
    size = 2 * len(plain)

    def dimension(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = dimension(rope.positive("beta_fast", 32.0))
    last = dimension(rope.positive("beta_slow", 1.0))
    if rope.values.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    span = max(last - first, 0.001)
    scaled = []
    for i, each in enumerate(plain):
        divided = min(1.0, max(0.0, (i - first) / span))
        scaled.append(divided * each / factor + (1 - divided) * each)

    def attention(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, all_dims = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    usual = attention(mscale) / attention(all_dims) if mscale and all_dims else attention(1.0)
    return Rope(tuple(scaled), rope.number("attention_factor", usual))


def scale_like_longrope(
    config: Config, rope: Config, plain: list[float], context_length: int
) -> Rope:
    """Ding et al., "LongRoPE", 2024: a factor for each frequency, from one list for contexts up to
    the original length, and from another one beyond. All sequences use the same.
    """
    trained = config.integer("max_position_embeddings", 2048, 1 << 30)
    length = rope.number(
        "original_max_position_embeddings",
        config.number("original_max_position_embeddings", float(trained)),
    )
    name = "long_factor" if context_length > length else "short_factor"
    factors = rope.values.get(name)
    if (
        not isinstance(factors, list)
        or len(factors) != len(plain)
        or not all(type(each) in (int, float) and 0 < each < LARGEST for each in factors)
    ):
        raise rope.fail(name, f"not {len(plain)} positive numbers")
    factor = rope.number("factor", trained / length)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    scaled = (each / by for each, by in zip(plain, factors, strict=True))
    return Rope(tuple(scaled), rope.number("attention_factor", usual))
