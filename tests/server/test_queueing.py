"""The class of a request, and the record of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE

from cllm.core.request import Priority
from cllm.observe.trace_file import read_trace
from cllm.server.queueing import priority_of


@pytest.mark.parametrize(
    ("asked", "of_key", "given"),
    [
        (None, None, Priority.NORMAL),
        ("interactive", None, Priority.INTERACTIVE),
        ("batch", None, Priority.BATCH),
        (None, "batch", Priority.BATCH),
        ("interactive", "batch", Priority.BATCH),
        ("interactive", "normal", Priority.NORMAL),
        (None, "interactive", Priority.INTERACTIVE),
        ("batch", "interactive", Priority.BATCH),
    ],
)
def test_no_class_above_that_of_the_key(asked, of_key, given):
    assert priority_of(asked, of_key) is given


@pytest.mark.slow
def test_a_server_records_what_it_is_asked_and_a_simulation_replays_it(
    start_server, tmp_path: Path
):
    """One line for each answer, in the class that its key allows; what prompts share is shared
    again.
    """
    file = tmp_path / "trace.jsonl"
    options = ["--backend.name", "fake", "--scheduler.trace-file", str(file)]
    server = start_server(*options, "--scheduler.priorities", '{"user-nightly": "batch"}')
    shared = "x" * 64
    for user, tail, n in (("nightly", "a", 1), ("ann", "b", 2), (None, "c", 1)):
        body = {"prompt": shared + tail, "user": user, "n": n, "max_tokens": 5, "ignore_eos": True}
        answer = server.client.post(
            "/v1/completions", json={**body, "priority": "interactive", "temperature": 1.0}
        )
        assert answer.status_code == 200, answer.text
    assert server.stop() == 0
    entries = read_trace(file)
    assert [(entry.key, entry.priority) for entry in entries] == [
        ("user-nightly", "batch"),
        ("user-ann", "interactive"),
        ("user-ann", "interactive"),
        ("", "interactive"),
    ]
    assert {(entry.input_length, entry.output_length) for entry in entries} == {(65, 5)}
    command = [
        sys.executable,
        "-m",
        "cllm",
        "simulate",
        str(file),
        "--json",
        "--costs",
        "0.01,0.001,0.001",
    ]
    report = json.loads(
        subprocess.run(command, capture_output=True, check=True, timeout=PATIENCE).stdout
    )
    assert (report["num_succeeded"], report["prompt_tokens"]) == (4, 260)
    assert report["cached_tokens"] == 3 * 64
