"""The SQLite databases of the store and of the accounts' usage."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VERSION = 1  # of both schemas; cLLM 0.1 wrote the store's schema without a version
NEWER = "it was written by a newer version of cLLM"
STORE_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, account TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE INDEX IF NOT EXISTS files_of_account ON files (account, created_at);
CREATE INDEX IF NOT EXISTS files_that_expire ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, account TEXT NOT NULL, created_at INTEGER NOT NULL,
    input_file_id TEXT NOT NULL, has_ended INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of_account ON batches (account, created_at);
CREATE INDEX IF NOT EXISTS readers ON batches (input_file_id) WHERE NOT has_ended;
"""
# Earlier versions wrote the table "usage", which told no models apart; its rows are moved.
USAGE_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS days (
    account TEXT NOT NULL, day TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, PRIMARY KEY (account, day, model)
);
CREATE TABLE IF NOT EXISTS usage (
    account TEXT NOT NULL, day TEXT NOT NULL, requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, PRIMARY KEY (account, day)
);
CREATE TABLE IF NOT EXISTS latest (
    account TEXT NOT NULL, second INTEGER NOT NULL, requests INTEGER NOT NULL,
    tokens INTEGER NOT NULL, PRIMARY KEY (account, second)
);
CREATE TABLE IF NOT EXISTS clocks (
    boot_id TEXT NOT NULL, seconds REAL NOT NULL, unix_time REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS reports (
    front TEXT NOT NULL, replica TEXT NOT NULL, epoch TEXT NOT NULL, number INTEGER NOT NULL,
    PRIMARY KEY (front, replica)
);
INSERT INTO days SELECT account, day, '', requests, prompt_tokens, cached_tokens, completion_tokens
    FROM usage WHERE true ON CONFLICT DO UPDATE SET requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens;
DELETE FROM usage;
COMMIT;
"""
# The folder's lock excludes other processes. Without shared memory, SQLite needs no third file.
ALONE = ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL")
SHARED = ("busy_timeout = 5000", "journal_mode = WAL", "synchronous = NORMAL")
FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}


class Database:
    """A connection, used by one thread. All errors of SQLite become OSError: ENOSPC if a write
    failed (because the disk is full or a quota is used up), otherwise EIO.
    """

    def __init__(self, path: Path, schema: str, pragmas: Sequence[str]) -> None:
        """Open the database and create what is missing.

        Raises OSError, also for a database of a newer version, which stays unchanged.
        """
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite would let others read it
        self._connection = sqlite3.connect(path, isolation_level=None)
        try:
            with as_os_error():
                [(version,)] = self.rows("PRAGMA user_version")
                if version > VERSION:
                    raise OSError(errno.EPERM, NEWER)
                for pragma in pragmas:
                    self._connection.execute(f"PRAGMA {pragma}")
                self._connection.executescript(schema + f"PRAGMA user_version = {VERSION};")
        except OSError:
            self._connection.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all changes within this context, so that they are on disk afterwards. An exception
        undoes all of them.
        """
        with as_os_error():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.rollback()

    def rows(self, query: str, *values: Any) -> list[Any]:
        """Return the rows that ``query`` finds, as tuples."""
        with as_os_error():
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        self._connection.close()


@contextmanager
def as_os_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        is_full = getattr(error, "sqlite_errorcode", None) in FULL
        raise OSError(errno.ENOSPC if is_full else errno.EIO, str(error)) from error
