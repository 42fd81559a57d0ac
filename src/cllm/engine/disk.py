"""Snapshots in files: written and read by a thread, so that no step waits for the disk.

A file is written under another name and renamed when it is whole. It begins with MAGIC and a head that says what model
it belongs to, its tokens, and the size and the CRC-32s of what follows. Whatever does not agree is no snapshot.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from cllm.errors import StartupError
from cllm.kv_cache.radix_tree import Tokens

MAGIC = b"cLLM KV 2\n"
LENGTH = struct.Struct("<I")
MAX_HEAD = 1 << 26
PIECE = 1 << 24  # bytes that one thread reads at a time
READERS = 4
LEFT_OVER = 3600.0  # seconds after which nobody writes to a temporary file any longer
MAX_PENDING = 1 << 30  # bytes that wait to be written; beyond that nothing more is accepted
SUFFIX = ".kv"

log = logging.getLogger("cllm.disk")


class Head(msgspec.Struct):
    """fingerprint: of the model and its states. tokens: as int32, little-endian. checksums: of each PIECE of ``size``
    bytes. salt: see Request.
    """

    fingerprint: str
    tokens: bytes
    size: int
    checksums: list[int]
    salt: str = ""


class Written(msgspec.Struct):
    key: int


class Read(msgspec.Struct):
    """``succeeded``: the file was what it should be."""

    key: int
    succeeded: bool


class File(NamedTuple):
    """``size``: bytes of the snapshot in it."""

    path: Path
    size: int


class DiskCache:
    """The files of one folder that belong to one model. Results of the thread are fetched with ``results``."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Raises StartupError if the folder cannot be written to."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._files: dict[int, File] = {}
        self._jobs: queue.SimpleQueue[Callable[[], Written | Read | None]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Written | Read | None] = queue.SimpleQueue()
        self._num_accepted_bytes = 0  # to be written; only the caller's thread changes this
        self._num_finished_bytes = 0  # of those; only the thread that writes changes this
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left_over in folder.glob("*.tmp"):
                if time.time() - left_over.stat().st_mtime > LEFT_OVER:
                    left_over.unlink()
            probe = folder / f"probe.{os.getpid()}.tmp"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StartupError(f"kv.disk_cache: cannot write to {folder}: {error.strerror}") from None
        threading.Thread(target=self._work, daemon=True).start()

    def find(self) -> list[tuple[File, Tokens, str]]:
        """Files of this model, the tokens they hold and their salts, the longest unused first."""
        found = []
        with contextlib.suppress(OSError):
            paths = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
            for path in paths:
                with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
                    head = read_head(file)
                    named = path.stem == self._name(
                        head.tokens, head.salt
                    )  # else the tokens are not those of the state
                    if head.fingerprint == self._fingerprint and named and file.seek(0, os.SEEK_END) >= head.size:
                        tokens = np.frombuffer(head.tokens, "<i4").astype(np.int32)
                        found.append((File(path, head.size), tokens, head.salt))
        return found

    def _name(self, tokens: bytes, salt: str) -> str:
        person = hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""
        return hashlib.blake2b(tokens, key=self._fingerprint.encode()[:64], digest_size=16, person=person).hexdigest()

    def name(self, key: int, file: File) -> None:
        """The snapshot ``key`` is what ``file`` holds."""
        self._files[key] = file

    def size(self, key: int) -> int:
        """Bytes of the snapshot ``key``."""
        return self._files[key].size

    def write(self, key: int, tokens: Tokens, data: memoryview, salt: str = "") -> None:
        """Begin to write; ``data`` must not change. Does nothing if MAX_PENDING would be exceeded."""
        if self._num_accepted_bytes - self._num_finished_bytes + len(data) > MAX_PENDING:
            return
        self._num_accepted_bytes += len(data)
        raw = tokens.astype("<i4").tobytes()
        path = self._folder / f"{self._name(raw, salt)}{SUFFIX}"
        self._files[key] = File(path, len(data))
        self._jobs.put(lambda: self._write(key, path, raw, data, salt))

    def _write(self, key: int, path: Path, tokens: bytes, data: memoryview, salt: str) -> Written | None:
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            head = msgspec.msgpack.encode(Head(self._fingerprint, tokens, len(data), checksums(data), salt))
            with temporary.open("wb") as file:
                file.write(MAGIC + LENGTH.pack(len(head)) + head)
                file.write(data)
            temporary.replace(path)
        except OSError as error:
            log.warning("a prefix could not be written to %s: %s", self._folder, error.strerror)
            with contextlib.suppress(OSError):
                temporary.unlink()
            return None
        finally:
            self._num_finished_bytes += len(data)
        return Written(key)

    def read(self, key: int, into: memoryview) -> None:
        """Begin to read what ``key`` names; ``into`` has its size."""
        path = self._files[key].path
        self._jobs.put(lambda: Read(key, self._read(path, into)))

    def _read(self, path: Path, into: memoryview) -> bool:
        try:
            with path.open("rb") as file:
                head = read_head(file)
                begin = file.tell()
            if head.fingerprint != self._fingerprint or head.size != len(into):
                raise ValueError("it is not what it was")

            def read_piece(at: int) -> int:
                with path.open("rb") as file:
                    file.seek(begin + at)
                    file.readinto(into[at : at + PIECE])
                return zlib.crc32(into[at : at + PIECE])

            with ThreadPoolExecutor(READERS) as pool:
                found = list(pool.map(read_piece, range(0, head.size, PIECE)))
            if found != head.checksums:
                raise ValueError("a checksum is wrong")
            os.utime(path)
        except Exception as error:  # noqa: BLE001  # whatever it is, somebody waits for the answer
            log.warning("%s is not used: %s", path.name, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return False
        return True

    def delete(self, key: int) -> None:
        """Begin to delete the file of ``key``, unless the same tokens were saved again under another key."""
        path = self._files.pop(key).path
        if any(file.path == path for file in self._files.values()):
            return

        def job() -> None:
            with contextlib.suppress(OSError):
                path.unlink()

        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            try:
                self._results.put(self._jobs.get()())
            except Exception:
                log.exception("a job of the disk cache failed")

    def results(self, wait: float = 0.0) -> list[Written | Read]:
        """What the thread has done since the last call; waits so many seconds for something."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._results.get(timeout=wait) if wait else self._results.get_nowait())
            while True:
                found.append(self._results.get_nowait())
        return [result for result in found if result is not None]

    def flush(self, timeout: float) -> None:
        """Wait until all that was begun is done, so many seconds at most."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait(timeout)


def read_head(file: BinaryIO) -> Head:
    """Raises ValueError if the file does not begin like a snapshot."""
    start = file.read(len(MAGIC) + LENGTH.size)
    if not start.startswith(MAGIC) or len(start) < len(MAGIC) + LENGTH.size:
        raise ValueError("no snapshot of this version")
    (length,) = LENGTH.unpack_from(start, len(MAGIC))
    if length > MAX_HEAD:
        raise ValueError("the head is too long")
    try:
        return msgspec.msgpack.decode(file.read(length), type=Head)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the head is damaged: {error}") from None


def checksums(data: memoryview) -> list[int]:
    """Against damage, not against enemies: who can write here can write anything. They have to be fast."""
    return [zlib.crc32(data[at : at + PIECE]) for at in range(0, len(data), PIECE)]
