"""Traces: the accounts, sizes and times of requests, without their texts.

Servers record and simulations replay them.

The format is Mooncake's (Qin et al., FAST 2025), one JSON object per line: ``timestamp`` in
milliseconds, ``input_length`` and ``output_length`` in tokens, and ``hash_ids``, the ids of the
prompt's blocks of 512 tokens. The same id means the same tokens. The later fields of TraceEntry are
our own and may be missing. Other fields are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import secrets
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from cllm.core.params import LARGEST
from cllm.core.request import Priority, PriorityName, Request
from cllm.errors import StartupError
from cllm.input_files import read_input
from cllm.private_files import open_private

ID_BYTES = 8  # a block begins with its id, so that different blocks differ from the start

NotNegative = Annotated[float, Meta(ge=0)]
Length = Annotated[int, Meta(ge=1, le=LARGEST)]
BlockId = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class TraceEntry(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, rename={"account": "key"}
):
    """One request of a trace.

    Lengths are in tokens, times in milliseconds; deadline_ms counts from the arrival.
    """

    timestamp: NotNegative
    input_length: Length
    output_length: Length
    hash_ids: list[BlockId]
    account: str = ""
    priority: PriorityName = "normal"
    block_size: Annotated[int, Meta(ge=ID_BYTES)] = 512
    deadline_ms: Annotated[float, Meta(gt=0)] | None = None
    model: str = ""

    def __post_init__(self) -> None:
        if not 0 <= len(self.hash_ids) * self.block_size - self.input_length < self.block_size:
            raise ValueError(
                f"hash_ids: {len(self.hash_ids)} blocks of {self.block_size} tokens, "
                f"but input_length is {self.input_length}"
            )

    @property
    def arrived(self) -> float:
        """The time of arrival in seconds."""
        return self.timestamp / 1000

    @property
    def service_class(self) -> Priority:
        return Priority[self.priority.upper()]

    def make_prompt(self) -> list[int]:
        """Return tokens below 256: the same for the same blocks; different blocks differ in their
        first few tokens.
        """
        return list(
            b"".join(make_block(i, self.block_size) for i in self.hash_ids)[: self.input_length]
        )


def make_block(block_id: int, size: int) -> bytes:
    name = block_id.to_bytes(ID_BYTES, "little")
    return name + hashlib.shake_128(name).digest(size - ID_BYTES)


def read_trace(path: Path) -> list[TraceEntry]:
    """Return all requests, sorted by timestamp.

    Raises StartupError with one line that names the file, the line and the field.
    """
    decode = msgspec.json.Decoder(TraceEntry).decode
    entries = []
    try:
        lines = read_input(path).splitlines()
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entries.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StartupError(f"{path}, line {number}: {str(error).replace('$.', '')}") from None
    if not entries:
        raise StartupError(f"{path} contains no requests")
    return sorted(entries, key=lambda entry: entry.timestamp)


def write_trace(path: Path, entries: list[TraceEntry]) -> None:
    """Write ``entries`` to ``path``. Raises StartupError if that fails."""
    try:
        path.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from None


# --- recording ----------------------------------------------------------------------------------

RECORDED_BLOCK = 16  # tokens; the smallest block worth sharing
MAX_PENDING = 10_000  # requests
CLOSE_TIMEOUT = 2.0  # seconds

log = logging.getLogger("cllm.trace")


class Recorder:
    """Appends the requests that have ended to a trace, with the lengths of their answers.

    The id of a block is a keyed hash of all tokens up to its end. The key is random and never
    stored, so a trace shows which requests share a prefix, but not their text. A thread writes the
    file. Entries that it cannot write in time are dropped, so a hanging disk delays no request.
    """

    def __init__(self, path: Path) -> None:
        """Raises StartupError if ``path`` cannot be written."""
        try:
            self._file = open_private(path, "ab")
        except OSError as error:
            raise StartupError(f"the trace {path} cannot be written: {error.strerror}") from None
        self._path = path
        self._secret = secrets.token_bytes(32)
        self._pending: queue.Queue[tuple[float, Request, list[int], str] | None] = queue.Queue(
            MAX_PENDING
        )
        self._failed = False
        self._num_tokens = self._num_answers = 0
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def record(
        self, request: Request, seconds_ago: float, output_lengths: Sequence[int], model: str = ""
    ) -> None:
        """Record ``request`` to ``model``, which arrived ``seconds_ago`` and got answers of
        ``output_lengths`` tokens.

        For an answer that did not begin, max_tokens is recorded, or else the mean length of the
        answers so far.
        """
        begun = [*filter(None, output_lengths)]
        self._num_tokens, self._num_answers = (
            self._num_tokens + sum(begun),
            self._num_answers + len(begun),
        )
        usual = round(self._num_tokens / (self._num_answers or 1)) or 1
        lengths = [length or request.params.max_tokens or usual for length in output_lengths]
        with contextlib.suppress(queue.Full):
            self._pending.put_nowait((time.time() - seconds_ago, request, lengths, model))

    def _write(self) -> None:
        while (item := self._pending.get()) is not None:
            arrived, request, lengths, model = item
            entry = TraceEntry(
                timestamp=round(arrived * 1000, 3),
                input_length=len(request.prompt),
                output_length=1,
                hash_ids=self._hash_ids(request.prompt),
                account=request.account,
                priority=request.priority.name.lower(),  # type: ignore[arg-type]
                block_size=RECORDED_BLOCK,
                deadline_ms=request.deadline and request.deadline * 1000,
                model=model,
            )
            lines = [
                msgspec.json.encode(msgspec.structs.replace(entry, output_length=length))
                for length in lengths
            ]
            try:
                self._file.writelines(line + b"\n" for line in lines)
                if self._pending.empty():
                    self._file.flush()
                self._failed = False
            except OSError as error:
                if not self._failed:
                    log.warning("the trace %s cannot be written: %s", self._path, error.strerror)
                self._failed = True

    def close(self) -> None:
        """Write pending entries for at most CLOSE_TIMEOUT, and close the file."""
        with contextlib.suppress(queue.Full):
            self._pending.put_nowait(None)
        self._thread.join(CLOSE_TIMEOUT)
        with contextlib.suppress(OSError):
            self._file.close()

    def _hash_ids(self, prompt: list[int]) -> list[int]:
        """Return the id of each block, including the last one, which may not be full."""
        tokens = array("i", prompt)
        data, size = tokens.tobytes(), RECORDED_BLOCK * tokens.itemsize
        ids, before = [], b""
        for start in range(0, len(data), size):
            before = hashlib.blake2b(
                before + data[start : start + size], digest_size=8, key=self._secret
            ).digest()
            ids.append(int.from_bytes(before, "little") >> 1)
        return ids
