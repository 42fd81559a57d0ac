"""Reports on simulations: latencies, throughput and fairness.

Latencies are those of successful requests, as in bench/load/report.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cllm.bench.console import latency_table, number_table, print_lines
from cllm.bench.distribution import HasLatencies, LatencyLimits, LatencySummary, jain_index
from cllm.bench.simulation.replica import Course, Replica
from cllm.scheduler.policy import OUTPUT_WEIGHT

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_ACCOUNTS = 20  # rows of the table that people read


class AccountReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one account. ``served`` is its service as the policy fair counts it: the prompt
    tokens computed for the account, plus OUTPUT_WEIGHT times the tokens of its answers.
    """

    num_requests: int
    num_succeeded: int
    served: int
    mean_ttft_ms: float | None
    mean_e2e_ms: float | None


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """The service that the compared accounts got while each of them had a request without a first
    token.

    ``jain_index`` is 1 if all got the same, 1 / (number of accounts) if one got everything, and
    None if none got anything.
    """

    seconds: float
    served: dict[str, int]
    jain_index: float | None


class SimulationReport(
    HasLatencies, msgspec.Struct, frozen=True, kw_only=True, rename={"accounts": "keys"}
):
    """The object that ``--json`` prints.

    Latencies are those of successful requests, as in bench/load/report.py.

    ``num_cut`` answers were cut short by the context length. ``prefill_tokens`` counts all prompt
    tokens that were computed, including those that parked sequences computed again. Rates are over
    ``wall_s``, the simulated seconds from the first arrival to the last end. Good requests are
    those within the limits. Requests were continued ``num_replays`` times after the death of a
    replica. ``mean_replicas`` and ``max_replicas`` count those that ran at the same time.
    """

    trace: str
    settings: dict[str, Any]
    num_requests: int
    num_succeeded: int
    num_failed: int
    failures: dict[str, int]
    num_cut: int
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    good_requests_per_s: float
    good_share: float
    ttft_ms: LatencySummary | None
    itl_ms: LatencySummary | None
    tpot_ms: LatencySummary | None
    e2e_ms: LatencySummary | None
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    num_steps: int
    num_parked: int
    requests_per_replica: list[int]
    num_loads: int
    num_replays: int
    mean_replicas: float
    max_replicas: int
    accounts: dict[str, AccountReport]
    fairness: Fairness | None


def ttft(course: Course) -> float:
    return course.times[0] - course.entry.arrived


def tpot(course: Course) -> float:
    """Return the seconds per token after the first; 0 if there is none."""
    return (course.ended - course.times[0]) / max(1, len(course.times) - 1)


def e2e(course: Course) -> float:
    return course.ended - course.entry.arrived


def summarize(
    courses: list[Course],
    replicas: list[Replica],
    *,
    trace: str,
    settings: dict[str, Any],
    limits: LatencyLimits = LatencyLimits(),  # noqa: B008  # immutable
    accounts: Sequence[str] = (),
) -> SimulationReport:
    """Return the report.

    ``accounts`` are the accounts of the trace whose fairness is compared: by default all, if there
    are several.
    """
    good = [course for course in courses if not course.failure]
    bad = [course for course in courses if course.failure]
    wall = max(max(course.ended for course in courses) - courses[0].entry.arrived, 1e-9)
    num_tokens = sum(len(course.times) for course in good)
    num_kept = sum(limits.allow(ttft(course), tpot(course)) for course in good)
    by_account: dict[str, list[Course]] = {}
    for course in courses:
        by_account.setdefault(course.entry.account, []).append(course)
    compared = {account: by_account[account] for account in accounts or by_account}
    schedulers = [replica.scheduler for replica in replicas]
    end = courses[0].entry.arrived + wall
    spans = [(replica.started, min(replica.stopped, end)) for replica in replicas]
    num_requests = Counter(course.replica for course in courses)
    return SimulationReport(
        trace=trace,
        settings=settings,
        num_requests=len(courses),
        num_succeeded=len(good),
        num_failed=len(bad),
        failures=dict(Counter(course.failure for course in bad).most_common()),
        num_cut=sum(len(course.times) < course.entry.output_length for course in good),
        wall_s=round(wall, 4),
        output_tokens=num_tokens,
        output_tokens_per_s=round(num_tokens / wall, 2),
        requests_per_s=round(len(good) / wall, 3),
        good_requests_per_s=round(num_kept / wall, 3),
        good_share=round(num_kept / len(courses), 4),
        ttft_ms=LatencySummary.summarize(map(ttft, good)),
        itl_ms=LatencySummary.summarize(
            np.concatenate([np.diff(course.times) for course in good] or [np.zeros(0)])
        ),
        tpot_ms=LatencySummary.summarize(tpot(course) for course in good if len(course.times) > 1),
        e2e_ms=LatencySummary.summarize(map(e2e, good)),
        prompt_tokens=sum(course.entry.input_length for course in good),
        cached_tokens=sum(course.num_cached for course in good),
        prefill_tokens=sum(scheduler.statistics.num_prefill_tokens for scheduler in schedulers),
        num_steps=sum(scheduler.statistics.num_steps for scheduler in schedulers),
        num_parked=sum(scheduler.statistics.num_parked for scheduler in schedulers),
        requests_per_replica=[num_requests[i] for i in range(len(replicas))],
        num_loads=len(replicas) // settings.get("replicas", 1),
        num_replays=sum(course.num_replays for course in courses),
        mean_replicas=round(
            sum(max(0.0, stop - max(start, end - wall)) for start, stop in spans) / wall, 3
        ),
        max_replicas=max(sum(a <= start < b for a, b in spans) for start, _ in spans),
        accounts={account: summarize_account(own) for account, own in sorted(by_account.items())},
        fairness=fairness(compared) if len(compared) > 1 else None,
    )


def summarize_account(courses: list[Course]) -> AccountReport:
    good = [course for course in courses if not course.failure]
    return AccountReport(
        num_requests=len(courses),
        num_succeeded=len(good),
        served=measure_service(courses, [(-math.inf, math.inf)]),
        mean_ttft_ms=round(fmean(map(ttft, good)) * 1000, 3) if good else None,
        mean_e2e_ms=round(fmean(map(e2e, good)) * 1000, 3) if good else None,
    )


Interval = tuple[float, float]
"""(begin, end], without begin and with end, because the outputs of a step belong to the time
before it ends.
"""


def fairness(compared: dict[str, list[Course]]) -> Fairness:
    common = [(-math.inf, math.inf)]
    for courses in compared.values():
        common = overlap(common, backlog(courses))
    amounts = {account: measure_service(courses, common) for account, courses in compared.items()}
    index = jain_index([*amounts.values()])
    return Fairness(
        seconds=round(sum(end - begin for begin, end in common), 4),
        served=amounts,
        jain_index=None if index is None else round(index, 4),
    )


def backlog(courses: list[Course]) -> list[Interval]:
    """Return the intervals in which a request waited for its first token, in order and disjoint."""
    waits = [
        (course.entry.arrived, course.times[0] if course.times else course.ended)
        for course in courses
    ]
    merged: list[Interval] = []
    for begin, end in sorted(waits):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def overlap(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the intersection of two lists of intervals, which are in order."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def measure_service(courses: list[Course], intervals: list[Interval]) -> int:
    """Return what was served in these intervals, as in AccountReport.

    A prompt counts at the time of the first token.
    """
    begins, ends = (np.array([interval[side] for interval in intervals]) for side in (0, 1))
    amount = 0
    for course in courses:
        # the last interval that began before each token
        at = np.searchsorted(begins, course.times) - 1
        inside = (
            (at >= 0) & (np.array(course.times) <= ends[at])
            if len(intervals)
            else np.zeros(len(at), bool)
        )
        amount += OUTPUT_WEIGHT * int(inside.sum())
        if len(inside) and inside[0]:
            amount += course.entry.input_length - course.num_cached
    return amount


def print_report(report: SimulationReport, console: Console) -> None:
    """Print the report as text and tables."""
    settings = report.settings | {
        "costs": ",".join(f"{part:.4g}" for part in report.settings["costs"].values())
    }
    shown = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    print_lines(console, [report.trace, shown, "", *results(report)])
    tables = [latency_table(report.latencies)]
    if len(report.accounts) > 1:
        tables.append(account_table(report.accounts))
    for table in tables:
        if table.row_count:
            console.print(table)
    print_lines(console, remarks(report))


def account_table(accounts: dict[str, AccountReport]) -> Table:
    table = number_table(
        "account", "requests", "succeeded", "served", "mean TTFT ms", "mean E2E ms"
    )
    for account, own in islice(accounts.items(), MOST_ACCOUNTS):
        cells = msgspec.structs.astuple(own)
        table.add_row(account, *("" if cell is None else f"{cell:,}" for cell in cells))
    return table


def results(report: SimulationReport) -> list[str]:
    lines = [
        (
            f"{report.num_succeeded} of {report.num_requests} requests succeeded in "
            f"{report.wall_s:,.2f} s"
        )
    ]
    lines += [f"  {count} failed: {reason}" for reason, count in report.failures.items()]
    if report.num_cut:
        lines.append(f"  {report.num_cut} answers were cut short by the context")
    rates = (
        f"{report.output_tokens_per_s:,.1f} output tokens/s, {report.requests_per_s:,.2f} "
        f"requests/s"
    )
    if report.settings["ttft"] or report.settings["tpot"]:
        rates += (
            f", {report.good_requests_per_s:,.2f} of them good ({report.good_share:.1%} of "
            f"all requests)"
        )
    loads = (
        f"; models were loaded {report.num_loads} times" if report.settings.get("models") else ""
    )
    tokens = f"{report.output_tokens:,} output tokens, {report.prompt_tokens:,} prompt tokens"
    cached = f" of which {report.cached_tokens:,} were cached" if report.cached_tokens else ""
    parked = f"; sequences were parked {report.num_parked} times" if report.num_parked else ""
    least, most = min(report.requests_per_replica), max(report.requests_per_replica)
    replicas = (
        f", {least:,} to {most:,} requests on each replica"
        if len(report.requests_per_replica) > 1
        else ""
    )
    sizes = ""
    if report.max_replicas != round(report.mean_replicas, 2):
        sizes = f"; {report.mean_replicas:.2f} replicas on average, {report.max_replicas} at most"
    if report.num_replays:
        sizes += f"; requests were continued {report.num_replays:,} times after a death"
    work = (
        f"{report.num_steps:,} steps computed {report.prefill_tokens:,} tokens of "
        f"prompts{parked}{replicas}{loads}{sizes}"
    )
    return [*lines, rates, tokens + cached, work]


def remarks(report: SimulationReport) -> list[str]:
    lines = []
    if len(report.accounts) > MOST_ACCOUNTS:
        lines.append(f"{len(report.accounts) - MOST_ACCOUNTS} more accounts: see --json")
    fairness = report.fairness
    if fairness is not None and fairness.jain_index is not None:
        lines.append(
            f"Jain index {fairness.jain_index:.3f} of the service that {len(fairness.served)} "
            f"accounts got in the {fairness.seconds:,.1f} s in which all of them waited"
        )
    elif fairness is not None:
        lines.append("no Jain index: the compared accounts never waited all at the same time")
    return lines
