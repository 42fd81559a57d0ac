"""The page and pictures that show the results of ``cllm bench compare``."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cllm.bench.comparison import CLLM, Depth, Parts, Results, Run
from cllm.bench.targets import Figure, figures, sizes
from cllm.errors import StartupError
from cllm.models.gguf import format_size

NOTES = re.compile(r"<!-- notes: (\w+) -->\n(.*?)<!-- end of notes -->", re.DOTALL)
EMPTY_NOTES = "\nNothing has been written here yet.\n\n"

HOW = """\
Each run starts a server, measures it and stops it before the next run begins, so that no other model is loaded. Every
second round runs in reverse order. All systems get the same work: two prompts for each client, at least four, of
{prompt_words} random words (about {prompt_tokens} tokens with the template). No prompt is sent twice. Answers have
exactly {max_tokens} tokens, at temperature 0.8, top-k 40 and top-p 0.95. Each system uses {threads} threads and
{context} tokens of context for each sequence. Each client sends its next request when the one before has ended.

* cLLM runs with its defaults, but without speculation and without the prefix cache in RAM, which these prompts would
  never use.
* llama-server runs with `--cache-ram 0`, a new connection for each request, and at each concurrency the fastest of
  the settings that were tried before the rounds. It is measured twice: built with the compiler switches of cLLM's own
  llama.cpp (pyproject.toml), which shows what the servers add to the same kernels, and as llama.cpp's own
  instructions build it (default build), which is what users have otherwise.
* The engine in process does the same work without a server. Both cLLM and this engine use big pages of memory, for
  which cLLM asks the system itself.
* llama-batched-bench computes prompts of that length, and then decodes them all at once. It neither samples nor
  schedules, so it is an upper bound and not a peer.

Numbers are medians (least to most) of {rounds} rounds. Ratios and differences are taken within a round."""


SHARED = """\
{shared_requests} requests from {shared_seqs} clients. All prompts begin with the same {shared_words} random words and
continue with {own_words} words of their own. Answers have {shared_tokens} tokens. Each sequence has a context of
{shared_context} tokens."""


def write_page(results: Results, path: Path) -> list[Path]:
    """Write the page, and its pictures next to it.

    Keeps the notes in an existing page. Returns the written paths.

    Raises StartupError if a file cannot be written.
    """
    from cllm.bench.plots import picture

    try:
        notes = dict(NOTES.findall(path.read_text("utf-8"))) if path.exists() else {}
        pictures = {
            path.with_name(f"{path.stem}-{name}.svg"): figure
            for name, figure in drawn(results).items()
        }
        for file, figure in pictures.items():
            file.write_bytes(picture(figure, file.suffix))
        path.write_text(page(results, path.stem, notes), "utf-8")
    except OSError as error:
        raise StartupError(
            f"{error.filename or path} cannot be written: {error.strerror}"
        ) from None
    return [path, *pictures]


def page(results: Results, stem: str, notes: dict[str, str]) -> str:
    """Return the page in Markdown. Its pictures are named ``stem``-name.svg."""
    sections = (
        figures_section(results),
        measurement_section(results),
        systems_section(results),
        requests_section(results, stem, notes),
        context_section(results, stem, notes),
    )
    return "\n\n".join(part for section in sections for part in section) + "\n"


def figures_section(results: Results) -> Iterator[str]:
    yield "# Performance"
    yield (
        f"`cllm bench compare` wrote this page on {results.date}. Only the notes below the "
        f"curves are written by hand."
    )
    yield "## Figures and targets"
    yield "The number at the end of a name is the number of concurrent requests."
    yield figure_table(figures(results))


def measurement_section(results: Results) -> Iterator[str]:
    yield "## How this was measured"
    yield HOW.format(**results.setup)
    yield table(("", ""), [(name, value) for name, value in machine_of(results).items()], "ll")
    if results.llama_bench:
        builds = {"cLLM's switches": results.llama_bench, "default build": results.default_bench}
        rows = [(name, *map(spread, tests.values())) for name, tests in builds.items() if tests]
        yield "llama-bench, tokens/s, with both builds in turn:"
        yield table(("", *results.llama_bench), rows, "l" + "r" * len(results.llama_bench))
    if results.skipped:
        yield "Not measured:"
        yield "\n".join(f"* {name}: {reason}" for name, reason in results.skipped.items())


def systems_section(results: Results) -> Iterator[str]:
    yield "## All systems"
    for size in sizes(results.runs):
        yield "### 1 request at a time" if size == 1 else f"### {size} concurrent requests"
        yield systems([run for run in results.runs if run.num_seqs == size])
    if results.shared:
        yield "## Shared prefix"
        yield SHARED.format(**results.setup)
        yield systems(results.shared)
    if results.kept:
        yield "## Kept-alive connections"
        yield (
            f"Short answers, {results.kept[0].num_seqs} clients, each with one connection for "
            f"all its requests."
        )
        yield kept_table(results.kept)


def requests_section(results: Results, stem: str, notes: dict[str, str]) -> Iterator[str]:
    if results.curve:
        yield "## Growth over requests at a time"
        yield curve_table(results)
        yield from links(CONCURRENCY_PICTURES, stem)
    if results.curve or "concurrency" in notes:
        yield slot("concurrency", notes)


def context_section(results: Results, stem: str, notes: dict[str, str]) -> Iterator[str]:
    if results.depths:
        yield "## Growth over context"
        yield depth_table(results.depths)
        yield from links(CONTEXT_PICTURES, stem)
    if results.depths or "context" in notes:
        yield slot("context", notes)


def links(pictures: dict[str, str], stem: str) -> Iterator[str]:
    yield from (f"![{text}]({stem}-{name}.svg)" for name, text in pictures.items())


def slot(name: str, notes: dict[str, str]) -> str:
    return f"<!-- notes: {name} -->\n{notes.get(name, EMPTY_NOTES)}<!-- end of notes -->"


def machine_of(results: Results) -> dict[str, str]:
    setup = results.setup
    return {**results.machine, "model": f"{setup['model']}, {format_size(setup['model_bytes'])}"}


def figure_table(found: Sequence[Figure]) -> str:
    rows = []
    for figure in found:
        sign = "≥" if figure.at_least else "≤"
        target = "" if figure.target is None else f"{sign} {figure.target:g}{figure.unit}"
        rows.append((figure.name, target, spread(figure.values, figure.unit), figure.verdict()))
    return table(("figure", "target", "measured", ""), rows, "lrrl")


def systems(runs: Sequence[Run]) -> str:
    """Return a table of ``runs``, which have the same concurrency."""
    columns: dict[str, Callable[[Run], float | None]] = {
        "output tokens/s": lambda run: run.output_tokens_per_s,
        "decoding tokens/s": lambda run: run.decode_tokens_per_s,
        "mean TTFT ms": lambda run: run.ttft_ms,
        "ITL p50 ms": lambda run: run.itl_p50_ms,
        "ITL p99 ms": lambda run: run.itl_p99_ms,
        "start s": lambda run: run.start_s if run.start_s is not None else run.load_s,
        "memory MB": lambda run: run.memory_mb,
    }
    rows = []
    for system in dict.fromkeys(run.system for run in runs):
        mine = [run for run in runs if run.system == system]
        cells = [
            spread([found for run in mine if (found := value(run)) is not None])
            for value in columns.values()
        ]
        succeeded = (
            f"{sum(run.num_succeeded for run in mine)}/{sum(run.num_requests for run in mine)}"
        )
        chosen = mine[0].settings
        rows.append(
            (f"{system} ({chosen})" if chosen not in ("", "default") else system, *cells, succeeded)
        )
    return table(("", *columns, "succeeded"), rows, "l" + "r" * (len(columns) + 1))


def kept_table(runs: Sequence[Run]) -> str:
    rows = [(run.system, f"{run.num_succeeded} of {run.num_requests}", why(run)) for run in runs]
    return table(("", "succeeded", "failures"), rows, "lrl")


def why(run: Run) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in run.failures.items())


def curve_table(results: Results) -> str:
    host = {parts.num_seqs: host_us(parts) for parts in results.parts}
    rows = [
        (
            f"{run.num_seqs}",
            run.system,
            number(run.output_tokens_per_s),
            number(run.ttft_ms),
            number(run.itl_p50_ms),
            number(run.itl_p99_ms),
            number(host.get(run.num_seqs)) if run.system == CLLM else "",
        )
        for run in sorted(results.curve, key=lambda run: (run.num_seqs, run.system))
    ]
    head = (
        "at a time",
        "",
        "output tokens/s",
        "mean TTFT ms",
        "ITL p50 ms",
        "ITL p99 ms",
        "host µs a row",
    )
    return table(head, rows, "rlrrrrr")


def depth_table(depths: Sequence[Depth]) -> str:
    counts = sorted({count for depth in depths for count in depth.decode_tokens_per_s})
    head = [
        f"{what}, {count} at a time" for count in counts for what in ("decoding tokens/s", "ITL ms")
    ]
    rows = []
    for depth in sorted(depths, key=lambda depth: (depth.context, depth.system)):
        speeds = [(count, depth.decode_tokens_per_s.get(count) or None) for count in counts]
        cells = [
            cell
            for count, speed in speeds
            for cell in (number(speed), number(speed and 1e3 * count / speed))
        ]
        rows.append(
            (f"{depth.context:,}", depth.system, number(depth.prefill_tokens_per_s), *cells)
        )
    return table(("context", "", "prefill tokens/s", *head), rows, "rl" + "r" * (1 + len(head)))


def host_us(parts: Parts) -> float:
    """Return the microseconds per row that are spent outside llama.cpp."""
    return sum(us for part, us in parts.step_us.items() if part != "decode") / parts.num_seqs


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    lines = [head, ["---" if which == "l" else "---:" for which in align], *rows]
    return "\n".join(
        f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines
    )


def spread(values: Sequence[float], unit: str = "") -> str:
    """Return "median (least to most)"; the median alone if there is one value; "" if there is
    none.
    """
    if not values:
        return ""
    middle = number(statistics.median(values)) + unit
    return (
        middle if len(values) == 1 else f"{middle} ({number(min(values))} to {number(max(values))})"
    )


def number(value: float | None) -> str:
    """Return the number with three or four digits, or "" for None."""
    if value is None:
        return ""
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.3f}"
    )


# --- the pictures -------------------------------------------------------------------------------

CONCURRENCY_PICTURES = {
    "tokens": "Output tokens per second over requests at a time",
    "ttft": "Mean time to first token over requests at a time",
    "itl": "Times from token to token over requests at a time",
    "host": "Microseconds a row on the host beside llama.cpp over sequences",
}
CONTEXT_PICTURES = {
    "prefill": "Prompt tokens per second over the length of the prompt",
    "decode": "Output tokens per second over the length of the context",
    "context-itl": "Milliseconds from token to token over the length of the context",
}
AT_A_TIME, CONTEXT = "requests at a time", "tokens of context"


Points = dict[float, list[float]]
"""x -> values measured there."""


def drawn(results: Results) -> dict[str, Any]:
    """Return name -> matplotlib figure for the curves that were measured."""
    pictures = concurrency_pictures(results) if results.curve else {}
    return pictures | context_pictures(results.depths) if results.depths else pictures


def concurrency_pictures(results: Results) -> dict[str, Any]:
    from cllm.bench.plots import curves

    names = list(dict.fromkeys(run.system for run in results.curve))
    rates = {name: line(results, name, lambda run: run.output_tokens_per_s) for name in names}
    firsts = {name: line(results, name, lambda run: run.ttft_ms) for name in names}
    gaps = {f"{name}, p50": line(results, name, lambda run: run.itl_p50_ms) for name in names}
    gaps |= {f"{name}, p99": line(results, name, lambda run: run.itl_p99_ms) for name in names}
    host: Points = {}
    for parts in results.parts:
        host.setdefault(parts.num_seqs, []).append(host_us(parts))
    return {
        "tokens": curves(rates, x=AT_A_TIME, y="output tokens/s"),
        "ttft": curves(firsts, x=AT_A_TIME, y="mean TTFT (ms)"),
        "itl": curves(gaps, x=AT_A_TIME, y="ITL (ms)"),
        "host": curves(
            {"schedule, build, sample, advance, send": host}, x=AT_A_TIME, y="host µs a row"
        ),
    }


def line(results: Results, system: str, value: Callable[[Run], float | None]) -> Points:
    """Return the values of the system's runs by number of requests at a time."""
    points: Points = {}
    for run in sorted(results.curve, key=lambda run: run.num_seqs):
        if run.system == system and (found := value(run)) is not None:
            points.setdefault(run.num_seqs, []).append(found)
    return points


def context_pictures(depths: Sequence[Depth]) -> dict[str, Any]:
    from cllm.bench.plots import curves

    prefill: dict[str, Points] = {depth.system: {} for depth in depths}
    speeds: dict[str, Points] = {}
    gaps: dict[str, Points] = {}
    for depth in (depth for system in prefill for depth in depths if depth.system == system):
        prefill[depth.system][depth.context] = [depth.prefill_tokens_per_s]
        for count, speed in depth.decode_tokens_per_s.items():
            if not speed:  # there was no step in which all decoded
                continue
            label = f"{depth.system}, {count} at a time"
            speeds.setdefault(label, {}).setdefault(depth.context, []).append(speed)
            gaps.setdefault(label, {}).setdefault(depth.context, []).append(1e3 * count / speed)
    return {
        "prefill": curves(prefill, x=CONTEXT, y="prefill tokens/s"),
        "decode": curves(speeds, x=CONTEXT, y="decoding tokens/s"),
        "context-itl": curves(gaps, x=CONTEXT, y="ITL (ms)"),
    }
