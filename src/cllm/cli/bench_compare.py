"""``cllm bench compare``: cLLM and its peers on one model."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from cllm import __version__
from cllm.bench.peers import BUILT, FOLDER
from cllm.bench.peers import build as build_peers
from cllm.cli.doctor import describe_cpu, installed
from cllm.cli.files import write_json
from cllm.cli.options import AnswerTokens, ModelFile, Positive, PromptWords
from cllm.cli.pictures import check_files
from cllm.cli.progress import open_bar
from cllm.errors import StartupError
from cllm.models.catalog import BUILTIN

if TYPE_CHECKING:
    from cllm.bench.comparison import Results

PAGE = Path("docs/performance.md")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    concurrency: Annotated[
        tuple[int, ...],
        Parameter(
            validator=Number(gte=1, lte=256),
            negative="",
            consume_multiple=True,
            help="Numbers of concurrent requests, such as 1 8 32.",
        ),
    ] = (1, 8, 32)
    rounds: Annotated[
        int, Parameter(validator=Number(gte=3), help="Runs of each system, in turn; at least 3.")
    ] = 3
    prompt_words: PromptWords = 16
    max_tokens: AnswerTokens = 64
    threads: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Threads of each system. [default: all cores]",
            show_default=False,
        ),
    ] = None
    peers: Annotated[
        Path,
        Parameter(
            help="The folder of llama-server, llama-batched-bench and llama-bench, before PATH."
        ),
    ] = FOLDER
    build: Annotated[
        bool,
        Parameter(
            negative="",
            help="First build the peers in .tools/peers, from the llama.cpp that cLLM uses.",
        ),
    ] = False
    curves: Annotated[
        bool, Parameter(help="Also measure by number of concurrent requests and by context length.")
    ] = True
    out: Annotated[
        Path, Parameter(help="The page to write, or its folder; pictures go into the same folder.")
    ] = PAGE
    json: Annotated[Path | None, Parameter(help="File for all results.", show_default=False)] = None
    source: Annotated[
        Path | None,
        Parameter(
            name="--from",
            help="Write the page from a file of --json, without measuring.",
            show_default=False,
        ),
    ] = None


def compare(model: ModelFile = None, /, *, options: CompareOptions = CompareOptions()) -> None:
    """Measure cLLM and its peers in turn on one model, and write a page with the results.

    Peers: llama-server, llama-batched-bench and, if installed, llama-bench, Ollama,
    llama-cpp-python's example server.
    """
    from cllm.bench.comparison import read_results
    from cllm.bench.performance import write_page
    from cllm.bench.targets import figures

    page = options.out / PAGE.name if options.out.is_dir() else options.out
    check_files(options.json, page.with_suffix(".svg"), None)
    source = options.source
    results = measure(model or BUILTIN, options) if source is None else read_results(source)
    for path in write_page(results, page):
        print(path)
    for figure in figures(results):
        if figure.met is False:
            print(
                f"missed: {figure.name}: {figure.judged:.3f}{figure.unit}, target "
                f"{figure.target:g}{figure.unit}"
            )


def measure(model: Path, options: CompareOptions) -> Results:
    """Measure all systems. Writes the results so far to the options' file after each step."""
    from cllm.bench.compare import Options
    from cllm.bench.compare import compare as run

    if options.build:
        if options.peers != FOLDER:
            raise StartupError(f"--build writes to {FOLDER}, so it cannot be combined with --peers")
        build_peers(BUILT, print)
    what = Options(
        model=model,
        peers=options.peers,
        concurrency=sorted(set(options.concurrency)),
        rounds=options.rounds,
        prompt_words=options.prompt_words,
        max_tokens=options.max_tokens,
        threads=options.threads or os.cpu_count() or 1,
        curves=options.curves,
    )

    def keep(results: Results) -> None:
        if options.json is not None:
            write_json(options.json, results)

    with closing(open_bar("comparing")) as bar:
        return run(what, machine(), bar.update, keep)


def machine() -> dict[str, str]:
    """Return what readers of the results need to know about the machine."""
    return {
        "CPU": f"{describe_cpu()}, {os.cpu_count()} cores",
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
