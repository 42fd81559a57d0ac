"""Read the settings of a LoRA adapter in the form of PEFT: a folder with ``adapter_config.json``
and ``adapter_model.safetensors``.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cllm.errors import ModelFileError
from cllm.models.checkpoint import MAX_SIZE, read_json

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INVOCATION = "alora_invocation_tokens"
# what PEFT can do besides adding a product of two matrices to the output of a module
UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "fan_in_fan_out",
    "arrow_config",
)
T = TypeVar("T")
NAME = re.compile(r"[\w.]+")


@dataclass(frozen=True)
class PeftAdapter:
    """The settings of an adapter. ``ranks`` and ``alphas`` have those of modules that differ from
    ``rank`` and ``alpha``, by the ends of their names. With ``is_root_scaled`` (rsLoRA), scales are
    divided by the root of the rank.
    """

    folder: Path
    rank: int
    alpha: float
    ranks: dict[str, int]
    alphas: dict[str, float]
    is_root_scaled: bool

    def find_rank(self, module: str) -> int:
        return find_by_end(self.ranks, module, self.rank)

    def compute_scale(self, module: str) -> float:
        """Return the factor of what the adapter adds to the output of ``module``."""
        rank, alpha = self.find_rank(module), find_by_end(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_root_scaled else rank)


def find_by_end(values: dict[str, T], module: str, default: T) -> T:
    for end, value in values.items():
        if f".{module}".endswith(f".{end}"):
            return value
    return default


def list_adapter_files(path: Path) -> list[Path]:
    """Return the files of an adapter, which is a file or a folder."""
    return [path / ADAPTER_CONFIG, path / ADAPTER_WEIGHTS] if path.is_dir() else [path]


def read_peft_adapter(folder: Path) -> PeftAdapter:
    """Raises ModelFileError for settings that are damaged or that cLLM does not compute."""
    path = folder / ADAPTER_CONFIG
    settings = read_json(path)

    def check(name: str, value: Any, *, is_valid: bool, what: str) -> None:
        if not is_valid:
            shown = repr(value)[:80]
            raise ModelFileError(f"{path}: {name} is {shown}, {what}", path)

    kind = settings.get("peft_type")
    check("peft_type", kind, is_valid=kind == "LORA", what="and only LORA is supported")
    for name in UNSUPPORTED:
        value = settings.get(name)
        check(name, value, is_valid=not value, what="which is not supported")
    bias = settings.get("bias", "none")
    check("bias", bias, is_valid=bias in ("none", None), what="and only none is supported")
    rank, alpha = settings.get("r", 8), settings.get("lora_alpha", 8)
    check("r", rank, is_valid=is_rank(rank), what=f"not a number from 1 to {MAX_SIZE}")
    check("lora_alpha", alpha, is_valid=is_number(alpha), what="not a finite number")
    patterns: list[dict[str, Any]] = []
    for name, is_valid in (("rank_pattern", is_rank), ("alpha_pattern", is_number)):
        found = settings.get(name) or {}
        patterns.append(found)
        is_table = isinstance(found, dict) and all(
            NAME.fullmatch(end) and is_valid(value) for end, value in found.items()
        )
        check(name, found, is_valid=is_table, what="not a table of modules and numbers")
    return PeftAdapter(
        folder=folder,
        rank=rank,
        alpha=float(alpha),
        ranks=patterns[0],
        alphas={end: float(value) for end, value in patterns[1].items()},
        is_root_scaled=bool(settings.get("use_rslora")),
    )


def is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_SIZE


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and math.isfinite(value)
