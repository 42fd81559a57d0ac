"""Imports the records of earlier versions, which were JSON files beside the contents."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from cllm.store.batches import BatchRecord, import_batch
from cllm.store.database import Database
from cllm.store.files import StoredFile, insert_file

T = TypeVar("T", StoredFile, BatchRecord)

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
