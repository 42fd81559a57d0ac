"""The examples in CONTRIBUTING.md are changes of this code, not of an older one."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("diff", DIFFS, ids=["route", "policy", "metric"])
def test_example_can_be_applied_and_is_python(diff, tmp_path):
    """To copies of the files that it names."""
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
