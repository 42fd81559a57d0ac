"""Estimates which usual models fit into the memory of this machine, with how long a context."""

from __future__ import annotations

from typing import NamedTuple

from cllm.backends.registry import BACKENDS, import_loader
from cllm.models import memory
from cllm.models.gguf import format_size


class UsualModel(NamedTuple):
    """A model as an example of its size. It has ``parameters`` billions of weights, takes
    ``kv_bytes_per_token`` for the keys and values of all layers in 16 bits, and was trained with a
    context of ``trained`` tokens.
    """

    name: str
    parameters: float
    kv_bytes_per_token: int
    trained: int


def kv_bytes(layers: int, kv_heads: int, head_size: int) -> int:
    return 2 * layers * kv_heads * head_size * 2


# layers, heads and contexts from the models' config.json
MODELS = (
    UsualModel("Qwen3 0.6B", 0.6, kv_bytes(28, 8, 128), 40_960),
    UsualModel("Qwen3 1.7B", 1.7, kv_bytes(28, 8, 128), 40_960),
    UsualModel("Qwen3 4B", 4.0, kv_bytes(36, 8, 128), 40_960),
    UsualModel("Qwen3 8B", 8.2, kv_bytes(36, 8, 128), 40_960),
    UsualModel("Qwen3 14B", 14.8, kv_bytes(40, 8, 128), 40_960),
    UsualModel("Qwen3 32B", 32.8, kv_bytes(64, 8, 128), 40_960),
    UsualModel("Llama 3.3 70B", 70.6, kv_bytes(80, 8, 128), 131_072),
)
# bits for each weight, roughly: some tensors have more than the name says
QUANTIZATIONS = {"Q4_K_M": 4.9, "Q8_0": 8.5}
MIN_TOKENS = 1024  # fewer are useless


class ModelFit(NamedTuple):
    """Whether a model fits into the memory. If it does, the KV cache of all requests together has
    ``max_tokens``, at most the context that the model was trained with; otherwise 0.
    """

    model: str
    quantization: str
    file_bytes: int
    max_tokens: int


def list_fits(available_bytes: int, *, on_gpu: bool) -> list[ModelFit]:
    """Return an entry for each model and quantization in ``available_bytes`` of the GPUs' memory,
    or of the RAM, where llama.cpp's copy of weights counts too. These are estimates; ``cllm serve``
    measures the file.
    """
    return [
        ModelFit(model.name, name, size, _count_tokens(model, size, available_bytes, on_gpu=on_gpu))
        for model in MODELS
        for name, bits in QUANTIZATIONS.items()
        for size in [int(model.parameters * 1e9 * bits / 8)]
    ]


def _count_tokens(model: UsualModel, size: int, available_bytes: int, *, on_gpu: bool) -> int:
    copied = 0 if on_gpu else int(size * import_loader(BACKENDS[0]).COPIED_SHARE)
    left = available_bytes - memory.weigh(size, 0, model.kv_bytes_per_token, copied)
    if on_gpu:
        left = int(left * memory.GPU_SHARE)
    tokens = min(left // model.kv_bytes_per_token, model.trained)
    return tokens if tokens >= MIN_TOKENS else 0


def describe_fits(fits: list[ModelFit]) -> list[str]:
    """Return the lines of a table: one for each model, a column for each quantization."""
    cells: dict[str, list[str]] = {}
    for fit in fits:
        tokens = f"{fit.max_tokens:,} tokens" if fit.max_tokens else "too large"
        text = f"{fit.quantization} {format_size(fit.file_bytes)}: {tokens}"
        cells.setdefault(fit.model, []).append(f"{text:<32}")
    width = max(map(len, cells), default=0)
    return [f"{name:<{width}}  {''.join(texts)}".rstrip() for name, texts in cells.items()]
