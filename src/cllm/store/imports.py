"""Imports the records of earlier versions, which were JSON files next to the contents, and those of
another folder.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from cllm.store.batches import BatchRecord, import_batch
from cllm.store.database import ALONE, STORE_SCHEMA, Database
from cllm.store.files import StoredFile, insert_file

T = TypeVar("T", StoredFile, BatchRecord)
READ = {"files": "SELECT * FROM files", "batches": "SELECT * FROM batches"}
COPY = {
    "files": "INSERT OR IGNORE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
    "batches": "INSERT OR IGNORE INTO batches VALUES (?, ?, ?, ?, ?, ?)",
}

log = logging.getLogger("cllm.store")


def import_records(files: Path, batches: Path, database: Database) -> None:
    """Move the records in both folders into the database. After a crash this can be repeated.

    A file without content has no record. A damaged record of a batch is left where it is.
    """
    imported = []
    with database.transaction() as connection:
        for path, file in records_in(files, StoredFile):
            if path.with_suffix(".data").exists():
                insert_file(connection, file)
            imported.append(path)
        for path, record in records_in(batches, BatchRecord):
            import_batch(connection, record)
            imported.append(path)
    for path in imported:
        path.unlink()
    if imported:
        log.info("imported %d records of an earlier version", len(imported))


def move_records(source: Path, folder: Path, database: Database) -> None:
    """Move the files and batches of the folder ``source`` to ``folder``, and remove ``source``.

    After a crash this can be repeated, because a content is placed before its record and removed
    last. Raises OSError; then nothing has changed.
    """
    there = Database(source / "store.db", STORE_SCHEMA, ALONE)
    try:
        tables = {name: there.rows(query) for name, query in READ.items()}
    finally:
        there.close()
    for name in tables:
        for path in (source / name).glob("*"):
            place(path, folder / name / path.name)
    with database.transaction() as connection:
        for name, rows in tables.items():
            connection.executemany(COPY[name], rows)
    shutil.rmtree(source)
    log.info("moved the files and batches of %s to %s", source, folder)


def place(content: Path, target: Path) -> None:
    """Give ``target`` the content of a file, which also stays in place. Raises OSError."""
    try:
        target.hardlink_to(content)
    except FileExistsError:  # left by an earlier attempt
        pass
    except OSError:  # the file system has no hard links
        shutil.copy2(content, target)


def records_in(folder: Path, kind: type[T]) -> Iterator[tuple[Path, T]]:
    for path in sorted(folder.glob("*.json")):
        try:
            fields = msgspec.json.decode(path.read_bytes(), type=dict)
            record = msgspec.convert({**fields, "account": fields.get("owner")}, kind)
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            log.warning("%s cannot be imported: %s", path, error)
            continue
        if record.id == path.stem:
            yield path, record
