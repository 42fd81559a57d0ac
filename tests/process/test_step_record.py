"""The record of what the engine computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cllm.errors import StartupError
from cllm.private_files import remove_shared_file
from cllm.process.step_record import HEAD, SIZE, StepRecord, create_file


@pytest.fixture
def path():
    path = create_file()
    yield path
    remove_shared_file(path)
    assert not path.exists()


def test_reader_sees_the_step_and_its_end(path):
    """Each request once, and another version for each event."""
    writer, reader = StepRecord(path), StepRecord(path)
    versions = [reader.read().version]
    writer.begin(["a", "b", "a"], 1.5)
    entry = reader.read()
    assert (entry.request_ids, entry.expected_seconds) == (["a", "b"], 1.5)
    versions.append(entry.version)
    writer.end()
    versions.append(reader.read().version)
    writer.end()
    assert reader.read().request_ids == []
    versions.append(reader.read().version)
    assert versions == sorted({*versions})
    for one in (reader, writer):
        one.close()


def test_too_many_requests_are_cut(path):
    record = StepRecord(path)
    record.begin([f"request-{i}" for i in range(10_000)], 0.1)
    assert record.read().request_ids[:2] == ["request-0", "request-1"]
    record.close()


def test_half_written_step_has_no_requests(path):
    record = StepRecord(path)
    record.begin(["a"], 0.1)
    record._map[: HEAD.size] = HEAD.pack(7, 0.1, 1)
    assert record.read().request_ids == []
    record.close()


def test_dead_process_leaves_its_step(path):
    """In a file that only its user can read."""
    code = (
        "import os, sys; from pathlib import Path; from cllm.process.step_record import StepRecord;"
        " StepRecord(Path(sys.argv[1])).begin(['poison'], 2.0); os.abort()"
    )
    assert path.stat().st_size == SIZE
    assert path.stat().st_mode & 0o77 == 0
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode < 0
    record = StepRecord(path)
    assert record.read().request_ids == ["poison"]
    record.close()


def test_full_disk_is_a_readable_error(monkeypatch, tmp_path):
    monkeypatch.setattr("cllm.private_files.SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(StartupError, match="cannot create a temporary file of 65536 bytes"):
        create_file()
