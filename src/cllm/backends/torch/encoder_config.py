"""What a checkpoint's config.json says about an encoder of the BERT family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cllm.backends.torch.architecture import ACTIVATIONS, MAX_LAYERS, Config, read_ranks


@dataclass(frozen=True)
class EncoderFamily:
    """How a family names what all of them have.

    ``root`` is what the names of tensors begin with, unless the encoder was saved alone. ``names``
    are those of modules within a layer. ``keys`` are those of entries in config.json. ``head`` are
    the modules that compute a score from the first token, with ``head_activation`` between them.
    ``starts_behind_padding`` means that positions count from the number of the padding token on.
    """

    root: str
    layers: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    head: tuple[str, str]
    head_activation: str = "tanh"
    starts_behind_padding: bool = False


BERT_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
DISTIL_NAMES = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "attention_out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "down": "ffn.lin2",
    "norm": "output_layer_norm",
}
BERT_KEYS = {
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "inner_size": "intermediate_size",
    "activation": "hidden_act",
}
DISTIL_KEYS = {
    "hidden_size": "dim",
    "heads": "n_heads",
    "layers": "n_layers",
    "inner_size": "hidden_dim",
    "activation": "activation",
}
ROBERTA = EncoderFamily(
    "roberta.",
    "encoder.layer",
    BERT_NAMES,
    BERT_KEYS,
    ("classifier.dense", "classifier.out_proj"),
    starts_behind_padding=True,
)
ENCODERS = {
    "bert": EncoderFamily(
        "bert.", "encoder.layer", BERT_NAMES, BERT_KEYS, ("bert.pooler.dense", "classifier")
    ),
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": EncoderFamily(
        "distilbert.",
        "transformer.layer",
        DISTIL_NAMES,
        DISTIL_KEYS,
        ("pre_classifier", "classifier"),
        head_activation="relu",
    ),
}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """An encoder's sizes. Positions begin at ``first_position``; a text has at most
    ``max_tokens``.
    """

    model_type: str
    family: EncoderFamily
    vocabulary_size: int
    hidden_size: int
    num_heads: int
    num_layers: int
    inner_size: int
    num_types: int
    first_position: int
    max_tokens: int
    norm_epsilon: float
    activation: str
    ranks: bool


def is_encoder(values: Mapping[str, Any]) -> bool:
    """Return whether config.json is that of an encoder that this backend computes."""
    return values.get("model_type") in [*ENCODERS]


def read_encoder_config(values: Mapping[str, Any], where: str) -> EncoderConfig:
    """Return what config.json, whose entries are ``values``, says. ``where`` names it in errors.

    Raises StartupError for contradictions, and for what this backend does not compute.
    """
    config, model_type = Config(values, where), str(values["model_type"])
    config.check_quantization()
    family = ENCODERS[model_type]
    keys = family.keys
    hidden, heads = config.integer(keys["hidden_size"]), config.integer(keys["heads"])
    if hidden % heads:
        raise config.fail(keys["hidden_size"], f"not a multiple of {keys['heads']}, {heads}")
    for name, known in (("position_embedding_type", "absolute"), ("is_decoder", False)):
        if values.get(name, known) not in (known, None):
            raise config.fail(name, f"and the torch backend knows only {known}")
    activation = values.get(keys["activation"], "gelu")
    positions = config.integer("max_position_embeddings", 512, 1 << 30)
    first = 0
    if family.starts_behind_padding:
        first = 1 + config.integer("pad_token_id", 1)
    if first >= positions:
        raise config.fail("max_position_embeddings", f"not more than {first}, the first position")
    return EncoderConfig(
        model_type=model_type,
        family=family,
        vocabulary_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_layers=config.integer(keys["layers"], most=MAX_LAYERS),
        inner_size=config.integer(keys["inner_size"]),
        num_types=0 if model_type == "distilbert" else config.integer("type_vocab_size", 2, 1000),
        first_position=first,
        max_tokens=positions - first,
        norm_epsilon=config.positive("layer_norm_eps", 1e-12),
        activation=config.choose(keys["activation"], activation, ACTIVATIONS),
        ranks=read_ranks(values, where),
    )
