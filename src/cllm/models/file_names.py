"""Which files of a repository or a folder make up a model, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from cllm.errors import StartupError
from cllm.models.checkpoint import CONFIG, INDEX, SHARD, SINGLE

Form = Literal["gguf", "checkpoint"]
"""GGUF files, or a folder with safetensors."""

DEFAULT_ORDER = (
    "Q4_K_M Q4_0 Q8_0 UD-Q4_K_XL Q4_K_S Q5_K_M Q5_K_S Q6_K IQ4_NL IQ4_XS MXFP4 "
    "MXFP4_MOE Q4_1 Q5_0 Q5_1"
)
SPLIT = re.compile(r"-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf$", re.IGNORECASE)
QUANTIZATION = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32))(?![A-Z0-9])"
)
NOT_MODELS = re.compile(r"(^|/)(mmproj|imatrix)|[-_.](mmproj|imatrix)[-_.]", re.IGNORECASE)
DEFAULT_TAGS = ("latest", "default")
FLOAT = re.compile(r"(?<![a-z0-9])fp(16|32)(?![a-z0-9])")  # another name of F16 and F32
# The files of a checkpoint, apart from its weights
CHECKPOINT_FILES = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|modules|"
    r"sentence_bert_config|model\.safetensors\.index)\.json|chat_template\.jinja|"
    r"additional_chat_templates/[^/]+\.jinja|[^/]+/config\.json"
)


def choose_form(files: Iterable[str], quantization: str | None) -> Form:
    """Return the form in which a repository is downloaded: GGUF files, unless it has none and no
    ``quantization`` is asked for.
    """
    files = list(files)
    is_any = quantization is None or quantization.lower() in DEFAULT_TAGS
    return "checkpoint" if is_any and not group_files(files) and list_checkpoint(files) else "gguf"


def list_checkpoint(files: Iterable[str]) -> list[str]:
    """Return the files of the checkpoint among ``files``, the weights last; none without a
    configuration and safetensors.
    """
    names = {*files}
    weights = {name for name in names if name.endswith(".safetensors") and "/" not in name}
    if INDEX in names:
        weights = {name for name in weights if SHARD.search(name) and "consolidated" not in name}
    elif SINGLE in names:
        weights = {SINGLE}
    if CONFIG not in names or not weights:
        return []
    return [*sorted(filter(CHECKPOINT_FILES.fullmatch, names)), *sorted(weights)]


def choose_files(where: str, files: Iterable[str], quantization: str | None) -> list[str]:
    """Return the files of one model among ``files``, in order.

    Raises StartupError, which names the alternatives.
    """
    models = group_files(files)
    if not models:
        raise StartupError(
            f"{where} has no complete GGUF model; look for a repository of the same name that ends "
            "in -GGUF"
        )
    matching = find_matching(models, quantization)
    if len(matching) == 1:
        return models[matching[0]]
    if matching:
        names = ", ".join(matching)
        raise StartupError(f"{where} has several files for {quantization}; name one: {names}")
    there = ", ".join(sorted({_find_quantization(name).upper() or name for name in models}))
    raise StartupError(f"{where} has no {quantization}; it has {there}")


def parse_quantization(file: str) -> str | None:
    """Return the quantization in a file's name (or else its folder's), in capitals; None if there
    is none.
    """
    stem, folder = SPLIT.sub("", Path(file).name).removesuffix(".gguf"), str(Path(file).parent)
    names = QUANTIZATION.findall(stem.upper()) or QUANTIZATION.findall(folder.upper())
    return names[-1] if names else None


def group_files(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the complete models: the name without its part number -> its files in order."""
    parts: dict[str, dict[int, str]] = {}
    wanted: dict[str, int] = {}
    for file in files:
        if not file.lower().endswith(".gguf") or NOT_MODELS.search(file):
            continue
        split = SPLIT.search(file)
        name = file[: split.start()] + ".gguf" if split else file
        wanted[name] = int(split["parts"]) if split else 1
        parts.setdefault(name, {})[int(split["part"]) if split else 1] = file
    complete = {
        name for name, count in wanted.items() if sorted(parts[name]) == list(range(1, count + 1))
    }
    return {name: [parts[name][part] for part in sorted(parts[name])] for name in sorted(complete)}


def _choose_default(models: Mapping[str, list[str]]) -> str:
    """Return the model with the most usual quantization.

    Of several, take the shortest: additions mark variants.
    """
    order = {name: rank for rank, name in enumerate(DEFAULT_ORDER.split())}
    return min(
        models,
        key=lambda name: (order.get(parse_quantization(name) or "", len(order)), len(name), name),
    )


def find_matching(models: Mapping[str, list[str]], wanted: str | None) -> list[str]:
    """Return the models among those of ``group_files`` that ``wanted`` names: a quantization, a
    file, or None and ``latest`` for the usual one.
    """
    if wanted is None or wanted.lower() in DEFAULT_TAGS:
        return [_choose_default(models)] if models else []
    lower = SPLIT.sub(".gguf", wanted.lower())
    named = [name for name in models if lower in (name.lower(), Path(name).name.lower())]
    lower = FLOAT.sub(r"f\1", lower.removesuffix(".gguf"))
    quantizations = {name: _find_quantization(name) for name in models}
    exact = [name for name, quantization in quantizations.items() if quantization == lower]
    dynamic = [
        name for name, quantization in quantizations.items() if quantization == f"ud-{lower}"
    ]
    return named or exact or dynamic


def _find_quantization(file: str) -> str:
    """Return the quantization in a file's name in small letters, f16 for fp16; "" if there is
    none.
    """
    float_type = FLOAT.search(SPLIT.sub("", Path(file).name).lower())
    return (parse_quantization(file) or (f"f{float_type[1]}" if float_type else "")).lower()
