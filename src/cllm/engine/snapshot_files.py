"""Snapshots in files, written and read by a thread so that no step waits for the disk.

A file is written under a temporary name and renamed when it is complete. It starts with MAGIC and a
head, which contains the model's fingerprint, the tokens, and the size and CRC-32s of the data that
follows. Files that do not match their head are not used.
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
from collections.abc import Callable, Iterable, KeysView
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, NamedTuple

import msgspec

from cllm.errors import StartupError
from cllm.private_files import open_private

if TYPE_CHECKING:
    from cllm.kv_cache.radix_tree import Tokens

MAGIC = b"cLLM KV 2\n"
LENGTH = struct.Struct("<I")
MAX_HEAD = 1 << 26
PIECE = 1 << 24  # bytes that one thread reads at a time
READERS = 4
MAX_PENDING = 1 << 30  # bytes waiting to be written; snapshots beyond this limit are not written
SUFFIX = ".kv"
TOKEN_BYTES = 4

log = logging.getLogger("cllm.disk")


class Head(msgspec.Struct):
    """The head of a file, before its ``size`` bytes of data.

    ``fingerprint`` identifies the model and its saved states. ``tokens`` are little-endian int32.
    ``checksums`` has the CRC-32 of each PIECE of the data. ``salt`` is the request's cache_salt.
    """

    fingerprint: str
    tokens: bytes
    size: int
    checksums: list[int]
    salt: str = ""


class Written(msgspec.Struct):
    """The end of a write. ``succeeded`` says whether the file is complete."""

    key: int
    succeeded: bool = True


class Read(msgspec.Struct):
    """The end of a read. ``succeeded`` says whether the file was intact and matched its key."""

    key: int
    succeeded: bool


class File(NamedTuple):
    """A file with a snapshot of ``size`` bytes."""

    path: Path
    size: int


class SnapshotFiles:
    """The files in one folder that belong to one model.

    Fetch the thread's results with ``results``, then call ``delete_all_except``. A file stays in
    the folder while its snapshot is kept or being written.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Raises StartupError if the folder cannot be written to."""
        self._folder = folder
        self._fingerprint = fingerprint
        self._files: dict[int, File] = {}
        self._writing: set[int] = set()  # keys whose Written was not fetched yet
        self._jobs: queue.SimpleQueue[Callable[[], Written | Read | None]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Written | Read | None] = queue.SimpleQueue()
        self._num_accepted_bytes = 0  # accepted for writing; changed only by the caller's thread
        # accepted bytes whose write has ended or failed; changed only by the writing thread
        self._num_finished_bytes = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for temporary in folder.glob("*.tmp"):
                delete_abandoned(temporary)
            probe = folder / f"probe.{os.getpid()}.tmp"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StartupError(
                f"kv.disk_cache: cannot write to {folder}: {error.strerror}"
            ) from None
        threading.Thread(target=self._work, daemon=True).start()

    def find(self) -> list[tuple[File, Tokens, str]]:
        """Return (file, tokens, salt) for each file of this model, least recently used first.

        Deletes files of this model that are damaged.
        """
        files = []
        for path in list_by_time(self._folder):
            with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
                head = read_head(file)
                if head.fingerprint != self._fingerprint:
                    continue
                # with another name, the tokens do not belong to the state
                size = file.tell() + head.size
                if path.name == name_file(head) and file.seek(0, os.SEEK_END) == size:
                    files.append((File(path, head.size), read_tokens(head), head.salt))
                else:
                    path.unlink()
        return files

    def find_new(self, name: str) -> tuple[File, Tokens, str] | None:
        """Return (file, tokens, salt) for a file that another process has put into the folder; None
        if it is known already, or cannot be used.
        """
        path = self._folder / name
        if any(file.path == path for file in self._files.values()):
            return None
        try:
            with path.open("rb") as file:
                head = read_head(file)
        except (OSError, ValueError) as error:
            log.warning("%s is not used: %s", name, error)
            return None
        if head.fingerprint != self._fingerprint or name != name_file(head):
            return None
        return File(path, head.size), read_tokens(head), head.salt

    def note_use(self, used: Iterable[tuple[Tokens, str]]) -> None:
        """Set the times of the files with these tokens and salts to now, least recently used
        first.
        """
        now = time.time_ns()
        for number, (tokens, salt) in enumerate(used):
            path = self._folder / name_file(self._make_head(tokens, salt))
            with contextlib.suppress(OSError):
                os.utime(path, ns=(now + number, now + number))

    def _make_head(self, tokens: Tokens, salt: str, size: int = 0) -> Head:
        return Head(self._fingerprint, tokens.astype("<i4").tobytes(), size, [], salt)

    def register(self, key: int, file: File) -> None:
        """Record that ``file`` contains the snapshot ``key``."""
        self._files[key] = file

    def size(self, key: int) -> int:
        """Return the size of the snapshot ``key`` in bytes."""
        return self._files[key].size

    def has_room(self, num_bytes: int) -> bool:
        """Return whether ``num_bytes`` more may be written without exceeding MAX_PENDING."""
        return self._num_accepted_bytes - self._num_finished_bytes + num_bytes <= MAX_PENDING

    def write(self, key: int, tokens: Tokens, data: memoryview, salt: str = "") -> None:
        """Start writing; ``data`` must not change.

        Does nothing if MAX_PENDING would be exceeded.
        """
        if not self.has_room(len(data)):
            return
        self._num_accepted_bytes += len(data)
        head = self._make_head(tokens, salt, len(data))
        path = self._folder / name_file(head)
        self._files[key] = File(path, len(data))
        self._writing.add(key)
        self._jobs.put(lambda: Written(key, self._write(path, head, data)))

    def _write(self, path: Path, head: Head, data: memoryview) -> bool:
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            head.checksums = checksums(data)
            encoded = msgspec.msgpack.encode(head)
            with open_private(temporary, "wb") as file:
                lock(file)
                file.write(MAGIC + LENGTH.pack(len(encoded)) + encoded)
                file.write(data)
            temporary.replace(path)
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller forgets the file
            log.warning("cannot write a prefix to %s: %s", self._folder, error)
            delete(temporary)
            return False
        finally:
            self._num_finished_bytes += len(data)
        return True

    def read(self, key: int, into: memoryview) -> None:
        """Start reading the snapshot ``key``; ``into`` must have its size."""
        path = self._files[key].path
        self._jobs.put(lambda: Read(key, self._read(path, into)))

    def _read(self, path: Path, into: memoryview) -> bool:
        try:
            with path.open("rb") as file:
                head = read_head(file)
                begin = file.tell()
            if head.fingerprint != self._fingerprint or head.size != len(into):
                raise ValueError("another file has replaced it")

            def read_piece(at: int) -> int:
                with path.open("rb") as file:
                    file.seek(begin + at)
                    file.readinto(into[at : at + PIECE])
                return zlib.crc32(into[at : at + PIECE])

            with ThreadPoolExecutor(READERS) as pool:
                checksums = list(pool.map(read_piece, range(0, head.size, PIECE)))
            if checksums != head.checksums:
                raise ValueError("a checksum is wrong")
            os.utime(path)
        except Exception as error:  # noqa: BLE001  # whatever it is, sequences wait for the result
            log.warning("%s is not used: %s", path.name, error)
            delete(path)
            return False
        return True

    def fail_read(self, key: int) -> None:
        """Make ``results`` report that the snapshot ``key`` could not be read. Do not try it."""
        self._results.put(Read(key, succeeded=False))

    def delete_all_except(self, keys: KeysView[int]) -> None:
        """Start deleting the files of all snapshots that are neither in ``keys`` nor being written.

        A file stays if the same tokens were saved again under another key. The call is cheap if
        there is nothing to delete.
        """
        if len(self._files) == len(keys) + len(self._writing):
            return
        for key in self._files.keys() - keys - self._writing:
            path = self._files.pop(key).path
            if all(file.path != path for file in self._files.values()):
                self._jobs.put(partial(delete, path))

    def _work(self) -> None:
        while True:
            try:
                self._results.put(self._jobs.get()())
            except Exception:
                log.exception("a job of the disk cache failed")

    def results(self, wait: float = 0.0) -> list[Written | Read]:
        """Return the thread's results since the last call; wait up to ``wait`` seconds for the
        first one.
        """
        ends: list[Written | Read | None] = []
        with contextlib.suppress(queue.Empty):
            ends.append(self._results.get(timeout=wait) if wait else self._results.get_nowait())
            while True:
                ends.append(self._results.get_nowait())
        results = [result for result in ends if result is not None]
        self._writing -= {result.key for result in results if isinstance(result, Written)}
        return results

    def flush(self, timeout: float) -> None:
        """Wait until all started jobs are done, at most ``timeout`` seconds."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait(timeout)


def delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def lock(file: IO[bytes]) -> None:
    """Lock a file until it is closed or its process ends. Raises BlockingIOError if another process
    has locked it.

    Without locks, a file counts as not locked: deleting a file that is being written costs only
    this file.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except (ImportError, OSError):
        pass


def delete_abandoned(temporary: Path) -> None:
    """Delete a temporary file, unless a process is writing it."""
    with contextlib.suppress(OSError):
        with temporary.open("rb") as file:
            lock(file)
        temporary.unlink()


def name_file(head: Head) -> str:
    """Return the name of the file for the tokens of ``head``."""
    key = hashlib.blake2b(head.fingerprint.encode()).digest()
    salt = head.salt.encode()
    person = hashlib.blake2b(salt, digest_size=16).digest() if salt else b""
    name = hashlib.blake2b(head.tokens, key=key, digest_size=16, person=person)
    return name.hexdigest() + SUFFIX


def read_tokens(head: Head) -> Tokens:
    import numpy as np  # not at the start of a server, which imports this module

    return np.frombuffer(head.tokens, "<i4").astype(np.int32)


def list_by_time(folder: Path) -> list[Path]:
    """Return the files with snapshots in ``folder``, least recently used first."""
    times = {}
    with contextlib.suppress(OSError):
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process may delete it meanwhile
                times[path] = path.stat().st_mtime_ns
    return sorted(times, key=times.__getitem__)


def check_file(path: Path) -> Head:
    """Return the head of a file that another machine has sent.

    Raises ValueError if the file is damaged or incomplete.
    """
    with path.open("rb") as file:
        head = read_head(file)
        begin = file.tell()
        pieces = iter(partial(file.read, PIECE), b"")
        if checksums_of(pieces) != head.checksums or file.tell() - begin != head.size:
            raise ValueError("it is damaged or incomplete")
    if len(head.tokens) % TOKEN_BYTES or not head.tokens:
        raise ValueError("its tokens are damaged")
    return head


def read_head(file: BinaryIO) -> Head:
    """Read the head of a file. Raises ValueError if the file is not a snapshot of this version."""
    start = file.read(len(MAGIC) + LENGTH.size)
    if not start.startswith(MAGIC) or len(start) < len(MAGIC) + LENGTH.size:
        raise ValueError("not a snapshot of this version")
    (length,) = LENGTH.unpack_from(start, len(MAGIC))
    if length > MAX_HEAD:
        raise ValueError("the head is too long")
    try:
        return msgspec.msgpack.decode(file.read(length), type=Head)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the head is damaged: {error}") from None


def checksums(data: memoryview) -> list[int]:
    """Return the CRC-32 of each PIECE, which is fast to compute.

    They detect damage, not attacks: a process that can write to the folder can write any valid
    file.
    """
    return checksums_of(data[at : at + PIECE] for at in range(0, len(data), PIECE))


def checksums_of(pieces: Iterable[bytes | memoryview]) -> list[int]:
    return [zlib.crc32(piece) for piece in pieces]
