"""The results of ``cllm bench compare``, their targets, and the page and pictures that show
them.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cllm.errors import StartupError
from cllm.models.gguf import size_text

CLLM, ENGINE, BOUND, LLAMA_SERVER = (
    "cLLM",
    "engine in process",
    "llama-batched-bench",
    "llama-server",
)
DEFAULT_SERVER = "llama-server, default build"
OLLAMA, EXAMPLE = "Ollama", "llama-cpp-python's example server"


class Run(msgspec.Struct, kw_only=True):
    """One system at one concurrency in one round. Rates and latencies are those of successful
    requests. None: not measured.

    output_tokens_per_s: over the time from the first prompt to the last token. decode_tokens_per_s:
    of steps in which all sequences decode. load_s: loading the model alone. memory_mb: PSS of all
    the system's processes after the work. cpu_us_per_token: CPU time of cLLM's API process.
    """

    system: str
    settings: str = ""
    num_seqs: int
    round: int
    num_requests: int
    num_succeeded: int
    failures: dict[str, int] = {}
    output_tokens_per_s: float
    decode_tokens_per_s: float | None = None
    ttft_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    start_s: float | None = None
    load_s: float | None = None
    memory_mb: float | None = None
    cpu_us_per_token: float | None = None


class Parts(msgspec.Struct):
    """Microseconds of a decoding step of the engine, by part."""

    num_seqs: int
    step_us: dict[str, float]


class Depth(msgspec.Struct, kw_only=True):
    """Speeds in tokens/s after ``context`` tokens. Decoding speed is by number of sequences."""

    system: str
    context: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: dict[int, float]


class Results(msgspec.Struct, kw_only=True):
    """All measurements, as ``--json`` writes and ``--from`` reads them."""

    date: str
    machine: dict[str, str]
    setup: dict[str, Any]
    skipped: dict[str, str] = {}
    """System -> why it was not measured."""
    llama_bench: dict[str, list[float]] = {}
    """Test -> tokens/s of each round, for the build with cLLM's compiler switches."""
    default_bench: dict[str, list[float]] = {}
    """The same for llama.cpp's default build."""
    trials: list[Run] = []
    runs: list[Run] = []
    kept: list[Run] = []
    """Runs over kept-alive connections."""
    shared: list[Run] = []
    """Runs whose prompts share a prefix."""
    curve: list[Run] = []
    parts: list[Parts] = []
    depths: list[Depth] = []


def read_results(path: Path) -> Results:
    """Return the results in a file. Raises StartupError with a message of one line."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} holds no results of cllm bench compare: {error}") from None


# --- figures ------------------------------------------------------------------------------------


class Figure(msgspec.Struct, frozen=True):
    """A number with a target. ``values``: one for each round. Their median, or with ``every`` each
    of them, must be at least ``target``; without ``at_least``, at most ``target``.
    """

    name: str
    values: list[float]
    target: float | None = None
    at_least: bool = True
    every: bool = False
    unit: str = ""

    @property
    def judged(self) -> float:
        if not self.every:
            return statistics.median(self.values)
        return min(self.values) if self.at_least else max(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.target is None:
            return None
        return self.judged >= self.target if self.at_least else self.judged <= self.target

    def verdict(self) -> str:
        if self.target is None:
            return ""
        by = abs(self.judged - self.target)
        distance = f"{by:.1f}{self.unit}" if self.unit else f"{by / self.target:.1%}"
        return f"{'met' if self.met else '**missed**'} by {distance}" if by else "met"


TO_BOUND, TO_ENGINE = 0.99, 0.97
TO_LLAMA_SERVER = {1: 1.00, 8: 1.05, 32: 1.08}
TO_DEFAULT_BUILD = 1.2  # for prefill, if AVX2 is the CPU's widest vector extension
TTFT = {LLAMA_SERVER: {8: 1.0, 32: 1.0}, DEFAULT_SERVER: {8: 0.8}}
MEMORY_MB, START_S = 150.0, 1.5


def figures(results: Results) -> list[Figure]:
    """Return the figures that were measured, with their targets."""
    found: list[Figure] = []

    def add(name: str, values: list[float], target: float | None, **how: Any) -> None:
        if values:
            found.append(Figure(name, values, target, **how))

    for test, rates in results.llama_bench.items():
        ratios = [
            ratio(a, b) for a, b in zip(rates, results.default_bench.get(test, []), strict=False)
        ]
        target = TO_DEFAULT_BUILD if test.startswith("pp") and is_avx2(results) else None
        add(f"llama-bench {test}, cLLM's compiler switches / default build", ratios, target)
    sizes = sorted({run.num_seqs for run in results.runs})
    for num_seqs in sizes:
        pair = paired(results.runs, num_seqs, lambda run: run.decode_tokens_per_s)
        add(
            f"decoding, engine in process / llama-batched-bench, {num_seqs}",
            pair(ENGINE, BOUND, ratio),
            TO_BOUND,
        )
    speed = {
        size: paired(results.runs, size, lambda run: run.output_tokens_per_s) for size in sizes
    }
    for num_seqs in sizes:
        name = f"output tokens/s, HTTP streaming / engine in process, {num_seqs}"
        add(name, speed[num_seqs](CLLM, ENGINE, ratio), TO_ENGINE)
    for num_seqs in sizes:
        name, target = (
            f"output tokens/s, cLLM / llama-server, {num_seqs}",
            TO_LLAMA_SERVER.get(num_seqs),
        )
        add(name, speed[num_seqs](CLLM, LLAMA_SERVER, ratio), target)
        name = f"the bound of it, llama-batched-bench / llama-server, {num_seqs}"
        add(name, speed[num_seqs](BOUND, LLAMA_SERVER, ratio), None)
        name = f"output tokens/s, cLLM / {DEFAULT_SERVER}, {num_seqs}"
        add(name, speed[num_seqs](CLLM, DEFAULT_SERVER, ratio), None)
    for system, targets in TTFT.items():
        for num_seqs in sizes:
            values = paired(results.runs, num_seqs, lambda run: run.ttft_ms)(CLLM, system, ratio)
            add(
                f"mean TTFT, cLLM / {system}, {num_seqs}",
                values,
                targets.get(num_seqs),
                at_least=False,
            )
    for system in TTFT:
        for num_seqs in sorted({run.num_seqs for run in results.shared}):
            speeds = paired(results.shared, num_seqs, lambda run: run.output_tokens_per_s)(
                CLLM, system, ratio
            )
            add(f"shared prefix, output tokens/s, cLLM / {system}, {num_seqs}", speeds, None)
            values = paired(results.shared, num_seqs, lambda run: run.ttft_ms)(CLLM, system, ratio)
            add(f"shared prefix, mean TTFT, cLLM / {system}, {num_seqs}", values, None)
    every = (*results.runs, *results.kept, *results.curve, *results.shared)
    ours = [run for run in every if run.system == CLLM]
    add("share of cLLM's requests that succeed", [success(run) for run in ours], 1.0, every=True)
    for num_seqs in sizes:
        pair = paired(results.runs, num_seqs, lambda run: run.memory_mb)
        add(
            f"memory, cLLM - llama-server, {num_seqs}",
            pair(CLLM, LLAMA_SERVER, difference),
            MEMORY_MB,
            at_least=False,
            unit=" MB",
        )
    starts = [
        value
        for size in sizes
        for value in paired(
            results.runs, size, lambda run: run.load_s if run.system == ENGINE else run.start_s
        )(CLLM, ENGINE, difference)
    ]
    add(
        "start of cLLM until ready - loading of the model",
        starts,
        START_S,
        at_least=False,
        unit=" s",
    )
    costs = [
        run.cpu_us_per_token
        for run in results.runs
        if run.system == CLLM and run.cpu_us_per_token is not None
    ]
    add("CPU of the API process for a streamed token", costs, None, unit=" µs")
    return found


def is_avx2(results: Results) -> bool:
    """Return whether AVX2 is the widest vector extension that llama.cpp uses on this machine."""
    used = results.machine.get("llama.cpp uses", "").split(", ")
    return "AVX2" in used and "AVX512" not in used


def paired(
    runs: Iterable[Run], num_seqs: int, value: Callable[[Run], float | None]
) -> Callable[[str, str, Callable[[float, float], float]], list[float]]:
    """Return a function that combines the values of two systems round by round, where both were
    measured.
    """
    values = {(run.system, run.round): value(run) for run in runs if run.num_seqs == num_seqs}

    def join(one: str, other: str, how: Callable[[float, float], float]) -> list[float]:
        pairs = [(values[one, i], values.get((other, i))) for system, i in values if system == one]
        return [how(a, b) for a, b in pairs if a is not None and b]

    return join


def ratio(one: float, other: float) -> float:
    return one / other


def difference(one: float, other: float) -> float:
    return one - other


def success(run: Run) -> float:
    return run.num_succeeded / run.num_requests


# --- the page -----------------------------------------------------------------------------------

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
    setup = results.setup
    parts = [
        "# Performance",
        (
            f"`cllm bench compare` wrote this page on {results.date}. Only the notes below the "
            f"curves are written by hand."
        ),
        "## Figures and targets",
        "The number at the end of a name is the number of concurrent requests.",
        figure_table(figures(results)),
        "## How this was measured",
        HOW.format(**setup),
        table(("", ""), [(name, value) for name, value in machine_of(results).items()], "ll"),
    ]
    if results.llama_bench:
        builds = {"cLLM's switches": results.llama_bench, "default build": results.default_bench}
        rows = [(name, *map(spread, tests.values())) for name, tests in builds.items() if tests]
        parts += ["llama-bench, tokens/s, with both builds in turn:"]
        parts += [table(("", *results.llama_bench), rows, "l" + "r" * len(results.llama_bench))]
    if results.skipped:
        lines = (f"* {name}: {reason}" for name, reason in results.skipped.items())
        parts += ["Not measured:", "\n".join(lines)]
    parts.append("## All systems")
    for size in sorted({run.num_seqs for run in results.runs}):
        title = "1 request at a time" if size == 1 else f"{size} concurrent requests"
        parts += [f"### {title}", systems([run for run in results.runs if run.num_seqs == size])]
    if results.shared:
        parts += ["## Shared prefix", SHARED.format(**setup), systems(results.shared)]
    if results.kept:
        rows = [
            (run.system, f"{run.num_succeeded} of {run.num_requests}", why(run))
            for run in results.kept
        ]
        parts += [
            "## Kept-alive connections",
            (
                f"Short answers, {results.kept[0].num_seqs} clients, each with one connection for "
                f"all its requests."
            ),
            table(("", "succeeded", "failures"), rows, "lrl"),
        ]
    if results.curve:
        parts += ["## Growth over requests at a time", curve_table(results)]
        parts += [f"![{text}]({stem}-{name}.svg)" for name, text in CONCURRENCY_PICTURES.items()]
    if results.curve or "concurrency" in notes:
        parts.append(slot("concurrency", notes))
    if results.depths:
        parts += ["## Growth over context", depth_table(results.depths)]
        parts += [f"![{text}]({stem}-{name}.svg)" for name, text in CONTEXT_PICTURES.items()]
    if results.depths or "context" in notes:
        parts.append(slot("context", notes))
    return "\n\n".join(parts) + "\n"


def slot(name: str, notes: dict[str, str]) -> str:
    return f"<!-- notes: {name} -->\n{notes.get(name, EMPTY_NOTES)}<!-- end of notes -->"


def machine_of(results: Results) -> dict[str, str]:
    setup = results.setup
    return {**results.machine, "model": f"{setup['model']}, {size_text(setup['model_bytes'])}"}


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


def drawn(results: Results) -> dict[str, Any]:
    """Return name -> matplotlib figure for the curves that were measured."""
    from cllm.bench.plots import curves

    pictures: dict[str, Any] = {}
    if results.curve:
        names = list(dict.fromkeys(run.system for run in results.curve))

        def line(system: str, value: Callable[[Run], float | None]) -> dict[float, list[float]]:
            points: dict[float, list[float]] = {}
            for run in sorted(results.curve, key=lambda run: run.num_seqs):
                if run.system == system and (found := value(run)) is not None:
                    points.setdefault(run.num_seqs, []).append(found)
            return points

        rates = {name: line(name, lambda run: run.output_tokens_per_s) for name in names}
        pictures["tokens"] = curves(rates, x=AT_A_TIME, y="output tokens/s")
        firsts = {name: line(name, lambda run: run.ttft_ms) for name in names}
        pictures["ttft"] = curves(firsts, x=AT_A_TIME, y="mean TTFT (ms)")
        gaps = {f"{name}, p50": line(name, lambda run: run.itl_p50_ms) for name in names}
        gaps |= {f"{name}, p99": line(name, lambda run: run.itl_p99_ms) for name in names}
        pictures["itl"] = curves(gaps, x=AT_A_TIME, y="ITL (ms)")
        host: dict[float, list[float]] = {}
        for parts in results.parts:
            host.setdefault(parts.num_seqs, []).append(host_us(parts))
        pictures["host"] = curves(
            {"schedule, build, sample, advance, send": host}, x=AT_A_TIME, y="host µs a row"
        )
    if results.depths:
        systems = list(dict.fromkeys(depth.system for depth in results.depths))
        of = {name: [depth for depth in results.depths if depth.system == name] for name in systems}
        prefill: dict[str, dict[float, list[float]]]
        prefill = {
            name: {depth.context: [depth.prefill_tokens_per_s] for depth in of[name]}
            for name in systems
        }
        pictures["prefill"] = curves(prefill, x=CONTEXT, y="prefill tokens/s")
        speeds: dict[str, dict[float, list[float]]] = {}
        gaps = {}
        for name in systems:
            for depth in of[name]:
                for count, speed in depth.decode_tokens_per_s.items():
                    if not speed:  # there was no step in which all decoded
                        continue
                    label = f"{name}, {count} at a time"
                    speeds.setdefault(label, {}).setdefault(depth.context, []).append(speed)
                    gaps.setdefault(label, {}).setdefault(depth.context, []).append(
                        1e3 * count / speed
                    )
        pictures["decode"] = curves(speeds, x=CONTEXT, y="decoding tokens/s")
        pictures["context-itl"] = curves(gaps, x=CONTEXT, y="ITL (ms)")
    return pictures
