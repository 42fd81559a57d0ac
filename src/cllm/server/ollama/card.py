"""Information on a model for Ollama's clients, from its files."""

from __future__ import annotations

import datetime
import functools
import hashlib
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import TypedDict

from cllm.models.description import describe_model


class Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Card(msgspec.Struct, frozen=True):
    """What is shown of a model.

    Its files were written at ``modified`` and have ``size`` bytes. The 64 hex digits of ``digest``
    identify their content.
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
    """Return the card of a model's file or folder, or of a backend that has none ("").

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
    model = describe_model(Path(path))
    parameters = format_count(model.num_parameters)
    return Card(
        digest=model.digest,
        modified=format_time(model.modified),
        size=model.num_bytes,
        details=make_details(model.architecture, model.form, parameters, model.quantization),
        model_info={**model.metadata, "general.parameter_count": model.num_parameters},
        license=model.license,
        template=model.template,
        context_length=model.context_length or 0,
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
