"""The comparison with peers: stored rounds, repeated and resumed ones, the best settings, and a
run on the built-in model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cllm.bench.compare import measure as module
from cllm.bench.compare.intervals import Median, num_left_out
from cllm.bench.compare.measure import REPEATS, Comparison, ComparisonPlan, compare
from cllm.bench.compare.noise import Watch
from cllm.bench.compare.rounds import (
    BOUND,
    CLLM,
    DEFAULT_SERVER,
    ENGINE,
    LLAMA_SERVER,
    Rounds,
    StoredRun,
)
from cllm.bench.compare.rows import MEMORY, OUTPUT, OUTSIDE, PER_CPU, ROWS, START, SUCCEEDED, TTFT
from cllm.bench.compare.runs import RunResult, accept_without_usage, collect_values
from cllm.bench.compare.systems import Purpose, llama_server_openers
from cllm.bench.compare.targets import find_figures
from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.client import Outcome
from cllm.bench.load.dialects import TokenCounts
from cllm.bench.load.report import summarize
from cllm.bench.load.workload import Task
from cllm.bench.peers import FOLDER, find
from cllm.errors import StartupError

ROOT = Path(__file__).resolve().parents[3]
HERE = {"host": "a", "CPU": "any, 2 cores", "build": "abc"}
SETTINGS = ["default", "-np 8", "-np 8 -kvu"]


# --- stored rounds ------------------------------------------------------------------------------


def run(**changes: Any) -> StoredRun:
    made = StoredRun(
        row="shared", system=CLLM, round=0, machine=HERE, at="2026-01-01", values={"a": 1.0}
    )
    return msgspec.structs.replace(made, **changes)


def test_rounds_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    stored = [run(), run(round=1, failures={"HTTP 500": 1}), run(system=LLAMA_SERVER)]
    rounds = Rounds(path, HERE)
    for one in stored:
        rounds.add(one)
    for again in (Rounds(path, HERE), Rounds(path)):
        assert sorted(again.of("shared"), key=stored.index) == stored
        assert again.of("agents") == []
    path.write_text("{}\n")
    with pytest.raises(StartupError, match="no rounds of cllm bench compare"):
        Rounds(path, HERE)
    with pytest.raises(StartupError, match="cannot write"):
        Rounds(tmp_path / "none" / "a", HERE).add(run())


def test_incomplete_line_is_dropped(tmp_path: Path) -> None:
    """The session was killed while it wrote."""
    path = tmp_path / "rounds.jsonl"
    Rounds(path, HERE).add(run())
    path.write_bytes(path.read_bytes() + b'{"row": "sha')
    rounds = Rounds(path, HERE)
    assert rounds.of("shared") == [run()]
    rounds.add(run(round=1))
    assert Rounds(path, HERE).of("shared") == [run(), run(round=1)]


@pytest.mark.parametrize("other", [{"CPU": "any, 4 cores"}, {"build": "abd"}, {"host": "b"}])
def test_only_rounds_of_one_machine_are_combined(tmp_path: Path, other: dict[str, str]) -> None:
    """The machine of the last run counts where nothing is measured. Other facts do not matter."""
    path = tmp_path / "rounds.jsonl"
    for machine in (HERE, HERE | other, HERE | {"cLLM": "another commit"}):
        Rounds(path, machine).add(run(machine=machine, round=len(path.name)))
    rounds = Rounds(path)
    assert (rounds.machine["cLLM"], rounds.num_foreign) == ("another commit", 1)
    assert [found.machine["CPU"] for found in rounds.of("shared")] == [HERE["CPU"]]
    foreign = Rounds(path, HERE | other)
    assert (len(foreign.of("shared")), foreign.num_foreign) == (1, 2)


def test_quietest_attempt_at_same_work_counts() -> None:
    rounds = Rounds(None, HERE)
    for others in (0.5, 0.1, 0.3):
        rounds.add(run(others=others, work="new", at="2026-01-02"))
    rounds.add(run(others=0.0, work="old"))
    assert [found.others for found in rounds.of("shared")] == [0.1]
    assert [found.others for found in rounds.of("shared", "old")] == [0.0]
    assert len(rounds.attempts(run(work="new"))) == 3


# --- intervals and noise ------------------------------------------------------------------------


def test_interval_of_median_are_order_statistics() -> None:
    """From Conover's table for 95 %: which ranks bound the median."""
    assert [num_left_out(count) for count in (1, 3, 5, 6, 8, 9, 12, 20)] == [0, 0, 0, 0, 0, 1, 2, 5]
    assert Median.of([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert Median.of([float(i) for i in range(9)]) == (4.0, 1.0, 7.0)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_own_processes_are_not_noise() -> None:
    watch = Watch()
    assert sum(i * i for i in range(1_000_000)) > 0
    assert 0 <= watch.others() <= 1


# --- what is measured ---------------------------------------------------------------------------


class Machine:
    """Pretends to measure: speeds by system and settings, and the noise of each attempt."""

    def __init__(self, noise: Callable[[StoredRun], float] = lambda run: 0.0) -> None:
        self.measured: list[tuple[str, str, int]] = []
        self.noise = noise

    def speed(self, run: StoredRun) -> float:
        theirs = {"default": 40.0, "-np 8": 95.0, "-np 8 -kvu": 100.0 + run.round}
        return 200.0 if run.system == CLLM else theirs[run.settings]

    def measure(self, run: StoredRun) -> StoredRun:
        self.measured.append((run.system, run.settings, run.round))
        speed = self.speed(run)
        values = {OUTPUT: speed, TTFT: 1e4 / speed, PER_CPU: speed / 2, SUCCEEDED: 1.0}
        found = RunResult(values, 24, 24, {}, self.noise(run))
        at = f"2026-01-01T00:{len(self.measured):04}"
        return msgspec.structs.replace(run, at=at, **found._asdict())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(Comparison, "_measure", lambda self, row, run: made.measure(run))
    monkeypatch.setattr(
        Comparison,
        "_openers",
        lambda self, row, system: dict.fromkeys([""] if system == CLLM else SETTINGS),
    )
    monkeypatch.setattr(module, "find_required", lambda program, folder: Path(program))
    monkeypatch.setattr(Comparison, "_work", lambda self, row: "")
    monkeypatch.setattr(Comparison, "_model", lambda self, row: None)
    return made


def measure(rounds: Rounds, count: int, **changes: Any) -> None:
    options = ComparisonPlan(
        model=None, peers=FOLDER, rows=[ROWS["shared"]], rounds=count, **changes
    )
    compare(options, rounds, lambda share, text: None)


def test_best_settings_are_measured_in_all_rounds(machine: Machine) -> None:
    """The first round tries all settings; the default build gets the best ones, in every third
    round. Every second round is reversed.
    """
    measure(Rounds(None, HERE), 4)
    first = [(CLLM, ""), *((LLAMA_SERVER, which) for which in SETTINGS)]
    first.append((DEFAULT_SERVER, "-np 8 -kvu"))
    later = [run for run in first if run[1] != "default"]
    order = [*first, *reversed(later[:-1]), *later[:-1], *reversed(later)]
    assert [(system, settings) for system, settings, _ in machine.measured] == order


def test_noisy_run_is_repeated_up_to_limit(machine: Machine) -> None:
    """A quiet attempt ends the repetition; without one, the figure is marked."""
    attempts = Counter[tuple[str, str]]()

    def noise(run: StoredRun) -> float:
        attempts[run.system, run.settings] += 1
        if run.system == CLLM:
            return 0.5
        return 0.5 if run.settings == "-np 8" and attempts[run.system, run.settings] < 3 else 0.01

    machine.noise = noise
    rounds = Rounds(None, HERE)
    measure(rounds, 1)
    assert attempts[CLLM, ""] == 1 + REPEATS
    assert attempts[LLAMA_SERVER, "-np 8"] == 3
    assert attempts[LLAMA_SERVER, "default"] == 1
    noisy = {figure.name: figure.noisy for figure in find_figures(rounds)}
    assert noisy["shared: output tokens/s, cLLM / llama-server"]
    machine.noise, machine.measured = lambda run: 0.9, []
    measure(Rounds(None, HERE), 1, most_others=1.0)
    assert len(set(machine.measured)) == len(machine.measured) == 5


def test_later_session_goes_on(machine: Machine, tmp_path: Path) -> None:
    """Only what is missing is measured, the repetitions of noisy runs included."""
    path = tmp_path / "rounds.jsonl"
    measure(Rounds(path, HERE), 2)
    first, machine.measured = machine.measured, []
    measure(Rounds(path, HERE), 3)
    assert {i for _, _, i in machine.measured} == {2}
    machine.measured = []
    measure(Rounds(path, HERE), 3)
    assert machine.measured == []
    measure(Rounds(path, HERE | {"build": "new"}), 2)
    assert machine.measured == first


def test_no_run_begins_after_time_limit(machine: Machine) -> None:
    measure(Rounds(None, HERE), 3, seconds=1e-9)
    assert machine.measured == []


def test_setting_that_fails_requests_is_not_judged(machine: Machine) -> None:
    """It is reported, but its speed does not count."""
    rounds = Rounds(None, HERE)
    measure(rounds, 2)
    fastest = run(
        system=LLAMA_SERVER,
        settings="short slots",
        at="2026-01-03",
        values={OUTPUT: 900.0, SUCCEEDED: 0.5},
        failures={"HTTP 400": 12},
    )
    rounds.add(fastest)
    (figure,) = (found for found in find_figures(rounds) if "tokens/s, cLLM" in found.name)
    assert (figure.settings, figure.values) == ("-np 8 -kvu", [2.0, 200 / 101])
    assert figure.default_values == figure.values[:1]


# --- runs ---------------------------------------------------------------------------------------


def answer(finish_reason: str | None, usage: TokenCounts | None, part: str = "") -> TimedAnswer:
    answer = TimedAnswer(Task(b"", num_tokens=4, part=part), 0.0)
    answer.content_times = [1.0, 1.5, 2.5]
    answer.ended, answer.finish_reason, answer.usage = 3.0, finish_reason, usage
    answer.judge()
    return answer


def test_load_results_are_summarized() -> None:
    """A stream without token counts counts as complete if it ended with the reason length."""
    answers = [
        answer("length", TokenCounts(4, 9, 0)),
        answer("length", None, "streams"),
        answer("stop", None, "streams"),
        answer(None, None),
    ]
    outcome = Outcome(answers, wall=2.0, cpu=0.1, server_cpu=4.0)
    accept_without_usage(outcome)
    values = collect_values(summarize(outcome, url="u", model="m", settings={}))
    assert (values[OUTPUT], values[PER_CPU], values[TTFT]) == (4, 2, 1000)
    assert (values[SUCCEEDED], values[f"streams: {SUCCEEDED}"]) == (0.5, 0.5)


def test_llama_server_gets_slots_for_all_clients(tmp_path: Path) -> None:
    purpose = Purpose(None, 8, 37_376, tmp_path, tmp_path)
    default, slots, pool = llama_server_openers(purpose, tmp_path / "llama-server")
    assert default == "default"
    assert slots.startswith("-np 8 -c 37376 -t ")
    assert pool == f"{slots} -kvu"
    assert len(llama_server_openers(purpose._replace(clients=1), tmp_path)) == 2
    assert ROWS["long-beside-short"].slots == 8


@pytest.mark.llama
@pytest.mark.slow
def test_comparison_measures_servers(tmp_path: Path) -> None:
    """Each round measures every system without an option for cLLM, and gives the figures."""
    folder = ROOT / FOLDER
    if not (find("llama-server", folder) and find("llama-batched-bench", folder)):
        pytest.skip("llama.cpp's programs are not built: python benchmarks/build_peers.py")
    told: list[float] = []
    path = tmp_path / "rounds.jsonl"
    options = ComparisonPlan(
        model=None,
        peers=folder,
        rows=[ROWS["unrelated-2"], ROWS["engine-1"]],
        rounds=2,
        scale=0.1,
        most_others=1.0,
    )
    compare(options, Rounds(path, HERE), lambda share, _: told.append(share))
    assert told == sorted(told)
    assert told[-1] == 1.0
    rounds = Rounds(path)
    runs = rounds.of("unrelated-2")
    for system in (CLLM, LLAMA_SERVER):
        found = [run for run in runs if run.system == system]
        assert {run.round for run in found} == {0, 1}
        assert all(run.values[SUCCEEDED] == 1 and run.num_succeeded == 8 for run in found)
        assert all(run.values[OUTPUT] > 0 and run.values[START] > 0 for run in found)
    ours = next(run for run in runs if run.system == CLLM)
    assert 0 < ours.values[OUTSIDE] < 1
    assert ours.values[PER_CPU] > 0
    assert ours.values[MEMORY] > 0
    assert {run.system for run in rounds.of("engine-1")} == {BOUND, ENGINE, CLLM}
    names = {figure.name for figure in find_figures(rounds)}
    assert {
        "unrelated-2: output tokens/s, cLLM / llama-server",
        "engine-1: decoding tokens/s, engine in process / llama-batched-bench",
        "engine-1: start until ready - loading of the model, cLLM - engine in process",
        "share of all requests to cLLM that succeed",
    } <= names
