"""The log file of a replica under Ray."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cllm.cluster.ray import log_file
from cllm.cluster.ray.log_file import LogFile


def test_log_of_a_replica_has_limited_size_and_keeps_the_latest_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "MAX_BYTES", 100)
    log = LogFile(tmp_path / "log")
    for number in range(50):
        log.write(f"line {number}: 100 %s\n")
    log.close()
    assert (tmp_path / "log").read_text().endswith("line 49: 100 %s\n")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200


def test_full_disk_does_not_end_the_reader_of_a_replica(capsys):
    log = LogFile(Path("/dev/full"))
    for _ in range(3):
        log.write("line\n")
    with suppress(OSError):
        log.close()
    assert capsys.readouterr().err == ""
