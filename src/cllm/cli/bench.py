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
from cllm.cli.progress import loading_bar
from cllm.cli.talk import server_url
from cllm.errors import StartupError
from cllm.models.gguf import size_text

if TYPE_CHECKING:
    from cllm.bench.workload import Task

    Shape = str
    Quant = str
else:
    Shape = Literal[tuple(SHAPES)]
    Quant = Literal[tuple(QUANTS)]

app = App(name="bench", help="Measure a server under load.")

Workload = Literal["words", "questions"]
MAX_TOKENS = {"words": 64, "questions": 320}

Positive = Number(gte=1)
NotNegative = Number(gte=0)


@app.command
def load(
    url: Annotated[str, Parameter(env_var="CLLM_URL", help="The server, such as http://127.0.0.1:8000.")],
    /,
    *,
    workload: Annotated[
        Workload,
        Parameter(
            help="words: random words; each answer must have exactly --max-tokens tokens. "
            "questions: the built-in model's, at temperature 0; each answer must be exactly right."
        ),
    ] = "words",
    requests: Annotated[int, Parameter(validator=Positive, help="Requests that are measured.")] = 100,
    concurrency: Annotated[
        int, Parameter(validator=Positive, help="Requests at a time; each end lets the next one start.")
    ] = 8,
    max_tokens: Annotated[
        int | None,
        Parameter(validator=Positive, help="Tokens of an answer. [default: 64 words, 320 questions]"),
    ] = None,
    prompt_words: Annotated[int, Parameter(validator=Positive, help="Words of a prompt.")] = 64,
    shared_words: Annotated[
        int, Parameter(validator=NotNegative, help="How many of them are the same in all prompts, at the beginning.")
    ] = 0,
    temperature: Annotated[float, Parameter(validator=NotNegative, help="Of the workload words.")] = 0.0,
    warmup: Annotated[
        int | None,
        Parameter(validator=NotNegative, help="Requests before the clock starts. [default: as --concurrency]"),
    ] = None,
    timeout: Annotated[float, Parameter(validator=Number(gt=0), help="Seconds for each request.")] = 600.0,
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
    json: Annotated[bool, Parameter(negative="", help="Print one JSON object.")] = False,
) -> None:
    """Send requests to any server that speaks OpenAI's chat completions, and report latencies and throughput.

    Answers are streamed. Exit code 1 if any request failed.
    """
    from cllm.bench.load import Target, find_model, run_load
    from cllm.bench.report import print_report, summarize
    from cllm.bench.workload import question_tasks, word_tasks

    target = Target(server_url(url), checked_key(api_key), timeout, keep_alive)
    model = find_model(target, model)
    warmup = concurrency if warmup is None else warmup
    max_tokens = max_tokens or MAX_TOKENS[workload]
    settings: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed}
    tasks: list[Task]
    if workload == "questions":
        tasks = question_tasks(warmup + requests, model=model, **settings)
    else:
        settings |= {"prompt_words": prompt_words, "shared_words": shared_words, "temperature": temperature}
        tasks = word_tasks(warmup + requests, model=model, **settings)
    with closing(loading_bar("requests")) as bar:
        outcome = run_load(
            target,
            tasks,
            concurrency=concurrency,
            warmup=warmup,
            progress=lambda ended: bar.update(ended / len(tasks), f"{ended} of {len(tasks)} requests"),
        )
    settings = {
        "workload": workload,
        "concurrency": concurrency,
        "warmup": warmup,
        "keep_alive": keep_alive,
        **settings,
    }
    report = summarize(outcome, url=target.url, model=model, settings=settings)
    if json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        from rich.console import Console

        print_report(report, Console())
    if report.num_failed:
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
