"""The examples in CONTRIBUTING.md apply to the current code."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("diff", DIFFS, ids=["route", "policy", "metric", "parameter"])
def test_example_applies_and_is_valid_python(diff, tmp_path):
    """The diff is applied to copies of the files that it names."""
    names = re.findall(r"^\+\+\+ b/(\S+)$", diff, re.MULTILINE)
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    command = ["git", "apply", "-"]
    done = subprocess.run(
        command, cwd=tmp_path, input=diff, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in names:
        changed = (tmp_path / name).read_text("utf-8")
        assert changed != (ROOT / name).read_text("utf-8")
        compile(changed, name, "exec")


@pytest.mark.slow
def test_example_parameter_appears_in_its_dialects(tmp_path):
    """In a copy of the package, from which the API page is generated."""
    (diff,) = [diff for diff in DIFFS if "Parameter(" in diff]
    shutil.copytree(ROOT / "src", tmp_path / "src")
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, str(ROOT / "tools" / "api_page.py")]
    page = subprocess.check_output(command, env=environment, text=True, cwd=tmp_path)
    sections = dict(re.findall(r"^### POST (\S+)\n(.*?)(?=^##)", page, re.DOTALL | re.MULTILINE))
    row = "top_a` | done | number from 0 to 1. Drop tokens"
    assert {route for route, text in sections.items() if row in text} == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/completion",
        "/infill",
        "/api/generate",
        "/api/chat",
        "/generate",
    }
