"""The answers of a batch while it is computed.

Each answer is a line appended to ``batches/ID.output`` or ``ID.errors``. A line that a crash has
cut off is removed, so every line exists once or not at all.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cllm.private_files import open_private

Identify = Callable[[bytes], tuple[str, dict[str, int]]]
"""Takes an answer; returns the id of its request, and its numbers of tokens by kind."""


class AnsweredRequests(NamedTuple):
    """The ids of the requests that have an answer, and the tokens of all answers together."""

    completed: set[str]
    failed: set[str]
    usage: dict[str, int]


class BatchAnswers:
    """The answers of one batch.

    All methods except ``add`` block, and are called by one thread, one at a time.
    """

    def __init__(self, folder: Path, batch_id: str) -> None:
        self.output = folder / f"{batch_id}.output"
        self.errors = folder / f"{batch_id}.errors"
        self._unwritten: dict[Path, list[bytes]] = {self.output: [], self.errors: []}
        self._sizes: dict[Path, int] = {}  # of the files up to the last answer that was flushed

    def add(self, line: bytes, *, succeeded: bool) -> None:
        """Add an answer, which is on disk after the next ``flush``."""
        self._unwritten[self.output if succeeded else self.errors].append(line)

    def flush(self) -> None:
        """Write all added answers to disk.

        This is the slowest part, and takes as long for one answer as for many.

        If an OSError keeps answers from the disk, the next flush writes them. A flush writes the
        answers of all tasks, not only those of its caller.
        """
        for path, lines in self._unwritten.items():
            if taken := lines.copy():
                size = self._sizes.setdefault(path, path.stat().st_size if path.exists() else 0)
                self._sizes[path] = append_whole(path, b"".join(taken), size)
                del lines[: len(taken)]

    def read_answered(self, identify: Identify) -> AnsweredRequests:
        """Return the ids of the requests that have an answer, and the answers' tokens.

        Remove lines that a crash has cut off.
        """
        self.flush()
        usage: Counter[str] = Counter()
        completed, failed = (
            set(read_request_ids(path, identify, usage)) for path in (self.output, self.errors)
        )
        return AnsweredRequests(completed, failed, dict(usage))

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.output, self.errors) if path.exists())

    def delete(self) -> None:
        for path in (self.output, self.errors):
            path.unlink(missing_ok=True)


def append_whole(path: Path, data: bytes, size: int) -> int:
    """Append ``data`` to the first ``size`` bytes, sync it to disk, and return the new size.

    If that raises OSError, nothing is appended, or the next call removes it.
    """
    with open_private(path, "ab", buffering=0) as file:
        if file.tell() > size:  # a failed call could not undo its writing
            file.truncate(size)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise
        return file.tell()


def read_request_ids(path: Path, identify: Identify, usage: Counter[str]) -> Iterator[str]:
    """Yield the ids of the requests whose answers are in a file, and add their tokens to ``usage``.

    Remove a line that a crash has cut off.
    """
    if not path.exists():
        return
    whole = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            request_id, tokens = identify(line)
            usage.update(tokens)
            yield request_id
    os.truncate(path, whole)
