"""Stores clients' files on disk. No name that a client chooses becomes a path.

The content of a file is ``files/ID.data``. It counts only if ``files/ID.json`` describes it. Both
are written under another name, synced to disk and renamed, so that both are complete after a crash.
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
except ImportError:  # Windows has no fcntl; there the operator must give each server its own folder
    fcntl = None  # type: ignore[assignment]


class StoredFile(msgspec.Struct):
    """owner: the account that it belongs to.

    bytes: its size. created_at, expires_at: Unix times.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class StateFolder:
    """A folder that only one server uses at a time. ``open`` creates it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @property
    def is_open(self) -> bool:
        return self._lock is not None

    def open(self) -> None:
        """Create the folder if necessary, and lock it. Raises BadRequest (503) if that fails."""
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
            message = (
                "Files and batches are off: their folder is in use by another server, or "
                "cannot be written to."
            )
            raise BadRequest(message, code="storage_unavailable", status=503) from None
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class FileStore:
    """At most ``max_files`` files.

    Together with the answers of batches, they take at most ``max_bytes``.
    """

    def __init__(self, folder: Path, max_files: int, max_bytes: int) -> None:
        self._folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._files: dict[str, StoredFile] = {}
        self._num_pending = 0  # files that are being written
        self._num_bytes = 0
        # whether a batch still needs a file, by its id
        self.is_read: Callable[[str], bool] = lambda _: False

    def load(self) -> None:
        """Load the files of an earlier server.

        Delete its incomplete files, and leave files of other programs alone.
        """
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
        """Return the path of a file's content."""
        return self._folder / f"{file_id}.data"

    def check_room(self, num_files: int) -> None:
        """Raise BadRequest if there is no room for ``num_files`` more."""
        if len(self._files) + self._num_pending + num_files > self._max_files:
            message = (
                f"No more than {self._max_files} files are kept (storage.max_files); delete some."
            )
            raise BadRequest(message, param="file", code="storage_full")

    def take_room(self, num_bytes: int, num_files: int = 0, *, check: bool = True) -> None:
        """Reserve room. With ``check``, raise BadRequest if there is not enough."""
        if check:
            self.check_room(num_files)
        if check and self._num_bytes + num_bytes > self._max_bytes:
            message = (
                f"The files would take more than {self._max_bytes} bytes "
                f"(storage.max_files_mb); delete some."
            )
            raise BadRequest(message, param="file", code="storage_full")
        self._num_pending += num_files
        self._num_bytes += num_bytes

    def return_room(self, num_bytes: int, num_files: int = 0) -> None:
        self._num_pending -= num_files
        self._num_bytes -= num_bytes

    def write(self, file: StoredFile, content: BinaryIO) -> None:
        """Write ``content`` to disk. Call ``take_room`` before and ``keep`` afterwards.

        Raises BadRequest (507) if the disk is full or fails.
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
        """Make ``part``, which is on disk, the content of ``file``.

        After a crash this is done or can be repeated.
        """
        # does not count before the next line
        write_whole(self._folder / f"{file.id}.json", msgspec.json.encode(file))
        part.replace(self.path(file.id))
        sync_folder(self._folder)

    def keep(self, file: StoredFile, num_pending: int = 0) -> None:
        """Register ``file``, which has been written."""
        self._num_pending -= num_pending
        self._files[file.id] = file

    def get(self, file_id: str, owner: str, param: str = "file_id") -> StoredFile:
        """Return a file.

        Raises BadRequest (404) if it does not exist or belongs to another account.
        """
        self._forget_expired()
        file = self._files.get(file_id)
        if file is None or file.owner != owner:
            message = f"There is no file {file_id[:100]!r}."
            raise BadRequest(message, param=param, code="file_not_found", status=404)
        return file

    def open(self, file: StoredFile) -> BinaryIO:
        return self.path(file.id).open("rb")

    def owned_by(self, owner: str) -> list[StoredFile]:
        """Return the files of ``owner``, oldest first."""
        self._forget_expired()
        return sorted(
            (file for file in self._files.values() if file.owner == owner),
            key=lambda file: file.created_at,
        )

    def delete(self, file: StoredFile) -> None:
        del self._files[file.id]
        self._num_bytes -= file.bytes
        (self._folder / f"{file.id}.json").unlink(missing_ok=True)
        self.path(file.id).unlink(missing_ok=True)

    def _forget_expired(self) -> None:
        now = time.time()
        for file in [
            file for file in self._files.values() if file.expires_at and file.expires_at < now
        ]:
            if not self.is_read(file.id):
                self.delete(file)


def disk_fault(error: OSError) -> BadRequest:
    """Log a disk error, and return the error for clients (507)."""
    log.warning("the disk does not take what clients leave: %s", error)
    message = "The server's disk does not take this now: it is full, or it fails."
    return BadRequest(message, code="disk_full", status=507)


def new_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_file(
    owner: str,
    filename: str,
    purpose: str,
    num_bytes: int,
    expires_after: int | None,
    file_id: str = "",
) -> StoredFile:
    """Return the record of a new file. ``expires_after``: seconds from now."""
    now = int(time.time())
    expires_at = None if expires_after is None else now + expires_after
    return StoredFile(file_id or new_id(), owner, filename, purpose, num_bytes, now, expires_at)


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file at ``path`` atomically: after a crash it has its old content or the new
    one.
    """
    part = path.with_suffix(".new")
    with part.open("wb") as target:
        target.write(content)
        target.flush()
        os.fsync(target.fileno())
    part.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, on systems where a folder can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
