"""Reports on runs of the load client.

Latencies are those of successful requests, in milliseconds:

- TTFT: from sending to the first chunk that contains text (a chunk that only opens the answer does
  not count),
- ITL: from one such chunk to the next; a chunk may contain several tokens, see
  ``tokens_per_chunk``,
- TPOT: (E2E - TTFT) / (tokens - 1), one value per request,
- E2E: from sending to the last byte, ``[DONE]`` included.

Rates are successful requests and their tokens divided by the wall time, including the ramps at both
ends. A request that is cancelled or rejected as the workload intends is neither a success nor a
failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from cllm.bench.console import latency_table, number_table, print_lines
from cllm.bench.distribution import HasLatencies, LatencyLimits, LatencySummary
from cllm.bench.load.answer import TimedAnswer, printable, split_parts
from cllm.bench.load.client import Outcome
from cllm.bench.load.scenario_figures import find_figures
from cllm.errors import StartupError
from cllm.input_files import read_input

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BUSY = 0.8  # share of a core from which the client may be the bottleneck instead of the server


BINS = 40  # of a timeline

Percentiles = Annotated[list[float], msgspec.Meta(min_length=101, max_length=101)]
Bins = Annotated[list[float], msgspec.Meta(min_length=1)]


class Timeline(msgspec.Struct, frozen=True):
    """What happened when, in bins of ``bin_s`` seconds from the first request sent to the last
    byte.

    The tokens of an answer are spread evenly over its chunks, because a chunk does not say how many
    it contains.
    """

    bin_s: float
    output_tokens_per_s: Bins
    """Of successful requests."""
    running: Bins
    """Requests that were sent and had not ended, as the mean over the bin."""

    @classmethod
    def of(cls, answers: list[TimedAnswer], good: list[TimedAnswer]) -> Timeline | None:
        """Return the timeline of ``answers``, or None if it has no duration.

        ``good`` has the successful answers.
        """
        sent = np.array([answer.sent for answer in answers])
        ended = np.array([answer.ended for answer in answers])
        if not len(answers) or sent.min() == ended.max():
            return None
        edges = np.linspace(sent.min(), ended.max(), BINS + 1)
        bin_s = edges[1] - edges[0]
        times = [answer.content_times or [answer.ended] for answer in good]
        shares = [
            np.full(len(at), answer.output_tokens / len(at))
            for at, answer in zip(times, good, strict=True)
        ]
        tokens = np.histogram(concatenate(times), edges, weights=concatenate(shares))[0]
        # request-seconds until edge
        waited = np.array([(np.clip(edge, sent, ended) - sent).sum() for edge in edges])
        return cls(
            float(bin_s), round_values(tokens / bin_s), round_values(np.diff(waited) / bin_s)
        )


def concatenate(parts: Sequence[Sequence[float] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0), *parts])


def round_values(values: np.ndarray) -> list[float]:
    return [round(float(value), 3) for value in values]


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one part of a workload. The rate is over the time from the part's first
    request to its last byte.
    """

    num_requests: int
    num_succeeded: int
    num_failed: int
    output_tokens_per_s: float
    ttft_ms: LatencySummary | None
    itl_ms: LatencySummary | None

    @classmethod
    def of(cls, answers: list[TimedAnswer]) -> PartReport:
        good = [answer for answer in answers if answer.succeeded]
        begun, ended = (min(a.sent for a in answers), max(a.ended for a in answers))
        latencies = collect_latencies(good)
        return cls(
            num_requests=len(answers),
            num_succeeded=len(good),
            num_failed=sum(bool(answer.failure) for answer in answers),
            output_tokens_per_s=round(
                sum(answer.output_tokens for answer in good) / max(ended - begun, 1e-9), 2
            ),
            ttft_ms=LatencySummary.summarize(latencies["ttft"]),
            itl_ms=LatencySummary.summarize(latencies["itl"]),
        )


class Report(HasLatencies, msgspec.Struct, frozen=True, kw_only=True):
    """The object that ``--json`` prints. The suffix of a name is its unit."""

    url: str
    model: str
    note: str = ""
    """What the user wants to remember of the run."""
    settings: dict[str, Any]
    num_requests: int
    num_succeeded: int
    num_short: int = 0
    """Successful requests with fewer tokens than requested, where the API cannot request an
    exact number.
    """
    num_cancelled: int
    """Cancelled by the client, as the workload intends."""
    num_refused: int
    """Rejected by the server because of overload. These are failures unless the workload allows
    them.
    """
    num_failed: int
    failures: dict[str, int]
    """Reason -> number of failures."""
    examples: dict[str, str]
    """Reason -> a detail of its first failure, such as the server's message."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_chunk: float | None
    wall_s: float
    output_tokens_per_s: float
    requests_per_s: float
    good_requests_per_s: float | None
    """Goodput: successes per second within the limits ``ttft`` and ``tpot`` of the settings.
    None without limits.
    """
    ttft_ms: LatencySummary | None
    itl_ms: LatencySummary | None
    tpot_ms: LatencySummary | None
    e2e_ms: LatencySummary | None
    client_cpu_s: float
    client_cpu_share: float
    """Share of one core. Near 1, the client was the bottleneck."""
    client_us_per_chunk: float | None
    server_cpu_s: float | None = None
    """CPU time of the server's processes. None if they are unknown."""
    output_tokens_per_cpu_s: float | None = None
    """Output tokens for each second of the server's CPU time."""
    parts: dict[str, PartReport] = {}
    """The parts of the workload, such as the first turns of conversations."""
    workload_figures: dict[str, float] = {}
    """Figures that only this workload has, by name and unit."""
    percentiles_ms: dict[str, Percentiles] = {}
    """The percentiles 0, 1 to 100 of ttft, itl, tpot and e2e. A latency without values is
    missing.
    """
    timeline: Timeline | None = None


def summarize(
    outcome: Outcome, *, url: str, model: str, settings: dict[str, Any], note: str = ""
) -> Report:
    good = [answer for answer in outcome.answers if answer.succeeded]
    bad = [answer for answer in outcome.answers if answer.failure]
    chunks = sum(len(answer.content_times) for answer in outcome.answers)
    good_chunks = sum(len(answer.content_times) for answer in good)
    tokens = sum(answer.output_tokens for answer in good)
    wall = max(outcome.wall, 1e-9)
    latencies = {name: np.array(values) for name, values in collect_latencies(good).items()}
    parts = split_parts(outcome.answers)
    return Report(
        url=url,
        model=model,
        note=note,
        settings=settings,
        num_requests=len(outcome.answers),
        num_succeeded=len(good),
        num_short=sum(answer.stopped_early for answer in good),
        num_cancelled=sum(answer.cancelled and not answer.failure for answer in outcome.answers),
        num_refused=sum(answer.refused for answer in outcome.answers),
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
        **{f"{name}_ms": LatencySummary.summarize(values) for name, values in latencies.items()},
        client_cpu_s=round(outcome.cpu, 4),
        client_cpu_share=round(outcome.cpu / wall, 3),
        client_us_per_chunk=round(outcome.cpu / chunks * 1e6, 1) if chunks else None,
        server_cpu_s=outcome.server_cpu,
        output_tokens_per_cpu_s=round(tokens / outcome.server_cpu, 3)
        if outcome.server_cpu
        else None,
        parts={name: PartReport.of(part) for name, part in parts.items() if name},
        workload_figures=find_figures(settings.get("workload"), outcome),
        percentiles_ms={
            name: round_values(1e3 * np.percentile(values, range(101)))
            for name, values in latencies.items()
            if len(values)
        },
        timeline=Timeline.of(outcome.answers, good),
    )


def collect_latencies(answers: list[TimedAnswer]) -> dict[str, list[float]]:
    """Return the latencies of ``answers`` in seconds, by name."""
    return {
        "ttft": [answer.first - answer.sent for answer in answers],
        "itl": [gap for answer in answers for gap in np.diff(answer.content_times)],
        "tpot": [time_per_token(answer) for answer in answers if answer.output_tokens > 1],
        "e2e": [answer.ended - answer.sent for answer in answers],
    }


def goodput(answers: list[TimedAnswer], wall: float, settings: dict[str, Any]) -> float | None:
    limits = LatencyLimits(settings.get("ttft"), settings.get("tpot"))
    if limits == LatencyLimits():
        return None
    good = sum(
        limits.allow(
            answer.first - answer.sent, time_per_token(answer) if answer.output_tokens > 1 else 0.0
        )
        for answer in answers
    )
    return round(good / wall, 3)


def time_per_token(answer: TimedAnswer) -> float:
    """Return the seconds per token after the first. 0 if the first text arrived with the last."""
    return (answer.ended - answer.first) / (answer.output_tokens - 1)


def print_report(report: Report, console: Console) -> None:
    """Print the report as text and a table."""
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    title = printable(f"{report.model} at {report.url}")
    note = [printable(report.note)] if report.note else []
    print_lines(console, [title, *note, settings, "", *results(report)])
    if report.latencies:
        console.print(latency_table(report.latencies))
    if report.parts:
        console.print(part_table(report.parts))
    print_lines(console, remarks(report))


def part_table(parts: Mapping[str, PartReport]) -> Table:
    table = number_table("", "succeeded", "tokens/s", "mean TTFT ms", "ITL p50 ms", "ITL p99 ms")
    for name, part in parts.items():
        ttft, itl = part.ttft_ms, part.itl_ms
        times = [ttft and ttft.mean, itl and itl.p50, itl and itl.p99]
        table.add_row(
            name,
            f"{part.num_succeeded} of {part.num_requests}",
            f"{part.output_tokens_per_s:,.1f}",
            *("" if time is None else f"{time:,.1f}" for time in times),
        )
    return table


def read_report(path: Path) -> Report:
    """Return the report in a file. Raises StartupError with a message of one line."""
    try:
        return msgspec.json.decode(read_input(path), type=Report)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not a report of cllm bench load: {error}") from None


def figures(report: Report) -> dict[str, float]:
    """Return the numbers worth comparing, by name and unit."""
    numbers: dict[str, float | None] = {
        "succeeded": report.num_succeeded,
        "output tokens/s": report.output_tokens_per_s,
        "requests/s": report.requests_per_s,
        "good requests/s": report.good_requests_per_s,
        "output tokens/CPU s": report.output_tokens_per_cpu_s,
    }
    for name, values in report.latencies.items():
        numbers |= {
            f"{name} {which} ms": value for which, value in msgspec.structs.asdict(values).items()
        }
    for name, part in report.parts.items():
        numbers[f"{name}: output tokens/s"] = part.output_tokens_per_s
        numbers[f"{name}: TTFT mean ms"] = part.ttft_ms.mean if part.ttft_ms else None
        numbers[f"{name}: ITL p50 ms"] = part.itl_ms.p50 if part.itl_ms else None
    numbers |= report.workload_figures
    return {name: float(value) for name, value in numbers.items() if value is not None}


def results(report: Report) -> list[str]:
    lines = [
        (
            f"{report.num_succeeded} of {report.num_requests} requests succeeded in "
            f"{report.wall_s:.2f} s"
        )
    ]
    for reason, count in report.failures.items():
        example = f", such as: {report.examples[reason]}" if reason in report.examples else ""
        lines.append(f"  {count} failed: {reason}{example}")
    if report.num_cancelled:
        lines.append(f"  {report.num_cancelled} were cancelled, as the workload intends")
    rightly_refused = (
        report.num_requests - report.num_succeeded - report.num_cancelled - report.num_failed
    )
    if rightly_refused:
        lines.append(f"  {rightly_refused} were rejected with Retry-After, as the workload allows")
    if report.num_short:
        mean = report.output_tokens / report.num_succeeded
        lines.append(
            f"  {report.num_short} of them ended before the requested length; {mean:,.1f} tokens "
            f"on average"
        )
    rates = (
        f"{report.output_tokens_per_s:,.1f} output tokens/s, {report.requests_per_s:,.2f} "
        f"requests/s"
    )
    if report.good_requests_per_s is not None:
        rates += f", {report.good_requests_per_s:,.2f} of them good"
    tokens = f"{report.output_tokens:,} output tokens, {report.prompt_tokens:,} prompt tokens"
    cached = f" of which {report.cached_tokens:,} were cached" if report.cached_tokens else ""
    return [*lines, rates, tokens + cached]


def remarks(report: Report) -> list[str]:
    per_chunk = (
        f", {report.client_us_per_chunk:.0f} µs a chunk"
        if report.client_us_per_chunk is not None
        else ""
    )
    lines = [
        (
            f"client: {report.client_cpu_s:.2f} s CPU, {report.client_cpu_share:.0%} of a "
            f"core{per_chunk}"
        )
    ]
    if report.server_cpu_s is not None:
        lines.append(
            f"server: {report.server_cpu_s:.2f} s CPU, {report.output_tokens_per_cpu_s or 0:,.2f} "
            f"output tokens for each second of it"
        )
    lines += [f"{name}: {value:,.3f}" for name, value in report.workload_figures.items()]
    if report.client_cpu_share > BUSY:
        lines.append(
            "The client was busy nearly all the time, so its own speed may be what was measured."
        )
    if report.settings.get("workload") == "overload" and not report.num_refused:
        lines.append("No request was rejected, so the server was not overloaded.")
    return lines
