"""Resolve a model's name to a file on this disk, and a file to the name that clients see."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from cllm.errors import ModelFileError, StartupError
from cllm.models import hub
from cllm.models.checkpoint import CONFIG, is_checkpoint
from cllm.models.file_names import DEFAULT_TAGS, SPLIT, Form
from cllm.models.file_start import measure_regular_file
from cllm.models.hub import Progress
from cllm.models.model_file import is_model, list_files

log = logging.getLogger("cllm.models")

BUILTIN_NAME = "cllm-builtin"
BUILTIN = Path(__file__).parent / "builtin" / "builtin.gguf"
FORMS = "a .gguf file, a checkpoint's folder, hf:owner/repo[:quantization], or cllm-builtin"

# hf:owner/repo:quant, or an address copied from a browser: https://huggingface.co/owner/repo
HUB = re.compile(
    r"(?:hf:(?://)?|(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/)(?P<rest>.*)",
    re.IGNORECASE,
)
# the rest of such a name: a tag, a file, or the page of a file or folder
REPO = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<tag>[^:\s][^:\n]*?)|"
    r"/(?:blob|resolve|raw|tree)/(?P<revision>[^/]+)(?:/(?P<path>.+?))?|/(?P<file>.+\.gguf))?/?",
    re.IGNORECASE,
)


def resolve(
    name: str | None,
    quantization: str | None = None,
    progress: Progress | None = None,
    form: Form | None = None,
) -> Path:
    """Return the GGUF file (the first one of several) or the checkpoint's folder for ``name``,
    downloaded if necessary.

    ``quantization`` selects among a hub repository's files, and ``form`` chooses if it has both.
    ``progress`` is called as ``hub.download`` does.

    Raises StartupError if the name has no known form or the file is not available, or is of another
    form than ``form``. The file is not opened here: ``gguf.read_header`` and ``read_checkpoint``
    check it.
    """
    if name is None or name == BUILTIN_NAME:
        return _find_builtin()
    if is_on_hub(name):
        return _resolve_hub_name(name, quantization, progress, form)
    path = Path(name).expanduser()
    try:
        if _looks_like_path(name) or (name and path.exists()):
            return _find_model(path, form)
    except OSError as error:
        raise ModelFileError(f"Cannot read {path}: {error.strerror}", path) from None
    raise StartupError(
        f"Unknown model {name!r}{_suggest_name(name)}; a model is {FORMS}. cllm list shows "
        "those on this machine, with --config those of a configuration too"
    )


def is_on_hub(name: str | None) -> bool:
    """Return whether ``name`` names a model on the hub."""
    return name is not None and HUB.fullmatch(name) is not None


def strip_hub(name: str) -> str:
    """Return ``name`` without the prefix of names on the hub: owner/repo[:quantization]."""
    match = HUB.fullmatch(name)
    if match is None:
        return name
    try:
        return ":".join(filter(None, split_hub_name(name)))
    except StartupError:
        return match["rest"]


def split_hub_name(name: str) -> tuple[str, str | None]:
    """Return the repository in a name on the hub, and the quantization or file that it names.

    Raises StartupError if the name has no known form.
    """
    on_hub = HUB.fullmatch(name)
    address = urlsplit(on_hub["rest"].strip()) if on_hub else urlsplit("")
    match = REPO.fullmatch(unquote(address.path))
    if match is None:
        raise StartupError(
            f"{name!r} does not name a repository; write hf:owner/repo or hf:owner/repo:Q4_K_M"
        )
    if match["revision"] not in (None, "main"):
        raise StartupError(
            f"{name!r} names the revision {match['revision']}; only main can be downloaded"
        )
    repo, *files = match.group("repo", "tag", "path")
    files += [match["file"], *parse_qs(address.query).get("show_file_info", [])]
    return repo, next(filter(None, files), None)


def list_folder(folder: Path) -> dict[str, Path]:
    """Return the models in a folder and the folders below it, by the names that clients see, and
    the first file or the folder of each. Raises StartupError if there is no such folder.

    Linked folders count too. Hidden files and folders do not.
    """
    if not folder.is_dir():
        raise StartupError(f"models.folder: there is no folder {folder}")
    models: dict[str, Path] = {}
    for path in sorted(_walk(folder)):
        match = SPLIT.search(path.name)
        if (match is not None and int(match["part"]) > 1) or not is_model(path):
            continue
        name = derive_model_name(path)
        if name in models:  # in another folder
            name = str(path.relative_to(folder).with_name(name))
        models[name] = path
    return models


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the GGUF files below a folder, and the folders that may be checkpoints. Each folder is
    read once, under its own path if that is below ``folder``, so links may form circles. Unreadable
    entries are skipped with a warning.
    """
    folders, linked, seen = [folder], list[Path](), set[tuple[int, int]]()
    while folders or linked:
        current = (folders or linked).pop()
        try:
            status = current.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = [one for one in current.iterdir() if not one.name.startswith(".")]
        except OSError as error:
            warn_once(f"{str(current)!r} is skipped: {error.strerror}")
            continue
        if any(path.name == CONFIG for path in entries):
            yield current
        for path in entries:
            try:
                mode = path.stat().st_mode
            except OSError as error:
                if path.suffix.lower() == ".gguf" or not isinstance(error, FileNotFoundError):
                    warn_once(f"{str(path)!r} is skipped: {error.strerror}")
                continue
            if stat.S_ISDIR(mode):
                (linked if path.is_symlink() else folders).append(path)
            elif stat.S_ISREG(mode) and path.suffix.lower() == ".gguf":
                yield path


@lru_cache(maxsize=1000)
def warn_once(message: str) -> None:
    """Log a warning that repeated scans of a folder would repeat."""
    log.warning("%s", message)


def check_sha256(path: Path, expected: str) -> None:
    """Raise StartupError unless the file has the SHA-256 ``expected``, in hex, or if the model has
    several files.
    """
    if SPLIT.search(path.name) or path.is_dir():
        raise StartupError(f"model.sha256 needs a model in one file, not {path.name}")
    measure_regular_file(path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StartupError(f"{path}: cannot be read: {error.strerror}") from None
    if digest != expected:
        raise StartupError(
            f"{path} has the SHA-256 {digest}, not {expected} (model.sha256): it is damaged or "
            "another file"
        )


def derive_model_name(path: Path) -> str:
    """Return the name clients see: ``cllm-builtin``, ``owner/repo`` for a file in the hub's cache,
    or the stem of the file, or the folder's name.
    """
    if path == BUILTIN:
        return BUILTIN_NAME
    for folder in path.parts:
        if folder.startswith("models--") and "snapshots" in path.parts:
            return folder.removeprefix("models--").replace("--", "/")
    name = SPLIT.sub("", path.name if path.name.strip(".") else path.resolve().name)
    return name[:-5] if name.lower().endswith(".gguf") else name


def _find_builtin() -> Path:
    if not BUILTIN.is_file():
        raise StartupError(
            "The built-in model is missing from this installation; install cLLM again or name a "
            "model"
        )
    return BUILTIN


def _resolve_hub_name(
    name: str, quantization: str | None, progress: Progress | None, form: Form | None
) -> Path:
    repo, named = split_hub_name(name)
    if quantization and named and named.lower() in DEFAULT_TAGS:
        named = None
    if named and quantization and named.casefold() != quantization.casefold():
        raise StartupError(
            f"{name!r} asks for {named}, but the requested quantization is {quantization}; drop one"
        )
    return hub.download(repo, named or quantization, progress, form)


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.lower().endswith(".gguf") or "\\" in name


def _suggest_name(name: str) -> str:
    return f" (did you mean hf:{name}?)" if REPO.fullmatch(name) else ""


def _find_model(path: Path, form: Form | None) -> Path:
    """Return the folder of a checkpoint, or the first file of a split model: llama.cpp opens that
    one and finds the others next to it.
    """
    if not path.exists():
        raise ModelFileError(f"There is no file {path}; a model is {FORMS}", path)
    if path.is_file() and (path.suffix == ".safetensors" or path.name == CONFIG):
        path = path.parent
    if path.is_dir():
        if not is_checkpoint(path):
            raise ModelFileError(
                f"{path} is a directory without {CONFIG}; give the path of a .gguf file in it", path
            )
        if form == "gguf":
            raise ModelFileError(
                f"{path} is a checkpoint, which llama.cpp cannot read: use backend.name torch, or "
                "convert it to a GGUF file",
                path,
            )
        return path
    files = list_files(path)
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise ModelFileError(f"The model has {len(files)} files; {missing} is missing", path)
    return files[0]
