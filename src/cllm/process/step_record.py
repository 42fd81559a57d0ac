"""A record in shared memory of the step that an engine process computes, and of how much it has
read of its messages. Its parent can read the record after a crash, or while the process hangs.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cllm.errors import StartupError
from cllm.private_files import create_shared_file

SIZE = 1 << 16  # bytes
# version (odd while the rest is being written), seconds that the step should take, bytes of names
HEAD = struct.Struct("<QdQ")
NUM_READ = struct.Struct("<Q")  # at the end; another thread writes it


class CurrentStep(NamedTuple):
    """The step that is being computed. ``version`` changes with each step.

    The step should take ``expected_seconds``, 0 if unknown. It has sequences of ``request_ids``,
    which are empty between steps.
    """

    version: int
    expected_seconds: float
    request_ids: list[str]

    @property
    def is_unknown(self) -> bool:
        """Whether the duration of the step cannot be estimated."""
        return bool(self.request_ids) and not self.expected_seconds


class StepRecord:
    """A file that both processes have mapped, with one entry and the number of bytes of messages
    that the engine process has read. Only the engine process writes it.
    """

    def __init__(self, path: Path) -> None:
        """Map the file at ``path``; see ``create_file``."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._version = 0

    def begin(self, request_ids: Iterable[str], expected_seconds: float) -> None:
        """Note that a step with sequences of these requests begins."""
        names = "\n".join(dict.fromkeys(request_ids)).encode()[: SIZE - HEAD.size - NUM_READ.size]
        self._version += 1
        self._map[: HEAD.size] = HEAD.pack(self._version, expected_seconds, 0)
        self._map[HEAD.size : HEAD.size + len(names)] = names
        self._write_head(expected_seconds, len(names))

    def end(self) -> None:
        """Note that the step has ended, or that there was none."""
        self._version += 1
        self._write_head(0.0, 0)

    def _write_head(self, expected_seconds: float, num_bytes: int) -> None:
        self._version += self._version % 2
        self._map[: HEAD.size] = HEAD.pack(self._version, expected_seconds, num_bytes)

    def read(self) -> CurrentStep:
        """Return the entry. One that was only partly written has no requests."""
        version, expected_seconds, num_bytes = HEAD.unpack_from(self._map)
        if version % 2:
            return CurrentStep(version, expected_seconds, [])
        names = self._map[HEAD.size : HEAD.size + num_bytes].decode(errors="replace")
        return CurrentStep(version, expected_seconds, names.split("\n") if names else [])

    @property
    def num_read(self) -> int:
        """The number of bytes that the engine process has read from its parent."""
        return int(NUM_READ.unpack_from(self._map, SIZE - NUM_READ.size)[0])

    @num_read.setter
    def num_read(self, value: int) -> None:
        self._map[SIZE - NUM_READ.size :] = NUM_READ.pack(value)

    def close(self) -> None:
        self._map.close()


def create_file() -> Path:
    """Create the file of a record. Raises StartupError if that is impossible."""
    try:
        return create_shared_file("cllm-step-", SIZE)
    except OSError as error:
        raise StartupError(f"cannot create a temporary file of {SIZE} bytes: {error}") from None
