"""Measuring the candidates of ``cllm tune`` with the workloads of users."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.client import Outcome
from cllm.bench.load.report import Report, summarize
from cllm.bench.load.scenarios import SCENARIOS
from cllm.bench.load.workload import RequestSpec, Task
from cllm.bench.tune.load import WORKLOADS, ServerBench, compute_rate, make_stages
from cllm.bench.tune.measure import CandidateError
from cllm.bench.tune.search import Traffic

SPEC = RequestSpec(model="m", prompt_words=1, max_tokens=8)


def report(**figures: float) -> Report:
    answer = TimedAnswer(Task(b""), 0.0)
    answer.content_times, answer.ended = [1.0, 2.0], 2.0
    made = summarize(Outcome([answer], wall=2.0, cpu=0.1), url="u", model="m", settings={})
    return msgspec.structs.replace(made, output_tokens_per_s=7.0, workload_figures=figures)


def test_every_workload_of_users_is_known() -> None:
    assert {*WORKLOADS} == {"chat", *SCENARIOS}
    for name in WORKLOADS:
        assert make_stages(Traffic(name, 0.1), SPEC, 2.5)


def test_rate_counts_long_prompt_and_streams() -> None:
    """Halving the time of both doubles the rate."""
    assert compute_rate(report()) == 7.0
    ttft, gap = "TTFT of the long prompt ms", "ITL p50 beside the long prompt ms"
    slow, fast = report(**{ttft: 4000.0, gap: 200.0}), report(**{ttft: 2000.0, gap: 100.0})
    assert compute_rate(fast) == pytest.approx(2 * compute_rate(slow))
    assert compute_rate(report(**{ttft: 2000.0, gap: 0.0})) > compute_rate(fast)
    chats = "chunks/s of the chats during it"
    slow, fast = report(**{ttft: 4000.0, chats: 20.0}), report(**{ttft: 4000.0, chats: 80.0})
    assert compute_rate(fast) == pytest.approx(2 * compute_rate(slow))


@pytest.mark.llama
@pytest.mark.slow
def test_candidate_is_measured_in_server() -> None:
    """Its settings reach the server; one that cannot be served is reported."""
    chosen: list[dict[str, Any]] = []

    def settings(choice: dict[str, Any]) -> dict[str, Any]:
        chosen.append(choice)
        return {"model": {"max_context_length": 1024}, "kv": {"type": choice["kv.type"]}}

    bench = ServerBench(settings)
    assert bench.measure({"kv.type": "f16"}, Traffic("chat", 0.1)).rate > 0
    assert bench.measure({"kv.type": "q8_0"}, Traffic("long-beside-short", 0.1)).rate > 0
    with pytest.raises(CandidateError, match="does not start"):
        bench.measure({"kv.type": "unknown"}, Traffic("chat", 1.0))
    with pytest.raises(CandidateError, match="requests failed: HTTP 400"):
        bench.measure({"kv.type": "f16"}, Traffic("agents", 1.0))
    assert len(chosen) == 4
