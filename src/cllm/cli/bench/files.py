"""Files that a command writes when it has finished. It checks them before, so that no result is
lost."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cllm.errors import StartupError


def check_writable(*paths: Path | None) -> None:
    """Check that files can be written; None is skipped.

    Raises StartupError naming the first file that cannot be written.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise StartupError(f"{path} is a folder, not a file")
        if not path.parent.is_dir():
            raise StartupError(f"cannot write {path}: the folder {path.parent} does not exist")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise StartupError(f"cannot write {path}: permission denied")


def write_file(path: Path, content: bytes) -> None:
    """Write ``content`` to a file. Raises StartupError if that fails."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path, value: object) -> None:
    """Write ``value`` to a file as JSON. Raises StartupError if that fails."""
    write_file(path, format_json(value) + b"\n")


def print_json(value: object) -> None:
    print(format_json(value).decode())


def format_json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value))
