"""Writes checkpoints: folders as Hugging Face's tools write them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
