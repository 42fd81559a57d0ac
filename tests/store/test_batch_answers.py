"""The answers of a batch on disk, after a crash and with a full disk."""

import io
import json
import os

import pytest
from store_parts import full_disk

from cllm.store.batch_answers import BatchAnswers


def line(request_id):
    return json.dumps({"id": request_id}).encode() + b"\n"


def identify(answer):
    return json.loads(answer)["id"], {"output": 2}


def test_line_truncated_by_a_crash_is_removed(tmp_path):
    """Its request is computed again, and has one answer."""
    answers = BatchAnswers(tmp_path, "batch_1")
    answers.add(line("a"), succeeded=True)
    answers.add(line("b"), succeeded=True)
    answers.add(line("c"), succeeded=False)
    answers.flush()
    whole = answers.output.read_bytes()
    for cut in range(len(line("a")), len(whole)):
        answers.output.write_bytes(whole[:cut])
        assert BatchAnswers(tmp_path, "batch_1").read_answered(identify) == (
            {"a"},
            {"c"},
            {"output": 4},
        )
        assert answers.output.read_bytes() == line("a")
    answers.add(line("b"), succeeded=True)
    assert answers.read_answered(identify) == ({"a", "b"}, {"c"}, {"output": 6}), (
        "added answers are written first"
    )
    assert answers.output.read_bytes() == whole


def test_answers_that_a_full_disk_rejects_are_written_later(tmp_path):
    """No answer is written twice or in part."""
    answers = BatchAnswers(tmp_path, "batch_1")
    answers.add(line("a"), succeeded=True)
    answers.add(line("b"), succeeded=False)
    answers.add(line("c"), succeeded=True)
    with full_disk(len(line("a")) + 3):
        for _ in range(2):
            with pytest.raises(OSError, match="too large"):
                answers.flush()
        assert answers.output.read_bytes() == b""
    answers.flush()
    assert answers.output.read_bytes() == line("a") + line("c")
    assert answers.errors.read_bytes() == line("b")


def test_part_that_cannot_be_undone_is_removed_by_the_next_flush(tmp_path, monkeypatch):
    answers = BatchAnswers(tmp_path, "batch_1")
    answers.add(line("a"), succeeded=True)
    answers.flush()
    answers.add(line("b"), succeeded=True)

    def fail(*_):
        raise OSError(5, "Input/output error")

    class Stuck(io.FileIO):
        truncate = fail

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        broken.setattr(
            "cllm.store.batch_answers.open_private", lambda path, *_, **__: Stuck(path, "a")
        )
        with pytest.raises(OSError, match="Input/output"):
            answers.flush()
    assert answers.output.read_bytes() == line("a") + line("b")
    answers.add(line("c"), succeeded=True)
    assert answers.read_answered(identify)[0] == {"a", "b", "c"}
    assert answers.output.read_bytes() == line("a") + line("b") + line("c")
