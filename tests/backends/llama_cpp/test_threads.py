"""How many threads llama.cpp gets while other programs use the CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import PATIENCE

from cllm.backends import threads as shared
from cllm.backends.llama_cpp import threads
from cllm.backends.llama_cpp.options import Options
from cllm.backends.llama_cpp.threads import Threads
from cllm.backends.threads import ThreadLimit

pytestmark = pytest.mark.llama

STEP = 0.02


class Machine:
    """CPUs that programs and threads share fairly. A thread and a program on one CPU get half of it
    each.
    """

    def __init__(self, num_cpus: int, *, says_idle: bool = True) -> None:
        self.num_cpus, self.says_idle = num_cpus, says_idle
        self.now = self.idle = self.own = 0.0
        self.num_programs = 0
        self.limit = ThreadLimit(
            num_cpus, lambda: self.now, lambda: self.idle if says_idle else None, lambda: self.own
        )
        self.counts: list[int] = []

    def wait(self, seconds: float, threads: int = 0) -> float:
        """Let time go by. Return the CPU time that the threads got."""
        self.now += seconds
        num_running = threads + self.num_programs
        share = min(1.0, self.num_cpus / num_running) if num_running else 0.0
        self.idle += max(0, self.num_cpus - num_running) * seconds
        self.own += threads * share * seconds
        return threads * share * seconds

    def compute(self, seconds: float) -> int:
        """Compute steps for so long; return the count at the end."""
        end = self.now + seconds
        while self.now < end:
            self.limit.look()
            count = self.limit.count
            self.counts.append(count)
            self.limit.note(count, STEP, self.wait(STEP, count))
        return self.limit.count


@pytest.mark.parametrize("says_idle", [True, False])
@pytest.mark.parametrize(
    ("num_cpus", "num_programs", "expected"),
    [(2, 0, 2), (2, 1, 1), (2, 6, 1), (4, 1, 3), (16, 0, 16), (16, 4, 12), (16, 40, 1), (1, 5, 1)],
)
def test_threads_get_the_cpus_that_other_programs_leave(
    num_cpus, num_programs, expected, says_idle
):
    machine = Machine(num_cpus, says_idle=says_idle)
    machine.num_programs = num_programs
    machine.compute(10)
    machine.counts.clear()
    machine.compute(60)
    mean = sum(machine.counts) / len(machine.counts)
    assert abs(mean - expected) <= 0.1 * num_cpus


def test_busy_machine_is_noticed_within_a_tenth_of_a_second_of_computing():
    machine = Machine(2)
    machine.compute(5)
    machine.num_programs = 6
    assert machine.compute(2 * shared.WINDOW) == 1


def test_all_threads_compute_again_soon_after_the_other_programs_end():
    machine = Machine(2)
    machine.num_programs = 6
    machine.compute(30)
    machine.num_programs = 0
    assert machine.compute(2 * shared.PAUSE) == 2


def test_no_step_is_wasted_on_trying_while_no_cpu_is_idle():
    machine = Machine(2)
    machine.num_programs = 2
    machine.compute(1)
    machine.counts.clear()
    machine.compute(100)
    assert set(machine.counts) == {1}


def test_trying_becomes_rare_where_the_system_does_not_say_what_is_idle():
    machine = Machine(2, says_idle=False)
    machine.num_programs = 6
    machine.compute(200)
    assert sum(count > 1 for count in machine.counts) <= 10 * shared.WINDOW / STEP


def test_busy_machine_is_seen_before_the_first_step():
    """For example while the model is being loaded, or between two requests."""
    machine = Machine(2)
    machine.num_programs = 6
    machine.wait(shared.FIRST_LOOK, threads=1)
    machine.compute(STEP)
    assert machine.counts == [1]
    machine.num_programs = 0
    machine.wait(5)
    machine.compute(1)
    assert machine.counts[-1] == 2
    machine.num_programs = 6
    machine.wait(5)
    machine.counts.clear()
    machine.compute(1)
    assert set(machine.counts) == {1}


def test_short_disturbances_change_nothing():
    """As of a server's own API process, or of the system."""
    machine = Machine(2)
    for _ in range(1000):
        machine.limit.look()
        # a tenth of the CPU time goes to others
        machine.limit.note(2, STEP, 0.9 * machine.wait(STEP, threads=2))
        assert machine.limit.count == 2


@pytest.fixture
def contexts(monkeypatch) -> dict[str, tuple[int, int]]:
    """Return the threads of contexts, by their names, as llama.cpp was told."""
    told: dict[str, tuple[int, int]] = {}

    def set_threads(context: str, *counts: int) -> None:
        told[context] = counts[0], counts[1]

    monkeypatch.setattr(threads.lib, "llama_set_n_threads", set_threads)
    monkeypatch.setattr(threads, "count_cpus", lambda: 8)
    monkeypatch.delenv("OMP_WAIT_POLICY")  # of all tests
    return told


@pytest.fixture
def lose_cpu_time(contexts, monkeypatch) -> None:
    """Make each call of llama_decode get the time of 2 of 8 CPUs."""
    clock = SimpleNamespace(now=0.0, process_time=lambda: 0.0)
    clock.monotonic = lambda: clock.now

    def decode(*_: object) -> int:
        clock.now += 2 * shared.WINDOW
        threads.decoding.seconds += 4 * shared.WINDOW
        return 0

    monkeypatch.setattr(threads, "time", clock)
    monkeypatch.setattr(threads.lib, "llama_decode", decode)


@pytest.mark.usefixtures("lose_cpu_time")
def test_missing_cpu_time_lowers_the_threads_of_all_contexts(contexts):
    model = Threads(Options())
    for name in ("model", "embeddings"):
        model.keep(name, name)
    assert model.decode("model", SimpleNamespace(n_tokens=1)) == 0
    assert contexts == {"model": (1, 1), "embeddings": (1, 1)}


@pytest.mark.usefixtures("lose_cpu_time")
def test_chosen_number_of_threads_stays(contexts, monkeypatch):
    for options, on_gpu in ((Options(n_threads=8), False), (Options(), True)):
        model = Threads(options, on_gpu=on_gpu)
        model.keep("model", "model")
        model.decode("model", SimpleNamespace(n_tokens=1))
        assert (model.counts, contexts) == ((8, 8), {})
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # threads that sleep use no CPU time
    assert not threads.may_adapt(Options())


@pytest.mark.usefixtures("lose_cpu_time")
def test_busy_cpus_are_logged_once(caplog):
    caplog.set_level("INFO", "cllm.llama_cpp")
    model = Threads(Options())
    for _ in range(3):
        model.decode("model", SimpleNamespace(n_tokens=1))
    assert [line.message.partition(",")[0] for line in caplog.records] == [
        "other programs use the CPUs: llama.cpp computes with 1 of 8 threads"
    ]


COUNT_THREADS = """
from cllm import LLM, SamplingParams
llm = LLM()
llm.generate(["Hello"] * 8, SamplingParams(max_tokens=64, ignore_eos=True))
print(llm._backend._threads.counts)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="other systems say it differently")
def test_one_thread_computes_while_programs_use_all_cpus():
    spin = [
        sys.executable,
        "-c",
        "import time\nend = time.time() + 100\nwhile time.time() < end: 0",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    programs = [subprocess.Popen(spin) for _ in range(3 * len(os.sched_getaffinity(0)))]
    try:
        child = subprocess.run(
            [sys.executable, "-c", COUNT_THREADS],
            env=environment,
            capture_output=True,
            timeout=PATIENCE,
            check=True,
        )
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert child.stdout.decode().strip() == "(1, 1)"
