"""Files of clients on disk. Nothing that a client names becomes a path.

A file is ``files/ID.data``, and exists once ``files/ID.json`` says what it is. Both are written under another name,
brought to the disk and renamed, so that what is found after a crash is whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from cllm.errors import BadRequest

log = logging.getLogger("cllm.files")

SUFFIXES = (".json", ".data", ".part", ".new")

try:
    import fcntl
except ImportError:  # Windows has none; there it is up to the operator that two servers have two folders
    fcntl = None  # type: ignore[assignment]


class StoredFile(msgspec.Struct):
    """owner: on whose account it lies here. bytes: its size. created_at, expires_at: Unix times."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class StateFolder:
    """A folder that one server uses at a time; it is made when something is put into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open(self) -> None:
        """Raises BadRequest (503) if it cannot be had."""
        if self.is_open:
            return
        lock = None
        try:
            for name in ("files", "batches"):
                (self.path / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if lock is not None:
                os.close(lock)
            log.warning("files and batches are off: %s: %s", self.path, error.strerror)
            message = "Files and batches are off: their folder is in use by another server, or cannot be written to."
            raise BadRequest(message, code="storage_unavailable", status=503) from None
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class FileStore:
    """At most ``max_files`` files; of all that is kept the size is at most ``max_bytes``."""

    def __init__(self, folder: Path, max_files: int, max_bytes: int) -> None:
        self._folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._files: dict[str, StoredFile] = {}
        self._num_pending = 0  # files on their way to the disk
        self._num_bytes = 0
        self.is_read: Callable[[str], bool] = lambda _: False  # somebody reads the file with this id, so it stays

    def load(self) -> None:
        """Find what an earlier server has left; of its files, what is not whole goes. Others are none of ours."""
        for path in self._folder.glob("*.json"):
            with contextlib.suppress(msgspec.MsgspecError, OSError):
                file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
                if file.id == path.stem and self.path(file.id).exists():
                    self._files[file.id] = file
                    self._num_bytes += file.bytes
        for path in self._folder.glob("file-*"):
            is_known = path.stem in self._files and path.suffix in (".json", ".data")
            if not is_known and path.suffix in SUFFIXES and path.is_file():
                path.unlink()

    def path(self, file_id: str) -> Path:
        """Where the content lies of a file that is known."""
        return self._folder / f"{file_id}.data"

    def check_room(self, num_files: int) -> None:
        """Raises BadRequest if there is no room for so many more."""
        if len(self._files) + self._num_pending + num_files > self._max_files:
            message = f"No more than {self._max_files} files are kept (storage.max_files); delete some."
            raise BadRequest(message, param="file", code="storage_full")

    def take_room(self, num_bytes: int, num_files: int = 0, *, check: bool = True) -> None:
        """Raises BadRequest if there is no room for so much more, unless it is there already."""
        if check:
            self.check_room(num_files)
        if check and self._num_bytes + num_bytes > self._max_bytes:
            message = f"The files would take more than {self._max_bytes} bytes (storage.max_files_mb); delete some."
            raise BadRequest(message, param="file", code="storage_full")
        self._num_pending += num_files
        self._num_bytes += num_bytes

    def return_room(self, num_bytes: int, num_files: int = 0) -> None:
        self._num_pending -= num_files
        self._num_bytes -= num_bytes

    def write(self, file: StoredFile, content: BinaryIO) -> None:
        """Bring ``content`` to the disk; the room for it has been taken. ``keep`` is to follow.

        Raises BadRequest (507) if the disk does not take it.
        """
        part = self._folder / f"{file.id}.part"
        try:
            with part.open("xb") as target:
                shutil.copyfileobj(content, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
            self.adopt(file, part)
        except OSError as error:
            for path in (part, self._folder / f"{file.id}.json", self._folder / f"{file.id}.new"):
                path.unlink(missing_ok=True)
            raise disk_fault(error) from None

    def adopt(self, file: StoredFile, part: Path) -> None:
        """Make ``part``, which is on the disk, the content of ``file``. After a crash this is done or can be done."""
        write_whole(self._folder / f"{file.id}.json", msgspec.json.encode(file))  # worth nothing before the next line
        part.replace(self.path(file.id))
        sync_folder(self._folder)

    def keep(self, file: StoredFile, num_pending: int = 0) -> None:
        """Let ``file``, which has been written, be known."""
        self._num_pending -= num_pending
        self._files[file.id] = file

    def get(self, file_id: str, owner: str, param: str = "file_id") -> StoredFile:
        """Raises BadRequest (404) for what is not there, or another's."""
        self._forget_expired()
        file = self._files.get(file_id)
        if file is None or file.owner != owner:
            message = f"There is no file {file_id[:100]!r}."
            raise BadRequest(message, param=param, code="file_not_found", status=404)
        return file

    def open(self, file: StoredFile) -> BinaryIO:
        return self.path(file.id).open("rb")

    def owned_by(self, owner: str) -> list[StoredFile]:
        """The oldest first."""
        self._forget_expired()
        return sorted((file for file in self._files.values() if file.owner == owner), key=lambda file: file.created_at)

    def delete(self, file: StoredFile) -> None:
        del self._files[file.id]
        self._num_bytes -= file.bytes
        (self._folder / f"{file.id}.json").unlink(missing_ok=True)
        self.path(file.id).unlink(missing_ok=True)

    def _forget_expired(self) -> None:
        now = time.time()
        for file in [file for file in self._files.values() if file.expires_at and file.expires_at < now]:
            if not self.is_read(file.id):
                self.delete(file)


def disk_fault(error: OSError) -> BadRequest:
    """What clients are told of a disk that is full, or does not write for another reason."""
    log.warning("the disk does not take what clients leave: %s", error)
    message = "The server's disk does not take this now: it is full, or it fails."
    return BadRequest(message, code="disk_full", status=507)


def new_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_file(
    owner: str, filename: str, purpose: str, num_bytes: int, expires_after: int | None, file_id: str = ""
) -> StoredFile:
    """``expires_after``: seconds from now on."""
    now = int(time.time())
    expires_at = None if expires_after is None else now + expires_after
    return StoredFile(file_id or new_id(), owner, filename, purpose, num_bytes, now, expires_at)


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file at ``path``: after a crash it has its old content or the new one."""
    part = path.with_suffix(".new")
    with part.open("wb") as target:
        target.write(content)
        target.flush()
        os.fsync(target.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk, where a folder can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
