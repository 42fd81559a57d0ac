"""One folder with what clients leave, and the thread that reads and writes its records."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from cllm.errors import BadRequest, EngineError
from cllm.store.batches import BatchStore
from cllm.store.database import ALONE, STORE_SCHEMA, Database
from cllm.store.files import FileStore, Room
from cllm.store.imports import import_records

T = TypeVar("T")

log = logging.getLogger("cllm.store")

try:
    import fcntl
except ImportError:  # Windows has no fcntl; there the operator must give each server its own folder
    fcntl = None  # type: ignore[assignment]


class Store:
    """``files`` and ``batches`` in a folder that only one server uses at a time; both exist once it
    is open. Their methods are called by ``run``.
    """

    files: FileStore
    batches: BatchStore

    def __init__(self, folder: Path, max_files: int, max_bytes: int) -> None:
        """``max_bytes``: of the files and of the answers of unfinished batches."""
        self.folder = folder
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
            self._lock = lock_folder(self.folder)
            self._load()
        except BaseException as error:
            self._close_and_unlock()
            if not isinstance(error, OSError):
                raise
            log.warning("files and batches are off: %s: %s", self.folder, error.strerror)
            is_locked = isinstance(error, BlockingIOError)
            reason = "is in use by another server" if is_locked else f"fails: {error.strerror}"
            message = f"Files and batches are off: their folder {reason}."
            raise BadRequest(message, code="storage_unavailable", status=503) from None
        self._is_open = True

    def _load(self) -> None:
        files, batches = self.folder / "files", self.folder / "batches"
        for folder in (files, batches):
            folder.mkdir(mode=0o700, exist_ok=True)
        self.room.clear()
        self._database = Database(self.folder / "store.db", STORE_SCHEMA, ALONE)
        import_records(files, batches, self._database)
        self.files = FileStore(files, self._database, self.room)
        self.batches = BatchStore(batches, self._database, self.files, self.room)
        self.files.load(self.batches.load())

    async def close(self) -> None:
        """Finish what the thread has to do, and unlock the folder."""
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


def lock_folder(folder: Path) -> int:
    """Create ``folder`` if necessary, and return the handle that locks it.

    Raises OSError if another process has locked it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
