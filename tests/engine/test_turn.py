"""Turns of engines on the same cores."""

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import PATIENCE, FakeEngine

from cllm.engine.turn import Turn, create_turn_file, remove_turn_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files cannot be locked so")

COMPUTE = """
import sys, time
from cllm.engine.turn import Turn
turn = Turn(sys.argv[1])
for _ in range(int(sys.argv[3])):
    if not turn.try_begin():
        turn.begin()
    begun = time.monotonic()
    time.sleep(0.01)
    with open(sys.argv[1] + ".log", "a") as log:
        log.write(f"{sys.argv[2]} {begun} {time.monotonic()}\\n")
    turn.end()
    print(flush=True)
"""


@pytest.fixture
def path():
    found = create_turn_file()
    yield found
    remove_turn_file(found)
    Path(found + ".log").unlink(missing_ok=True)


def start(path, name, count):
    return subprocess.Popen(
        [sys.executable, "-c", COMPUTE, path, name, str(count)], stdout=subprocess.PIPE
    )


def test_engines_compute_one_after_the_other(path):
    """No two turns overlap, and while both want to compute they alternate."""
    processes = [start(path, name, 40) for name in "ab"]
    for process in processes:
        process.communicate(timeout=PATIENCE)
    turns = [line.split() for line in Path(path + ".log").read_text().splitlines()]
    assert len(turns) == 80
    ends = [(float(begin), float(end)) for _, begin, end in turns]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ends))
    names = "".join(name for name, _, _ in turns)
    both = names[names.index("b" if names[0] == "a" else "a") :]
    both = both[: min(both.rindex("a"), both.rindex("b"))]
    assert "aa" not in both
    assert "bb" not in both


def test_killed_engine_leaves_its_turn(path):
    process = start(path, "a", 1000)
    process.stdout.readline()
    process.kill()
    process.communicate()
    turn = Turn(path)
    turn.begin()
    turn.end()
    assert turn.try_begin()


def test_turn_of_another_engine_is_noticed(path):
    process = start(path, "a", 1000)
    process.stdout.readline()
    turn, deadline = Turn(path), time.monotonic() + PATIENCE
    while turn.try_begin():
        turn.end()
        assert time.monotonic() < deadline
    process.kill()
    process.communicate()


class Recorder:
    """Notes what an engine does in a step."""

    def __init__(self, *, is_taken: bool) -> None:
        self.is_taken, self.events = is_taken, []

    def try_begin(self):
        self.events.append("try")
        return not self.is_taken

    def __getattr__(self, name):
        return lambda *arguments: self.events.append(name)


def test_step_is_a_turn(monkeypatch):
    """An engine takes a turn for each step, also for one that raises; without work, none."""
    engine = FakeEngine(engine_check=False)
    turn = Recorder(is_taken=False)
    engine.engine.take_turns(turn)
    engine.engine.step()
    assert turn.events == []
    engine.add("a", [1, 2, 3])
    engine.step()
    assert turn.events == ["try", "end"]
    monkeypatch.setattr(engine.backend, "forward", lambda _: 1 / 0)
    engine.engine.step()
    assert turn.events[2:] == ["try", "end"]


def test_engine_that_waits_for_its_turn_does_not_seem_to_hang():
    """It notes a step whose duration nobody knows, with no request as its cause."""
    engine = FakeEngine()
    turn, noted = Recorder(is_taken=True), []
    engine.engine.take_turns(turn)

    class Record:
        def begin(self, names, seconds):
            noted.append(([*names], seconds, [*turn.events]))

        def end(self):
            pass

    engine.engine.use_record(Record())
    engine.add("a", [1, 2, 3])
    engine.step()
    assert turn.events == ["try", "begin", "end"]
    names, seconds, events = noted[0]
    assert (len(names), seconds, events) == (1, 0.0, ["try"])
    assert names != ["a"]
