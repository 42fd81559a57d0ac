"""The benchmark of two replicas behind a front works, in a small size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
from conftest import PATIENCE

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "replicas.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCHMARK, "fake", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_two_replicas_find_as_much_in_their_caches_as_one(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    options = ("--shapes", "long-talks", "--routers", "one,cllm", "--requests", 16, "--rounds", 1)
    done = run(file, *options, "--loads", "closed")
    assert done.returncode == 0, done.stderr
    assert "long-talks: 1.000 times the cached tokens of one replica" in done.stdout
    results = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    assert [result["case"]["router"] for result in results] == ["one", "cllm"]
    assert all(len(result["ttft"]) == 16 and not result["failed"] for result in results)

    # what is in the file is not measured again
    done = run(file, *options, "--seconds", 0)
    assert done.returncode == 2
    assert "1 cases are missing" in done.stderr  # that with an open load


def test_service_of_two_accounts_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    done = run(file, "--shapes", "two-accounts", "--routers", "cllm", "--rounds", 1)
    assert done.returncode in (0, 1), done.stderr
    assert 0.5 <= msgspec.json.decode(file.read_bytes())["jain"] <= 1
