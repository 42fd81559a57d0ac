"""Limits of the input files of batches."""

import json

import pytest

from cllm.server.openai.batches.lines import MAX_LINES, check_lines

BODY = {"method": "POST", "url": "/v1/completions", "body": {}}


def test_batch_with_too_many_lines_is_rejected(tmp_path):
    path = tmp_path / "input"
    path.write_text(
        "".join(json.dumps({"custom_id": str(i), **BODY}) + "\n" for i in range(MAX_LINES + 5))
    )
    assert check_lines(path, "/v1/completions", 1000)[1][0]["code"] == "too_many_requests"


def test_lines_may_begin_with_byte_order_marks(tmp_path):
    path = tmp_path / "input"
    lines = [json.dumps({"custom_id": name, **BODY}) for name in "abc"]
    path.write_text(f"\ufeff{lines[0]}\n{lines[1]}\n\ufeff{lines[2]}\n\ufeff", encoding="utf-8")
    assert check_lines(path, "/v1/completions", 1000) == (3, [])


@pytest.mark.parametrize("end", ["", "\n"])
def test_line_with_too_many_bytes_is_rejected(tmp_path, end):
    path = tmp_path / "input"
    path.write_text(json.dumps({"custom_id": "a", **BODY}) + "\n" + "x" * 2000 + end)
    _, (error,) = check_lines(path, "/v1/completions", 1000)
    assert (error["code"], error["line"]) == ("line_too_long", 2)
