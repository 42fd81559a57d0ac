"""Turns of engines on the same cores."""

import signal
import subprocess
import sys
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
    turn.begin(lambda: None)
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
    Turn(path).begin(lambda: None)


def test_waiting_engine_gives_signs_of_life(path):
    """Until the turn of the other one has ended."""
    process = start(path, "a", 1_000_000)
    process.stdout.readline()
    ticks = []

    def tick():
        ticks.append(1)
        if len(ticks) == 3:
            process.kill()

    process.send_signal(signal.SIGSTOP)
    turn = Turn(path)
    for _ in range(1000):  # it may have been stopped between two turns
        turn.begin(tick)
        turn.end()
        if ticks:
            break
        process.send_signal(signal.SIGCONT)
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
    process.kill()
    process.communicate()
    assert len(ticks) >= 3


class Recorder:
    """Notes the turns of an engine, for which it waits."""

    def __init__(self) -> None:
        self.events = []

    def begin(self, tick):
        self.events.append("begin")
        tick()

    def end(self):
        self.events.append("end")


def test_step_is_a_turn(monkeypatch):
    """An engine takes a turn for each step, also for one that raises; without work, none."""
    engine = FakeEngine(engine_check=False)
    turn = Recorder()
    engine.engine.take_turns(turn)
    engine.engine.step()
    assert turn.events == []
    engine.add("a", [1, 2, 3])
    engine.step()
    assert turn.events == ["begin", "end"]

    def fail(_):
        raise RuntimeError

    monkeypatch.setattr(engine.backend, "forward", fail)
    engine.engine.step()
    assert turn.events[2:] == ["begin", "end"]


def test_engine_that_waits_for_its_turn_does_not_seem_to_hang():
    """It notes that it is between two steps, again and again."""
    engine, noted = FakeEngine(), []

    class Record:
        def begin(self, names, seconds):
            noted.append([*names])

        def end(self):
            noted.append([])

    engine.engine.take_turns(Recorder())
    engine.engine.use_record(Record())
    engine.add("a", [1, 2, 3])
    engine.step()
    assert noted[0] == []
    assert ["a"] in noted[1:]
