"""``cllm simulate``: runs the real scheduler on a recorded or synthetic load, in simulated time."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from cyclopts import App, Parameter
from cyclopts.validators import Number

from cllm.backends.fake import Costs
from cllm.bench.simulate import SMALL_MODEL, Limits, Setup, SimulationReport, simulate, summarize
from cllm.bench.synthetic import WORKLOADS, synthesize
from cllm.cli.progress import loading_bar
from cllm.config import Settings
from cllm.errors import StartupError
from cllm.observe.trace_file import read_trace, write_trace
from cllm.scheduler.step_cost import ROW_OFFSET

if TYPE_CHECKING:
    from rich.console import Console

    Workload = str
else:
    Workload = Literal[tuple(WORKLOADS)]

app = App(name="simulate", help="Replay a trace through the scheduler in simulated time.")

DEFAULTS = Settings()
MOST_KEYS = 20  # in the table for a person

Positive = Number(gte=1)
AboveZero = Number(gt=0)
NotNegative = Number(gte=0)


@app.default
def replay(
    trace: Annotated[
        Path, Parameter(help="Requests in Mooncake's format, one JSON object a line.")
    ],
    /,
    *,
    policy: Annotated[
        str, Parameter(help="Order of service: fair, priority, fcfs or package.module:Class.")
    ] = DEFAULTS.scheduler.policy,
    replicas: Annotated[
        int, Parameter(validator=Positive, help="Engines that share the load.")
    ] = 1,
    routing: Annotated[
        Literal["least-loaded", "prefix", "round-robin"],
        Parameter(
            help="Which replica gets a request: the one with the fewest requests; the one that "
            "has seen its longest "
            "prefix, unless it has more than twice as many requests as the least loaded; or each "
            "in turn."
        ),
    ] = "least-loaded",
    max_num_seqs: Annotated[
        int,
        Parameter(
            validator=Positive, help="Largest number of sequences in a batch, in each replica."
        ),
    ] = DEFAULTS.scheduler.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, Parameter(validator=Positive, help="Largest number of tokens in one step.")
    ] = DEFAULTS.scheduler.max_num_batched_tokens,
    target_itl_ms: Annotated[
        float,
        Parameter(
            validator=NotNegative,
            help="Longest ms between two tokens that prefill may cause; 0 means no limit.",
        ),
    ] = DEFAULTS.scheduler.target_itl_ms or 0,
    context: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=2),
            help="Largest number of tokens in a sequence. [default: what the longest request "
            "needs]",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        Literal["partitioned", "unified"],
        Parameter(help="KV cache layout: cells for each sequence, or one pool."),
    ] = "partitioned",
    num_cells: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Tokens in a unified KV cache. [default: --max-num-seqs times --context]",
            show_default=False,
        ),
    ] = None,
    ram_cache_tokens: Annotated[
        int,
        Parameter(
            validator=NotNegative,
            help="Size of the RAM tier of the prefix cache, in tokens; copies cost no time.",
        ),
    ] = 0,
    speculation: Annotated[
        Literal["off", "prompt_lookup"],
        Parameter(
            help="Speculation; the simulated text repeats itself, so drafts are accepted far too "
            "often."
        ),
    ] = "off",
    costs: Annotated[
        str | None,
        Parameter(
            help="Seconds of a step: step,row,token (a constant, for each decoding sequence, for "
            "each prompt token), "
            "or a JSON file with the row_seconds and token_seconds that a server has learned. "
            f"[default: {','.join(map(str, msgspec.structs.astuple(SMALL_MODEL)))}, a small "
            f"model on two cores]",
            show_default=False,
        ),
    ] = None,
    ttft: Annotated[
        float | None,
        Parameter(validator=AboveZero, help="Goodput limit: milliseconds to the first token."),
    ] = None,
    tpot: Annotated[
        float | None,
        Parameter(
            validator=AboveZero, help="Goodput limit: milliseconds for each token after the first."
        ),
    ] = None,
    key: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="An account to compare; may be repeated. [default: all]",
        ),
    ] = (),
    seed: Annotated[int, Parameter(help="Seed of the choice between equally loaded replicas.")] = 0,
    check: Annotated[
        bool,
        Parameter(negative="", help="Verify the bookkeeping and every cell after each step; slow."),
    ] = False,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object.")] = False,
) -> None:
    """Replay TRACE through the real scheduler in simulated time, and report latencies, throughput
    and fairness.

    "cllm simulate synth" makes traces. The exit code is 1 if a request failed for another reason
    than its deadline.
    """
    entries = read_trace(trace)
    setup = Setup(
        policy=policy,
        replicas=replicas,
        routing=routing,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        target_itl_ms=target_itl_ms or None,
        context=context or max(entry.input_length + entry.output_length for entry in entries),
        layout=layout,
        num_cells=num_cells,
        ram_cache_tokens=ram_cache_tokens,
        speculation=speculation,
        costs=SMALL_MODEL if costs is None else read_costs(costs),
        seed=seed,
        check=check,
    )
    if unknown := set(key) - {entry.key for entry in entries}:
        raise StartupError(f'no request of {trace} has the key "{min(unknown)}"')
    limits = Limits(ttft, tpot)
    begun = time.monotonic()
    with closing(loading_bar("simulating")) as bar:
        courses, engines = simulate(
            entries,
            setup,
            lambda ended: bar.update(ended / len(entries), f"{ended} of {len(entries)} requests"),
        )
    report = summarize(
        courses,
        engines,
        trace=str(trace),
        settings=msgspec.to_builtins(setup) | msgspec.to_builtins(limits),
        limits=limits,
        keys=key,
    )
    if json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        from rich.console import Console

        print_report(report, Console())
        print(
            f"simulated {report.wall_s:,.1f} s in {time.monotonic() - begun:.1f} s", file=sys.stderr
        )
    if report.failures.keys() - {"timeout"}:
        sys.exit(1)


@app.command
def synth(
    out: Annotated[Path, Parameter(help="The file to write, such as trace.jsonl.")],
    /,
    *,
    workload: Annotated[
        Workload,
        Parameter(help=" ".join(f"{name}: {text}." for name, (_, text) in WORKLOADS.items())),
    ],
    requests: Annotated[
        int, Parameter(validator=Positive, help="Total number of requests.")
    ] = 1000,
    rate: Annotated[
        float, Parameter(validator=AboveZero, help="Requests a second, on average.")
    ] = 1.0,
    seed: Annotated[
        int, Parameter(validator=NotNegative, help="The same seed gives the same trace.")
    ] = 0,
) -> None:
    """Write a synthetic trace: Poisson arrivals, lognormal lengths. It replaces OUT."""
    entries = synthesize(workload, requests, rate, seed)
    write_trace(out, entries)
    prompts = sum(entry.input_length for entry in entries)
    answers = sum(entry.output_length for entry in entries)
    seconds = entries[-1].arrived
    print(
        f"{out}: {requests} requests in {seconds:,.0f} s, {prompts:,} prompt tokens, {answers:,} "
        f"output tokens"
    )


# --- costs --------------------------------------------------------------------------------------


class Measured(msgspec.Struct, frozen=True):
    """What a server's scheduler has learned, as it explains it: see scheduler/trace.py."""

    row_seconds: dict[int, float]
    token_seconds: float | None


def read_costs(text: str) -> Costs:
    """From "step,row,token" in seconds, or from a file. Raises StartupError."""
    parts = text.split(",")
    try:
        costs = Costs(*map(float, parts)) if len(parts) == 3 else fit(read_measured(Path(text)))
    except ValueError:
        raise StartupError(
            f"--costs must be a file or three numbers of seconds (step,row,token), not {text}"
        ) from None
    if not all(0 <= seconds < float("inf") for seconds in msgspec.structs.astuple(costs)):
        raise StartupError(f"--costs {text}: seconds must be numbers from 0")
    return costs


def read_measured(path: Path) -> Measured:
    try:
        measured = msgspec.json.decode(path.read_bytes(), type=Measured)
    except OSError as error:
        raise StartupError(f"--costs {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"--costs {path}: {str(error).replace('$.', '')}") from None
    for field in ("row_seconds", "token_seconds"):
        if not getattr(measured, field):
            raise StartupError(
                f"--costs {path}: {field} is empty, because the server has not measured it yet"
            )
    return measured


def fit(measured: Measured) -> Costs:
    """The line step + row * n that is nearest to what was measured, without parts below 0."""
    rows = np.array([*measured.row_seconds], np.float64)
    seconds = np.array([*measured.row_seconds.values()], np.float64)
    if len(rows) == 1:  # as the scheduler assumes
        row = float(seconds[0] / (rows[0] + ROW_OFFSET))
        step = ROW_OFFSET * row
    else:
        row, step = map(float, np.polyfit(rows, seconds, 1))
        if step < 0:
            step, row = 0.0, float(rows @ seconds / (rows @ rows))
        elif row < 0:
            step, row = float(seconds.mean()), 0.0
    return Costs(step=step, row=row, token=measured.token_seconds or 0.0)


# --- for a person -------------------------------------------------------------------------------


def print_report(report: SimulationReport, console: Console) -> None:
    from rich.table import Table

    settings = report.settings | {
        "costs": ",".join(f"{part:.4g}" for part in report.settings["costs"].values())
    }
    shown = ", ".join(f"{name} {value}" for name, value in settings.items() if value is not None)
    for line in (report.trace, shown, "", *results(report)):
        console.print(line, markup=False, highlight=False)
    table = Table("milliseconds", "mean", "p50", "p95", "p99")
    rows = {
        "TTFT": report.ttft_ms,
        "ITL": report.itl_ms,
        "TPOT": report.tpot_ms,
        "E2E": report.e2e_ms,
    }
    for name, values in rows.items():
        if values:
            table.add_row(name, *(f"{value:,.1f}" for value in msgspec.structs.astuple(values)))
    tables = [table]
    if len(report.keys) > 1:
        tables.append(
            Table("key", "requests", "succeeded", "served", "mean TTFT ms", "mean E2E ms")
        )
        for key, of_key in list(report.keys.items())[:MOST_KEYS]:
            cells = msgspec.structs.astuple(of_key)
            tables[-1].add_row(key, *("" if cell is None else f"{cell:,}" for cell in cells))
    for table in tables:
        for column in table.columns[1:]:
            column.justify = "right"
        if table.row_count:
            console.print(table)
    for line in remarks(report):
        console.print(line, markup=False, highlight=False)


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
    tokens = f"{report.output_tokens:,} output tokens, {report.prompt_tokens:,} prompt tokens"
    cached = f" of which {report.cached_tokens:,} were cached" if report.cached_tokens else ""
    parked = f"; sequences were parked {report.num_parked} times" if report.num_parked else ""
    least, most = min(report.requests_per_replica), max(report.requests_per_replica)
    replicas = (
        f", {least:,} to {most:,} requests on each replica"
        if len(report.requests_per_replica) > 1
        else ""
    )
    work = (
        f"{report.num_steps:,} steps computed {report.prefill_tokens:,} tokens of "
        f"prompts{parked}{replicas}"
    )
    return [*lines, rates, tokens + cached, work]


def remarks(report: SimulationReport) -> list[str]:
    lines = []
    if len(report.keys) > MOST_KEYS:
        lines.append(f"{len(report.keys) - MOST_KEYS} more keys: see --json")
    fairness = report.fairness
    if fairness is not None and fairness.jain_index is not None:
        lines.append(
            f"Jain index {fairness.jain_index:.3f} of what {len(fairness.served)} keys were "
            f"served in the "
            f"{fairness.seconds:,.1f} s in which all of them waited"
        )
    elif fairness is not None:
        lines.append("no Jain index: the compared keys never waited all at the same time")
    return lines
