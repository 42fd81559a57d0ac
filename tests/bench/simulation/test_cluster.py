"""Simulations with several fronts, and with replicas that die, drain, start and are slow."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest

from cllm.bench.simulation.replica import Course, Replica
from cllm.bench.simulation.report import SimulationReport, summarize
from cllm.bench.simulation.setup import Setup
from cllm.bench.simulation.simulator import simulate
from cllm.bench.simulation.synthetic import synthesize
from cllm.errors import StartupError
from cllm.observe.trace_file import TraceEntry

pytestmark = pytest.mark.slow

CLUSTER: dict[str, Any] = {
    "context": 65536,
    "routing": "prefix-window",
    "max_num_seqs": 8,
    "num_cells": 65536,
}


def run(
    entries: list[TraceEntry], **options: Any
) -> tuple[list[Course], list[Replica], SimulationReport]:
    courses, replicas = simulate(entries, Setup(**(CLUSTER | options)))
    return courses, replicas, summarize(courses, replicas, trace="", settings={})


def test_requests_of_dead_replicas_are_continued() -> None:
    """Each client gets its whole answer, without a token twice, and times only grow."""
    entries = synthesize("multi-turn", 300, 3.0, 1)
    courses, replicas, report = run(
        entries, replicas=4, death_seconds=5, lease_seconds=1, fronts=2, load_seconds=3
    )
    assert report.num_failed == 0
    assert report.num_replays > 20
    assert len(replicas) > 8
    for course in courses:
        assert len(course.times) == course.entry.output_length
        assert [*course.times] == sorted(course.times)
    _, _, calm = run(entries, replicas=4)
    assert (calm.num_replays, calm.mean_replicas, calm.max_replicas) == (0, 4, 4)
    assert calm.e2e_ms is not None
    assert report.e2e_ms is not None
    assert calm.e2e_ms.mean < report.e2e_ms.mean


def test_requests_wait_while_the_only_replica_starts() -> None:
    entries = synthesize("chat", 40, 0.5, 1)
    courses, replicas, report = run(entries, replicas=1, death_seconds=20, load_seconds=10)
    assert len(replicas) > 1
    assert report.num_failed == 0
    for before, after in itertools.pairwise(replicas):
        assert after.started == pytest.approx(before.stopped + 10)
    assert all(len(course.times) == course.entry.output_length for course in courses)


def test_drained_replica_finishes_its_requests() -> None:
    """It gets no more of them, and no request is continued elsewhere."""
    entries = synthesize("chat", 200, 2.0, 1)
    courses, replicas, report = run(
        entries, replicas=4, lease_seconds=1, drain_seconds=5, load_seconds=3
    )
    assert (report.num_failed, report.num_replays) == (0, 0)
    assert len(replicas) > 8
    for course in courses:
        assert course.ended <= replicas[course.replica].stopped


def test_replicas_are_added_and_removed_with_the_load() -> None:
    busy = synthesize("chat", 400, 4.0, 1)
    calm = synthesize("chat", 40, 0.05, 2)
    last = busy[-1].timestamp
    entries = [
        *busy,
        *(TraceEntry(**{**as_fields(one), "timestamp": last + one.timestamp}) for one in calm),
    ]
    options = {"lease_seconds": 1.0, "load_seconds": 5.0, "down_after": 60.0}
    _, replicas, report = run(entries, replicas=1, max_replicas=16, **options)
    assert report.num_failed == report.num_replays == 0
    assert 8 <= report.max_replicas <= 16
    assert sum(replica.stopped == float("inf") for replica in replicas) <= 2, "the calm needs one"
    _, _, fixed = run(entries, replicas=1)
    assert report.ttft_ms is not None
    assert fixed.ttft_ms is not None
    assert report.ttft_ms.mean < fixed.ttft_ms.mean / 3


def as_fields(entry: TraceEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def test_slow_replicas_get_fewer_requests() -> None:
    courses, _, report = run(
        synthesize("chat", 600, 1.0, 1), replicas=8, slow_replicas=2, slow_factor=3.0
    )
    slow, fast = report.requests_per_replica[:2], report.requests_per_replica[2:]
    assert statistics.mean(slow) < 0.6 * statistics.mean(fast)
    assert all(not course.failure for course in courses)


def test_fronts_keep_conversations_on_their_replicas() -> None:
    """Five fronts, which do not talk to each other, get the turns of a conversation in turn. They
    find less than one front does: 0.65 of it in docs/simulation.md.
    """
    entries = synthesize("multi-turn", 400, 1.2, 1)
    _, _, one = run(entries, replicas=8)
    _, _, five = run(entries, replicas=8, fronts=5, lease_seconds=1)
    _, _, blind = run(entries, replicas=8, routing="least-loaded")
    assert 0.55 * one.cached_tokens < five.cached_tokens < one.cached_tokens
    assert five.cached_tokens > 2 * blind.cached_tokens


@pytest.mark.parametrize(
    ("workload", "rate", "most"),
    # the last one is twice what the replicas can serve
    [
        ("chat", 1.2, 1.05),
        ("shared-prefix", 2.0, 1.05),
        ("multi-turn", 1.2, 1.05),
        ("two-keys", 4.0, 1.1),
    ],
)
def test_chosen_replicas_are_about_as_good_as_those_of_the_best_rule(
    workload: str, rate: float, most: float
) -> None:
    """A part of benchmarks/routing.py."""
    entries = synthesize(workload, 300, rate, 0)
    means = {}
    for rule in ("least-loaded", "prefix", "prefix-window"):
        courses, _, _ = run(entries, replicas=8, max_num_seqs=16, routing=rule)
        means[rule] = statistics.fmean(one.times[0] - one.entry.arrived for one in courses)
    assert means["prefix-window"] <= most * min(means.values())


@pytest.mark.parametrize(
    "options",
    [
        {"max_replicas": 2, "replicas": 4, "lease_seconds": 1},
        {"max_replicas": 8, "replicas": 4},
        {"models": 1, "death_seconds": 1},
    ],
)
def test_impossible_clusters_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(StartupError):
        Setup(**(CLUSTER | options))


def test_waiting_requests_move_to_engines_of_the_same_server_that_have_room() -> None:
    """Every second answer is long, so one of two engines in turn gets all of these."""
    entries = [
        TraceEntry(
            timestamp=number,
            input_length=16,
            output_length=200 if number % 2 else 5,
            hash_ids=[number],
            block_size=16,
        )
        for number in range(16)
    ]
    ends = []
    for lease_seconds in (0.0, 1e6):
        courses, _, report = run(
            entries,
            replicas=2,
            max_num_seqs=2,
            routing="round-robin",
            lease_seconds=lease_seconds,
            check=True,
        )
        assert report.num_failed == 0
        assert all(len(course.times) == course.entry.output_length for course in courses)
        ends.append(max(course.ended for course in courses))
    assert ends[0] < 0.6 * ends[1]
