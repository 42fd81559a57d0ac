"""What a report stores about a run, and reading reports of older versions."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.client import Outcome
from cllm.bench.load.comparison import compare_figures, differences
from cllm.bench.load.dialects import TokenCounts
from cllm.bench.load.report import BINS, Report, Timeline, read_report, summarize
from cllm.bench.load.workload import Task
from cllm.errors import StartupError


def answered(sent: float, gaps: list[float], tokens: int) -> TimedAnswer:
    answer = TimedAnswer(Task(b""), sent)
    for gap in gaps:
        answer.ended += gap
        answer.content_times.append(answer.ended)
    answer.finish_reason, answer.usage = "length", TokenCounts(tokens, 1, 0)
    return answer


def report_of(answers: list[TimedAnswer]) -> Report:
    return summarize(Outcome(answers, wall=2.0, cpu=0.1), url="u", model="m", settings={"seed": 0})


SECONDS = st.floats(0, 100)
ANSWERS = st.lists(
    st.builds(answered, SECONDS, st.lists(SECONDS, max_size=5), st.integers(1, 50)), max_size=8
)


@given(ANSWERS)
def test_timeline_counts_every_token(answers: list[TimedAnswer]) -> None:
    """The bins contain all tokens, and all the time in which requests ran."""
    timeline = Timeline.of(answers, answers)
    waited = sum(answer.ended - answer.sent for answer in answers)
    if timeline is None:
        assert waited == 0
        return
    assert len(timeline.running) == len(timeline.output_tokens_per_s) == BINS
    rounding = 0.001 * BINS * timeline.bin_s
    assert sum(timeline.running) * timeline.bin_s == pytest.approx(waited, rel=1e-9, abs=rounding)
    tokens = sum(answer.output_tokens for answer in answers)
    assert sum(timeline.output_tokens_per_s) * timeline.bin_s == pytest.approx(
        tokens, rel=1e-9, abs=rounding
    )


def test_timeline_has_expected_intervals() -> None:
    """One request takes 2 s, with 4 tokens in 2 chunks; another begins and ends halfway."""
    timeline = Timeline.of([answered(0, [1, 1], 4), answered(1, [], 1)], [answered(0, [1, 1], 4)])
    assert timeline.bin_s == 2 / BINS
    assert timeline.running == [1] * BINS
    assert [i for i, rate in enumerate(timeline.output_tokens_per_s) if rate] == [
        BINS // 2,
        BINS - 1,
    ]


def test_percentiles_are_computed() -> None:
    report = report_of([answered(0, [i / 100], 1) for i in range(101)])
    assert (
        report.percentiles_ms["ttft"]
        == report.percentiles_ms["e2e"]
        == pytest.approx(list(range(0, 1010, 10)))
    )
    assert set(report.percentiles_ms) == {"ttft", "e2e"}, "no request has two tokens"
    assert report_of([]).percentiles_ms == {}
    assert report_of([]).timeline is None


def test_old_reports_can_be_read(tmp_path: Path) -> None:
    """Fields that an old report lacks are empty."""
    content = msgspec.to_builtins(report_of([answered(0, [1, 1], 4)]))
    for name in ("num_short", "percentiles_ms", "timeline"):
        del content[name]
    (tmp_path / "old").write_bytes(msgspec.json.encode(content))
    report = read_report(tmp_path / "old")
    assert (report.num_short, report.percentiles_ms, report.timeline) == (0, {}, None)
    assert differences(report, report) == []


def test_figures_differ_if_their_intervals_have_nothing_in_common() -> None:
    """Requests that take 1 to 2 s, and ones that take 10 % or ten times as long."""

    def run(factor: float, count: int = 100) -> Report:
        seconds = [factor * (1 + i / (count - 1)) for i in range(count)]
        return report_of([answered(0, [at], 1) for at in seconds])

    before = run(1)
    for after, differ in ((run(1.05), False), (run(10), True), (run(0.1), True)):
        compared = {figure.name: figure for figure in compare_figures(before, after)}
        median = compared["TTFT p50 ms"]
        assert median.differ is differ
        assert median.ratio == pytest.approx(median.after / median.before)
        low, high = median.interval_before
        assert low < median.before < high
        # 100 requests: the ranks 40 to 60
        assert (low, high) == pytest.approx((1402, 1598), abs=2)
        assert compared["TTFT mean ms"].differ is differ
        assert compared["succeeded"].differ is None
    (few,) = [one for one in compare_figures(before, run(10, 4)) if one.name == "TTFT p50 ms"]
    assert (few.ratio, few.interval_after, few.differ) == (pytest.approx(10), None, None)


@pytest.mark.parametrize(
    "wrong", [{"percentiles_ms": {"ttft": [1.0]}}, {"timeline": {"bin_s": 1, "running": []}}]
)
def test_invalid_report_raises(tmp_path: Path, wrong: dict) -> None:
    content = msgspec.to_builtins(report_of([answered(0, [1, 1], 4)])) | wrong
    (tmp_path / "wrong").write_bytes(msgspec.json.encode(content))
    with pytest.raises(StartupError, match="not a report"):
        read_report(tmp_path / "wrong")
