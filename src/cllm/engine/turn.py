"""Lets engines that use the same cores compute one after the other.

The threads of llama.cpp spin while they wait for each other. With two engines on the same cores,
each one's threads wait for threads that the other one's have displaced, and both take several
times as long.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

NEXT, NOW = 0, 1  # the bytes of the file that are locked by who computes next, and who computes


class Turn:
    """A lock that is held during a step. Who waits is next, before one that has just had it.

    The system releases the locks of a process that ends.
    """

    def __init__(self, path: str) -> None:
        """``path``: of the file that the engines lock; see ``create_turn_file``."""
        self._file = os.open(path, os.O_RDWR)

    def try_begin(self) -> bool:
        """Begin a turn, if no other engine computes or waits."""
        try:
            self._lock(NEXT, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            self._lock(NOW, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            self._lock(NEXT, fcntl.LOCK_UN)
        return True

    def begin(self) -> None:
        """Begin a turn, after those of the engines that compute or wait already."""
        self._lock(NEXT, fcntl.LOCK_EX)
        self._lock(NOW, fcntl.LOCK_EX)
        self._lock(NEXT, fcntl.LOCK_UN)

    def end(self) -> None:
        """End the turn."""
        self._lock(NOW, fcntl.LOCK_UN)

    def _lock(self, byte: int, how: int) -> None:
        fcntl.lockf(self._file, how, 1, byte)


def create_turn_file() -> str:
    """Create a file that engines lock, and return its path; "" where files cannot be locked so."""
    if sys.platform == "win32":
        return ""
    descriptor, path = tempfile.mkstemp(prefix="cllm-turn-")
    os.close(descriptor)
    return path


def remove_turn_file(path: str) -> None:
    """Remove the file, if there is one."""
    with suppress(OSError):
        Path(path).unlink()
