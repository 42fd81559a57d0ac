"""``cllm bench``: load on a server, and models to measure with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

from cllm import __version__
from cllm.bench.dialects import Api
from cllm.bench.make_model import QUANTS, SHAPES
from cllm.bench.make_model import make_model as write_model
from cllm.bench.peers import BUILT, FOLDER
from cllm.bench.peers import build as build_peers
from cllm.bench.workload import (
    SHARED,
    WORKLOADS,
    Arrivals,
    Task,
    Words,
    arrival_times,
    num_requests,
    question_tasks,
    word_tasks,
)
from cllm.cli.doctor import cpu_name, installed
from cllm.cli.files import check_writable, write_file
from cllm.cli.progress import loading_bar
from cllm.cli.talk import server_url
from cllm.errors import StartupError
from cllm.models.catalog import BUILTIN
from cllm.models.gguf import size_text

# What the project's seed measured: requests, at a time, tokens of an answer.
PRESETS = {"seed-40x8x50": (40, 8, 50), "seed-160x5x50": (160, 5, 50)}

if TYPE_CHECKING:
    from cllm.bench.report import Report

    Shape = str
    Quant = str
    Workload = str
    Preset = str
else:
    Shape = Literal[tuple(SHAPES)]
    Quant = Literal[tuple(QUANTS)]
    Workload = Literal[(*WORKLOADS, "questions")]
    Preset = Literal[tuple(PRESETS)]

app = App(name="bench", help="Measure servers and compare them; make stand-in models.")

# 100 in the other workloads; many systems give a process 1024 open files
REQUESTS = {"overload": 500}
MAX_TOKENS = {"questions": 320}  # of an answer; 64 in the other workloads

PAGE = Path("docs/performance.md")  # of cllm bench compare

Positive = Number(gte=1)
AboveZero = Number(gt=0)
NotNegative = Number(gte=0)

Plot = Annotated[
    Path | None, Parameter(help="File for a picture: .png or .svg.", show_default=False)
]
Html = Annotated[
    Path | None, Parameter(help="File for an HTML report with pictures.", show_default=False)
]


@app.command
def load(
    url: Annotated[
        str, Parameter(env_var="CLLM_URL", help="The server, such as http://127.0.0.1:8000.")
    ],
    /,
    *,
    api: Annotated[
        Api, Parameter(help="The server's API: OpenAI's chat completions, or Ollama's /api/chat.")
    ] = ("openai"),
    workload: Annotated[
        Workload,
        Parameter(
            help="".join(f"{name}: {text}; " for name, (_, text) in WORKLOADS.items())
            + "in all of these, each answer must have exactly --max-tokens tokens (Ollama's may "
            "be shorter). "
            "questions: questions for the built-in model at temperature 0; each answer must be "
            "correct."
        ),
    ] = "words",
    preset: Annotated[
        Preset | None,
        Parameter(
            help="Sets --requests, --concurrency and --max-tokens; these flags override it.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Requests to measure. [default: 100, 500 overload]",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Concurrent requests; when one ends, the next one starts. [default: 8; "
            "overload: all]",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        Parameter(
            validator=AboveZero,
            help="Mean requests a second, sent independently of the answers, instead of "
            "--concurrency.",
            show_default=False,
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals,
        Parameter(help="Arrivals with --rate: poisson, bursty (gamma distributed gaps) or even."),
    ] = "poisson",
    max_tokens: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Tokens of an answer. [default: 64, 320 questions]",
            show_default=False,
        ),
    ] = None,
    prompt_words: Annotated[int, Parameter(validator=Positive, help="Words of a prompt.")] = 64,
    shared_words: Annotated[
        int | None,
        Parameter(
            validator=NotNegative,
            help="How many words at the beginning are the same in all prompts. [default: 0; "
            "shared-prefix: three "
            "quarters]",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float,
        Parameter(validator=NotNegative, help="Temperature of all workloads except questions."),
    ] = 0.0,
    ttft: Annotated[
        float | None,
        Parameter(
            validator=AboveZero,
            help="Goodput limit: milliseconds to the first token.",
            show_default=False,
        ),
    ] = None,
    tpot: Annotated[
        float | None,
        Parameter(
            validator=AboveZero,
            help="Goodput limit: milliseconds for each token after the first.",
            show_default=False,
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        Parameter(
            validator=NotNegative,
            help="Requests before the clock starts. [default: as --concurrency; overload: 8]",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, Parameter(validator=AboveZero, help="Seconds for each request.")
    ] = 600.0,
    keep_alive: Annotated[
        bool, Parameter(help="Reuse connections; some servers lose requests then.")
    ] = True,
    seed: Annotated[
        int, Parameter(help="The same seed gives the same prompts; it is sent with them.")
    ] = 0,
    model: Annotated[
        str | None,
        Parameter(
            help="The model to request. [default: the server's first model]", show_default=False
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        Parameter(env_var="CLLM_API_KEY", help="Sent as a bearer token.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        Parameter(help="A file for the report as JSON, for cllm bench diff.", show_default=False),
    ] = None,
    plot: Plot = None,
    html: Html = None,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object.")] = False,
) -> None:
    """Send requests to any server that speaks OpenAI's chat completions or Ollama's chat; report
    latencies and rates.

    Answers are streamed. The exit code is 1 if a request failed; with --rate, rejections because of
    overload do not count.
    """
    from cllm.bench.load import Target, find_model, run_load
    from cllm.bench.report import print_report, summarize

    check_files(out, plot, html)
    preset_requests, at_once, preset_tokens = (
        PRESETS[preset] if preset else (REQUESTS.get(workload, 100), 8, None)
    )
    requests, at_once = requests or preset_requests, concurrency or at_once
    concurrency = requests if workload == "overload" and concurrency is None else at_once
    max_tokens = max_tokens or preset_tokens or MAX_TOKENS.get(workload, 64)
    warmup = at_once if warmup is None else warmup
    target = Target(server_url(url), checked_key(api_key), timeout, keep_alive, api)
    model = find_model(target, model)
    settings: dict[str, Any] = {
        "api": api,
        "workload": workload,
        "requests": requests,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    settings |= (
        {"concurrency": concurrency} if rate is None else {"rate": rate, "arrivals": arrivals}
    )
    settings |= {"warmup": warmup, "keep_alive": keep_alive, "ttft": ttft, "tpot": tpot}
    tasks: list[Task]
    if workload == "questions":
        tasks = question_tasks(
            warmup + requests, model=model, max_tokens=max_tokens, seed=seed, api=api
        )
    else:
        if shared_words is None:
            shared_words = int(SHARED * prompt_words) if workload == "shared-prefix" else 0
        sizes: dict[str, Any] = {
            "prompt_words": prompt_words,
            "shared_words": shared_words,
            "temperature": temperature,
        }
        words = Words(api=api, model=model, max_tokens=max_tokens, seed=seed, **sizes)
        settings |= sizes
        # the warm-up shares no prefix with the measured requests
        strangers = msgspec.structs.replace(words, seed=seed + 1, shared_words=0)
        tasks = word_tasks(warmup, strangers) + WORKLOADS[workload][0](requests, words)
    total = num_requests(tasks)
    share = (len(tasks) - warmup) / max(1, total - warmup)  # of requests that begin a conversation
    with closing(loading_bar("requests")) as bar:
        outcome = run_load(
            target,
            tasks,
            concurrency=concurrency,
            warmup=warmup,
            progress=lambda ended: bar.update(ended / total, f"{ended} of {total} requests"),
            arrivals=None
            if rate is None
            else arrival_times(len(tasks) - warmup, rate * share, arrivals, seed),
        )
    settings = {name: value for name, value in settings.items() if value is not None}
    report = summarize(outcome, url=target.url, model=model, settings=settings)
    if json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        from rich.console import Console

        print_report(report, Console())
    if out is not None:
        write_file(out, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if plot is not None:
        write_plot(plot, {model: report})
    if html is not None:
        from cllm.bench.page import report_page

        write_file(html, report_page(report).encode())
    forgiven = report.num_refused if rate is not None and workload != "overload" else 0
    if report.num_failed - forgiven:
        sys.exit(1)


def check_files(out: Path | None, plot: Path | None, html: Path | None) -> None:
    """Raises StartupError if a file cannot be written, before anything is measured."""
    if plot is not None or html is not None:
        from cllm.bench.plots import checked_picture

        if plot is not None:
            checked_picture(plot)
    check_writable(out, plot, html)


def write_plot(path: Path, reports: dict[str, Report]) -> None:
    from cllm.bench.plots import load_figure, picture

    write_file(path, picture(load_figure(reports), path.suffix.lower()))


@app.command
def diff(
    before: Annotated[Path, Parameter(help="A report that cllm bench load --out has written.")],
    after: Annotated[Path, Parameter(help="Another one.")],
    /,
    *,
    plot: Plot = None,
    html: Html = None,
) -> None:
    """Compare two reports, figure by figure."""
    from rich.console import Console

    from cllm.bench.report import print_diff, read_report

    check_files(None, plot, html)
    old, new = read_report(before), read_report(after)
    if plot is not None:
        write_plot(plot, {f"before: {before.name}": old, f"after: {after.name}": new})
    if html is not None:
        from cllm.bench.page import diff_page

        write_file(html, diff_page(old, new).encode())
    print_diff(old, new, Console())


@app.command
def stages(
    model: Annotated[
        Path | None,
        Parameter(help="A GGUF file. [default: the built-in model]", show_default=False),
    ] = None,
    /,
    *,
    sequences: Annotated[
        tuple[int, ...],
        Parameter(
            validator=Positive,
            negative="",
            consume_multiple=True,
            help="Numbers of concurrent sequences, such as 1 8 32.",
        ),
    ] = (1, 8, 32),
    rounds: Annotated[
        int,
        Parameter(validator=Positive, help="Runs of each stage, in turn, after one for warm-up."),
    ] = 5,
    prompt_words: Annotated[int, Parameter(validator=Positive, help="Words of a prompt.")] = 16,
    max_tokens: Annotated[
        int, Parameter(validator=Number(gte=2), help="Tokens of an answer.")
    ] = 48,
    temperature: Annotated[float, Parameter(validator=NotNegative, help="0 is greedy.")] = 0.8,
    budget: Annotated[
        float | None,
        Parameter(
            validator=Number(gte=0, lt=1),
            help="Largest median loss of speed of a stage against the one before, as a share; "
            "more gives exit code 1.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="The same seed gives the same prompts.")] = 0,
    plot: Plot = None,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object.")] = False,
) -> None:
    """Run the same work at every stage from llama_decode to the socket, and show what each stage
    costs.
    """
    begin_like_an_engine()
    from cllm.bench.stages import Size, losses, print_stages, run_stages, shares

    check_files(None, plot, None)
    sizes = [Size(count, prompt_words, max_tokens, temperature, seed) for count in sequences]
    with closing(loading_bar("measuring stages")) as bar:
        results = run_stages(model or BUILTIN, sizes, rounds, bar.update)
    if plot is not None:
        from cllm.bench.plots import bars, picture

        write_file(
            plot,
            picture(bars(shares(results), y="share of the backend's speed"), plot.suffix.lower()),
        )
    if json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
    else:
        from rich.console import Console

        print_stages(results, Console())
    if budget is not None and any(
        loss > budget for result in results for loss in losses(result)[1:]
    ):
        sys.exit(1)


def begin_like_an_engine() -> None:
    """Restart this process with an engine process's environment, so that an engine in it runs under
    the same terms.
    """
    from cllm.process.launch import with_big_pages

    environment = with_big_pages(os.environ)
    if (
        sys.argv[1:3] == ["bench", "stages"]
        and sys.platform == "linux"
        and environment != dict(os.environ)
    ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606  # ourselves


@app.command
def compare(
    model: Annotated[
        Path | None,
        Parameter(help="A GGUF file. [default: the built-in model]", show_default=False),
    ] = None,
    /,
    *,
    concurrency: Annotated[
        tuple[int, ...],
        Parameter(
            validator=Number(gte=1, lte=256),
            negative="",
            consume_multiple=True,
            help="Numbers of concurrent requests, such as 1 8 32.",
        ),
    ] = (1, 8, 32),
    rounds: Annotated[
        int, Parameter(validator=Number(gte=3), help="Runs of each system, in turn; at least 3.")
    ] = 3,
    prompt_words: Annotated[int, Parameter(validator=Positive, help="Words of a prompt.")] = 16,
    max_tokens: Annotated[
        int, Parameter(validator=Number(gte=2), help="Tokens of an answer.")
    ] = 64,
    threads: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Threads of each system. [default: all cores]",
            show_default=False,
        ),
    ] = None,
    peers: Annotated[
        Path,
        Parameter(
            help="The folder of llama-server, llama-batched-bench and llama-bench, before PATH."
        ),
    ] = FOLDER,
    build: Annotated[
        bool,
        Parameter(
            negative="",
            help="First build the peers in .tools/peers, from the llama.cpp that cLLM uses.",
        ),
    ] = False,
    curves: Annotated[
        bool, Parameter(help="Also measure by number of concurrent requests and by context length.")
    ] = True,
    out: Annotated[
        Path, Parameter(help="The page to write, or its folder; pictures go into the same folder.")
    ] = PAGE,
    json: Annotated[
        Path | None, Parameter(help="File for all results.", show_default=False)
    ] = None,
    source: Annotated[
        Path | None,
        Parameter(
            name="--from",
            help="Write the page from a file of --json, without measuring.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure cLLM and its peers in turn on one model, and write a page with the results.

    Peers: llama-server, llama-batched-bench and, if installed, llama-bench, Ollama,
    llama-cpp-python's example server.
    """
    from cllm.bench.comparison import Results, read_results
    from cllm.bench.performance import write_page
    from cllm.bench.targets import figures

    out = out / PAGE.name if out.is_dir() else out
    check_files(json, out.with_suffix(".svg"), None)
    if source is not None:
        results: Results = read_results(source)
    else:
        from cllm.bench.compare import Options
        from cllm.bench.compare import compare as measure

        if build:
            if peers != FOLDER:
                raise StartupError(f"--build builds in {FOLDER}; leave --peers out")
            build_peers(BUILT, print)
        options = Options(
            model=model or BUILTIN,
            peers=peers,
            concurrency=sorted(set(concurrency)),
            rounds=rounds,
            prompt_words=prompt_words,
            max_tokens=max_tokens,
            threads=threads or os.cpu_count() or 1,
            curves=curves,
        )

        def keep(results: Results) -> None:
            if json is not None:
                write_file(json, msgspec.json.format(msgspec.json.encode(results)) + b"\n")

        with closing(loading_bar("comparing")) as bar:
            results = measure(options, machine(), bar.update, keep)
    for path in write_page(results, out):
        print(path)
    for figure in figures(results):
        if figure.met is False:
            print(
                f"missed: {figure.name}: {figure.judged:.3f}{figure.unit}, target "
                f"{figure.target:g}{figure.unit}"
            )


def machine() -> dict[str, str]:
    """Return what readers of the results need to know about the machine."""
    return {
        "CPU": f"{cpu_name()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cLLM": __version__ + commit(),
        "llama.cpp": f"of llama-cpp-python {installed('llama-cpp-python')}",
    }


def commit() -> str:
    """Return the commit of the checkout, if there is one."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [
        git,
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--exclude",
        "*",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return f", commit {found.stdout.strip()}" if found.returncode == 0 else ""


def checked_key(key: str | None) -> str | None:
    if key and not (key.isascii() and key.isprintable()):
        raise StartupError("the API key holds characters that no HTTP header can")
    return key


@app.command
def make_model(
    out: Annotated[Path, Parameter(help="The file to write, such as model.gguf.")],
    /,
    *,
    shape: Annotated[Shape, Parameter(help="The model whose dimensions to use.")],
    quant: Annotated[Quant, Parameter(help="The quantization of the weights.")],
    seed: Annotated[
        int, Parameter(validator=NotNegative, help="The same seed gives the same weights.")
    ] = 0,
    threads: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Threads for quantizing. [default: all cores]",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, Parameter(negative="", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write a model with a real model's shape and random weights, for measuring speed."""
    if out.is_dir():
        raise StartupError(f"{out} is a folder; name the file to write")
    if out.exists() and not force:
        raise StartupError(f"{out} exists; --force replaces it")
    begun = time.monotonic()
    with closing(loading_bar(f"making {shape}")) as bar:
        write_model(
            shape,
            quant,
            out,
            seed=seed,
            threads=threads,
            progress=lambda stage, share: bar.update(share, stage),
        )
    print(f"{out}: {size_text(out.stat().st_size)} in {time.monotonic() - begun:.1f} s")
