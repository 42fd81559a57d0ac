"""What a run of the load client comes to.

Latencies are those of successful requests, in milliseconds:

- TTFT from sending to the first chunk that holds text (a chunk that only opens the answer does not count),
- ITL between one such chunk and the next; a chunk may hold several tokens, see ``tokens_per_chunk``,
- TPOT (E2E - TTFT) / (tokens - 1), one value a request,
- E2E from sending to the last byte, ``[DONE]`` included.

Rates are successful requests and their tokens over the wall time, ramps at both ends included.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cllm.bench.distribution import Distribution
from cllm.bench.load import Answer, Outcome, printable
from cllm.errors import StartupError

if TYPE_CHECKING:
    from rich.console import Console

BUSY = 0.8  # share of a core from which the client rather than the server may be what was measured


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The object that ``--json`` prints; the ending of a name is its unit."""

    url: str
    model: str
    settings: dict[str, Any]
    num_requests: int
    num_succeeded: int
    num_cancelled: int
    """By the client, as the workload wants: neither successes nor failures."""
    num_refused: int
    """Of those that failed: the server had too much to do and said so."""
    num_failed: int
    failures: dict[str, int]
    """Reason -> how many."""
    examples: dict[str, str]
    """Reason -> what the first of these servers' answers said."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_chunk: float | None
    wall_s: float
    output_tokens_per_s: float
    requests_per_s: float
    good_requests_per_s: float | None
    """Goodput: successes a second that kept the limits ``ttft`` and ``tpot`` of the settings; None without limits."""
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    client_cpu_s: float
    client_cpu_share: float
    """Of one core; near 1 the client was the bottleneck."""
    client_us_per_chunk: float | None


def summarize(outcome: Outcome, *, url: str, model: str, settings: dict[str, Any]) -> Report:
    good = [answer for answer in outcome.answers if not answer.failure and not answer.cancelled]
    bad = [answer for answer in outcome.answers if answer.failure]
    chunks = sum(len(answer.content_times) for answer in outcome.answers)
    good_chunks = sum(len(answer.content_times) for answer in good)
    tokens = sum(answer.output_tokens for answer in good)
    wall = max(outcome.wall, 1e-9)
    return Report(
        url=url,
        model=model,
        settings=settings,
        num_requests=len(outcome.answers),
        num_succeeded=len(good),
        num_cancelled=sum(answer.cancelled and not answer.failure for answer in outcome.answers),
        num_refused=sum(answer.refused for answer in bad),
        num_failed=len(bad),
        failures=dict(Counter(answer.failure for answer in bad).most_common()),
        examples={answer.failure: answer.detail for answer in reversed(bad) if answer.detail},
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        cached_tokens=sum(answer.cached_tokens for answer in good),
        output_tokens=tokens,
        tokens_per_chunk=round(tokens / good_chunks, 3) if good_chunks else None,
        wall_s=round(outcome.wall, 4),
        output_tokens_per_s=round(tokens / wall, 2),
        requests_per_s=round(len(good) / wall, 3),
        good_requests_per_s=goodput(good, wall, settings),
        ttft_ms=Distribution.of(answer.first - answer.sent for answer in good),
        itl_ms=Distribution.of(gap for answer in good for gap in np.diff(answer.content_times)),
        tpot_ms=Distribution.of(time_per_token(answer) for answer in good if answer.output_tokens > 1),
        e2e_ms=Distribution.of(answer.ended - answer.sent for answer in good),
        client_cpu_s=round(outcome.cpu, 4),
        client_cpu_share=round(outcome.cpu / wall, 3),
        client_us_per_chunk=round(outcome.cpu / chunks * 1e6, 1) if chunks else None,
    )


def goodput(answers: list[Answer], wall: float, settings: dict[str, Any]) -> float | None:
    ttft, tpot = settings.get("ttft"), settings.get("tpot")
    if ttft is None and tpot is None:
        return None
    kept = [
        answer
        for answer in answers
        if (ttft is None or 1e3 * (answer.first - answer.sent) <= ttft)
        and (tpot is None or answer.output_tokens < 2 or 1e3 * time_per_token(answer) <= tpot)
    ]
    return round(len(kept) / wall, 3)


def time_per_token(answer: Answer) -> float:
    """Seconds a token after the first; 0 if the first text came with the last."""
    return (answer.ended - answer.first) / (answer.output_tokens - 1)


def print_report(report: Report, console: Console) -> None:
    """For a person."""
    from rich.table import Table

    table = Table("milliseconds", *(("mean", "p50", "p95", "p99")), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {"TTFT": report.ttft_ms, "ITL": report.itl_ms, "TPOT": report.tpot_ms, "E2E": report.e2e_ms}
    for name, values in rows.items():
        if values:
            table.add_row(name, *(f"{value:,.1f}" for value in msgspec.structs.astuple(values)))
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    for line in (printable(f"{report.model} at {report.url}"), settings, "", *results(report)):
        console.print(line, markup=False, highlight=False)
    if table.row_count:
        console.print(table)
    for line in remarks(report):
        console.print(line, markup=False, highlight=False)


def read_report(path: Path) -> Report:
    """Raises StartupError with one line."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is no report of cllm bench load: {error}") from None


def print_diff(before: Report, after: Report, console: Console) -> None:
    """For a person: what differs in the settings, then each figure, and the second over the first."""
    from rich.table import Table

    for name in dict.fromkeys([*before.settings, *after.settings]):
        values = before.settings.get(name), after.settings.get(name)
        if values[0] != values[1]:
            console.print(f"{name}: {values[0]} before, {values[1]} after", markup=False, highlight=False)
    table = Table("", "before", "after", "after / before")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, old in figures(before).items():
        new = figures(after).get(name)
        ratio = f"{new / old:.3f}" if new is not None and old else ""
        table.add_row(name, f"{old:,.2f}", "" if new is None else f"{new:,.2f}", ratio)
    console.print(table)


def figures(report: Report) -> dict[str, float]:
    """The numbers that are worth comparing, by name and unit."""
    found: dict[str, float | None] = {
        "succeeded": report.num_succeeded,
        "output tokens/s": report.output_tokens_per_s,
        "requests/s": report.requests_per_s,
        "good requests/s": report.good_requests_per_s,
    }
    latencies = {"TTFT": report.ttft_ms, "ITL": report.itl_ms, "TPOT": report.tpot_ms, "E2E": report.e2e_ms}
    for name, values in latencies.items():
        if values is not None:
            found |= {f"{name} {which} ms": value for which, value in msgspec.structs.asdict(values).items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def results(report: Report) -> list[str]:
    lines = [f"{report.num_succeeded} of {report.num_requests} requests succeeded in {report.wall_s:.2f} s"]
    for reason, count in report.failures.items():
        example = f", such as: {report.examples[reason]}" if reason in report.examples else ""
        lines.append(f"  {count} failed: {reason}{example}")
    if report.num_cancelled:
        lines.append(f"  {report.num_cancelled} were cancelled, as the workload wants")
    rates = f"{report.output_tokens_per_s:,.1f} output tokens/s, {report.requests_per_s:,.2f} requests/s"
    if report.good_requests_per_s is not None:
        rates += f", {report.good_requests_per_s:,.2f} of them good"
    tokens = f"{report.output_tokens:,} output tokens, {report.prompt_tokens:,} prompt tokens"
    cached = f" of which {report.cached_tokens:,} were cached" if report.cached_tokens else ""
    return [*lines, rates, tokens + cached]


def remarks(report: Report) -> list[str]:
    per_chunk = f", {report.client_us_per_chunk:.0f} µs a chunk" if report.client_us_per_chunk is not None else ""
    lines = [f"client: {report.client_cpu_s:.2f} s CPU, {report.client_cpu_share:.0%} of a core{per_chunk}"]
    if report.client_cpu_share > BUSY:
        lines.append("The client was busy nearly all the time: this may be its speed and not the server's.")
    return lines
