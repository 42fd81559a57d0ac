"""Lets engines that use the same cores divide them while several compute.

The threads of llama.cpp spin while they wait for each other. With two engines that use all cores,
each one's threads wait for threads that the other one's have displaced, and both together are about
half as fast as one. With half of the threads each, they are faster than one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time

from cllm.private_files import create_shared_file

if sys.platform != "win32":
    import fcntl

MOST_SECONDS = 5.0  # longest expected duration of a step
SLOTS = 256  # engines that can use a file
BUSY_SECONDS = 0.5  # an engine counts as idle so long after the expected end of its step


class SharedCores:
    """A file in which each engine records that it computes.

    An engine process locks the byte of its slot, so that no other engine uses the slot. The system
    releases the lock when the process ends.
    """

    def __init__(self, path: str) -> None:
        """``path`` is the file that ``create_cores_file`` has created.

        Raises OSError if it cannot be used, and ValueError if it is too short.
        """
        import numpy as np  # imported here, because the API process only creates the file

        self._file = os.open(path, os.O_RDWR)
        self._slot = self._find_slot()
        self._until = np.frombuffer(mmap.mmap(self._file, 8 * SLOTS), np.float64)

    def _find_slot(self) -> int:
        for slot in range(SLOTS):
            with contextlib.suppress(BlockingIOError, PermissionError):  # another engine has it
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
                return slot
        raise OSError(f"more than {SLOTS} engines share cores")

    def begin(self, seconds: float) -> int:
        """Note that a step begins that should take ``seconds``. Return how many engines compute
        now, including this one.

        The step is expected to take at most MOST_SECONDS.
        """
        now = time.monotonic()  # the same for all processes
        self._until[self._slot] = now + min(max(seconds, 0.0), MOST_SECONDS) + BUSY_SECONDS
        return int((self._until > now).sum())


def create_cores_file() -> str:
    """Create a file for ``SharedCores`` and return its path, or "" if that is impossible."""
    if sys.platform == "win32":
        return ""
    with contextlib.suppress(OSError):
        return str(create_shared_file("cllm-cores-", 8 * SLOTS))
    return ""
