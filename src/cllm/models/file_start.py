"""Explains what a file is if it is not a GGUF file, without reading the header."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from cllm.errors import StartupError


def measure_regular_file(path: Path) -> int:
    """Return the size of a file in bytes. Raises StartupError unless it is a regular file that is
    not empty.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise StartupError(f"There is no file {path}") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"Cannot read {path}: {error}") from None
    if stat.S_ISDIR(status.st_mode):
        raise StartupError(f"{path} is a directory; give the path of a .gguf file in it")
    if not stat.S_ISREG(status.st_mode):
        raise StartupError(f"{path} is not a regular file")
    if status.st_size == 0:
        raise StartupError(f"{path} is empty: the download did not start, or the disk was full")
    return status.st_size


def explain_format(start: bytes) -> str:
    """Return what the file is if it is not a GGUF file, as the end of a sentence."""
    if start.startswith(b"version https://git-lfs"):
        return ", but a Git LFS pointer: fetch the real file with `git lfs pull`"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return (
            ", but a web page: the download went wrong, or the link leads to a page about the file"
        )
    if start[:4] in (b"ggml", b"ggjt", b"ggla", b"lmgg", b"tjgg", b"algg"):
        return ", but its predecessor GGML: convert the model again"
    return ""


def compute_fingerprint(path: Path) -> str:
    """Return a hash of a file's size, its first and last MB, and pages in between: 128 bits in
    hex.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for at in (0, *range(1 << 20, size, max(1 << 20, size // 256)), max(0, size - (1 << 20))):
            file.seek(at)
            digest.update(file.read(1 << 20 if at in (0, size - (1 << 20)) else 4096))
    return digest.hexdigest()
