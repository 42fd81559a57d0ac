"""Engines that divide the cores while several compute."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PATIENCE, FakeEngine

from cllm.engine import shared_cores
from cllm.engine.shared_cores import MOST_SECONDS, SharedCores, create_cores_file
from cllm.private_files import remove_shared_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="bytes cannot be locked so")

COMPUTE = """
import sys
from cllm.engine import shared_cores
shared_cores.BUSY_SECONDS = float(sys.argv[2])
cores = shared_cores.SharedCores(sys.argv[1])
for line in sys.stdin:
    print(cores.begin(3), flush=True)
"""


@pytest.fixture
def path():
    created = create_cores_file()
    yield created
    remove_shared_file(Path(created))


def start(path):
    return subprocess.Popen(
        [sys.executable, "-c", COMPUTE, path, str(PATIENCE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def step(process):
    process.stdin.write("step\n")
    process.stdin.flush()
    return int(process.stdout.readline())


@pytest.mark.slow
def test_engines_that_compute_are_counted(path, monkeypatch):
    """Each has a slot of its own; one that has ended leaves its slot to the next one.

    None is forgotten as idle, however long the others take to start.
    """
    monkeypatch.setattr(shared_cores, "BUSY_SECONDS", PATIENCE)
    cores = SharedCores(path)
    others = [start(path) for _ in range(2)]
    assert cores.begin(3) == 1
    assert [step(process) for process in others] == [2, 3]
    assert cores.begin(0) == 3
    others[0].kill()
    others[0].communicate()
    others.append(start(path))
    cores.begin(3)
    step(others[1])
    assert step(others[2]) == 3
    for process in others[1:]:
        process.communicate(timeout=PATIENCE)


def test_idle_engines_are_forgotten(path, monkeypatch):
    monkeypatch.setattr(shared_cores, "BUSY_SECONDS", 0.05)
    first, second = SharedCores(path), SharedCores(path)
    second._slot = 1  # a process of its own would get this one
    assert first.begin(3600) == 1
    assert second.begin(0) == 2
    assert first._until[0] <= time.monotonic() + MOST_SECONDS + 0.05
    first.begin(0)
    deadline = time.monotonic() + PATIENCE
    while second.begin(0) > 1:
        assert time.monotonic() < deadline


def test_engine_uses_its_share_of_the_cores(monkeypatch):
    """It tells its backend whenever another number of engines computes; without work, never."""
    engine, counts = FakeEngine(), [2, 2, 1]

    class Cores:
        def begin(self, seconds):
            return counts.pop(0)

    engine.engine.share_cores(Cores())
    engine.engine.step()
    assert len(counts) == 3
    engine.add("a", [1, 2, 3], ignore_eos=True, max_tokens=9)
    shares = []
    monkeypatch.setattr(engine.backend, "share_cores", shares.append)
    for _ in range(3):
        engine.step()
    assert shares == [2, 1]
    assert counts == []
