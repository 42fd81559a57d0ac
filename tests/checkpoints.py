"""Writes checkpoints: folders as Hugging Face's tools write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cllm.models.checkpoint import POOLINGS, read_checkpoint

read_gguf = lru_cache(maxsize=1)(gguf.GGUFReader)  # takes seconds for a large vocabulary

Tensor = tuple[str, list[int], bytes]
"""A tensor's type, its shape and its bytes."""

TENSORS: dict[str, Tensor] = {
    "model.norm.weight": ("F32", [2], bytes(range(8))),
    "lm_head.weight": ("BF16", [3, 2], bytes(range(12))),
    "scale": ("F16", [], b"ab"),
}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 3}


def pack_header(header: Mapping[str, Any]) -> bytes:
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def pack_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return pack_header(header) + b"".join(data for _, _, data in tensors.values())


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor] = TENSORS, **files: Any) -> Path:
    """Write a folder with a configuration, ``tensors`` in one file, and a JSON file for each of
    ``files``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ({"config": CONFIG} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "model.safetensors").write_bytes(pack_tensors(tensors))
    return folder


def write_shards(folder: Path, tensors: Mapping[str, Tensor] = TENSORS) -> Path:
    """Write a folder with one file for each tensor, and their index."""
    write_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    places = {}
    for part, (name, tensor) in enumerate(tensors.items(), 1):
        places[name] = f"model-{part:05}-of-{len(tensors):05}.safetensors"
        (folder / places[name]).write_bytes(pack_tensors({name: tensor}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def add_tokens(*texts: str, first: int = 0, special: bool = True) -> list[dict[str, Any]]:
    """Return entries of ``added_tokens`` in ``tokenizer.json``."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": token, "content": text, "special": special} | flags
        for token, text in enumerate(texts, first)
    ]


def make_tokenizer(model: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    """Return the content of ``tokenizer.json``."""
    empty = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], **empty, "model": model} | parts


def convert_tokenizer(path: Path) -> dict[str, Any]:
    """Return the vocabulary of a GGUF file of the kinds "qwen2" and "smollm" as
    ``tokenizer.json``.
    """
    fields = read_gguf(path).fields
    tokens, kinds, merges = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges")
    )
    added = [
        entry
        for token, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != gguf.TokenType.NORMAL
        for entry in add_tokens(text, first=token, special=kind == gguf.TokenType.CONTROL)
    ]
    model = {
        "type": "BPE",
        "vocab": {text: token for token, text in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in merges],
    }
    words = {
        "type": "Split",
        "pattern": {"Regex": QWEN_WORDS},
        "behavior": "Isolated",
        "invert": False,
    }
    letters = BYTE_LEVEL | {"use_regex": False}
    if fields["tokenizer.ggml.pre"].contents() == "smollm":
        words = {"type": "Digits", "individual_digits": True}
        letters = BYTE_LEVEL | {"use_regex": True}
    return make_tokenizer(
        model,
        added_tokens=added,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [words, letters]},
        decoder=letters,
    )


def write_tokenizer(folder: Path, path: Path) -> None:
    """Write the files about the vocabulary of a GGUF file of the kind "qwen2"."""
    fields = read_gguf(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    settings: dict[str, Any] = {
        f"{name}_token": tokens[field.contents()]
        for name in ("bos", "eos")
        if (field := fields.get(f"tokenizer.ggml.{name}_token_id"))
    }
    settings["chat_template"] = fields["tokenizer.chat_template"].contents()
    (folder / "tokenizer.json").write_text(json.dumps(convert_tokenizer(path)))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_adapter(
    folder: Path, model: Path, seed: int, rank: int = 4, tensors: dict[str, Tensor] | None = None
) -> Path:
    """Write a LoRA adapter with random weights for a checkpoint, in the form of PEFT.

    ``tensors`` receives what is in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    random, tensors = np.random.default_rng(seed), {} if tensors is None else tensors
    matrices = ("q_proj", "v_proj", "up_proj", "down_proj")
    for name, tensor in read_checkpoint(model).tensors.items():
        module = name.removesuffix(".weight")
        if module.endswith(matrices):
            outputs, inputs = tensor.shape
            for half, shape, size in (
                ("A", [rank, inputs], inputs),
                ("B", [outputs, rank], rank),
            ):
                data = random.normal(0, size**-0.5, shape).astype(np.float32).tobytes()
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = "F32", shape, data
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": matrices}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(pack_tensors(tensors))
    return folder


def write_word_tokenizer(folder: Path, size: int) -> None:
    """Write a vocabulary like BERT's, with ``size`` words: w5, w6 and so on."""
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    words = [*special, *(f"w{token}" for token in range(len(special), size))]
    separators = {"cls": ("[CLS]", 1), "sep": ("[SEP]", 2)}
    definition = make_tokenizer(
        {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: token for token, word in enumerate(words)},
        },
        added_tokens=add_tokens(*special),
        pre_tokenizer={"type": "BertPreTokenizer"},
        post_processor={"type": "BertProcessing"} | separators,
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
    )
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


ENCODER = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 300,
    "num_labels": 1,
    "pad_token_id": 3,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {"hidden_act": "gelu_new"},
    "Roberta": {"type_vocab_size": 1},
    "XLMRoberta": {"type_vocab_size": 1},
    "Camembert": {},
    "DistilBert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
}
"""By the beginnings of the names of transformers' classes, how their models differ from ENCODER."""


def write_encoder(folder: Path, name: str, kind: str, **options: Any) -> Any:
    """Write a small encoder with random weights, and return it as transformers reads it.

    Its class has the name ``name`` with ``kind``.
    """
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**ENCODER | ENCODERS[name] | options)
    torch.manual_seed(5)
    model = getattr(transformers, name + kind)(config)
    for weights in model.parameters():  # otherwise the biases are zero
        weights.data += torch.randn_like(weights) * 0.2
    model.save_pretrained(folder)
    write_word_tokenizer(folder, config.vocab_size)
    return getattr(transformers, name + kind).from_pretrained(folder, dtype=torch.float32).eval()


def write_pooling(folder: Path, pooling: str, max_tokens: int | None = None) -> None:
    """Write what sentence-transformers stores with a model for embeddings of size 64."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    chosen = {f"pooling_mode_{name}": known == pooling for name, known in POOLINGS.items()}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64} | chosen)
    )
    settings = {"max_seq_length": max_tokens, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_COUNTS = {"attn_q": "", "attn_k": "_kv"}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert_model(path: Path, folder: Path) -> Path:
    """Write a GGUF file of the architecture qwen3 or llama as a checkpoint in float32."""
    reader = read_gguf(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"]

    def name_of(name: str) -> str:
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            stem, end = rest.rsplit(".", 1)
            return f"model.layers.{layer}.{LAYER_NAMES[stem]}.{end}"
        stem, end = name.rsplit(".", 1)
        return f"{NAMES[stem]}.{end}"

    heads = {name: fields[f"{kind}.attention.head_count{end}"] for name, end in HEAD_COUNTS.items()}
    tensors = {}
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        shape = [int(size) for size in reversed(tensor.shape)]
        module = tensor.name.split(".")[-2]
        if kind == "llama" and module in heads:  # GGUF files have the pairs of RoPE side by side
            pairs = data.reshape(heads[module], -1, 2, shape[-1])
            data = pairs.swapaxes(1, 2)
        tensors[name_of(tensor.name)] = "F32", shape, data.tobytes()
    width = fields[f"{kind}.embedding_length"] // heads["attn_q"]
    config = {
        "model_type": kind,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields[f"{kind}.embedding_length"],
        "intermediate_size": fields[f"{kind}.feed_forward_length"],
        "num_hidden_layers": fields[f"{kind}.block_count"],
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "head_dim": fields.get(f"{kind}.attention.key_length", width),
        "max_position_embeddings": fields[f"{kind}.context_length"],
        "rms_norm_eps": fields[f"{kind}.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields[f"{kind}.rope.freq_base"],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }
    write_checkpoint(folder, tensors, config=config)
    write_tokenizer(folder, path)
    return folder
