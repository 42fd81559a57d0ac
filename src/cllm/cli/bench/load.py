"""``cllm bench load`` and ``cllm bench diff``: load on a server, and reports on it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from cyclopts import Parameter

from cllm.bench.load.dialects import Api
from cllm.bench.load.scenarios import SCENARIOS, Sizes
from cllm.bench.load.workload import (
    SHARED,
    WORKLOADS,
    Arrivals,
    Group,
    RequestSpec,
    Stage,
    arrival_times,
    num_requests,
    question_tasks,
    word_tasks,
)
from cllm.cli.bench.files import print_json, write_file, write_json
from cllm.cli.bench.pictures import PictureOptions, check_files, write_picture
from cllm.cli.options import AboveZero, GoodputLimits, Json, NotNegative, Positive, PromptWords
from cllm.cli.progress import open_bar
from cllm.cli.remote import server_url
from cllm.errors import StartupError

# (requests, concurrency, tokens of an answer), as in the project's first measurements
PRESETS = {"seed-40x8x50": (40, 8, 50), "seed-160x5x50": (160, 5, 50)}

if TYPE_CHECKING:
    from cllm.bench.load.client import Endpoint, Watch
    from cllm.bench.load.report import Report

    Workload = str
    Preset = str
else:
    Workload = Literal[(*WORKLOADS, *SCENARIOS, "questions")]
    Preset = Literal[tuple(PRESETS)]

# 100 in the other workloads; many systems give a process 1024 open files
REQUESTS = {"overload": 500}
MAX_TOKENS = {"questions": 320}  # of an answer; 64 in the other workloads


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    api: Annotated[
        Api, Parameter(help="The server's API: OpenAI's chat completions, or Ollama's /api/chat.")
    ] = "openai"
    workload: Annotated[
        Workload,
        Parameter(
            help="".join(f"{name}: {text}; " for name, (_, text) in WORKLOADS.items())
            + "".join(f"{name}: {one.text}; " for name, one in SCENARIOS.items() if name != "edit")
            + "in all of these, each answer must have exactly --max-tokens tokens (Ollama's may "
            f"be shorter). edit: {SCENARIOS['edit'].text}. "
            "questions: questions for the built-in model at temperature 0; each answer must be "
            "correct."
        ),
    ] = "words"
    preset: Annotated[
        Preset | None,
        Parameter(help="Sets --requests, --concurrency and --max-tokens; these flags override it."),
    ] = None
    requests: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Requests to measure. [default: 100; overload: 500; agents to long-context: each "
            "its own number]",
        ),
    ] = None
    seconds: Annotated[
        float | None,
        Parameter(
            validator=AboveZero,
            help="Begin no further request after these seconds, even if not all of --requests have "
            "been sent.",
        ),
    ] = None
    concurrency: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Concurrent requests; when one ends, the next one starts. [default: 8; "
            "overload: all; agents to long-context: each its own number]",
        ),
    ] = None
    rate: Annotated[
        float | None,
        Parameter(
            validator=AboveZero,
            help="Mean requests a second, sent independently of the answers, instead of "
            "--concurrency.",
        ),
    ] = None
    arrivals: Annotated[
        Arrivals,
        Parameter(help="Arrivals with --rate: poisson, bursty (gamma distributed gaps) or even."),
    ] = "poisson"
    max_tokens: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Tokens of an answer. [default: 64; questions: 320; agents to long-context: 32 "
            "or 64]",
        ),
    ] = None
    prompt_words: PromptWords = 64
    shared_words: Annotated[
        int | None,
        Parameter(
            validator=NotNegative,
            help="Number of words at the beginning that all prompts share. [default: 0; "
            "shared-prefix: three "
            "quarters]",
        ),
    ] = None
    long_tokens: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Tokens of the long prompt. [default: 3000; long-context: 30000]",
        ),
    ] = None
    scale: Annotated[
        float,
        Parameter(
            validator=AboveZero,
            help="Factor for all numbers of prompt tokens of the workloads from agents to "
            "long-context.",
        ),
    ] = 1.0
    temperature: Annotated[
        float,
        Parameter(
            validator=NotNegative, help="Temperature of all workloads except questions and edit."
        ),
    ] = 0.0
    limits: GoodputLimits = field(default_factory=GoodputLimits)
    warmup: Annotated[
        int | None,
        Parameter(
            validator=NotNegative,
            help="Requests before the clock starts. [default: as --concurrency; overload: 8]",
        ),
    ] = None
    timeout: Annotated[float, Parameter(validator=AboveZero, help="Seconds for each request.")] = (
        3600.0
    )
    keep_alive: Annotated[
        bool,
        Parameter(
            negative="--no-keep-alive",
            help="Reuse connections. With some servers, this loses requests.",
        ),
    ] = True
    seed: Annotated[
        int, Parameter(help="The same seed gives the same prompts; it is sent with them.")
    ] = 0
    model: Annotated[
        str | None, Parameter(help="The model to request. [default: the server's first model]")
    ] = None
    api_key: Annotated[
        str | None, Parameter(env_var="CLLM_API_KEY", help="Sent as a bearer token.")
    ] = None
    server_pid: Annotated[
        int,
        Parameter(
            validator=NotNegative,
            help="Process id of the server on this machine: also report the CPU time that it and "
            "its child processes use.",
            show_default=False,
        ),
    ] = 0
    note: Annotated[
        str, Parameter(help="A few words for the report, such as 'with 8 threads'.")
    ] = ""
    out: Annotated[
        Path | None, Parameter(help="A file for the report as JSON, for cllm bench diff.")
    ] = None
    pictures: PictureOptions = field(default_factory=PictureOptions)
    json: Json = False


class LoadSize(NamedTuple):
    """The amount of load."""

    requests: int
    concurrency: int
    warmup: int
    max_tokens: int

    @classmethod
    def of(cls, options: LoadOptions) -> LoadSize:
        """Return sizes from the options, else the preset, else the workload's defaults."""
        workload = options.workload
        defaults = REQUESTS.get(workload, 100), 8, MAX_TOKENS.get(workload, 64)
        if scenario := SCENARIOS.get(workload):
            defaults = scenario.sizes.requests, scenario.sizes.clients, scenario.max_tokens
        requests, at_once, max_tokens = PRESETS[options.preset] if options.preset else defaults
        requests, at_once = options.requests or requests, options.concurrency or at_once
        all_at_once = workload == "overload" and options.concurrency is None
        return cls(
            requests,
            requests if all_at_once else at_once,
            at_once if options.warmup is None else options.warmup,
            options.max_tokens or max_tokens,
        )


def load(
    url: Annotated[
        str, Parameter(env_var="CLLM_URL", help="The server, such as http://127.0.0.1:8000.")
    ],
    /,
    *,
    options: LoadOptions = LoadOptions(),
) -> None:
    """Send requests to a server with OpenAI's chat completions or Ollama's chat, and report
    latencies and rates.

    Answers are streamed. The exit code is 1 if a request failed; with --rate, rejections because of
    overload do not count.
    """
    from cllm.bench.load.client import Endpoint, find_model

    check_files(options.out, options.pictures.plot, options.pictures.html)
    target = Endpoint(
        server_url(url),
        check_key(options.api_key),
        options.timeout,
        options.keep_alive,
        options.api,
        options.server_pid,
    )
    with closing(open_bar("requests")) as bar:
        report = measure(
            target,
            options,
            find_model(target, options.model),
            progress=lambda ended, total: bar.update(
                min(1.0, ended / total), f"{ended} of {max(ended, total)} requests"
            ),
        )
    show(report, options)
    forgiven = options.rate is not None and options.workload != "overload"
    if report.num_failed - (report.num_refused if forgiven else 0):
        sys.exit(1)


def measure(
    target: Endpoint,
    options: LoadOptions,
    model: str,
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
    watch: Watch | None = None,
) -> Report:
    """Send the requests, and return the report. ``progress`` is called with the number of requests
    that have ended, and the total; both include the warm-up.

    Raises StartupError for inconsistent options, and if the server cannot be measured.
    """
    from cllm.bench.load.client import measure_tokens_per_word, run_stages
    from cllm.bench.load.report import summarize

    size = LoadSize.of(options)
    spec = make_spec(options, size, model)
    if options.workload in SCENARIOS:
        spec = msgspec.structs.replace(spec, tokens_per_word=measure_tokens_per_word(target, spec))
    warmup, stages = make_groups(options, size, spec)
    groups = [warmup, *(group for stage in stages for group in stage if not group.background)]
    total = sum(num_requests(group.tasks) for group in groups)
    outcome = run_stages(
        target,
        stages,
        warmup=warmup,
        progress=lambda ended: progress(ended, total),
        watch=watch,
        seconds=math.inf if options.seconds is None else options.seconds,
    )
    settings = collect_settings(options, size, spec)
    return summarize(outcome, url=target.url, model=model, settings=settings, note=options.note)


def check_key(key: str | None) -> str | None:
    """Return the API key. Raises StartupError if no header can contain it."""
    if key and not (key.isascii() and key.isprintable()):
        raise StartupError("the API key contains characters that HTTP headers do not allow")
    return key


def make_spec(options: LoadOptions, size: LoadSize, model: str) -> RequestSpec:
    shared_words = options.shared_words
    if shared_words is None:
        is_shared = options.workload == "shared-prefix"
        shared_words = int(SHARED * options.prompt_words) if is_shared else 0
    return RequestSpec(
        api=options.api,
        model=model,
        prompt_words=options.prompt_words,
        shared_words=shared_words,
        max_tokens=size.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )


def make_groups(
    options: LoadOptions, size: LoadSize, spec: RequestSpec
) -> tuple[Group, list[Stage]]:
    """Return the warm-up and the stages to measure.

    Raises StartupError for inconsistent options.
    """
    # the warm-up shares no prefix with the measured requests
    strangers = msgspec.structs.replace(spec, seed=spec.seed + 1, shared_words=0)
    warmup, clients = word_tasks(size.warmup, strangers), size.concurrency
    if scenario := SCENARIOS.get(options.workload):
        if options.rate is not None:
            raise StartupError(f"--rate does not apply to the workload {options.workload}")
        stages = scenario.make(spec, make_sizes(options, size))
        return Group(tasks=warmup, clients=clients), stages
    if options.workload == "questions":
        tasks = question_tasks(
            size.warmup + size.requests,
            model=spec.model,
            max_tokens=size.max_tokens,
            seed=options.seed,
            api=options.api,
        )
        warmup, tasks = tasks[: size.warmup], tasks[size.warmup :]
    else:
        tasks = WORKLOADS[options.workload][0](size.requests, spec)
    arrivals = None
    if options.rate is not None:
        share = len(tasks) / num_requests(tasks)  # of requests that begin a conversation
        arrivals = arrival_times(len(tasks), options.rate * share, options.arrivals, options.seed)
    group = Group(tasks=tasks, clients=clients, arrivals=arrivals)
    return Group(tasks=warmup, clients=clients), [[group]]


def make_sizes(options: LoadOptions, size: LoadSize) -> Sizes:
    usual = SCENARIOS[options.workload].sizes.long_tokens
    long_tokens = (options.long_tokens or usual) if usual else 0
    return Sizes(size.requests, size.concurrency, long_tokens, options.scale)


def collect_settings(options: LoadOptions, size: LoadSize, spec: RequestSpec) -> dict[str, Any]:
    """Return the settings of a report: those that have an effect."""
    settings: dict[str, Any] = {
        "api": options.api,
        "workload": options.workload,
        "requests": size.requests,
        "max_tokens": size.max_tokens,
        "seed": options.seed,
    }
    if options.seconds is not None:
        settings["seconds"] = options.seconds
    if options.rate is None:
        settings["concurrency"] = size.concurrency
    else:
        settings |= {"rate": options.rate, "arrivals": options.arrivals}
    settings |= {"warmup": size.warmup, "keep_alive": options.keep_alive}
    settings |= {"ttft": options.limits.ttft, "tpot": options.limits.tpot}
    if options.workload == "edit":
        del settings["max_tokens"]
    elif options.workload in SCENARIOS:
        settings["long_tokens"] = make_sizes(options, size).long_tokens or None
        settings |= {"scale": options.scale, "temperature": spec.temperature}
    elif options.workload != "questions":
        sizes = ("prompt_words", "shared_words", "temperature")
        settings |= {name: getattr(spec, name) for name in sizes}
    return {name: value for name, value in settings.items() if value is not None}


def show(report: Report, options: LoadOptions) -> None:
    """Print the report, and write the files that the options name."""
    from cllm.bench.load.report import print_report

    if options.json:
        print_json(report)
    else:
        from rich.console import Console

        print_report(report, Console())
    if options.out is not None:
        write_json(options.out, report)
    if options.pictures.plot is not None:
        write_plot(options.pictures.plot, {report.model: report})
    if options.pictures.html is not None:
        from cllm.bench.load.page import report_page

        write_file(options.pictures.html, report_page(report).encode())


def write_plot(path: Path, reports: dict[str, Report]) -> None:
    from cllm.bench.load.plots import load_figure

    write_picture(path, load_figure(reports))


def diff(
    before: Annotated[Path, Parameter(help="A report written by cllm bench load --out.")],
    after: Annotated[Path, Parameter(help="Another report.")],
    /,
    *,
    pictures: PictureOptions = PictureOptions(),  # noqa: B008  # immutable
) -> None:
    """Compare two reports, figure by figure."""
    from rich.console import Console

    from cllm.bench.load.comparison import print_diff
    from cllm.bench.load.report import read_report

    check_files(None, pictures.plot, pictures.html)
    old, new = read_report(before), read_report(after)
    if pictures.plot is not None:
        write_plot(pictures.plot, {f"before: {before.name}": old, f"after: {after.name}": new})
    if pictures.html is not None:
        from cllm.bench.load.page import diff_page

        write_file(pictures.html, diff_page(old, new).encode())
    print_diff(old, new, Console())
