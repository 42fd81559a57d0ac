"""Figures, targets and the page, computed from invented results."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.bench.compare import SHARED
from cllm.bench.comparison import (
    BOUND,
    CLLM,
    DEFAULT_SERVER,
    ENGINE,
    LLAMA_SERVER,
    Depth,
    Parts,
    Results,
    Run,
    read_results,
)
from cllm.bench.performance import page, spread, write_page
from cllm.bench.targets import Figure, figures, paired, ratio
from cllm.errors import StartupError

SETUP = {
    "model": "m.gguf",
    "model_bytes": 4e8,
    "prompt_words": 16,
    "prompt_tokens": 60,
    "max_tokens": 64,
}
SETUP |= {"context": 256, "threads": 2, "rounds": 3, "concurrency": [8], **SHARED}


def run(system: str, i: int = 0, speed: float = 100.0, **changes) -> Run:
    sizes = {"num_seqs": 8, "num_requests": 16, "num_succeeded": 16, **changes}
    return Run(system=system, round=i, output_tokens_per_s=speed, **sizes)


def made_up() -> Results:
    runs = []
    for i in range(3):
        runs += [
            run(BOUND, i, 120.0 + i, decode_tokens_per_s=200.0),
            run(ENGINE, i, 110.0, decode_tokens_per_s=199.0, ttft_ms=50.0, load_s=0.5),
            run(
                CLLM,
                i,
                108.0,
                ttft_ms=80.0 + i,
                start_s=1.5,
                memory_mb=700.0,
                cpu_us_per_token=40.0,
            ),
            run(
                LLAMA_SERVER, i, 100.0, ttft_ms=100.0, start_s=0.4, memory_mb=500.0, settings="-kvu"
            ),
            run(DEFAULT_SERVER, i, 90.0, ttft_ms=160.0),
        ]
    failed = run(LLAMA_SERVER, num_succeeded=4, failures={"connection lost | reset": 12})
    curve = [
        run(name, num_seqs=size, ttft_ms=9.0) for size in (1, 64) for name in (CLLM, LLAMA_SERVER)
    ]
    step = {"schedule": 10.0, "decode": 900.0, "send": 6.0}
    depths = [
        Depth(
            system=name,
            context=context,
            prefill_tokens_per_s=500.0,
            decode_tokens_per_s={1: 40.0, 8: 100.0},
        )
        for context in (100, 8000)
        for name in (ENGINE, BOUND)
    ]
    return Results(
        date="2025-01-01",
        machine={"CPU": "a | b"},
        setup=SETUP,
        skipped={"Ollama": "not installed"},
        llama_bench={"pp512": [500.0, 510.0, 490.0], "tg64": [50.0, 50.0, 50.0]},
        default_bench={"pp512": [400.0, 425.0, 400.0], "tg64": [50.0, 40.0, 50.0]},
        runs=runs,
        kept=[run(CLLM), failed],
        shared=[
            run(name, speed=speed, ttft_ms=9.0)
            for name, speed in ((CLLM, 30.0), (DEFAULT_SERVER, 10.0))
        ],
        curve=curve,
        parts=[Parts(1, step), Parts(64, step)],
        depths=depths,
    )


def by_name() -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(made_up())}


def test_figures_are_computed_from_rounds() -> None:
    """Each figure is a ratio or a difference within a round, and has a target."""
    found = by_name()
    decoding = found["decoding, engine in process / llama-batched-bench, 8"]
    assert (decoding.values, decoding.target, decoding.met) == ([0.995] * 3, 0.99, True)
    assert found["output tokens/s, HTTP streaming / engine in process, 8"].met
    against = found["output tokens/s, cLLM / llama-server, 8"]
    assert (against.values, against.target, against.verdict()) == ([1.08] * 3, 1.05, "met by 2.9%")
    bound = found["the bound of it, llama-batched-bench / llama-server, 8"]
    assert (bound.values, bound.met, bound.verdict()) == (
        pytest.approx([1.2, 1.21, 1.22]),
        None,
        "",
    )
    assert found["mean TTFT, cLLM / llama-server, 8"].values == [0.8, 0.81, 0.82]
    default = found["mean TTFT, cLLM / llama-server, default build, 8"]
    assert (default.values, default.target, default.met) == ([0.5, 81 / 160, 82 / 160], 0.8, True)
    assert found["output tokens/s, cLLM / llama-server, default build, 8"].values == [1.2] * 3
    assert found[
        "shared prefix, output tokens/s, cLLM / llama-server, default build, 8"
    ].values == [3.0]
    memory = found["memory, cLLM - llama-server, 8"]
    assert (memory.values, memory.verdict()) == ([200.0] * 3, "**missed** by 50.0 MB")
    assert found["start of cLLM until ready - loading of the model"].values == [1.0] * 3


@pytest.mark.parametrize(
    ("used", "target"), [("AVX, AVX2", 1.2), ("AVX2, AVX512", None), ("NEON", None)]
)
def test_compiler_gain_has_target_with_avx2_only(used: str, target: float) -> None:
    """Only the AVX2 kernels for prompts gain from the switches; decoding gains little."""
    results = made_up()
    results.machine["llama.cpp uses"] = used
    found = {figure.name: figure for figure in figures(results)}
    prefill = found["llama-bench pp512, cLLM's compiler switches / default build"]
    assert (prefill.values, prefill.target) == ([1.25, 1.2, 1.225], target)
    assert found["llama-bench tg64, cLLM's compiler switches / default build"].target is None


def test_single_failure_misses_target() -> None:
    """Failures over kept connections count too; failures of peers do not."""
    results = made_up()
    name = "share of cLLM's requests that succeed"
    assert by_name()[name].met
    results.kept[0].num_succeeded -= 1
    assert {figure.name: figure.met for figure in figures(results)}[name] is False


def test_missing_measurements_give_no_figure() -> None:
    results = msgspec.structs.replace(
        made_up(), runs=[], kept=[], curve=[], depths=[], shared=[], default_bench={}
    )
    assert figures(results) == []
    assert "Growth" not in page(results, "x", {})


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)), min_size=1, max_size=5))
def test_ratios_use_values_of_one_round(speeds: list[tuple[float, float]]) -> None:
    """The order of measurement does not matter, and a round without the other value is left out."""
    runs = [run(CLLM, i, a) for i, (a, _) in enumerate(speeds)]
    runs += [run(LLAMA_SERVER, i, b) for i, (_, b) in reversed(list(enumerate(speeds)))]
    runs.append(run(CLLM, len(speeds), 7.0))
    assert paired(runs, 8, lambda run: run.output_tokens_per_s)(CLLM, LLAMA_SERVER, ratio) == [
        a / b for a, b in speeds
    ]


def test_spread_is_computed() -> None:
    assert spread([3.0, 1.0, 20.0]) == "3.000 (1.000 to 20.0)"
    assert spread([1234.5], " MB") == "1,234 MB"
    assert spread([]) == ""


def test_page_shows_figures_and_targets(tmp_path: Path) -> None:
    """The page shows every picture, and no cell's content breaks a table."""
    path = tmp_path / "performance.md"
    written = write_page(made_up(), path)
    assert written[0] == path
    text = path.read_text()
    assert sorted(picture.name for picture in written[1:]) == sorted(
        line.partition("](")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")
    )
    assert len(written) == 8
    for words in (
        "**missed** by 50.0 MB",
        "llama-server (-kvu)",
        "Ollama: not installed",
        "4 of 16",
        "| default build | 400.0 (400.0 to 425.0) |",
    ):
        assert words in text
    columns = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert all(columns)
    assert "| CPU | a / b |" in text
    assert "16.0" in text, "host µs a row: what is not llama.cpp's"


def test_rewriting_page_keeps_notes(tmp_path: Path) -> None:
    path = tmp_path / "performance.md"
    write_page(made_up(), path)
    mine = "<!-- notes: context -->\n\nThe knee at 512\nis \\1 tile.\n\n<!-- end of notes -->"
    old = path.read_text()
    begin = old.index("<!-- notes: context -->")
    path.write_text(
        old[:begin]
        + mine
        + old[old.index("<!-- end of notes -->", begin) + len("<!-- end of notes -->") :]
    )
    for _ in range(2):
        write_page(made_up(), path)
        assert mine in path.read_text()
        assert path.read_text().count("<!-- notes: concurrency -->") == 1


def test_results_can_be_read_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(msgspec.json.encode(made_up()))
    assert read_results(tmp_path / "a") == made_up()
    (tmp_path / "b").write_text("{}")
    with pytest.raises(StartupError, match="no results of cllm bench compare"):
        read_results(tmp_path / "b")
    with pytest.raises(StartupError, match="cannot be read"):
        read_results(tmp_path / "c")


def test_unwritable_page_raises(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be written"):
        write_page(made_up(), tmp_path / "none" / "performance.md")
