"""Files that only their owner can read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, cast

FLAGS = {
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}


def open_private(path: Path, mode: str, buffering: int = -1) -> BinaryIO:
    """Open a file to write bytes: ``mode`` is wb, xb or ab. A new file gets the mode 0600.
    ``buffering``: as in ``open``. Raises OSError.
    """
    flags = FLAGS[mode] | getattr(os, "O_BINARY", 0)  # for Windows
    return cast("BinaryIO", os.fdopen(os.open(path, flags, 0o600), mode, buffering))
