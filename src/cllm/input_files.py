"""Reads files that a user names, which may be pipes or devices."""

from __future__ import annotations

import errno
import io
import os
import stat
from codecs import BOM_UTF8
from pathlib import Path

MAX_DEVICE_BYTES = 1 << 24  # /dev/zero has no end
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def read_input(path: Path, limit: int = -1) -> bytes:
    """Return the content of a text file, or its first ``limit`` bytes, without a byte order mark.

    For a device without ``limit``, return the first 16 MB. Raises OSError, also for a pipe that no
    process writes to; a plain read would wait for one.
    """
    with os.fdopen(os.open(path, FLAGS), "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        is_pipe = stat.S_ISFIFO(mode)
        if limit < 0 and stat.S_ISCHR(mode):
            limit = MAX_DEVICE_BYTES
        if is_pipe:
            os.set_blocking(file.fileno(), True)  # its writer may need time
        content = file.read(limit)
        if is_pipe and not content:
            raise OSError(errno.ENXIO, "no process writes to this pipe", str(path))
        return content.removeprefix(BOM_UTF8)


def read_input_text(path: Path) -> str:
    """Return the text of a file in UTF-8. Raises OSError as ``read_input``, and
    UnicodeDecodeError.
    """
    return io.TextIOWrapper(io.BytesIO(read_input(path)), "utf-8").read()
