"""Files that only their owner can read."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None  # type: ignore[assignment]

FLAGS = {
    "wb": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
}
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # files here are never written to a disk


def open_private(path: Path, mode: str, buffering: int = -1) -> BinaryIO:
    """Open a file to write bytes. ``mode`` is wb, xb or ab; ``buffering`` is passed to ``open``. A
    new file gets the mode 0600. Raises OSError.
    """
    flags = FLAGS[mode] | getattr(os, "O_BINARY", 0)  # for Windows
    return cast("BinaryIO", os.fdopen(os.open(path, flags, 0o600), mode, buffering))


def replace_private(path: Path, content: bytes) -> None:
    """Replace the content of a file, which only its owner can read. After a crash it has either the
    old content or the new one. It keeps its owner, if the user may do that. Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open_private(new, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with suppress(OSError, AttributeError):  # no such file, not root, Windows
            before = path.stat()
            os.chown(new, before.st_uid, before.st_gid)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def lock(file: BinaryIO | int, *, shared: bool = False, waits: bool = False) -> None:
    """Lock a file against other processes until it is closed. On Windows, do nothing.

    Raises BlockingIOError if another process has locked it, unless it ``waits`` for that one.
    """
    if fcntl is not None:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind if waits else kind | fcntl.LOCK_NB)


def create_shared_file(prefix: str, num_bytes: int) -> Path:
    """Create a file of zeros for processes to map, in memory where the system has a folder for
    that. Raises OSError.

    All of it is allocated, because memory that is missing later would end the process that writes.
    """
    reason = OSError()
    for folder in (SHARED_MEMORY, None):  # None means the folder for temporary files
        try:
            descriptor, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        except OSError as error:
            reason = error
            continue
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(bytes(num_bytes))
        except OSError as error:
            reason = error
            remove_shared_file(Path(name))
        else:
            return Path(name)
    raise reason


def remove_shared_file(path: Path) -> None:
    """Remove the file, unless the system refuses it while a process has mapped it."""
    with suppress(OSError):
        path.unlink()
