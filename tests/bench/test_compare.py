"""The comparison with peers, run on the built-in model, and the summary of a load."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.bench.answer import Answer
from cllm.bench.compare import Options, compare, run_of
from cllm.bench.comparison import BOUND, CLLM, ENGINE, LLAMA_SERVER
from cllm.bench.dialects import Usage
from cllm.bench.load import Outcome
from cllm.bench.peers import FOLDER, find
from cllm.bench.targets import figures, success
from cllm.bench.workload import Task

ROOT = Path(__file__).resolve().parents[2]


def answer(finish_reason: str | None, usage: Usage | None) -> Answer:
    answer = Answer(Task(b"", num_tokens=4), 0.0)
    answer.content_times = [1.0, 1.5, 2.5]
    answer.ended, answer.finish_reason, answer.usage = 3.0, finish_reason, usage
    answer.judge()
    return answer


def test_load_results_are_summarized() -> None:
    """A stream without token counts counts as complete if it ended with the reason length."""
    answers = [
        answer("length", Usage(4, 9, 0)),
        answer("length", None),
        answer("stop", None),
        answer(None, None),
    ]
    run = run_of(Outcome(answers, wall=2.0, cpu=0.1), CLLM, "default", 2, 0)
    assert (run.num_requests, run.num_succeeded, run.failures) == (
        4,
        2,
        {"no usage": 1, "no finish_reason": 1},
    )
    assert run.output_tokens_per_s == 4
    assert (run.ttft_ms, run.itl_p50_ms) == (1000, 750)
    nothing = run_of(Outcome(answers[2:], wall=2.0, cpu=0.1), CLLM, "default", 2, 0)
    assert (nothing.num_succeeded, nothing.output_tokens_per_s, nothing.ttft_ms) == (0, 0, None)


@pytest.mark.llama
@pytest.mark.slow
def test_comparison_measures_three_rounds(builtin_path: Path) -> None:
    """Each round measures every system and reports the figures that are compared."""
    folder = ROOT / FOLDER
    if not (find("llama-server", folder) and find("llama-batched-bench", folder)):
        pytest.skip("llama.cpp's programs are not built: python benchmarks/build_peers.py")
    told: list[float] = []
    options = Options(
        model=builtin_path,
        peers=folder,
        concurrency=[2],
        rounds=3,
        prompt_words=4,
        max_tokens=6,
        threads=2,
        curves=False,
    )
    kept: list[int] = []
    results = compare(
        options,
        {"CPU": "any"},
        lambda share, _: told.append(share),
        lambda found: kept.append(len(found.runs)),
    )
    assert kept[-1] == len(results.runs)
    assert told == sorted(told)
    assert told[-1] == 1.0
    for system in (BOUND, ENGINE, CLLM, LLAMA_SERVER):
        runs = [run for run in results.runs if run.system == system]
        assert [run.round for run in runs] == [0, 1, 2]
        assert all(run.output_tokens_per_s > 0 and success(run) == 1 for run in runs)
    order = [run.system for run in results.runs]
    assert order[: len(order) // 3] == order[len(order) // 3 : 2 * len(order) // 3][::-1]
    tried = {run.settings for run in results.trials if run.system == LLAMA_SERVER}
    assert {run.settings for run in results.runs if run.system == LLAMA_SERVER} <= tried
    assert {run.system for run in results.shared} >= {CLLM, LLAMA_SERVER}
    assert [run.system for run in results.kept][:2] == [CLLM, LLAMA_SERVER]
    assert len(figures(results)) >= 7
