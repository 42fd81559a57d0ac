"""Folders of earlier versions, which stored each record in a JSON file."""

import json
import subprocess
import sys

import pytest
from store_parts import OWN, names, opened

from cllm.store.batches import BatchRecord
from cllm.store.files import StoredFile

FILE = {
    "owner": "o",
    "filename": "in.jsonl",
    "purpose": "batch",
    "bytes": 3,
    "created_at": 1,
    "expires_at": None,
}
BATCH = {
    "owner": "o",
    "model": "m",
    "endpoint": "/v1/completions",
    "input_file_id": "file-1",
    "completion_window": "24h",
    "created_at": 1,
    "expires_at": 2,
    "metadata": {"a": "b"},
    "output_expires_after": None,
    "status": "in_progress",
    "ending": "",
    "total": 2,
    "completed": 1,
    "failed": 0,
    "errors": [],
    "output_file_id": None,
    "error_file_id": None,
    "times": {"in_progress": 1},
    "usage": {"input": 2},
}


def write_records(folder):
    """Write the files of an earlier version: two files, a running batch and one that has ended."""
    for name in ("files", "batches"):
        (folder / name).mkdir()
    for i in (1, 2):
        (folder / "files" / f"file-{i}.json").write_text(json.dumps({"id": f"file-{i}", **FILE}))
        (folder / "files" / f"file-{i}.data").write_bytes(b"abc")
    for i, status in ((1, "in_progress"), (2, "completed")):
        record = {"id": f"batch_{i}", **BATCH, "status": status}
        (folder / "batches" / f"batch_{i}.json").write_text(json.dumps(record))
    (folder / "batches" / "batch_1.output").write_bytes(b"{}\n")


def file_of(i):
    return StoredFile(f"file-{i}", "o", "in.jsonl", "batch", 3, 1)


def batch_of(i, status):
    fields = {name: value for name, value in BATCH.items() if name != "owner"}
    return BatchRecord(**{"id": f"batch_{i}", "account": "o", **fields, "status": status})


def check_imported(folder):
    with opened(folder) as store:
        assert store.files.list_for(OWN) == [file_of(1), file_of(2)]
        assert store.batches.list_for(OWN) == [
            batch_of(2, "completed"),
            batch_of(1, "in_progress"),
        ]
        assert store.batches.unfinished() == [batch_of(1, "in_progress")]
        assert (store.room._num_files, store.room._num_bytes) == (2, 9)
    assert names(folder / "files") == {"file-1.data", "file-2.data"}
    assert names(folder / "batches") == {"batch_1.output"}


def test_records_of_an_earlier_version_are_imported(tmp_path):
    write_records(tmp_path)
    check_imported(tmp_path)
    check_imported(tmp_path)


KILLED = """
import os, sys
from pathlib import Path
from cllm.store import imports
from cllm.store.store import Store

left = int(sys.argv[2])
def countdown(work):
    def called(*arguments):
        global left
        if not left:
            os._exit(9)
        left -= 1
        return work(*arguments)
    return called

imports.insert_file = countdown(imports.insert_file)
imports.import_batch = countdown(imports.import_batch)
Path.unlink = countdown(Path.unlink)
Store(Path(sys.argv[1]), 10, 10_000)._open()
"""


@pytest.mark.parametrize("num_calls", [0, 1, 3, 4, 5, 7])
def test_interrupted_import_is_repeated(tmp_path, num_calls):
    """It is interrupted before its transaction is committed, or while the JSON files are deleted."""
    write_records(tmp_path)
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(num_calls)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 9
    check_imported(tmp_path)


def test_deleted_file_does_not_come_back(tmp_path):
    """Its old record could not be deleted."""
    write_records(tmp_path)
    old = (tmp_path / "files" / "file-2.json").read_bytes()
    with opened(tmp_path) as store:
        store.files.delete("file-2", OWN)
    (tmp_path / "files" / "file-2.json").write_bytes(old)
    with opened(tmp_path) as store:
        assert store.files.list_for(OWN) == [file_of(1)]


def test_newer_records_are_not_replaced(tmp_path):
    """Records left behind by an interrupted import are ignored."""
    write_records(tmp_path)
    old = (tmp_path / "batches" / "batch_1.json").read_bytes()
    with opened(tmp_path) as store:
        store.batches.save(batch_of(1, "cancelled"))
    (tmp_path / "batches" / "batch_1.json").write_bytes(old)
    with opened(tmp_path) as store:
        assert store.batches.get("batch_1", OWN).status == "cancelled"


def test_damaged_records_are_not_imported(tmp_path, caplog):
    """A file is deleted, because no client can request it; a batch stays for the operator."""
    write_records(tmp_path)
    (tmp_path / "files" / "file-2.json").write_text('{"id":')
    (tmp_path / "batches" / "batch_2.json").write_text('{"id":')
    (tmp_path / "batches" / "batch_3.new").write_text('{"id":')
    with opened(tmp_path) as store:
        assert store.files.list_for(OWN) == [file_of(1)]
        assert [record.id for record in store.batches.list_for(OWN)] == ["batch_1"]
    assert names(tmp_path / "files") == {"file-1.data"}
    assert names(tmp_path / "batches") == {"batch_1.output", "batch_2.json", "batch_3.new"}
    assert "batch_2.json cannot be imported" in caplog.text


def test_file_without_content_is_not_imported(tmp_path):
    """Its batch had not finished, and creates it again."""
    write_records(tmp_path)
    (tmp_path / "files" / "file-2.data").unlink()
    with opened(tmp_path) as store:
        assert store.files.list_for(OWN) == [file_of(1)]
