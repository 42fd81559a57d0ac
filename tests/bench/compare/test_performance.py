"""Figures, targets and the page, computed from invented rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.bench.compare.performance import page, spread, write_page
from cllm.bench.compare.rounds import (
    BOUND,
    CLLM,
    DEFAULT_SERVER,
    ENGINE,
    FIXED,
    LLAMA_SERVER,
    Rounds,
    StoredRun,
)
from cllm.bench.compare.rows import (
    DECODE,
    MEMORY,
    OUTPUT,
    PREFILL,
    ROWS,
    START,
    SUCCEEDED,
    TTFT,
    UNUSUAL,
    Target,
)
from cllm.bench.compare.targets import Figure, compare_rounds, find_figures
from cllm.bench.load.scenarios import PHASES, SCENARIOS
from cllm.errors import StartupError

MACHINE = {"CPU": "a | b", "build": "abc"}


def run(row: str, system: str, i: int = 0, settings: str = "", **values: float) -> StoredRun:
    return StoredRun(
        row=row,
        system=system,
        settings=settings,
        round=i,
        machine=MACHINE,
        at=f"2026-01-0{i + 1}T00:00",
        values={SUCCEEDED: 1.0, **values},
        num_requests=16,
        num_succeeded=16,
    )


def made_up() -> Rounds:
    rounds = Rounds(None, MACHINE)
    for i in range(3):
        for name, ours in (("unrelated-8", 126.0), ("unrelated-32", 90.0)):
            for run_ in (
                run(name, CLLM, i, **{OUTPUT: ours, TTFT: 70.0 + i, MEMORY: 700.0}),
                run(
                    name,
                    LLAMA_SERVER,
                    i,
                    "-np 8 -kvu",
                    **{OUTPUT: 100.0, TTFT: 100.0, MEMORY: 500.0},
                ),
                run(name, DEFAULT_SERVER, i, "-np 8 -kvu", **{OUTPUT: 90.0, TTFT: 160.0}),
            ):
                rounds.add(run_)
        rounds.add(run("engine-8", BOUND, i, **{DECODE: 200.0}))
        rounds.add(run("engine-8", ENGINE, i, **{DECODE: 211.0, START: 0.5}))
        rounds.add(run("engine-8", CLLM, i, **{OUTPUT: 150.0, START: 1.2}))
    rounds.add(run("shared", CLLM, **{OUTPUT: 33.0, TTFT: 20.0}))
    rounds.add(run("shared", LLAMA_SERVER, 0, "default", **{OUTPUT: 10.0, TTFT: 100.0}))
    rounds.add(run("shared", DEFAULT_SERVER, 0, "default", **{OUTPUT: 9.0, TTFT: 90.0}))
    for system in (ENGINE, BOUND):
        for context in (100, 8000):
            rounds.add(
                run(
                    "context",
                    system,
                    0,
                    str(context),
                    **{PREFILL: 500.0, f"{DECODE}, 8 at a time": 100.0},
                )
            )
    return rounds


def by_name(rounds: Rounds) -> dict[str, Figure]:
    return {figure.name: figure for figure in find_figures(rounds)}


def test_figures_are_computed_from_rounds() -> None:
    """Each figure is a ratio or a difference within a round, and has a target."""
    found = by_name(made_up())
    speed = found["unrelated-8: output tokens/s, cLLM / llama-server"]
    assert (speed.values, speed.target, speed.verdict()) == ([1.26] * 3, 1.2, "met by 5.0%")
    assert (speed.settings, speed.default_values) == ("-np 8 -kvu", [1.4] * 3)
    ttft = found["unrelated-8: mean TTFT, cLLM / llama-server"]
    assert (ttft.values, ttft.met, ttft.certain) == ([0.7, 0.71, 0.72], False, False)
    assert ttft.verdict() == "**missed** by 1.4%, not certain"
    memory = found["unrelated-8: memory, cLLM - llama-server"]
    assert (memory.values, memory.verdict()) == ([200.0] * 3, "**missed** by 100.0 MB")
    decoding = found["engine-8: decoding tokens/s, engine in process / llama-batched-bench"]
    assert (decoding.values, decoding.met) == ([1.055] * 3, True)
    start = found["engine-8: start until ready - loading of the model, cLLM - engine in process"]
    assert start.values == pytest.approx([0.7] * 3)
    assert start.met
    shared = found["shared: mean TTFT, cLLM / llama-server"]
    assert (shared.met, shared.default_target, shared.default_met) == (True, 0.2, False)


def test_single_failure_misses_target() -> None:
    name = "share of all requests to cLLM that succeed"
    rounds = made_up()
    assert by_name(rounds)[name].met
    rounds.add(run("rag", CLLM, **{SUCCEEDED: 0.9}))
    assert by_name(rounds)[name].met is False


def test_each_phase_is_judged_by_its_best_fixed_layout() -> None:
    """A layout counts in the phases in which it served every request."""
    first, second, *_ = PHASES
    rounds = Rounds(None, MACHINE)
    rounds.add(run("phases", CLLM, **{f"{first}: {OUTPUT}": 96.0, f"{second}: {OUTPUT}": 45.0}))
    pool = {f"{first}: {OUTPUT}": 80.0, f"{second}: {OUTPUT}": 50.0}
    streams = {f"{first}: {OUTPUT}": 100.0, f"{second}: {OUTPUT}": 90.0}
    streams |= {SUCCEEDED: 0.9, f"{second}: {SUCCEEDED}": 0.9}
    rounds.add(run("phases", FIXED, 0, "pool", **pool))
    rounds.add(run("phases", FIXED, 0, "streams", **streams))
    figures = by_name(rounds)
    for part, ratio, settings in ((first, 0.96, "streams"), (second, 0.9, "pool")):
        figure = figures[f"phases: output tokens/s, {part}, cLLM / {FIXED}"]
        assert (figure.values, figure.settings, figure.target) == ([ratio], settings, 0.95)


def test_rows_have_every_target_of_the_table() -> None:
    """The targets as they were agreed on."""
    limits = {
        (row.name, target.name): target.limit
        for row in ROWS.values()
        for target in row.targets
        if target.limit is not None
    }
    for clients, speed, ttft in ((1, 1.05, 0.9), (8, 1.2, 0.7), (32, 1.15, 0.6), (64, 1.2, 0.6)):
        assert limits[f"unrelated-{clients}", "output tokens/s"] == speed
        assert limits[f"unrelated-{clients}", "mean TTFT"] == ttft
    assert limits["agents", "mean TTFT, first turns"] == pytest.approx(1 / 6)
    assert limits["agents", "mean TTFT, later turns"] == 0.5
    assert limits["edit", "output tokens/s"] == 1.4
    assert limits["rag", "output tokens/s"] == 2.2
    assert limits["unrelated-32", "CPU outside llama_decode"] == 0.03
    assert limits["long-context", "rate of the chats, during / before"] == 0.5
    assert {name for name, _ in limits} >= {*SCENARIOS} - {"batch-beside-chat"}
    assert all(ROWS[f"unrelated-{count}"].rounds >= 9 for count in (1, 8, 32, 64))
    assert ROWS["edit"].builtin
    assert {*UNUSUAL} <= {*ROWS}


def test_missing_measurements_give_no_figure() -> None:
    rounds = Rounds(None, MACHINE)
    assert find_figures(rounds) == []
    text = page(rounds, "x", {}, {})
    assert "Curves" not in text
    assert "* shared: no round is stored" in text


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=1, max_size=5))
def test_ratios_use_values_of_one_round(speeds: list[tuple[float, float]]) -> None:
    """The order of measurement does not matter, and a round without the other value is left out."""
    ours = {i: run("shared", CLLM, i, **{OUTPUT: a}) for i, (a, _) in enumerate(speeds)}
    theirs = {
        i: run("shared", LLAMA_SERVER, i, **{OUTPUT: b})
        for i, (_, b) in reversed(list(enumerate(speeds)))
    }
    ours[len(speeds)] = run("shared", CLLM, 0, **{OUTPUT: 7.0})
    assert [*compare_rounds(ours, theirs, Target("", OUTPUT))] == [a / b for a, b in speeds]


def test_spread_is_computed() -> None:
    assert spread([3.0, 1.0, 20.0]) == "3.000 (1.000 to 20.0)"
    assert spread([1234.5], " MB") == "1,234 MB"
    assert spread([]) == ""


@pytest.mark.slow
def test_page_shows_figures_and_rows(tmp_path: Path) -> None:
    """The page shows every picture, and no cell's content breaks a table."""
    path = tmp_path / "performance.md"
    rounds = made_up()
    failed: dict[str, Any] = {"num_succeeded": 4, "failures": {"connection lost | reset": 12}}
    rounds.add(
        StoredRun(
            row="rag", system=LLAMA_SERVER, round=0, machine=MACHINE, at="2026-01-03", **failed
        )
    )
    written = write_page(rounds, path, {"Ollama": "not installed"})
    assert written[0] == path
    text = path.read_text()
    assert sorted(picture.name for picture in written[1:]) == sorted(
        line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")
    )
    assert len(written) == 5, "no picture of what was not measured"
    for words in (
        "**missed** by 100.0 MB",
        "| llama-server (-np 8 -kvu) | 100.0 (100.0 to 100.0) |",
        "* Ollama: not installed",
        "* agents: no round is stored",
        "12 x connection lost / reset",
        "2026-01-01 to 2026-01-03",
        "| CPU | a / b |",
    ):
        assert words in text
    assert "runs with another" not in text


@pytest.mark.slow
def test_rewriting_page_keeps_notes(tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    write_page(made_up(), path, {})
    old = path.read_text()
    mine = "<!-- notes: context -->\n\nThe knee at 512\nis \\1 tile.\n\n<!-- end of notes -->"
    begin = old.index("<!-- notes: results -->")
    path.write_text(old[:begin] + mine + "\n")
    for _ in range(2):
        write_page(made_up(), path, {})
        assert path.read_text().count(mine) == 1
        assert "notes: results" not in path.read_text()


@pytest.mark.slow
def test_unwritable_page_raises(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be written"):
        write_page(made_up(), tmp_path / "none" / "performance.md", {})
