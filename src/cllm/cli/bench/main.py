"""``cllm bench``: measures servers and compares them, and makes models to measure with."""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number

from cllm.bench.make_model import QUANTS, SHAPES
from cllm.bench.make_model import make_model as write_model
from cllm.cli.bench.backends import compare_backends
from cllm.cli.bench.compare import compare
from cllm.cli.bench.files import check_writable, print_json, write_file
from cllm.cli.bench.load import diff, load
from cllm.cli.bench.pictures import Plot, check_files, write_picture
from cllm.cli.options import (
    AnswerTokens,
    Json,
    ModelFile,
    NotNegative,
    Positive,
    PromptWords,
)
from cllm.cli.progress import open_bar
from cllm.errors import StartupError
from cllm.models.catalog import BUILTIN
from cllm.models.gguf import format_size

if TYPE_CHECKING:
    Shape = str
    Quant = str
else:
    Shape = Literal[tuple(SHAPES)]
    Quant = Literal[tuple(QUANTS)]

app = App(name="bench")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StagesOptions:
    sequences: Annotated[
        tuple[int, ...],
        Parameter(
            validator=Positive,
            consume_multiple=True,
            help="Numbers of concurrent sequences, such as 1 8 32.",
        ),
    ] = (1, 8, 32)
    rounds: Annotated[
        int,
        Parameter(validator=Positive, help="Runs of each stage, in turn, after a warm-up run."),
    ] = 5
    prompt_words: PromptWords = 16
    max_tokens: AnswerTokens = 48
    temperature: Annotated[float, Parameter(validator=NotNegative, help="0 is greedy.")] = 0.8
    budget: Annotated[
        float | None,
        Parameter(
            validator=Number(gte=0, lt=1),
            help="Largest median loss of speed from one stage to the next, as a share. A larger "
            "loss gives exit code 1.",
        ),
    ] = None
    seed: Annotated[int, Parameter(help="The same seed gives the same prompts.")] = 0
    flame: Annotated[
        Path | None,
        Parameter(
            help="Only sample the Python functions of an engine with the first number of "
            "sequences, and write a flame graph: flame.svg, or flame.json for speedscope.app."
        ),
    ] = None
    plot: Plot = None
    json: Json = False


def stages(model: ModelFile = None, /, *, options: StagesOptions = StagesOptions()) -> None:
    """Run the same work at every stage from llama_decode to the socket, and show what each stage
    costs.
    """
    begin_like_an_engine()
    from cllm.bench.stages import losses, print_stages, run_stages, shares
    from cllm.bench.work import WorkSize

    check_files(None, options.plot, None)
    sizes = [
        WorkSize(count, options.prompt_words, options.max_tokens, options.temperature, options.seed)
        for count in options.sequences
    ]
    if options.flame is not None:
        from cllm.bench.flame import encode_flame, sample_engine

        check_writable(options.flame)
        stacks = sample_engine(model or BUILTIN, sizes[0])
        write_file(options.flame, encode_flame(stacks, options.flame.suffix))
        return
    with closing(open_bar("measuring stages")) as bar:
        results = run_stages(model or BUILTIN, sizes, options.rounds, bar.update)
    if options.plot is not None:
        from cllm.bench.load.plots import bars

        write_picture(options.plot, bars(shares(results), y="share of the backend's speed"))
    if options.json:
        print_json(results)
    else:
        from rich.console import Console

        print_stages(results, Console())
    all_losses = [loss for result in results for loss in losses(result)[1:]]
    if options.budget is not None and max(all_losses, default=0.0) > options.budget:
        sys.exit(1)


def begin_like_an_engine() -> None:
    """Restart this process with an engine process's environment, so that an engine in it runs under
    the same conditions.
    """
    from cllm.process.launch import enable_huge_pages

    environment = enable_huge_pages(os.environ)
    if (
        sys.argv[1:3] == ["bench", "stages"]
        and sys.platform == "linux"
        and environment != dict(os.environ)
    ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606  # this program itself


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
        Parameter(validator=Positive, help="Threads for quantizing. [default: all cores]"),
    ] = None,
    force: Annotated[bool, Parameter(help="Replace OUT if it exists.")] = False,
) -> None:
    """Write a model with a real model's shape and random weights, for measuring speed."""
    if out.is_dir():
        raise StartupError(f"{out} is a folder, not a file")
    if out.exists() and not force:
        raise StartupError(f"{out} already exists; use --force to replace it")
    begun = time.monotonic()
    with closing(open_bar(f"making {shape}")) as bar:
        write_model(
            shape,
            quant,
            out,
            seed=seed,
            threads=threads,
            progress=lambda stage, share: bar.update(share, stage),
        )
    print(f"{out}: {format_size(out.stat().st_size)} in {time.monotonic() - begun:.1f} s")


for command in (load, diff, stages, compare, compare_backends, make_model):
    app.command(command)
