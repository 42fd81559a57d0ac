"""Recorded requests: their accounts, classes and shared prefixes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE

from cllm.observe.trace_file import read_trace


@pytest.mark.slow
def test_recorded_requests_are_replayed_by_a_simulation(start_server, tmp_path: Path):
    """The record has a line for each answer, with the class that its API key allows. Shared
    prefixes are shared in the replay too.
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
    assert [(entry.account, entry.priority) for entry in entries] == [
        ("user-nightly", "batch"),
        ("user-ann", "interactive"),
        ("user-ann", "interactive"),
        ("address-127.0.0.1", "interactive"),
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
