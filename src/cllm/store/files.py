"""The files of clients. No name that a client chooses becomes a path.

The content of a file is ``files/ID.data``. A file exists if it has a content and a record in the
database. Its content is written and deleted before its record: a crash in between leaves no file,
and a full disk does not prevent a file from being deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import BinaryIO

import msgspec

from cllm.core.account import Account
from cllm.errors import BadRequest
from cllm.private_files import open_private
from cllm.store.database import Database

log = logging.getLogger("cllm.store")

SUFFIXES = (".data", ".part", ".json", ".new")  # earlier versions wrote the last two


class StoredFile(msgspec.Struct, frozen=True):
    """The record of a file of ``account`` with ``bytes`` bytes. Both times are Unix times.

    The fields are the columns of the table ``files``, in this order.
    """

    id: str
    account: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class Room:
    """The room for files and for the answers of unfinished batches. Any thread may use it."""

    def __init__(self, max_files: int, max_bytes: int) -> None:
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self._num_files = 0
        self._num_bytes = 0

    def check(self, num_files: int) -> None:
        """Raise BadRequest if there is no room for ``num_files`` more."""
        if self._num_files + num_files > self._max_files:
            message = (
                f"No more than {self._max_files} files are kept (storage.max_files); delete some."
            )
            raise BadRequest(message, param="file", code="storage_full")

    def take(self, num_bytes: int, num_files: int = 0, *, check: bool = True) -> None:
        """Reserve room. With ``check``, raise BadRequest if there is not enough."""
        with self._lock:
            if check and num_files:
                self.check(num_files)
            if check and self._num_bytes + num_bytes > self._max_bytes:
                message = (
                    f"The files would take more than {self._max_bytes} bytes "
                    f"(storage.max_files_mb); delete some."
                )
                raise BadRequest(message, param="file", code="storage_full")
            self._num_files += num_files
            self._num_bytes += num_bytes

    def give_back(self, num_bytes: int, num_files: int = 0) -> None:
        self.take(-num_bytes, -num_files, check=False)


class FileStore:
    """The files in one folder. All methods block; all except ``write`` are called by the thread of
    the database.
    """

    def __init__(self, folder: Path, database: Database, room: Room) -> None:
        self._folder = folder
        self._database = database
        self._room = room

    def load(self, named: AbstractSet[str]) -> None:
        """Reserve room for all files. Delete files that a crash has left incomplete, and leave
        files of other programs alone.

        Batches name the files with the ids ``named``. Their contents are kept, because a batch may
        have been writing them.
        """
        lost = []
        for file_id, num_bytes in self._database.rows("SELECT id, bytes FROM files"):
            if self.path(file_id).exists():
                self._room.take(num_bytes, 1, check=False)
            else:
                lost.append((file_id,))
        with self._database.transaction() as connection:
            connection.executemany("DELETE FROM files WHERE id = ?", lost)
        known = {file_id for (file_id,) in self._database.rows("SELECT id FROM files")}
        for file_id in named - known:
            if (content := self.path(file_id)).exists():
                self._room.take(content.stat().st_size, check=False)
        for path in self._folder.glob("file-*"):
            is_known = path.suffix == ".data" and path.stem in known | named
            if not is_known and path.suffix in SUFFIXES and path.is_file():
                path.unlink()

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._folder / f"{file_id}.data"

    def write(self, file: StoredFile, content: BinaryIO) -> None:
        """Write ``content`` to disk. Take its room before, and call ``add`` afterwards.

        Raises BadRequest (507) if the disk is full or fails.
        """
        part = self._folder / f"{file.id}.part"
        try:
            with open_private(part, "xb") as target:
                shutil.copyfileobj(content, target, 1 << 20)
                target.flush()
                os.fsync(target.fileno())
            self.move_in(part, file.id)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise disk_fault(error) from None

    def move_in(self, source: Path, file_id: str) -> None:
        """Make ``source``, which is on disk, the content of a file, unless it already is."""
        with contextlib.suppress(FileNotFoundError):
            source.replace(self.path(file_id))
        sync_folder(self._folder)

    def add(self, file: StoredFile) -> None:
        """Record ``file``, whose content has been written. Raises BadRequest (507)."""
        try:
            with self._database.transaction() as connection:
                insert_file(connection, file)
        except OSError as error:
            self.path(file.id).unlink(missing_ok=True)
            raise disk_fault(error) from None

    def get(self, file_id: str, account: Account, param: str = "file_id") -> StoredFile:
        """Return a file.

        Raises BadRequest (404) if it does not exist or belongs to another account.
        """
        query = "SELECT * FROM files WHERE id = ? AND account = ?"
        files = self._find(query, file_id, account.name)
        if not files:
            raise no_file(file_id, param)
        return files[0]

    def exists(self, file_id: str, account: Account) -> bool:
        query = "SELECT * FROM files WHERE id = ? AND account = ?"
        return bool(self._find(query, file_id, account.name))

    def open(self, file_id: str, account: Account) -> tuple[StoredFile, BinaryIO]:
        """Return a file and its content. Raises what ``get`` raises."""
        file = self.get(file_id, account)
        try:
            return file, self.path(file.id).open("rb")
        except FileNotFoundError:  # it was deleted, and the disk kept its record from being deleted
            raise no_file(file_id, "file_id") from None

    def list_for(self, account: Account) -> list[StoredFile]:
        """Return the files of ``account``, oldest first."""
        query = "SELECT * FROM files WHERE account = ? ORDER BY created_at, rowid"
        return self._find(query, account.name)

    def delete(self, file_id: str, account: Account) -> None:
        """Delete a file. Raises BadRequest if a batch still reads it, and what ``get`` raises."""
        file = self.get(file_id, account)
        for (batch_id,) in self._database.rows(
            "SELECT id FROM batches WHERE input_file_id = ? AND NOT has_ended", file_id
        ):
            message = f"The batch {batch_id} still reads this file; cancel it first, or wait."
            raise BadRequest(message, param="file_id", code="file_in_use")
        self._delete(file)

    def _find(self, query: str, *values: str) -> list[StoredFile]:
        """Return the files that ``query`` finds and that have not expired.

        Delete those that have expired and that no batch reads. If that fails, the next call tries
        again.
        """
        undeleted = set()
        for file in self._select(
            "SELECT * FROM files WHERE expires_at < ? AND NOT EXISTS"
            " (SELECT 1 FROM batches WHERE input_file_id = files.id AND NOT has_ended)",
            time.time(),
        ):
            try:
                self._delete(file)
            except BadRequest:  # which has been logged
                undeleted.add(file)
        return [file for file in self._select(query, *values) if file not in undeleted]

    def _select(self, query: str, *values: str | float) -> list[StoredFile]:
        return [StoredFile(*row) for row in self._database.rows(query, *values)]

    def _delete(self, file: StoredFile) -> None:
        """Delete a file. Raises BadRequest (507)."""
        try:
            self.path(file.id).unlink(missing_ok=True)
            with self._database.transaction() as connection:
                connection.execute("DELETE FROM files WHERE id = ?", (file.id,))
        except OSError as error:
            raise disk_fault(error) from None
        self._room.give_back(file.bytes, 1)


def insert_file(connection: sqlite3.Connection, file: StoredFile) -> int:
    """Record ``file``, unless there is a record of it. Returns the number of new records."""
    insert = "INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)"
    return connection.execute(insert, msgspec.structs.astuple(file)).rowcount


def no_file(file_id: str, param: str) -> BadRequest:
    message = f"There is no file {file_id[:100]!r}."
    return BadRequest(message, param=param, code="file_not_found", status=404)


def disk_fault(error: OSError) -> BadRequest:
    """Log a disk error, and return the error for clients (507)."""
    log.warning("cannot write to the storage folder: %s", error)
    message = "The server cannot store this: its disk is full or fails."
    return BadRequest(message, code="disk_full", status=507)


def new_file(
    account: str,
    filename: str,
    purpose: str,
    num_bytes: int,
    expires_after: int | None,
    file_id: str,
) -> StoredFile:
    """Return the record of a new file, which expires ``expires_after`` seconds from now."""
    now = int(time.time())
    expires_at = None if expires_after is None else now + expires_after
    return StoredFile(file_id, account, filename, purpose, num_bytes, now, expires_at)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, on systems where a folder can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
