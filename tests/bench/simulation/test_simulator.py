"""Simulations whose results can be computed by hand, and the command line."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cllm.backends.fake.backend import Costs
from cllm.bench.distribution import LatencyLimits
from cllm.bench.simulation.fast_forward import FastForward
from cllm.bench.simulation.replica import STUCK
from cllm.bench.simulation.report import SimulationReport, backlog, overlap, summarize
from cllm.bench.simulation.setup import Setup
from cllm.bench.simulation.simulator import TOO_LONG, simulate
from cllm.bench.simulation.synthetic import WORKLOADS, synthesize
from cllm.cli import main as command_line
from cllm.cli import progress
from cllm.cli.bench.simulate import read_costs
from cllm.errors import StartupError
from cllm.observe.trace_file import TraceEntry, read_trace, write_trace
from cllm.scheduler.policy import FirstComeFirstServed

pytestmark = pytest.mark.slow  # together they compute for half a minute

COSTS = Costs(step=0.01, row=0.002, token=0.001)
TOKEN = 0.012  # seconds of a step in which one sequence decodes


def entry(
    at: float = 0.0, prompt: int = 100, answer: int = 5, blocks: list[int] | None = None, **fields
) -> TraceEntry:
    """Return a request that arrives at ``at`` seconds. By default, its prompt is one block that all
    requests share.
    """
    lengths = {"input_length": prompt, "output_length": answer}
    return TraceEntry(
        timestamp=at * 1000, hash_ids=[1] if blocks is None else blocks, **lengths, **fields
    )


def run(entries: list[TraceEntry], **options) -> SimulationReport:
    limits, accounts = options.pop("limits", LatencyLimits()), options.pop("accounts", ())
    setup = Setup(
        **{
            "context": 4096,
            "costs": COSTS,
            "check": True,
            "target_itl_ms": None,
            "prefill_share": 1.0,
            **options,
        }
    )
    courses, replicas = simulate(entries, setup)
    return summarize(courses, replicas, trace="test", settings={}, limits=limits, accounts=accounts)


def ms(seconds: float):
    return pytest.approx(seconds * 1000, abs=2e-3)


# --- by hand ------------------------------------------------------------------------------------


def test_single_request_has_expected_times() -> None:
    """The prompt takes one step, and each further token another one. The trace begins with its
    first request.
    """
    report = run([entry(at=7.0, prompt=100, answer=5)])
    assert report.ttft_ms.mean == ms(0.01 + 100 * 0.001)
    assert report.itl_ms.mean == report.itl_ms.p99 == report.tpot_ms.mean == ms(TOKEN)
    assert report.e2e_ms.mean == ms(0.11 + 4 * TOKEN)
    assert report.wall_s == pytest.approx(0.11 + 4 * TOKEN)
    assert report.output_tokens_per_s == pytest.approx(5 / report.wall_s, abs=0.01)
    assert (
        report.num_steps,
        report.prefill_tokens,
        report.output_tokens,
        report.prompt_tokens,
    ) == (5, 100, 5, 100)
    assert (report.num_succeeded, report.num_failed, report.failures, report.num_cut) == (
        1,
        0,
        {},
        0,
    )
    assert report.fairness is None


def test_long_prompt_is_split_into_chunks() -> None:
    """A prompt longer than a step takes several steps."""
    report = run([entry(prompt=100, answer=1)], max_num_batched_tokens=40, max_num_seqs=8)
    assert report.num_steps == 3
    assert report.ttft_ms.mean == report.e2e_ms.mean == ms(3 * 0.01 + 100 * 0.001)
    assert report.itl_ms is report.tpot_ms is None


def test_request_arriving_during_step_joins_next_step() -> None:
    """The first step ends at 0.11 s; the second computes a token of the first and the other's
    prompt.
    """
    report = run(
        [entry(prompt=100, answer=2, blocks=[1]), entry(at=0.05, prompt=20, answer=1, blocks=[2])]
    )
    ends = 0.11 + 0.01 + 0.002 + 20 * 0.001
    assert report.num_steps == 2
    assert report.e2e_ms.mean == ms((ends + ends - 0.05) / 2)


def test_time_advances_while_idle() -> None:
    report = run([entry(at=0.0, blocks=[1]), entry(at=100.0, blocks=[2])])
    assert report.wall_s == pytest.approx(100.11 + 4 * TOKEN)
    assert report.ttft_ms.mean == report.ttft_ms.p99 == ms(0.11)


def test_goodput_counts_requests_within_limits() -> None:
    """A request must meet both limits. Failed requests count as missed."""
    entries = [
        entry(),
        entry(at=10, prompt=500, blocks=[2]),
        entry(at=20, prompt=5000, blocks=[*range(10)]),
    ]
    report = run(entries, limits=LatencyLimits(ttft=200))
    assert report.failures == {TOO_LONG: 1}
    assert report.good_share == pytest.approx(1 / 3, abs=1e-4)
    assert report.good_requests_per_s == pytest.approx(1 / report.wall_s, abs=1e-3)
    assert run(entries, limits=LatencyLimits(ttft=600)).good_share == pytest.approx(2 / 3, abs=1e-4)
    assert run(entries, limits=LatencyLimits(tpot=11)).good_share == 0


def test_expired_requests_are_counted() -> None:
    """The second request could only begin when the first has ended, which is too late."""
    entries = [entry(answer=100), entry(at=0.05, blocks=[2], deadline_ms=500.0)]
    assert run(entries, max_num_seqs=1).failures == {"timeout": 1}
    assert run(entries, max_num_seqs=2).failures == {}


def test_high_priority_runs_first() -> None:
    """An urgent request that arrives late overtakes the waiting ones."""
    entries = [entry(answer=50, blocks=[i], account="normal") for i in range(4)]
    entries.append(entry(at=0.05, answer=2, blocks=[9], account="urgent", priority="interactive"))
    accounts = run(entries, policy="priority", max_num_seqs=1).accounts
    assert accounts["urgent"].mean_ttft_ms < 300 < accounts["normal"].mean_ttft_ms
    assert run(entries, policy="fair", max_num_seqs=1).accounts["urgent"].mean_ttft_ms < 300


def test_context_length_limits_answers() -> None:
    report = run([entry(prompt=100, answer=50)], context=110)
    assert (report.num_cut, report.output_tokens, report.num_failed) == (1, 10, 0)


# --- prefixes and replicas ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["paged", "partitioned", "unified"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_shared_prefix_is_computed_once_per_replica(layout: str, replicas: int) -> None:
    """Ten requests share 1,024 tokens and have 512 of their own."""
    entries = [entry(at=i / 100, prompt=1536, answer=1, blocks=[1, 2, 100 + i]) for i in range(10)]
    report = run(entries, layout=layout, replicas=replicas, routing="round-robin", max_num_seqs=16)
    assert report.prompt_tokens == 10 * 1536
    assert report.cached_tokens == (10 - replicas) * 1024
    assert report.prefill_tokens == 10 * 512 + replicas * 1024
    assert report.requests_per_replica == [10 // replicas] * replicas


def test_different_blocks_share_no_prefix() -> None:
    entries = [entry(at=i, prompt=1000, answer=1, blocks=[2 * i, 2 * i + 1]) for i in range(300)]
    assert run(entries, max_num_seqs=4, check=False).cached_tokens == 0


@pytest.mark.parametrize("routing", ["least-loaded", "prefix", "round-robin"])
def test_replicas_run_in_parallel(routing: str) -> None:
    """One replica runs as many requests as fit; of two replicas, each gets half of them."""
    entries = [entry(answer=20, blocks=[i]) for i in range(64)]
    one, two, four = (run(entries, replicas=n, max_num_seqs=4, routing=routing) for n in (1, 2, 4))
    assert two.wall_s == pytest.approx(one.wall_s / 2, rel=0.01)
    assert four.wall_s == pytest.approx(one.wall_s / 4, rel=0.01)
    assert four.requests_per_replica == [16] * 4


def test_ram_tier_keeps_evicted_prefixes() -> None:
    """The cells hold one of two prompts that alternate."""
    entries = [entry(at=i, prompt=500, answer=1, blocks=[i % 2]) for i in range(6)]
    assert run(entries, max_num_seqs=1).cached_tokens == 0
    assert run(entries, max_num_seqs=1, ram_cache_tokens=10_000).cached_tokens == 4 * 499


@pytest.mark.parametrize("routing", ["prefix", "prefix-window"])
def test_prefix_routing_prefers_replica_with_prefix(routing: str) -> None:
    """Two conversations of ten turns each stay on their replica, and move when it is crowded."""
    blocks = {"a": list(range(20)), "b": list(range(100, 120))}
    entries = [
        entry(
            at=10 * turn,
            prompt=512 * (turn + 1),
            answer=1,
            blocks=blocks[key][: turn + 1],
            account=key,
        )
        for turn in range(10)
        for key in "ab"
    ]
    options = {"context": 8192, "replicas": 4, "max_num_seqs": 4}
    home = run(entries, **options, routing=routing)
    assert sorted(home.requests_per_replica) == [0, 0, 10, 10]
    assert home.cached_tokens == 2 * sum(512 * turn for turn in range(10))
    assert run(entries, **options, routing="round-robin").cached_tokens < home.cached_tokens
    crowd = [entry(prompt=512, answer=50, blocks=[1]) for _ in range(40)]
    assert min(run(crowd, **options, routing=routing).requests_per_replica) > 5


def test_least_loaded_replica_is_chosen() -> None:
    """A long answer keeps one replica busy, so all other requests go to the other one."""
    entries = [
        entry(answer=1000, blocks=[0]),
        *(entry(at=i + 1, answer=2, blocks=[i]) for i in range(9)),
    ]
    assert sorted(run(entries, replicas=2).requests_per_replica) == [1, 9]


# --- fairness -----------------------------------------------------------------------------------


def two_accounts() -> list[TraceEntry]:
    """Return 90 requests of one key, then 10 of another, which all arrive at the beginning."""
    return [
        entry(answer=20, blocks=[i], account="heavy" if i < 90 else "light") for i in range(100)
    ]


def test_fair_policy_differs_from_fcfs() -> None:
    """With "fair", both accounts wait equally long; with "fcfs", light waits for heavy."""
    fair, fcfs = (run(two_accounts(), policy=policy, max_num_seqs=2) for policy in ("fair", "fcfs"))
    assert fair.fairness.jain_index > 0.98
    assert fcfs.fairness.jain_index < 0.7
    assert fair.accounts["light"].mean_ttft_ms < fcfs.accounts["light"].mean_ttft_ms / 3
    assert fair.accounts["heavy"].mean_e2e_ms > fcfs.accounts["heavy"].mean_e2e_ms
    assert fair.wall_s == pytest.approx(fcfs.wall_s, rel=0.02)
    for report in (fair, fcfs):
        assert {name: own.served for name, own in report.accounts.items()} == {
            "heavy": 90 * 140,
            "light": 10 * 140,
        }
        assert set(report.fairness.served) == {"heavy", "light"}


def test_comparison_uses_selected_accounts() -> None:
    """Only the given accounts are compared. Accounts that never wait at the same time cannot be
    compared.
    """
    entries = [*two_accounts(), entry(at=1000, account="late")]
    assert run(entries, max_num_seqs=2).fairness.jain_index is None
    assert run(entries, max_num_seqs=2, accounts=["heavy", "light"]).fairness.jain_index > 0.98


def test_overlap_of_intervals_is_computed() -> None:
    courses, _ = simulate(
        [entry(at=0), entry(at=0.05, blocks=[2]), entry(at=9, blocks=[3])], Setup(context=4096)
    )
    assert [len(backlog(courses[:n])) for n in (1, 2, 3)] == [1, 1, 2]
    assert overlap([(0, 2), (3, 5)], [(1, 4)]) == [(1, 2), (3, 4)]
    assert overlap([(0, 1)], [(1, 2)]) == []


# --- costs --------------------------------------------------------------------------------------


def test_costs_are_fitted_to_server_measurements(tmp_path: Path) -> None:
    """Other fields in the answer of /scheduler are ignored."""
    file = tmp_path / "costs.json"
    rows = {"1": 0.03, "2": 0.04, "4": 0.06, "8": 0.1}
    file.write_text(
        json.dumps({"row_seconds": rows, "token_seconds": 0.005, "steps": [], "cells": "..."})
    )
    costs = read_costs(str(file))
    assert (costs.step, costs.row, costs.token) == pytest.approx((0.02, 0.01, 0.005))
    assert read_costs("0.1,0.02,0.003") == Costs(0.1, 0.02, 0.003)


@pytest.mark.parametrize(
    ("rows", "step", "row"),
    [
        ({"5": 0.08}, 0.03, 0.01),  # in the scheduler's proportion
        ({"1": 0.01, "2": 0.03}, 0.0, 0.07 / 5),  # nothing is less than free
        ({"1": 0.03, "2": 0.01}, 0.02, 0.0),
    ],
)
def test_fitted_costs_are_never_negative(
    tmp_path: Path, rows: dict[str, float], step: float, row: float
) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"row_seconds": rows, "token_seconds": 0.005}))
    costs = read_costs(str(file))
    assert (costs.step, costs.row) == pytest.approx((step, row))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("1,2", "cannot read"),
        ("a,b,c", "step,row,token"),
        ("-1,0,0", "from 0"),
        ("nan,0,0", "from 0"),
        ('{"row_seconds": {"1": "x"}, "token_seconds": 1}', "row_seconds"),
        ('{"row_seconds": {}, "token_seconds": 1}', "row_seconds"),
        ('{"row_seconds": {"1": 1}, "token_seconds": null}', "token_seconds"),
        ('{"token_seconds": 1}', "row_seconds"),
    ],
)
def test_invalid_costs_raise(tmp_path: Path, text: str, word: str) -> None:
    if text.startswith("{"):
        (tmp_path / "costs.json").write_text(text)
        text = str(tmp_path / "costs.json")
    with pytest.raises(StartupError, match=word):
        read_costs(text)


# --- synthetic traces ---------------------------------------------------------------------------


@pytest.mark.parametrize("workload", WORKLOADS)
def test_synthetic_traces_can_be_read_again(tmp_path: Path, workload: str) -> None:
    """The seed determines the trace, a file returns what was written, and the mean rate is the
    requested one.
    """
    entries = synthesize(workload, 500, 10.0, 3)
    assert entries == synthesize(workload, 500, 10.0, 3) != synthesize(workload, 500, 10.0, 4)
    write_trace(tmp_path / "trace.jsonl", entries)
    assert read_trace(tmp_path / "trace.jsonl") == entries
    assert len(entries) == 500
    assert 35 < entries[-1].arrived < 120


def test_synthetic_traces_share_prefixes() -> None:
    def cached(workload: str) -> float:
        report = run(synthesize(workload, 60, 0.2, 1), context=65536, max_num_seqs=8, check=False)
        return report.cached_tokens / report.prompt_tokens

    assert cached("chat") == 0
    assert cached("shared-prefix") > 0.4
    assert cached("multi-turn") > 0.2


# --- the whole ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["paged", "partitioned", "unified"])
@pytest.mark.parametrize("speculation", ["off", "prompt_lookup"])
def test_fast_and_checking_backends_agree(layout: str, speculation: str) -> None:
    entries = synthesize("shared-prefix", 30, 2.0, 5)
    options = {"layout": layout, "speculation": speculation, "max_num_seqs": 4, "context": 4096}
    options["num_cells"] = None if layout == "partitioned" else 6000
    assert run(entries, **options, check=True) == run(entries, **options, check=False)


@pytest.mark.parametrize("workload", ["chat", "multi-turn", "shared-prefix", "long-prefill"])
def test_joined_steps_change_no_result(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive in the middle of joined steps, and sequences grow long in them."""
    entries = synthesize(workload, 80, 0.6, 5)
    options: dict[str, Any] = {"context": 65536, "replicas": 3, "max_num_seqs": 8, "check": False}
    options |= {"target_itl_ms": 1000.0, "prefill_share": 0.3, "routing": "prefix-window"}
    joined = run(entries, **options)
    calls = []
    monkeypatch.setattr(FastForward, "count_steps", lambda *_: calls.append(1) or 0)
    single = run(entries, **options)
    assert len(calls) == single.num_steps, "each step was computed"
    assert joined.num_steps == single.num_steps
    assert joined.cached_tokens == single.cached_tokens
    assert joined.e2e_ms.mean == pytest.approx(single.e2e_ms.mean, rel=1e-3)
    assert joined.ttft_ms.mean == pytest.approx(single.ttft_ms.mean, rel=1e-3)
    assert joined.requests_per_replica == single.requests_per_replica


def test_same_seed_gives_same_results() -> None:
    entries = synthesize("multi-turn", 40, 5.0, 1)
    first, again, other = (
        run(entries, replicas=4, context=65536, check=False, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


class Shortest(FirstComeFirstServed):
    """A policy from another module: short prompts first."""

    def group(self, seq):
        return seq.num_prompt_tokens


def test_custom_policy_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_policies", sys.modules[__name__])
    entries = [entry(prompt=500 - 10 * i, answer=10, blocks=[i]) for i in range(20)]
    shortest = run(entries, policy="my_policies:Shortest", max_num_seqs=1)
    assert shortest.ttft_ms.mean < run(entries, policy="fcfs", max_num_seqs=1).ttft_ms.mean
    with pytest.raises(StartupError, match="my_policies:Longest"):
        run(entries, policy="my_policies:Longest")


def test_stuck_scheduler_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.engine.engine.Engine.step", lambda _: [])
    report = run([entry(), entry(at=1)])
    assert report.failures == {STUCK: 2}
    assert report.ttft_ms is None


@pytest.fixture
def cllm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs the command line in this process and returns exit code, stdout
    and stderr.
    """
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(progress, "SILENCE", math.inf)  # a slow machine gets lines of progress
    monkeypatch.setattr(progress, "SHORT_SILENCE", math.inf)

    def run(*arguments: object) -> tuple[int, str, str]:
        code: int | str | None = 0
        try:
            command_line.main([*map(str, arguments)])
        except SystemExit as end:
            code = end.code
        output = capsys.readouterr()
        return int(code or 0), output.out, output.err

    return run


@pytest.fixture
def trace(cllm, tmp_path: Path) -> Path:
    """Return a trace of 40 requests with two accounts, made by the command line."""
    file = tmp_path / "trace.jsonl"
    code, out, err = cllm(
        "simulate", "synth", file, "--workload", "two-keys", "--requests", 40, "--rate", 20
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"{file}: 40 requests in ")
    return file


def test_simulate_prints_json(cllm, trace: Path) -> None:
    """stdout has one JSON object and nothing else, and it is the same each time."""
    options = ("--max-num-seqs", 2, "--replicas", 2, "--policy", "fcfs", "--ttft", 1000, "--json")
    code, out, _ = cllm("simulate", trace, *options)  # a slow machine tells its progress on stderr
    assert code == 0
    report = json.loads(out)
    assert (report["trace"], report["num_succeeded"], len(report["requests_per_replica"])) == (
        str(trace),
        40,
        2,
    )
    assert report["settings"]["policy"] == "fcfs"
    assert report["settings"]["costs"] == {
        "step": 0.012,
        "row": 0.012,
        "token": 0.0066,
        "context": 0.0,
        "switch": 0.0,
    }
    assert report["settings"]["ttft"] == 1000
    assert set(report["e2e_ms"]) == {"mean", "p50", "p95", "p99"}
    assert set(report["keys"]) == set(report["fairness"]["served"]) == {"heavy", "light"}
    assert cllm("simulate", trace, *options)[1] == out
    assert cllm("simulate", trace, *options, "--routing", "round-robin")[1] != out


def test_simulate_prints_table(cllm, trace: Path) -> None:
    code, out, err = cllm(
        "simulate", trace, "--costs", "0.1,0,0", "--max-num-seqs", 2, "--tpot", 90
    )
    assert code == 0
    assert "40 of 40 requests succeeded" in out
    words = (
        "TTFT",
        "ITL",
        "TPOT",
        "E2E",
        "p95",
        "output tokens/s",
        "heavy",
        "light",
        "Jain index",
        "0.00 of them good",
    )
    assert all(word in out for word in words)
    assert "simulated" in err


def test_oversized_requests_give_exit_code_1(cllm, trace: Path) -> None:
    code, out, _ = cllm("simulate", trace, "--context", 100, "--key", "light")
    assert code == 1
    assert f"failed: {TOO_LONG}" in out
    assert "cut short by the context" in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--policy", "none"),
        ("--replicas", "0"),
        ("--routing", "none"),
        ("--costs", "1,2"),
        ("--key", "nobody"),
        ("--layout", "partitioned", "--num-cells", "10000"),
        ("--layout", "unified", "--num-cells", "10"),
        ("--max-num-batched-tokens", "8"),
        ("--ttft", "0"),
    ],
)
def test_invalid_arguments_give_one_line(cllm, trace: Path, arguments: tuple[str, ...]) -> None:
    code, out, err = cllm("simulate", trace, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_invalid_files_give_one_line(cllm, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 1}\n')
    code, out, err = cllm("simulate", tmp_path / "trace.jsonl")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "trace.jsonl, line 1: " in err
    assert "input_length" in err
    assert cllm("simulate", tmp_path / "none.jsonl")[0] == 2
    assert cllm("simulate", "synth", tmp_path, "--workload", "chat")[0] == 2
    assert cllm("simulate", "synth", tmp_path / "x", "--workload", "none")[0] == 2


def test_help_describes_simulate(cllm) -> None:
    _, out, _ = cllm("simulate", "--help")
    assert all(
        word in out
        for word in ("synth", "--policy", "--replicas", "--routing", "--costs", "--key", "--json")
    )
    _, out, _ = cllm("simulate", "synth", "--help")
    assert all(workload in out for workload in WORKLOADS)


# --- several models ------------------------------------------------------------------------------


def of_model(at: float, model: str) -> TraceEntry:
    return msgspec.structs.replace(entry(at=at), model=model)


def test_models_are_loaded_when_requests_name_them() -> None:
    """The model that was used the longest ago makes room, and a request waits for the load."""
    names = ["a", "b", "a", "c", "a", "b"]  # c replaces b, and b replaces c
    entries = [of_model(100 * i, name) for i, name in enumerate(names)]
    setup = Setup(context=4096, models=2, load_seconds=7)
    courses, replicas = simulate(entries, setup)
    waits = [course.times[0] - course.entry.arrived for course in courses]
    assert [wait > 7 for wait in waits] == [True, True, False, True, False, True]
    assert len(replicas) == 4
    assert (
        summarize(courses, replicas, trace="", settings=msgspec.to_builtins(setup)).num_loads == 4
    )


def test_busy_model_is_not_unloaded() -> None:
    """It gets no further requests while another one waits for its memory."""
    entries = [of_model(at, name) for at, name in ((0, "a"), (20, "a"), (20.1, "b"), (20.2, "a"))]
    courses, _ = simulate(entries, Setup(context=4096, models=1, load_seconds=3))
    assert all(not course.failure for course in courses)
    first, second, other, last = courses
    assert first.ended < second.ended <= other.times[0] - 3
    assert last.times[0] >= other.ended + 3


def test_all_models_fit_unless_a_limit_is_set() -> None:
    entries = [of_model(0, "a"), of_model(0.1, "b")]
    courses, replicas = simulate(entries, Setup(context=4096))
    assert {course.replica for course in courses} == {0, 1}
    assert len(replicas) == 2


@pytest.mark.parametrize("models", [1, 2])
def test_every_request_to_more_models_than_fit_is_served(models: int) -> None:
    entries = synthesize("models", 120, 0.5, seed=2)
    assert {one.model for one in entries} == {"model-0", "model-1", "model-2"}
    courses, replicas = simulate(entries, Setup(context=8192, models=models, load_seconds=2))
    assert all(not course.failure for course in courses)
    assert len(replicas) > 3


def test_model_leaves_as_soon_as_one_of_them_may() -> None:
    """C waits for B, which may leave at 15, and not for A, which was used before it."""
    arrivals = ((0, "b"), (1, "a"), (12, "b"), (13, "c"), (40, "a"))
    entries = [of_model(at, name) for at, name in arrivals]
    courses, replicas = simulate(entries, Setup(context=4096, models=2, load_seconds=5))
    assert courses[3].times[0] < 21
    assert len(replicas) == 3


def test_model_that_was_busy_longest_stays() -> None:
    long = msgspec.structs.replace(of_model(20, "a"), output_length=3000)
    entries = [of_model(0, "a"), of_model(10, "b"), long, of_model(25, "b")]
    entries += [of_model(93, "c"), of_model(120, "a")]
    courses, replicas = simulate(entries, Setup(context=8192, models=2, load_seconds=5))
    assert 60 < courses[2].ended < 93
    assert len(replicas) == 3
