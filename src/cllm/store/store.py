"""One folder with the data that clients store, and the thread that reads and writes its records."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from cllm.errors import BadRequest, EngineError
from cllm.private_files import lock
from cllm.store.batches import BatchStore
from cllm.store.database import ALONE, STORE_SCHEMA, Database
from cllm.store.files import FileStore, Room
from cllm.store.imports import import_records, move_records

T = TypeVar("T")
LOCK = "lock"  # the name of the file that is locked, with the port of the server

log = logging.getLogger("cllm.store")


class Store:
    """``files`` and ``batches`` in a folder that only one server uses at a time.

    Both exist once the store is open. Call their methods through ``run``. A server that finds the
    folder in use creates its own folder inside, named after its ``port``. When the shared folder
    becomes free, it moves the content of its own folder there.
    """

    files: FileStore
    batches: BatchStore
    port = 0

    def __init__(self, folder: Path, max_files: int, max_bytes: int) -> None:
        """``max_bytes`` limits the files and the answers of unfinished batches together."""
        self.folder = self._shared = folder
        self.room = Room(max_files, max_bytes)
        self._thread = ThreadPoolExecutor(1, "cllm-store")
        self._is_open = self._is_closed = False
        self._lock: int | None = None
        self._database: Database | None = None

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``work``, called by the thread of the store.

        Calls are made in order. Raises EngineError once the store has been closed.
        """
        if self._is_closed:
            raise EngineError("The server is shutting down.")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def open(self) -> None:
        """Create the folder if necessary, lock it, and load what an earlier server left.

        Does nothing if it is open. Raises BadRequest (503) if that fails.
        """
        await self.run(self._open)

    def _open(self) -> None:
        if self._is_open:
            return
        try:
            self._lock = self._lock_folder()
            self._load()
        except BaseException as error:
            self._close_and_unlock()
            if not isinstance(error, OSError):
                raise
            is_locked = isinstance(error, BlockingIOError)
            reason = "is in use by another server" if is_locked else f"fails: {error.strerror}"
            log.warning(
                "files and batches are off, because the folder %s %s; storage.folder names another",
                *(self.folder, reason),
            )
            message = f"Files and batches are off: their folder {reason}."
            raise BadRequest(message, code="storage_unavailable", status=503) from None
        self._is_open = True

    def _lock_folder(self) -> int:
        """Lock the folder or, if another server uses it, this server's own folder inside. Raises
        OSError.
        """
        self.folder = self._shared
        try:
            return lock_folder(self.folder, self.port)
        except BlockingIOError:
            holder = (self.folder / LOCK).read_text()
            # an earlier server on the same port is about to end
            if not self.port or holder == str(self.port):
                raise
        log.warning(
            "another server uses %s, so this one keeps its files and batches in %s; "
            "storage.folder names another folder",
            *(self.folder, self._own_folder),
        )
        self.folder = self._own_folder
        return lock_folder(self.folder, self.port)

    @property
    def _own_folder(self) -> Path:
        return self._shared / f"port-{self.port}"

    def _load(self) -> None:
        files, batches = self.folder / "files", self.folder / "batches"
        for folder in (files, batches):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.room.clear()
        self._database = Database(self.folder / "store.db", STORE_SCHEMA, ALONE)
        import_records(files, batches, self._database)
        if self.folder == self._shared and self.port and self._own_folder.exists():
            self._take_over(self._own_folder)
        self.files = FileStore(files, self._database, self.room)
        self.batches = BatchStore(batches, self._database, self.files, self.room)
        self.files.load(self.batches.load())

    def _take_over(self, source: Path) -> None:
        """Move the data that this server kept in its own folder while another one used the shared
        one.

        Raises BlockingIOError while an earlier server of the same port uses it.
        """
        assert self._database is not None
        handle = lock_folder(source, self.port)
        try:
            move_records(source, self.folder, self._database)
        except OSError as error:
            log.warning("files and batches stay in %s: %s", source, error.strerror)
        finally:
            os.close(handle)

    async def close(self) -> None:
        """Finish the thread's work, and unlock the folder."""
        last = self._thread.submit(self._close_and_unlock)
        self._is_closed = True
        await asyncio.wrap_future(last)
        await asyncio.to_thread(self._thread.shutdown)

    def _close_and_unlock(self) -> None:
        if self._database is not None:
            self._database.close()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._database = None


def lock_folder(folder: Path, port: int) -> int:
    """Create ``folder`` if necessary, and return the handle that locks it for the server at a port.

    Raises OSError if another process has locked it. On Windows, which has no such locks, the
    operator must give each server a folder of its own.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock(handle)
        with suppress(OSError):  # of a full disk
            os.ftruncate(handle, 0)
            os.write(handle, str(port).encode())
    except OSError:
        os.close(handle)
        raise
    return handle
