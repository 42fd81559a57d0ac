"""What the doctor says of a build that he cannot meet on this machine."""

import subprocess

import pytest

from cllm.cli import probe as module
from cllm.cli.doctor import cure, failure
from cllm.cli.probe import Probe, probe


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (Probe(died_of="SIGSEGV", error="the process died of SIGSEGV while it decoded"), "-fno-tree-dse"),
        (Probe(answer="7!x"), "-fno-tree-dse"),
        (Probe(error="ModuleNotFoundError: No module named 'llama_cpp'"), "not installed"),
        (Probe(error="something else"), "debug"),
        (Probe(answer="72"), ""),
    ],
)
def test_each_failure_has_its_cure(result, word):
    """A crash and a wrong answer are cured by the compiler's switches."""
    assert word in cure(result)
    assert result.passed == (word == "")


def test_a_child_that_dies_is_a_finding(monkeypatch):
    """The signal is named, and this process lives on."""
    crash = ["python3", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    run = subprocess.run
    monkeypatch.setattr(module.subprocess, "run", lambda _, **options: run(crash, **options))
    found = probe()
    assert found.died_of == "SIGSEGV"
    assert "SIGSEGV" in failure(found)
