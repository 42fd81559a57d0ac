"""Describes a model from its files, whatever their form."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from cllm.models.checkpoint import Checkpoint, read_checkpoint, read_templates
from cllm.models.file_names import parse_quantization
from cllm.models.file_start import compute_fingerprint
from cllm.models.gguf import GgufHeader, read_header
from cllm.models.model_file import list_files
from cllm.models.sequence_memory import compute_kv_bytes_per_token

TEMPLATE = "tokenizer.chat_template"
HALF = 2  # bytes of a number; the KV cache has this type unless kv.type says otherwise


class ModelDescription(msgspec.Struct, frozen=True):
    """What a model's files say about it; "" or None where they do not.

    ``form`` is "gguf" or "safetensors", ``digest`` 64 hex digits that identify the content, and
    ``modified`` the time of the last change. ``num_bytes`` is the size of all files.
    ``kv_bytes_per_token`` counts 16 bits for a number. ``metadata`` has everything else, in the
    words of the format; long lists are None.
    """

    path: Path
    form: str
    architecture: str
    quantization: str
    num_parameters: int
    num_bytes: int
    modified: float
    digest: str
    context_length: int | None
    num_layers: int | None
    embedding_length: int | None
    kv_bytes_per_token: int | None
    license: str
    template: str
    metadata: dict[str, Any]


def describe_model(path: Path) -> ModelDescription:
    """Describe the model with this file, or in this folder. Raises StartupError if it is damaged
    or no model.
    """
    return (
        _describe_checkpoint(read_checkpoint(path))
        if path.is_dir()
        else _describe_gguf(read_header(path))
    )


def measure_files(files: Iterable[Path]) -> int:
    """Return the size of the existing files in bytes."""
    return sum(file.stat().st_size for file in files if file.exists())


def _describe_gguf(header: GgufHeader) -> ModelDescription:
    path, metadata = header.path, header.metadata
    info: dict[str, Any] = {name: one for name, one in metadata.items() if name != TEMPLATE}
    info |= dict.fromkeys(header.array_lengths.keys() - metadata.keys())
    return ModelDescription(
        path=path,
        form="gguf",
        architecture=header.architecture,
        quantization=parse_quantization(path.name)
        or _find_usual((one.type, math.prod(one.shape)) for one in header.tensors),
        num_parameters=count_parameters(header),
        num_bytes=measure_files(list_files(path)),
        modified=path.stat().st_mtime,
        digest=_digest(compute_fingerprint(path)),
        context_length=_as_int(header.get_number("context_length")),
        num_layers=_as_int(header.get_number("block_count")),
        embedding_length=_as_int(header.get_number("embedding_length")),
        kv_bytes_per_token=compute_kv_bytes_per_token(header),
        license=str(metadata.get("general.license", "")),
        template=str(metadata.get(TEMPLATE, "")),
        metadata=info,
    )


def _describe_checkpoint(checkpoint: Checkpoint) -> ModelDescription:
    folder, config = checkpoint.folder, checkpoint.text_config
    files = list_files(folder)
    tensors = checkpoint.tensors.values()
    numbers = checkpoint.count_kv_numbers()
    return ModelDescription(
        path=folder,
        form="safetensors",
        architecture=str(checkpoint.config.get("model_type", "")),
        quantization=_find_usual((one.dtype, math.prod(one.shape)) for one in tensors),
        num_parameters=checkpoint.num_parameters,
        num_bytes=measure_files(files),
        modified=max(file.stat().st_mtime for file in files),
        digest=_digest(checkpoint.fingerprint),
        context_length=_as_int(config.get("max_position_embeddings")),
        num_layers=_as_int(config.get("num_hidden_layers")),
        embedding_length=_as_int(config.get("hidden_size")),
        kv_bytes_per_token=None if numbers is None else numbers * HALF,
        license="",
        template=next(iter(read_templates(folder).values()), ""),
        metadata={
            "general.architecture": str(checkpoint.config.get("model_type", "")),
            **{f"config.{name}": value for name, value in checkpoint.config.items()},
        },
    )


def _digest(fingerprint: str) -> str:
    return hashlib.sha256(fingerprint.encode()).hexdigest()


def _as_int(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _find_usual(types: Iterable[tuple[str, int]]) -> str:
    """Return the type that most of the weights have."""
    sizes: dict[str, int] = {}
    for name, size in types:
        sizes[name] = sizes.get(name, 0) + size
    return max(sizes, key=lambda name: sizes[name], default="")


def count_parameters(header: GgufHeader) -> int:
    """Return the parameter count of the whole model if the header has it, else that of the tensors
    in this file.
    """
    count = header.metadata.get("general.parameter_count")
    return (
        count
        if isinstance(count, int) and count > 0
        else sum(math.prod(tensor.shape) for tensor in header.tensors)
    )
