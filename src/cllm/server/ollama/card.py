"""Information on a model for Ollama's clients, from the header of its file."""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import TypedDict

from cllm.models.file_start import compute_fingerprint
from cllm.models.gguf import GgufHeader, read_header
from cllm.models.hub import parse_quantization

NOT_SHOWN = {"tokenizer.chat_template"}  # shown in its own field


class Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Card(msgspec.Struct, frozen=True):
    """What is shown of a model.

    Its file was written at ``modified`` and has ``size`` bytes. The 64 hex digits of ``digest``
    identify its content.
    """

    digest: str
    modified: str
    size: int
    details: Details
    model_info: dict[str, Any]
    license: str
    template: str
    context_length: int

    def guess_capabilities(self) -> list[str]:
        """Return what the model seems to be able to do, by its file, before it has been loaded."""
        capabilities = ["completion"]
        capabilities += ["tools"] if "tools" in self.template else []
        capabilities += ["thinking"] if "think" in self.template else []
        return [*capabilities, "embedding"]


@functools.lru_cache(maxsize=256)
def read_card(path: str, backend: str) -> Card:
    """Return the card of a file, or of a backend that has no file ("").

    Raises StartupError.
    """
    if not path:
        details = make_details(backend, "", "", "")
        return Card(
            hashlib.sha256(backend.encode()).hexdigest(),
            format_time(0),
            0,
            details,
            {"general.architecture": backend},
            license="",
            template="",
            context_length=0,
        )
    file = Path(path)
    header = read_header(file)
    parameters, length = count_parameters(header), header.get_number("context_length")
    quantization = parse_quantization(file.name) or most_common_type(header)
    info: dict[str, Any] = {
        name: value for name, value in header.metadata.items() if name not in NOT_SHOWN
    }
    # long lists are named, not shown
    info |= dict.fromkeys(header.array_lengths.keys() - header.metadata.keys())
    return Card(
        digest=hashlib.sha256(compute_fingerprint(file).encode()).hexdigest(),
        modified=format_time(file.stat().st_mtime),
        size=header.file_bytes,
        details=make_details(header.architecture, "gguf", format_count(parameters), quantization),
        model_info={**info, "general.parameter_count": parameters},
        license=str(header.metadata.get("general.license", "")),
        template=str(header.metadata.get("tokenizer.chat_template", "")),
        context_length=length if isinstance(length, int) else 0,
    )


def make_details(family: str, form: str, parameters: str, quantization: str) -> Details:
    return {
        "parent_model": "",
        "format": form,
        "family": family,
        "families": [family],
        "parameter_size": parameters,
        "quantization_level": quantization,
    }


def count_parameters(header: GgufHeader) -> int:
    """Return the parameter count of the whole model if the header has it, else that of the tensors
    in this file.
    """
    count = header.metadata.get("general.parameter_count")
    return (
        count
        if isinstance(count, int) and count > 0
        else sum(math.prod(t.shape) for t in header.tensors)
    )


def most_common_type(header: GgufHeader) -> str:
    """Return the type that most of the weights have."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + math.prod(tensor.shape)
    return max(sizes, key=lambda name: sizes[name], default="")


def format_count(count: int) -> str:
    """Return a number of parameters for display: ``3.1M``, ``8.0B``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def format_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_modelfile(
    name: str, template: str, system: str, parameters: dict[str, Any], license_text: str
) -> str:
    """Return the Modelfile from which Ollama would make the model.

    It does not show the path of the weights.
    """
    lines = ["# Modelfile of the model that cLLM serves", f"FROM {name}"]
    lines += [f"TEMPLATE {quote(template)}"] if template else []
    lines += [f"SYSTEM {quote(system)}"] if system else []
    lines += [f"PARAMETER {key} {quote(str(value))}" for key, value in parameters.items()]
    lines += [f"LICENSE {quote(license_text)}"] if license_text else []
    return "\n".join(lines) + "\n"


def quote(text: str) -> str:
    """Return ``text`` quoted as one value of a Modelfile."""
    if "\n" not in text and text == text.strip():
        return text
    mark = '"""' if '"' in text else '"'
    return mark + text + mark
