"""``cllm simulate``: runs the real scheduler on a recorded or synthetic load, in simulated time."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
from cyclopts import App, Parameter
from cyclopts.validators import Number

from cllm.backends.fake.backend import Costs
from cllm.bench.distribution import LatencyLimits
from cllm.bench.simulation.baselines import Routing
from cllm.bench.simulation.report import SimulationReport, print_report, summarize
from cllm.bench.simulation.setup import SMALL_MODEL, Setup
from cllm.bench.simulation.simulator import simulate
from cllm.bench.simulation.synthetic import WORKLOADS, synthesize
from cllm.cli.bench.files import print_json
from cllm.cli.options import AboveZero, GoodputLimits, Json, NotNegative, Positive
from cllm.cli.progress import open_bar
from cllm.config.settings import Settings
from cllm.engine.build import CPU_PREFILL_SHARE
from cllm.errors import StartupError
from cllm.input_files import read_input
from cllm.observe.trace_file import TraceEntry, read_trace, write_trace
from cllm.routing.autoscale import ScalingLimits
from cllm.scheduler.step_cost import ROW_OFFSET

if TYPE_CHECKING:
    Workload = str
else:
    Workload = Literal[tuple(WORKLOADS)]

app = App(name="simulate")

DEFAULTS = Settings()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    policy: Annotated[
        str, Parameter(help="Order of service: fair, priority, fcfs or package.module:Class.")
    ] = DEFAULTS.scheduler.policy
    engines: Annotated[
        int,
        Parameter(
            name=("--engines", "--replicas"),
            validator=Positive,
            help="Engines of each model, which share its load.",
        ),
    ] = 1
    models: Annotated[
        int,
        Parameter(
            validator=NotNegative,
            help="Models of the trace that fit into memory at the same time. The others are loaded "
            "when a request names them, and lose their caches when they make room. 0: all.",
        ),
    ] = 0
    load_seconds: Annotated[
        float,
        Parameter(
            validator=NotNegative, help="Seconds until a model is loaded or an engine starts."
        ),
    ] = 5.0
    rate_factor: Annotated[
        float,
        Parameter(validator=AboveZero, help="Let requests arrive so many times faster."),
    ] = 1.0
    fronts: Annotated[
        int,
        Parameter(
            validator=Positive,
            help="Fronts, which get the requests in turn. Each only knows its own requests, and "
            "what the last leases say.",
        ),
    ] = 1
    lease_seconds: Annotated[
        float,
        Parameter(
            validator=NotNegative,
            help="Seconds between two leases. 0: none, as between the engines of one server.",
        ),
    ] = 0.0
    slow_engines: Annotated[
        int, Parameter(validator=NotNegative, help="Engines that take --slow-factor times as long.")
    ] = 0
    slow_factor: Annotated[
        float, Parameter(validator=AboveZero, help="How much longer slow engines take.")
    ] = 2.0
    death_seconds: Annotated[
        float,
        Parameter(
            validator=NotNegative,
            help="Mean seconds between two deaths of engines, whose requests others continue. "
            "0: never.",
        ),
    ] = 0.0
    drain_seconds: Annotated[
        float,
        Parameter(
            validator=NotNegative,
            help="Mean seconds between two engines that drain and are replaced. 0: never.",
        ),
    ] = 0.0
    max_engines: Annotated[
        int,
        Parameter(
            validator=NotNegative,
            help="Autoscaling: the largest number of engines; --engines is the least. 0: none.",
        ),
    ] = 0
    target_queue_seconds: Annotated[
        float,
        Parameter(validator=AboveZero, help="Autoscaling: the mean wait that adds engines."),
    ] = ScalingLimits().target_queue_seconds
    up_after: Annotated[
        float,
        Parameter(
            validator=NotNegative, help="Autoscaling: seconds of a high load that add engines."
        ),
    ] = ScalingLimits().up_after
    down_after: Annotated[
        float,
        Parameter(
            validator=NotNegative, help="Autoscaling: seconds of a low load that remove engines."
        ),
    ] = ScalingLimits().down_after
    routing: Annotated[
        Routing,
        Parameter(
            help="Which engine gets a request. least-loaded: the one with the fewest requests. "
            "prefix: the one that has seen its longest prefix, unless it has more than twice as "
            "many requests as the least loaded one. prefix-window: the one that has seen its "
            "longest prefix, among those that have at most twice as many requests as the least "
            "loaded one, or 8 more; it copies popular prefixes to further engines. round-robin: "
            "each in turn."
        ),
    ] = "prefix-window"
    max_num_seqs: Annotated[
        int,
        Parameter(
            validator=Positive, help="Largest number of sequences in a batch, in each replica."
        ),
    ] = DEFAULTS.scheduler.max_num_seqs
    max_num_batched_tokens: Annotated[
        int, Parameter(validator=Positive, help="Largest number of tokens in one step.")
    ] = DEFAULTS.scheduler.max_num_batched_tokens
    target_itl_ms: Annotated[
        float,
        Parameter(
            validator=NotNegative,
            help="Longest ms between two tokens that prefill may cause; 0 means no limit.",
        ),
    ] = 1000.0
    prefill_share: Annotated[
        float,
        Parameter(
            validator=Number(gt=0, lte=1),
            help="Share of the time for prompts while others decode; 1 computes them in every "
            "step.",
        ),
    ] = CPU_PREFILL_SHARE
    context: Annotated[
        int | None,
        Parameter(
            validator=Number(gte=2),
            help="Largest number of tokens in a sequence. [default: what the longest request "
            "needs]",
        ),
    ] = None
    layout: Annotated[
        Literal["paged", "partitioned", "unified"],
        Parameter(
            help="KV cache layout: pages that sequences can share, cells for each sequence, or one "
            "pool."
        ),
    ] = "paged"
    num_cells: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Tokens in a paged or unified KV cache. [default: --max-num-seqs times --context]",
        ),
    ] = None
    ram_cache_tokens: Annotated[
        int,
        Parameter(
            validator=NotNegative,
            help="Size of the RAM tier of the prefix cache, in tokens; copies cost no time.",
        ),
    ] = 0
    speculation: Annotated[
        Literal["off", "prompt_lookup"],
        Parameter(
            help="Speculation. The simulated text is repetitive, so far too many draft tokens are "
            "accepted."
        ),
    ] = "off"
    costs: Annotated[
        str | None,
        Parameter(
            help="Seconds of a step: step,row,token (a constant, for each decoding sequence, for "
            "each prompt token), "
            "or a JSON file with the row_seconds and token_seconds that a server has learned. "
            f"[default: {','.join(map(str, msgspec.structs.astuple(SMALL_MODEL)))}, a small "
            f"model on two cores]"
        ),
    ] = None
    limits: GoodputLimits = field(default_factory=GoodputLimits)
    key: Annotated[
        tuple[str, ...],
        Parameter(
            show_default=False, help="An account to compare; may be repeated. [default: all]"
        ),
    ] = ()
    seed: Annotated[int, Parameter(help="Seed of the choice between equally loaded replicas.")] = 0
    check: Annotated[
        bool, Parameter(help="Verify the bookkeeping and every cell after each step; slow.")
    ] = False
    json: Json = False


@app.default
def replay(
    trace: Annotated[
        Path, Parameter(help="Requests in Mooncake's format, one JSON object a line.")
    ],
    /,
    *,
    options: ReplayOptions = ReplayOptions(),
) -> None:
    """Replay TRACE through the real scheduler in simulated time, and report latencies, throughput
    and fairness.

    "cllm simulate synth" makes traces. The exit code is 1 if a request failed for a reason
    other than its deadline.
    """
    entries = speed_up(read_trace(trace), options.rate_factor)
    setup = make_setup(options, entries)
    if unknown := set(options.key) - {entry.account for entry in entries}:
        raise StartupError(f'{trace} contains no request of the account "{min(unknown)}"')
    begun = time.monotonic()
    report = run(trace, entries, setup, options)
    if options.json:
        print_json(report)
    else:
        from rich.console import Console

        print_report(report, Console())
        print(
            f"simulated {report.wall_s:,.1f} s in {time.monotonic() - begun:.1f} s", file=sys.stderr
        )
    if report.failures.keys() - {"timeout"}:
        sys.exit(1)


def run(
    trace: Path, entries: list[TraceEntry], setup: Setup, options: ReplayOptions
) -> SimulationReport:
    """Simulate, with progress on stderr."""
    limits = LatencyLimits(options.limits.ttft, options.limits.tpot)
    with closing(open_bar("simulating")) as bar:
        courses, engines = simulate(
            entries,
            setup,
            lambda ended: bar.update(ended / len(entries), f"{ended} of {len(entries)} requests"),
        )
    return summarize(
        courses,
        engines,
        trace=str(trace),
        settings=msgspec.to_builtins(setup) | msgspec.to_builtins(limits),
        limits=limits,
        accounts=options.key,
    )


def speed_up(entries: list[TraceEntry], factor: float) -> list[TraceEntry]:
    """Return the entries with ``factor`` times as many arrivals per second."""
    return [msgspec.structs.replace(entry, timestamp=entry.timestamp / factor) for entry in entries]


def make_setup(options: ReplayOptions, entries: list[TraceEntry]) -> Setup:
    """Return the setup that the options describe. Options named like its fields are copied."""
    same = {name: one for name, one in vars(options).items() if name in Setup.__struct_fields__}
    longest = max(entry.input_length + entry.output_length for entry in entries)
    others = {
        "replicas": options.engines,
        "max_replicas": options.max_engines,
        "slow_replicas": options.slow_engines,
        "target_itl_ms": options.target_itl_ms or None,
        "context": options.context or longest,
        "costs": SMALL_MODEL if options.costs is None else read_costs(options.costs),
    }
    return Setup(**same | others)


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


class MeasuredCosts(msgspec.Struct, frozen=True):
    """The step costs that a server's scheduler has learned: see scheduler/trace.py."""

    row_seconds: dict[int, float]
    token_seconds: float | None


def read_costs(text: str) -> Costs:
    """Read costs from "step,row,token" in seconds, or from a file. Raises StartupError."""
    parts = text.split(",")
    try:
        costs = Costs(*map(float, parts)) if len(parts) == 3 else fit(read_measured(Path(text)))
    except ValueError:
        raise StartupError(
            f"--costs must be a file or three numbers of seconds (step,row,token), not {text}"
        ) from None
    if not all(0 <= seconds < float("inf") for seconds in msgspec.structs.astuple(costs)):
        raise StartupError(f"--costs {text}: seconds must be finite numbers from 0")
    return costs


def read_measured(path: Path) -> MeasuredCosts:
    """Return the measured costs. Raises StartupError."""
    try:
        measured = msgspec.json.decode(read_input(path), type=MeasuredCosts)
    except OSError as error:
        raise StartupError(f"cannot read --costs {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"--costs {path}: {str(error).replace('$.', '')}") from None
    for name in ("row_seconds", "token_seconds"):
        if not getattr(measured, name):
            raise StartupError(
                f"--costs {path}: {name} is empty, because the server has not measured it yet"
            )
    return measured


def fit(measured: MeasuredCosts) -> Costs:
    """Return the line step + row * n that fits the measurements best, without negative parts."""
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
