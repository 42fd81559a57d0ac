"""``cllm bench``: load on a server, and models to measure with."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

from cllm.bench.make_model import QUANTS, SHAPES
from cllm.bench.make_model import make_model as write_model
from cllm.bench.workload import (
    WORKLOADS,
    Arrivals,
    Task,
    Words,
    arrival_times,
    num_requests,
    question_tasks,
    word_tasks,
)
from cllm.cli.progress import loading_bar
from cllm.cli.talk import server_url
from cllm.errors import StartupError
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

app = App(name="bench", help="Measure a server under load.")

MAX_TOKENS = {"questions": 320}  # of an answer; 64 in the other workloads

Positive = Number(gte=1)
AboveZero = Number(gt=0)
NotNegative = Number(gte=0)


@app.command
def load(
    url: Annotated[str, Parameter(env_var="CLLM_URL", help="The server, such as http://127.0.0.1:8000.")],
    /,
    *,
    workload: Annotated[
        Workload,
        Parameter(
            help="".join(f"{name}: {text}; " for name, (_, text) in WORKLOADS.items())
            + "in all of these each answer must have exactly --max-tokens tokens. questions: the built-in model's, at "
            "temperature 0; each answer must be exactly right."
        ),
    ] = "words",
    preset: Annotated[
        Preset | None,
        Parameter(help="Requests, at a time, tokens of an answer, all at once; flags go before.", show_default=False),
    ] = None,
    requests: Annotated[
        int | None, Parameter(validator=Positive, help="Requests that are measured. [default: 100]", show_default=False)
    ] = None,
    concurrency: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Requests at a time; each end lets the next one start. [default: 8]",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        Parameter(
            validator=AboveZero,
            help="Requests a second on average, sent whatever has become of the others, in place of --concurrency.",
            show_default=False,
        ),
    ] = None,
    arrivals: Annotated[
        Arrivals, Parameter(help="How they are spread in time: poisson, bursty (gamma distributed gaps) or even.")
    ] = "poisson",
    max_tokens: Annotated[
        int | None,
        Parameter(validator=Positive, help="Tokens of an answer. [default: 64, 320 questions]", show_default=False),
    ] = None,
    prompt_words: Annotated[int, Parameter(validator=Positive, help="Words of a prompt.")] = 64,
    shared_words: Annotated[
        int, Parameter(validator=NotNegative, help="How many of them are the same in all prompts, at the beginning.")
    ] = 0,
    temperature: Annotated[float, Parameter(validator=NotNegative, help="Of all workloads but questions.")] = 0.0,
    ttft: Annotated[
        float | None,
        Parameter(
            validator=AboveZero, help="Milliseconds to the first token that are good enough.", show_default=False
        ),
    ] = None,
    tpot: Annotated[
        float | None,
        Parameter(
            validator=AboveZero,
            help="Milliseconds for each token after it that are good enough.",
            show_default=False,
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        Parameter(
            validator=NotNegative,
            help="Requests before the clock starts. [default: as --concurrency]",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[float, Parameter(validator=AboveZero, help="Seconds for each request.")] = 600.0,
    keep_alive: Annotated[
        bool, Parameter(help="Send the next request over the same connection; some servers lose it then.")
    ] = True,
    seed: Annotated[int, Parameter(help="The same seed gives the same prompts.")] = 0,
    model: Annotated[
        str | None, Parameter(help="The model to ask for. [default: the first of /v1/models]", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None, Parameter(env_var="CLLM_API_KEY", help="Sent as a bearer token.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, Parameter(help="A file for the report as JSON, for cllm bench diff.", show_default=False)
    ] = None,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object.")] = False,
) -> None:
    """Send requests to any server that speaks OpenAI's chat completions, and report latencies and throughput.

    Answers are streamed. Exit code 1 if any request failed; with --rate those do not count that the server refused
    because it had too much to do.
    """
    from cllm.bench.load import Target, find_model, run_load
    from cllm.bench.report import print_report, summarize

    preset_requests, preset_concurrency, preset_tokens = PRESETS[preset] if preset else (100, 8, None)
    requests, concurrency = requests or preset_requests, concurrency or preset_concurrency
    max_tokens = max_tokens or preset_tokens or MAX_TOKENS.get(workload, 64)
    warmup = concurrency if warmup is None else warmup
    target = Target(server_url(url), checked_key(api_key), timeout, keep_alive)
    model = find_model(target, model)
    settings: dict[str, Any] = {"workload": workload, "requests": requests, "max_tokens": max_tokens, "seed": seed}
    settings |= {"concurrency": concurrency} if rate is None else {"rate": rate, "arrivals": arrivals}
    settings |= {"warmup": warmup, "keep_alive": keep_alive, "ttft": ttft, "tpot": tpot}
    tasks: list[Task]
    if workload == "questions":
        tasks = question_tasks(warmup + requests, model=model, max_tokens=max_tokens, seed=seed)
    else:
        sizes: dict[str, Any] = {"prompt_words": prompt_words, "shared_words": shared_words, "temperature": temperature}
        words = Words(model=model, max_tokens=max_tokens, seed=seed, **sizes)
        settings |= sizes
        # the clients of the warm-up share nothing with the others, and go to the end
        strangers = msgspec.structs.replace(words, seed=seed + 1, shared_words=0)
        tasks = word_tasks(warmup, strangers) + WORKLOADS[workload][0](requests, words)
    total = num_requests(tasks)
    with closing(loading_bar("requests")) as bar:
        outcome = run_load(
            target,
            tasks,
            concurrency=concurrency,
            warmup=warmup,
            progress=lambda ended: bar.update(ended / total, f"{ended} of {total} requests"),
            arrivals=None if rate is None else arrival_times(len(tasks) - warmup, rate, arrivals, seed),
        )
    settings = {name: value for name, value in settings.items() if value is not None}
    report = summarize(outcome, url=target.url, model=model, settings=settings)
    if out is not None:
        write_report(out, report)
    if json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        from rich.console import Console

        print_report(report, Console())
    if report.num_failed - (report.num_refused if rate is not None else 0):
        sys.exit(1)


def write_report(path: Path, report: Report) -> None:
    """Raises StartupError if that cannot be done."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from None


@app.command
def diff(
    before: Annotated[Path, Parameter(help="A report that cllm bench load --out has written.")],
    after: Annotated[Path, Parameter(help="Another one.")],
    /,
) -> None:
    """Compare two reports, figure by figure."""
    from rich.console import Console

    from cllm.bench.report import print_diff, read_report

    print_diff(read_report(before), read_report(after), Console())


@app.command
def stages(
    model: Annotated[
        Path | None, Parameter(help="A GGUF file. [default: the built-in model]", show_default=False)
    ] = None,
    /,
    *,
    sequences: Annotated[
        tuple[int, ...], Parameter(validator=Positive, negative="", help="How many at a time; once for each size.")
    ] = (1, 8, 32),
    rounds: Annotated[int, Parameter(validator=Positive, help="Runs of each stage, in turn; one more warms up.")] = 5,
    prompt_words: Annotated[int, Parameter(validator=Positive, help="Words of a prompt.")] = 16,
    max_tokens: Annotated[int, Parameter(validator=Number(gte=2), help="Tokens of an answer.")] = 48,
    temperature: Annotated[float, Parameter(validator=NotNegative, help="0 is greedy.")] = 0.8,
    budget: Annotated[
        float | None,
        Parameter(
            validator=Number(gte=0, lt=1),
            help="Share of the speed that a stage may lose against the one before, as a median; more is exit code 1.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, Parameter(help="The same seed gives the same prompts.")] = 0,
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object.")] = False,
) -> None:
    """Measure the same work at every stage from llama_decode to the socket, and what each stage costs."""
    from cllm.bench.stages import Size, losses, print_stages, run_stages
    from cllm.models.catalog import BUILTIN

    sizes = [Size(count, prompt_words, max_tokens, temperature, seed) for count in sequences]
    with closing(loading_bar("measuring stages")) as bar:
        results = run_stages(model or BUILTIN, sizes, rounds, bar.update)
    if json:
        print(msgspec.json.format(msgspec.json.encode(results)).decode())
    else:
        from rich.console import Console

        print_stages(results, Console())
    if budget is not None and any(loss > budget for result in results for loss in losses(result)[1:]):
        sys.exit(1)


def checked_key(key: str | None) -> str | None:
    if key and not (key.isascii() and key.isprintable()):
        raise StartupError("the API key holds characters that no HTTP header can")
    return key


@app.command
def make_model(
    out: Annotated[Path, Parameter(help="The file to write, such as model.gguf.")],
    /,
    *,
    shape: Annotated[Shape, Parameter(help="The model whose dimensions it has.")],
    quant: Annotated[Quant, Parameter(help="How the weights are stored.")],
    seed: Annotated[int, Parameter(validator=NotNegative, help="The same seed gives the same weights.")] = 0,
    threads: Annotated[
        int | None,
        Parameter(validator=Positive, help="Threads that quantize. [default: all cores]", show_default=False),
    ] = None,
    force: Annotated[bool, Parameter(negative="", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write a model of a real one's shape with random weights: right for measuring speed, useless to talk with."""
    if out.is_dir():
        raise StartupError(f"{out} is a folder; name the file to write")
    if out.exists() and not force:
        raise StartupError(f"{out} exists; --force replaces it")
    begun = time.monotonic()
    with closing(loading_bar(f"making {shape}")) as bar:
        write_model(
            shape, quant, out, seed=seed, threads=threads, progress=lambda stage, share: bar.update(share, stage)
        )
    print(f"{out}: {size_text(out.stat().st_size)} in {time.monotonic() - begun:.1f} s")
