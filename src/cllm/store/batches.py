"""The records of batches.

A batch that has ended is deleted when there are too many.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sqlite3
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from cllm.core.account import Account
from cllm.core.carried import Carried
from cllm.errors import BadRequest
from cllm.store.batch_answers import BatchAnswers
from cllm.store.database import Database
from cllm.store.files import FileStore, Room, disk_fault, insert_file, new_file

Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
]
STATUSES: tuple[Status, ...] = get_args(Status)
FINAL: frozenset[Status] = frozenset({"completed", "failed", "expired", "cancelled"})

MAX_UNFINISHED = 100
MAX_RECORDS = 1000  # beyond that, the oldest batches that have ended are deleted


class BatchRecord(msgspec.Struct):
    """A batch of the account ``account``.

    Its output files get the purpose ``output_purpose``, and are deleted ``output_expires_after``
    seconds after they were made. ``missing`` counts the failed requests that were not computed.
    ``ending`` is the status that the batch will have once its files are complete. ``times`` maps
    each status to the Unix time at which the batch got it, and ``usage`` maps kinds of tokens to
    their numbers when they were last counted. ``carried`` is set if the batch came from a front.
    """

    id: str
    account: str
    model: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None
    output_purpose: str = "batch_output"
    status: Status = "validating"
    ending: Status | Literal[""] = ""
    total: int = 0
    completed: int = 0
    failed: int = 0
    missing: int = 0
    errors: list[dict[str, Any]] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    times: dict[str, int] = {}
    usage: dict[str, int] = {}
    carried: Carried | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in FINAL


INSERT = "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO"
FILE_ID = re.compile(rb'"(file-\w+)"')

log = logging.getLogger("cllm.store")


class BatchStore:
    """The batches of one folder. All methods except ``answers`` block, and are called by the thread
    of the database.
    """

    def __init__(self, folder: Path, database: Database, files: FileStore, room: Room) -> None:
        self._folder = folder
        self._database = database
        self._files = files
        self._room = room
        self._answers: dict[str, BatchAnswers] = {}

    def load(self) -> set[str]:
        """Reserve room for the answers in the folder. Delete those that belong to no batch.

        Returns the ids of the files that batches name. Damaged records name files too.
        """
        records = dict(self._database.rows("SELECT id, CAST(record AS BLOB) FROM batches"))
        for pattern in ("*batch_*.output", "*batch_*.errors"):
            for path in self._folder.glob(pattern):
                if path.stem in records:
                    self._room.take(path.stat().st_size, check=False)
                else:
                    path.unlink()
        return {name.decode() for data in records.values() for name in FILE_ID.findall(data)}

    def answers(self, batch_id: str) -> BatchAnswers:
        """Return the answers of a batch, always the same object while it runs."""
        return self._answers.setdefault(batch_id, BatchAnswers(self._folder, batch_id))

    def add(self, record: BatchRecord, account: Account) -> None:
        """Store a new batch of ``account``; from now on its input file cannot be deleted.

        Raises BadRequest: 404 without that file, 429 if too many batches are unfinished, 507 if the
        disk is full, and if there is no room for its files.
        """
        self._files.get(record.input_file_id, account, "input_file_id")
        [(num_records, num_ended)] = self._database.rows(
            "SELECT count(*), coalesce(sum(has_ended), 0) FROM batches"
        )
        if num_records - num_ended >= MAX_UNFINISHED:
            message = (
                f"There are already {MAX_UNFINISHED} unfinished batches, the limit; please retry "
                f"when one has ended."
            )
            raise BadRequest(message, code="too_many_batches", status=429)
        self._room.check(2)
        oldest = self._database.rows(
            "SELECT id FROM batches WHERE has_ended ORDER BY created_at, rowid LIMIT ?",
            max(0, num_records + 1 - MAX_RECORDS),
        )
        try:
            with self._database.transaction() as connection:
                insert_batch(connection, record)
                connection.executemany("DELETE FROM batches WHERE id = ?", oldest)
        except OSError as error:
            raise disk_fault(error) from None
        for (batch_id,) in oldest:
            self._delete_answers(batch_id)

    def _delete_answers(self, batch_id: str) -> None:
        """Delete the answers of a batch without a record. If that fails, the next start deletes
        them.
        """
        answers = self.answers(batch_id)
        try:
            num_bytes = answers.num_bytes()
            answers.delete()
            self._room.give_back(num_bytes)
        except OSError as error:
            log.warning("the answers of %s cannot be deleted: %s", batch_id, error)
        del self._answers[batch_id]

    def save(self, record: BatchRecord) -> None:
        """Store the current state of ``record``, unless its batch has ended. Raises OSError."""
        with self._database.transaction() as connection:
            insert_batch(connection, record)

    def finish(self, record: BatchRecord) -> None:
        """Turn the answers of a batch into the files that ``record`` names, and store ``record``.

        If that raises OSError, or after a crash, it can be repeated.
        """
        answers, files = self.answers(record.id), []
        for part, file_id in (
            (answers.output, record.output_file_id),
            (answers.errors, record.error_file_id),
        ):
            if file_id is None:
                continue
            self._files.move_in(part, file_id)
            if (content := self._files.path(file_id)).exists():
                name, size = f"{record.id}{part.suffix}.jsonl", content.stat().st_size
                purpose, expires_after = record.output_purpose, record.output_expires_after
                files.append(new_file(record.account, name, purpose, size, expires_after, file_id))
        with self._database.transaction() as connection:
            num_new = sum(insert_file(connection, file) for file in files)
            insert_batch(connection, record)
        self._room.take(0, num_new, check=False)  # their bytes were taken as answers

    def delete(self, record: BatchRecord, account: Account) -> None:
        """Delete a batch that has ended, with its files. Raises BadRequest (507)."""
        for file_id in (record.input_file_id, record.output_file_id, record.error_file_id):
            if file_id is not None and self._files.exists(file_id, account):
                self._files.delete(file_id, account)
        try:
            with self._database.transaction() as connection:
                connection.execute("DELETE FROM batches WHERE id = ?", (record.id,))
        except OSError as error:
            raise disk_fault(error) from None
        self._delete_answers(record.id)

    def get(self, batch_id: str, account: Account) -> BatchRecord:
        """Return a batch.

        Raises BadRequest (404) if it does not exist or belongs to another account.
        """
        query = "SELECT id, record FROM batches WHERE id = ? AND account = ?"
        records = self._select(query, batch_id, account.name)
        if not records:
            raise no_batch(batch_id)
        return records[0]

    def list_for(self, account: Account) -> list[BatchRecord]:
        """Return the batches of ``account``, newest first."""
        query = "SELECT id, record FROM batches WHERE account = ?"
        return self._select(f"{query} ORDER BY created_at DESC, rowid DESC", account.name)

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches that have not ended, oldest first. Damaged ones count as ended."""
        query = "SELECT id, record FROM batches WHERE NOT has_ended ORDER BY created_at, rowid"
        records = self._select(query)
        rows = self._database.rows("SELECT id FROM batches WHERE NOT has_ended")
        if damaged := {batch_id for (batch_id,) in rows} - {record.id for record in records}:
            with contextlib.suppress(OSError), self._database.transaction() as connection:
                connection.executemany(
                    "UPDATE batches SET has_ended = 1 WHERE id = ?", [(one,) for one in damaged]
                )
        return records

    def _select(self, query: str, *values: str) -> list[BatchRecord]:
        """Return the records that ``query`` finds, without damaged ones."""
        records = []
        for batch_id, data in self._database.rows(query, *values):
            try:
                records.append(msgspec.json.decode(data, type=BatchRecord))
            except (msgspec.DecodeError, ValueError) as error:
                log.warning("the record of %s cannot be read: %s", batch_id, error)
        return records


def no_batch(batch_id: str) -> BadRequest:
    message = f"There is no batch {batch_id[:100]!r}."
    return BadRequest(message, param="batch_id", code="batch_not_found", status=404)


def insert_batch(connection: sqlite3.Connection, record: BatchRecord) -> None:
    """Store ``record``. The record of a batch that has ended does not change any more."""
    update = "UPDATE SET has_ended = excluded.has_ended, record = excluded.record"
    connection.execute(f"{INSERT} {update} WHERE NOT batches.has_ended", make_row(record))


def import_batch(connection: sqlite3.Connection, record: BatchRecord) -> None:
    """Store ``record``, unless the batch is known."""
    connection.execute(f"{INSERT} NOTHING", make_row(record))


def make_row(record: BatchRecord) -> tuple[Any, ...]:
    data = msgspec.json.encode(record)
    return (
        record.id,
        record.account,
        record.created_at,
        record.input_file_id,
        record.has_ended,
        data,
    )
