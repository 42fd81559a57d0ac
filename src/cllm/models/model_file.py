"""Checks that files are a complete model. llama.cpp would report errors only in its log.

The format of split models: https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from cllm.errors import ModelFileError, StartupError
from cllm.models.checkpoint import is_checkpoint
from cllm.models.file_names import NOT_MODELS, SPLIT, list_checkpoint
from cllm.models.gguf import GgufHeader, Value, read_header, read_start

log = logging.getLogger("cllm.models")


def read_parts(path: Path, *, check_tokens: bool = False) -> list[GgufHeader]:
    """Return the headers of all files of the model whose first file is ``path``. See
    ``read_header`` for ``check_tokens``.

    Raises ModelFileError if the file is not a model, or if its parts do not belong together.
    """
    first = read_header(path, check_tokens=check_tokens)
    other = describe_other(first.metadata, len(first.tensors) if first.split_count == 1 else None)
    if first.split_count > 1:
        check_part(first)
    if other:
        raise ModelFileError(f"{path} is {other}, not a model", path)
    if not first.architecture:
        raise ModelFileError(f"{path} is damaged: general.architecture is missing", path)
    parts = [first, *(read_header(part) for part in list_files(path)[1:])]
    check_together(parts)
    return parts


def list_files(path: Path) -> list[Path]:
    """Return all files of the model with this file, which may be split, or of a checkpoint."""
    if path.is_dir():
        there = (file.relative_to(path).as_posix() for file in list_near(path) if file.is_file())
        return [path / name for name in list_checkpoint(there)]
    match = SPLIT.search(path.name)
    if match is None:
        return [path]
    start, parts = path.name[: match.start()], int(match["parts"])
    return [
        path.with_name(f"{start}-{part:05}-of-{parts:05}{path.suffix}")
        for part in range(1, parts + 1)
    ]


def list_near(folder: Path) -> list[Path]:
    """Return what is in a folder and the folders in it; nothing for those that cannot be read."""
    found = list[Path]()
    with suppress(OSError):
        for path in folder.iterdir():
            found.append(path)
            if path.is_dir():
                with suppress(OSError):
                    found += path.iterdir()
    return found


def check_part(header: GgufHeader) -> None:
    """Raise ModelFileError unless the name of a part says which part it is."""
    path, count, number = header.path, header.split_count, header.split_number + 1
    if has_another_behind(header):
        raise ModelFileError(
            f"{path} has parts of a split model joined into one file, which llama.cpp cannot read: "
            "keep the parts as separate files with their names, or join them with "
            "llama-gguf-split --merge",
            path,
        )
    match = SPLIT.search(path.name)
    if match is None or (int(match["part"]), int(match["parts"])) != (number, count):
        raise ModelFileError(
            f"{path} is part {number} of {count} of a split model: rename it so that its name ends "
            f"in -{number:05}-of-{count:05}.gguf, with all parts in one folder",
            path,
        )


def has_another_behind(header: GgufHeader) -> bool:
    """Return whether another GGUF file begins where the data of this one ends."""
    end = header.data_offset + max(
        (one.offset + one.num_bytes for one in header.tensors), default=0
    )
    alignment = header.metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)
    with header.path.open("rb") as file:
        file.seek(-(-end // alignment) * alignment)
        return file.read(4) == b"GGUF"


def check_together(parts: list[GgufHeader]) -> None:
    """Raise ModelFileError unless these are the parts of one model, in order."""
    first, count = parts[0], len(parts)
    for number, part in enumerate(parts):
        if count > 1 and (part.split_number, part.split_count) != (number, count):
            raise_foreign(first, f"{part.path.name} is not part {number + 1} of {count}")
        if count > 1:
            check_part(part)
    names = [tensor.name for part in parts for tensor in part.tensors]
    wanted = first.metadata.get("split.tensors.count", len(names))
    if len(names) != wanted or len({*names}) < len(names):
        raise_foreign(first, f"they have {len({*names})} tensors, not {wanted}")


def raise_foreign(first: GgufHeader, reason: str) -> NoReturn:
    raise ModelFileError(
        f"{first.path}: the parts are not of one model: {reason}. Download them again", first.path
    )


def describe_other(metadata: Mapping[str, Value], num_tensors: int | None) -> str:
    """Return what a GGUF file is if it is not a model or its first part; "" if it is one.
    ``num_tensors`` is None if other files have tensors too.
    """
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    if kind == "adapter" or "adapter.type" in metadata:
        return "a LoRA adapter (see adapters in the settings)"
    if kind in ("mmproj", "projector") or architecture == "clip":
        return "a projector for pictures or sounds (mmproj)"
    if kind == "imatrix" or any(key.startswith("imatrix.") for key in metadata):
        return "an importance matrix for quantizing"
    if architecture == "controlvector":
        return "a control vector"
    if metadata.get("split.no", 0) != 0:
        return "a later part of a split model"
    return "a vocabulary without weights" if num_tensors == 0 else ""


def is_model(path: Path) -> bool:
    """Return whether a file is a model or its first part, or cannot be a GGUF file at all, which
    loading it will report. For any other file, log once what it is. A folder is a model if it has
    a configuration and weights.
    """
    if path.is_dir():
        return is_checkpoint(path) and any(path.glob("*.safetensors"))
    try:
        status = path.stat()
    except OSError:
        return False
    return _is_model(path, (status.st_ino, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=10_000)
def _is_model(path: Path, _stamp: tuple[int, ...]) -> bool:
    if not os.access(path, os.R_OK):
        log.warning("%r is skipped: it may not be read", str(path))
        return False
    try:
        metadata, num_tensors = read_start(path)
    except StartupError:
        return NOT_MODELS.search(path.name) is None
    is_part = SPLIT.search(path.name) is not None
    if other := describe_other(metadata, None if is_part else num_tensors):
        log.info("%r is not listed: it is %s", str(path), other)
    return not other
