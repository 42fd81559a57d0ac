"""The page and pictures that show the rounds of ``cllm bench compare``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cllm.bench.compare.intervals import Median
from cllm.bench.compare.rounds import CLLM, LLAMA_SERVER, MACHINE, Rounds, StoredRun
from cllm.bench.compare.rows import (
    CLIENTS,
    DECODE,
    MEMORY,
    OUTPUT,
    PER_CPU,
    PREFILL,
    ROWS,
    START,
    TTFT,
    ComparisonRow,
)
from cllm.bench.compare.targets import Figure, best_settings, find_figures
from cllm.errors import StartupError

NOTES = re.compile(r"<!-- notes: (\w+) -->\n(.*?)<!-- end of notes -->", re.DOTALL)
EMPTY_NOTES = "\nNothing has been written here yet.\n\n"

HOW = """\
* **cLLM runs without any option**: `cllm serve model.gguf`; only the rows about scheduling show options. The row `edit`
  uses the built-in model.
* **llama-server** runs with its default settings (`default`: no option), with a slot for each client, and with one pool
  of cells for these slots (`-kvu`), both with as many cells as cLLM reports that it has, and a thread for each CPU. The
  first round measures all settings. Those that served every request and were at most 10 % slower than the best one are
  measured in all rounds, and the best one of them is judged. The others are shown below and not judged.
* It is built with the compiler switches of cLLM's own llama.cpp (pyproject.toml), which shows what the servers add to
  the same kernels. The default build, as llama.cpp's own instructions make it, runs in every third round, with the
  settings that were best in the first one.
* Each run starts a server, sends one short request for each client, measures, and stops the server. Systems are
  measured in turn, and every second round runs in reverse order. Each round has requests of its own, the same for all
  systems. Temperature 0.8, top-k 40 and top-p 0.95; in `edit`, temperature 0.
* llama-server gets a new connection for each request, because it drops some kept-alive ones.
* llama-batched-bench computes prompts and decodes them all at once. It neither samples nor schedules, so it is an upper
  bound. The engine in process does the same work as a server without one.
* *CPU outside llama_decode* is the CPU time of all processes of cLLM minus that inside `llama_decode`, as a share of the
  whole: reading requests, templates and tokens, scheduling, filling batches, sampling, frames between the processes,
  text, and writing to sockets. It includes threads of llama.cpp that still spin after a decode.
* *Output tokens for a second of the CPU* are those of all processes of a server. The load client runs on the same
  machine, pinned to one CPU, and is not counted.

Numbers are medians of the rounds, with intervals in brackets that contain the true median with a probability of at
least 95 %: order statistics, which assume no distribution. With fewer than six rounds they are the least and the
greatest value. Ratios are taken within a round. A verdict is *not certain* if the interval contains the target. A run
in which other processes took more than 2 % of the CPU is repeated up to three times; if none was quiet, the quietest one
counts and the figure is marked *noisy*. Only rounds of one machine and one build are combined."""

ITL, DECODE_8 = "ITL p50 ms", f"{DECODE}, 8 at a time"
COLUMNS = {
    OUTPUT: "output tokens/s",
    PER_CPU: "output tokens/CPU s",
    TTFT: "mean TTFT ms",
    ITL: "ITL p50 ms",
    "ITL p99 ms": "ITL p99 ms",
    DECODE: "decoding tokens/s",
    START: "start s",
    MEMORY: "memory MB",
}
# values of a load that are not shown
HIDDEN = re.compile(
    r"^(succeeded|requests/s|good requests/s|requests that succeed.*|.*: requests that succeed.*"
    r"|(TTFT|ITL|TPOT|E2E) (mean|p\d+) ms)$"
)


def write_page(rounds: Rounds, path: Path, skipped: dict[str, str]) -> list[Path]:
    """Write the page, and its pictures next to it. Return the written paths.

    The notes of an existing page are kept. ``skipped`` lists what was not measured, and why.

    Raises StartupError if a file cannot be written.
    """
    from cllm.bench.load.plots import picture

    try:
        notes = dict(NOTES.findall(path.read_text("utf-8"))) if path.exists() else {}
        pictures = {
            path.with_name(f"{path.stem}-{name}.svg"): figure
            for name, figure in draw_curves(rounds).items()
        }
        for file, figure in pictures.items():
            file.write_bytes(picture(figure, file.suffix))
        path.write_text(page(rounds, path.stem, notes, skipped), "utf-8")
    except OSError as error:
        raise StartupError(
            f"{error.filename or path} cannot be written: {error.strerror}"
        ) from None
    return [path, *pictures]


def page(rounds: Rounds, stem: str, notes: dict[str, str], skipped: dict[str, str]) -> str:
    """Return the page in Markdown. Its pictures are named ``stem``-name.svg."""
    later = [*(notes or {"results": EMPTY_NOTES}).items()]
    first = [(name, text) for name, text in later if name == "summary"]
    parts = [
        "# Performance",
        *map(mark, first),
        *figures_section(rounds),
        *measurement_section(rounds, skipped),
        "## All rows",
        *(part for row in ROWS.values() for part in row_section(row, rounds.of(row.name))),
        *curves_section(rounds, stem),
        *(mark(note) for note in later if note not in first),
    ]
    return "\n\n".join(parts) + "\n"


def mark(note: tuple[str, str]) -> str:
    """Return the note ``note`` (name and text) in the form in which the next run finds it."""
    return f"<!-- notes: {note[0]} -->\n{note[1]}<!-- end of notes -->"


def figures_section(rounds: Rounds) -> Iterator[str]:
    yield "## Figures and targets"
    yield (
        "`cllm bench compare` wrote this page. Only what users gain, and the notes at the end, are "
        "written by hand."
    )
    yield (
        "cLLM without any option, and the best settings of llama-server that served every request "
        "of the row with the same\nKV memory."
    )
    yield figure_table(find_figures(rounds))


def measurement_section(rounds: Rounds, skipped: dict[str, str]) -> Iterator[str]:
    yield "## How this was measured"
    yield HOW
    runs = [run for name in ROWS for run in rounds.of(name)]
    machine = dict(rounds.machine)
    if runs:
        machine["measured"] = (
            f"{min(run.at for run in runs)[:10]} to {max(run.at for run in runs)[:10]}"
        )
    models = {msgspec.json.decode(run.work)["model"] for run in runs if run.work}
    machine["models"] = "; ".join(sorted(models))
    yield table(("", ""), machine.items(), "ll")
    if rounds.num_foreign:
        yield (
            f"{rounds.num_foreign} runs with another {' or '.join(MACHINE)} are stored too, and "
            f"left out."
        )
    missing = {name: "no round is stored" for name in ROWS if not rounds.of(name)}
    if reasons := skipped | missing:
        yield "Not measured:"
        yield "\n".join(f"* {name}: {reason}" for name, reason in reasons.items())


def row_section(row: ComparisonRow, runs: Sequence[StoredRun]) -> Iterator[str]:
    """Yield the tables of a row, or nothing if the row was not measured."""
    if not runs:
        return
    yield f"### {row.name}"
    yield row.text[0].upper() + row.text[1:] + "."
    groups = group_runs(runs)
    columns = {
        value: title for value, title in COLUMNS.items() if any(value in run.values for run in runs)
    }
    if columns:
        yield table(
            ("", *columns.values(), "succeeded", "rounds"),
            [
                (
                    name,
                    *(spread(collect_values(group, value)) for value in columns),
                    succeeded(group),
                    f"{len(group)}{', noisy' if any(run.noisy for run in group) else ''}",
                )
                for name, group in groups.items()
            ],
            "l" + "r" * (len(columns) + 2),
        )
    names = {
        value
        for run in runs
        for value in run.values
        if value not in columns and not HIDDEN.match(value)
    }
    ordered = [value for run in runs for value in run.values if value in names]
    if names:
        yield table(
            ("", *groups),
            [
                (value, *(spread(collect_values(group, value)) for group in groups.values()))
                for value in dict.fromkeys(ordered)
            ],
            "l" + "r" * len(groups),
        )
    failures = [
        (name, f"{count} x {reason}")
        for name, group in groups.items()
        for run in group
        for reason, count in run.failures.items()
    ]
    if failures:
        yield table(("", "failures"), [*dict.fromkeys(failures)], "ll")


def group_runs(runs: Iterable[StoredRun]) -> dict[str, list[StoredRun]]:
    """Return system and settings -> runs, in the order of the systems."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        name = f"{run.system} ({run.settings})" if run.settings else run.system
        groups.setdefault(name, []).append(run)
    return groups


def collect_values(runs: Iterable[StoredRun], value: str) -> list[float]:
    return [run.values[value] for run in runs if value in run.values]


def succeeded(runs: Sequence[StoredRun]) -> str:
    total = sum(run.num_requests for run in runs)
    return f"{sum(run.num_succeeded for run in runs)}/{total}" if total else ""


def figure_table(figures: Iterable[Figure]) -> str:
    rows = []
    for figure in figures:
        sign = "≥" if figure.at_least else "≤"
        limits = [
            "" if limit is None else f"{sign} {limit:.3g}{figure.unit}"
            for limit in (figure.target, figure.default_target)
        ]
        default = spread(figure.default_values, figure.unit)
        if limits[1] and default:
            default += f", {limits[1]}: {'met' if figure.default_met else '**missed**'}"
        measured = spread(figure.values, figure.unit)
        rows.append(
            (
                figure.name,
                limits[0],
                measured,
                str(len(figure.values)),
                figure.verdict(),
                default,
                figure.settings,
            )
        )
    head = ("figure", "target", "measured", "n", "", "against the default build", "peer's settings")
    return table(head, rows, "lrrrlrl")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    lines = [head, ["---" if which == "l" else "---:" for which in align], *rows]
    return "\n".join(
        f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines
    )


def spread(values: Sequence[float], unit: str = "") -> str:
    """Return "median (confidence interval)"; the median alone if there is one value; "" if there
    is none.
    """
    if not values:
        return ""
    median = Median.of(values)
    middle = number(median.middle) + unit
    if len(values) == 1:
        return middle
    return f"{middle} ({number(median.low)} to {number(median.high)})"


def number(value: float) -> str:
    """Return the number with three or four digits."""
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.3f}"
    )


# --- the pictures -------------------------------------------------------------------------------

Points = dict[float, list[float]]
"""x -> values measured there."""


class Curve(NamedTuple):
    """A picture of ``value`` over ``x``. ``collect`` returns the points of each line."""

    name: str
    value: str
    title: str
    x: str
    collect: Callable[[Rounds, str], dict[str, Points]]


def curves_section(rounds: Rounds, stem: str) -> Iterator[str]:
    measured = measured_curves(rounds)
    if measured:
        yield "## Curves"
        yield from (f"![{curve.title}]({stem}-{curve.name}.svg)" for curve, _ in measured)


def measured_curves(rounds: Rounds) -> list[tuple[Curve, dict[str, Points]]]:
    """Return the curves that have a line with several points, and their lines."""
    lines = ((curve, curve.collect(rounds, curve.value)) for curve in CURVES)
    return [
        (curve, drawn) for curve, drawn in lines if max(map(len, drawn.values()), default=0) > 1
    ]


def draw_curves(rounds: Rounds) -> dict[str, Any]:
    """Return name -> matplotlib figure of each curve that was measured."""
    from cllm.bench.load.plots import curves

    return {
        curve.name: curves(lines, x=curve.x, y=COLUMNS.get(curve.value, curve.value))
        for curve, lines in measured_curves(rounds)
    }


def over_clients(rounds: Rounds, value: str) -> dict[str, Points]:
    """Return the values of cLLM and of llama-server's best settings by number of clients."""
    lines: dict[str, Points] = {CLLM: {}, LLAMA_SERVER: {}}
    for count in CLIENTS:
        row = ROWS[f"unrelated-{count}"]
        runs = rounds.of(row.name)
        best = best_settings(runs, row, LLAMA_SERVER, row.targets[0])
        for system, settings in ((CLLM, ""), (LLAMA_SERVER, best)):
            mine = [run for run in runs if (run.system, run.settings) == (system, settings)]
            if rates := collect_values(mine, value):
                lines[system][count] = rates
    return {system: points for system, points in lines.items() if points}


def over_context(rounds: Rounds, value: str) -> dict[str, Points]:
    lines: dict[str, Points] = {}
    for run in sorted(rounds.of("context"), key=lambda run: int(run.settings)):
        if value in run.values:
            points = lines.setdefault(run.system, {})
            points.setdefault(int(run.settings), []).append(run.values[value])
    return lines


OVER_CLIENTS = ("requests at a time", over_clients)
OVER_CONTEXT = ("tokens of context", over_context)
CURVES = (
    Curve("tokens", OUTPUT, "Output tokens per second over requests at a time", *OVER_CLIENTS),
    Curve("ttft", TTFT, "Mean time to first token over requests at a time", *OVER_CLIENTS),
    Curve("itl", ITL, "Median time between tokens over requests at a time", *OVER_CLIENTS),
    Curve("prefill", PREFILL, "Prompt tokens per second over their number", *OVER_CONTEXT),
    Curve("decode", DECODE_8, "Output tokens per second over the context", *OVER_CONTEXT),
)
