"""Lets engines that use the same cores compute one after the other.

The threads of llama.cpp spin while they wait for each other. With two engines on the same cores,
each one's threads wait for threads that the other one's have displaced, and both take several
times as long.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl

NEXT, NOW = 0, 1  # the bytes of the file that are locked by who computes next, and who computes
LOOK_SECONDS = 0.001  # between two looks at whether the turn of another engine has ended
TICK_SECONDS = 0.05  # between two signs of life while it has not


class Turn:
    """A lock that is held during a step. Who waits is next, before one that has just had it.

    The system releases the locks of a process that ends.
    """

    def __init__(self, path: str) -> None:
        """``path``: of the file that the engines lock, created if it is gone; see
        ``create_turn_file``.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def begin(self, tick: Callable[[], None]) -> None:
        """Begin a turn, after those of the engines that compute or wait already.

        ``tick`` is called regularly while it waits, so that one that is stopped is noticed.
        """
        self._lock(NEXT, tick)
        try:
            self._lock(NOW, tick)
        finally:
            self._unlock(NEXT)

    def end(self) -> None:
        """End the turn."""
        self._unlock(NOW)

    def _lock(self, byte: int, tick: Callable[[], None]) -> None:
        ticked = 0.0
        while True:
            with suppress(BlockingIOError, PermissionError):  # another engine has it
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                return
            if time.monotonic() - ticked >= TICK_SECONDS:
                tick()
                ticked = time.monotonic()
            time.sleep(LOOK_SECONDS)

    def _unlock(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


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
