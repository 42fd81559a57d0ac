"""The workflows of GitHub name only what exists, and have no more rights than they need. They run
elsewhere; make lint checks their syntax with actionlint.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS = {file.name: yaml.safe_load(file.read_text("utf-8")) for file in FILES}
JOBS = {
    f"{file}: {name}": job for file, flow in WORKFLOWS.items() for name, job in flow["jobs"].items()
}
STEPS = [step for job in JOBS.values() for step in job["steps"]]
COMMANDS = sorted({line for step in STEPS for line in step.get("run", "").splitlines()})
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OF_THE_RUNNER = {"gh", "grep", "pip", "uvx"}


def check_command(words: list[str]) -> None:
    """Raise AssertionError if a command, one of its files or its make target does not exist."""
    match words:
        case ["make", target, *_]:
            assert target in TARGETS
        case ["uv", "sync", *_]:
            pass
        case ["uv", "run", "--no-sync", program, *_]:
            packages = " ".join(PROJECT["dependency-groups"]["dev"])
            assert program in re.findall(r"[\w-]+", packages)
        case ["python", script, *options]:
            command = [sys.executable, str(ROOT / script), "--help"]
            described = subprocess.check_output(command, text=True, cwd=ROOT)
            assert set(options) <= set(described.split())
        case [program, *_]:
            assert program in OF_THE_RUNNER or (ROOT / program).is_file()


@pytest.mark.parametrize("command", COMMANDS)
def test_workflows_name_only_commands_that_exist(command: str) -> None:
    check_command(shlex.split(command))


@pytest.mark.parametrize(
    "command", ["make all", "python tools/none.py", "python tools/build_wheels.py --no", ".ci/go"]
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        check_command(shlex.split(command))


def test_markers_of_the_workflows_exist() -> None:
    known = {
        marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]
    }
    used = re.findall(r'-m "([^"]+)"', "\n".join(COMMANDS))
    assert used
    assert set(re.findall(r"\w+", " ".join(used))) - {"not", "and", "or"} <= known


def test_actions_are_pinned_to_exact_versions() -> None:
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", name)] == []


def test_only_two_jobs_may_write() -> None:
    """One creates the release, the other one asks for PyPI's token."""
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    rights = {name: job["permissions"] for name, job in JOBS.items() if "permissions" in job}
    assert rights == {
        "release.yml: github": {"contents": "write"},
        "release.yml: pypi": {"id-token": "write"},
    }
    checkouts = [step for step in STEPS if step.get("uses", "").startswith("actions/checkout@")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_every_job_ends() -> None:
    assert [name for name, job in JOBS.items() if not job.get("timeout-minutes")] == []


def test_release_needs_only_a_tag_that_is_the_version(tmp_path: Path) -> None:
    """yaml reads the key ``on`` as True."""
    assert WORKFLOWS["release.yml"][True] == {"push": {"tags": ["v*"]}}
    (check,) = [command for command in COMMANDS if command.startswith("grep")]
    version = PROJECT["project"]["version"]
    for tag, code in ((f"v{version}", 0), (f"v{version}1", 1), ("v" + version[:-1], 1)):
        environment = {"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(["sh", "-c", check], cwd=ROOT, env=environment, check=False)
        assert done.returncode == code, tag
