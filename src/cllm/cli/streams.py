"""The standard streams of the process, which a shell or a service manager may have closed."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MODES = {"stdin": "r", "stdout": "w", "stderr": "w"}


def open_closed_streams() -> None:
    """Connect closed standard streams with the null device.

    Otherwise the next file or socket would get such a stream's number, and receive the output of
    libraries and child processes.
    """
    for name, mode in MODES.items():
        if getattr(sys, name) is not None:
            continue
        number = os.open(os.devnull, os.O_RDWR)  # the lowest free one, which is the stream's
        os.set_inheritable(number, True)
        # without closefd, because the interpreter never closes it, and would warn about that
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


class LossyFile(io.FileIO):
    """A file that drops output that cannot be written, because the disk is full, the reader has
    gone, or the file does not block and the reader is slow.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        written = None
        with suppress(OSError):
            written = super().write(data)
        # BufferedWriter would repeat a call that writes nothing, forever
        return len(memoryview(data).cast("B")) if written is None else written


def set_error_handling() -> None:
    """Print characters that stdout cannot encode as ?, reject stdin that is not text, and ignore
    messages that cannot be written to stderr.

    Python's own choice of encoding errors depends on the locale.
    """
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    if isinstance(sys.stderr, io.TextIOWrapper) and sys.stderr.fileno() == 2:
        # without a buffer of bytes, which would write a line again that Ctrl-C has interrupted
        file, encoding = LossyFile(2, "wb", closefd=False), sys.stderr.encoding
        sys.stderr = io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)


def flush_stdout() -> None:
    """Print the rest of stdout's buffer. If that fails, drop it, because the interpreter's own
    attempt at exit would also fail.
    """
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
