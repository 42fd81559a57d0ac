"""Resolve a model's name to a file on this disk, and a file to the name that clients see."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from cllm.errors import StartupError
from cllm.models import hub
from cllm.models.hub import NOT_MODELS, SPLIT, Progress

BUILTIN_NAME = "cllm-builtin"
BUILTIN = Path(__file__).parent / "builtin" / "builtin.gguf"
FORMS = "a path to a .gguf file, hf:owner/repo[:quantization], or cllm-builtin"

# hf:owner/repo:quant, or an address copied from a browser: https://huggingface.co/owner/repo
HUB = re.compile(r"(?:hf:|(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/)(?P<rest>.*)")
REPO = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quantization>[\w./-]+))?/?")


def resolve(
    name: str | None, quantization: str | None = None, progress: Progress | None = None
) -> Path:
    """Return the GGUF file (the first one of several) for ``name``, downloaded if necessary.

    quantization: selects among a hub repository's files. progress: as in ``hub.download``. Raises
    StartupError if the name has no known form or the file is not available. The file is not opened
    here: ``gguf.read_header`` checks it.
    """
    if name is None or name == BUILTIN_NAME:
        return _find_builtin()
    if match := HUB.fullmatch(name):
        return _resolve_hub_name(name, match["rest"], quantization, progress)
    path = Path(name).expanduser()
    if not _looks_like_path(name) and not (name and path.exists()):
        raise StartupError(
            f"Unknown model {name!r}{_suggest_name(name)}; a model is {FORMS}. cllm list shows "
            "those on this machine, with --config those of a configuration too"
        )
    return _find_first_part(path)


def is_on_hub(name: str | None) -> bool:
    """Return whether ``name`` names a model on the hub."""
    return name is not None and HUB.fullmatch(name) is not None


def strip_hub(name: str) -> str:
    """Return ``name`` without the prefix of names on the hub: owner/repo[:quantization]."""
    match = HUB.fullmatch(name)
    return match["rest"] if match else name


def list_folder(folder: Path) -> dict[str, Path]:
    """Return the models in a folder and the folders below it, by the names that clients see, and
    the first file of each. Raises StartupError if the folder cannot be read.
    """
    if not folder.is_dir():
        raise StartupError(f"models.folder: there is no folder {folder}")
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() != ".gguf" or NOT_MODELS.search(path.name) or not path.is_file():
            continue
        match = SPLIT.search(path.name)
        if match is not None and int(match["part"]) > 1:
            continue
        name = derive_model_name(path)
        if name in found:  # in another folder
            name = str(path.relative_to(folder).with_name(name))
        found[name] = path
    return found


def check_sha256(path: Path, expected: str) -> None:
    """Raise StartupError unless the file has the SHA-256 ``expected``, in hex, or if the model has
    several files.
    """
    if SPLIT.search(path.name):
        raise StartupError(f"model.sha256 needs a model in one file, not {path.name}")
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from None
    if found != expected:
        raise StartupError(
            f"{path} has the SHA-256 {found}, not {expected} (model.sha256): it is damaged or "
            "another file"
        )


def derive_model_name(path: Path) -> str:
    """Return the name clients see: ``cllm-builtin``, ``owner/repo`` for a file in the hub's cache,
    or the file stem.
    """
    if path == BUILTIN:
        return BUILTIN_NAME
    for folder in path.parts:
        if folder.startswith("models--") and "snapshots" in path.parts:
            return folder.removeprefix("models--").replace("--", "/")
    name = SPLIT.sub("", path.name)
    return name[:-5] if name.lower().endswith(".gguf") else name


def _find_builtin() -> Path:
    if not BUILTIN.is_file():
        raise StartupError(
            "The built-in model is missing from this installation; install cLLM again or name a "
            "model"
        )
    return BUILTIN


def _resolve_hub_name(
    name: str, rest: str, quantization: str | None, progress: Progress | None
) -> Path:
    match = REPO.fullmatch(rest)
    if match is None:
        raise StartupError(
            f"{name!r} does not name a repository; write hf:owner/repo or hf:owner/repo:Q4_K_M"
        )
    named = match["quantization"]
    if named and quantization and named.casefold() != quantization.casefold():
        raise StartupError(
            f"{name!r} asks for {named}, but the requested quantization is {quantization}; drop one"
        )
    return hub.download(match["repo"], named or quantization, progress)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.lower().endswith(".gguf") or "\\" in name


def _suggest_name(name: str) -> str:
    return f" (did you mean hf:{name}?)" if REPO.fullmatch(name) else ""


def _find_first_part(path: Path) -> Path:
    """Return the first file of a split model: llama.cpp opens that one and finds the others next to
    it.
    """
    if not path.exists():
        raise StartupError(f"There is no file {path}; a model is {FORMS}")
    files = list_parts(path)
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise StartupError(f"The model has {len(files)} files; {missing} is missing")
    return files[0]


def list_parts(path: Path) -> list[Path]:
    """Return all files of the model with this file, which may be split."""
    match = SPLIT.search(path.name)
    if match is None:
        return [path]
    start, parts = path.name[: match.start()], int(match["parts"])
    return [
        path.with_name(f"{start}-{part:05}-of-{parts:05}{path.suffix}")
        for part in range(1, parts + 1)
    ]
