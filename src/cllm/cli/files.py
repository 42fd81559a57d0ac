"""What a command writes when it is done. Files are checked before, so that no result is lost."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cllm.errors import StartupError


def check_writable(*paths: Path | None) -> None:
    """Raises StartupError naming the first that cannot be written; None are skipped."""
    for path in filter(None, paths):
        if path.is_dir():
            raise StartupError(f"{path} is a folder; name the file to write")
        if not path.parent.is_dir():
            raise StartupError(f"{path} cannot be written: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise StartupError(f"{path} cannot be written")


def write_file(path: Path, content: bytes) -> None:
    """Raises StartupError if that cannot be done."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from None


def write_json(path: Path, value: object) -> None:
    """Raises StartupError if that cannot be done."""
    write_file(path, indented(value) + b"\n")


def print_json(value: object) -> None:
    print(indented(value).decode())


def indented(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value))
