"""Limits of the input files of batches."""

import json

import pytest

from cllm.server.openai.batch_lines import MAX_LINES, check_lines

BODY = {"method": "POST", "url": "/v1/completions", "body": {}}


def test_batch_with_too_many_lines_is_rejected(tmp_path):
    path = tmp_path / "input"
    path.write_text(
        "".join(json.dumps({"custom_id": str(i), **BODY}) + "\n" for i in range(MAX_LINES + 5))
    )
    assert check_lines(path, "/v1/completions", 1000)[1][0]["code"] == "too_many_requests"


@pytest.mark.parametrize("end", ["", "\n"])
def test_line_with_too_many_bytes_is_rejected(tmp_path, end):
    path = tmp_path / "input"
    path.write_text(json.dumps({"custom_id": "a", **BODY}) + "\n" + "x" * 2000 + end)
    _, (error,) = check_lines(path, "/v1/completions", 1000)
    assert (error["code"], error["line"]) == ("line_too_long", 2)
