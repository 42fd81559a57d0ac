"""``cllm bench compare``: cLLM and its peers on one model."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import uuid
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from cllm import __version__
from cllm.bench.compare.rounds import MOST_OTHERS
from cllm.bench.compare.rows import ROWS, UNUSUAL
from cllm.bench.peers import BUILT, DEFAULT_FOLDER, FOLDER
from cllm.bench.peers import build as build_peers
from cllm.cli.bench.pictures import check_files
from cllm.cli.doctor import describe_cpu, find_version
from cllm.cli.options import AboveZero, ModelFile, Positive
from cllm.cli.progress import open_bar
from cllm.errors import StartupError

if TYPE_CHECKING:
    from cllm.bench.compare.rounds import Rounds

    RowName = str
else:
    RowName = Literal[tuple(ROWS)]

PAGE = Path("docs/performance.md")
PACKAGE = Path(__file__).parents[2]
# files that do not change what a server does
NOT_SERVED = {PACKAGE / "bench", PACKAGE / "cli" / "bench"}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    rows: Annotated[
        tuple[RowName, ...],
        Parameter(
            consume_multiple=True,
            help=f"What to measure. [default: all but {' '.join(UNUSUAL)}]",
            show_default=False,
        ),
    ] = tuple(name for name in ROWS if name not in UNUSUAL)
    rounds: Annotated[
        int | None,
        Parameter(
            validator=Positive,
            help="Runs of each system, in turn. [default: 9 of the most important rows, 3 of "
            "others, 1 of long-context]",
        ),
    ] = None
    store: Annotated[
        Path,
        Parameter(
            help="The file of all rounds, one line of JSON for each run. What it already contains "
            "of this machine and build is not measured again."
        ),
    ] = Path("compare.jsonl")
    minutes: Annotated[
        float | None,
        Parameter(
            validator=AboveZero,
            help="Begin no run after this time; a later call goes on. [default: no limit]",
        ),
    ] = None
    max_busy: Annotated[
        float,
        Parameter(
            validator=Number(gte=0, lte=1),
            help="Share of the CPU that other processes may take; a run with more is repeated up "
            "to three times.",
        ),
    ] = MOST_OTHERS
    scale: Annotated[
        float, Parameter(validator=AboveZero, help="Factor for the lengths of all prompts.")
    ] = 1.0
    peers: Annotated[
        Path,
        Parameter(
            help="The folder of llama-server, llama-batched-bench and llama-bench, before PATH."
        ),
    ] = FOLDER
    default_peers: Annotated[
        Path, Parameter(help="The folder of the same programs as llama.cpp builds them.")
    ] = DEFAULT_FOLDER
    build: Annotated[
        bool,
        Parameter(help="First build the peers in .tools/peers, from the llama.cpp that cLLM uses."),
    ] = False
    out: Annotated[
        Path, Parameter(help="The page to write, or its folder; pictures go into the same folder.")
    ] = PAGE
    source: Annotated[
        Path | None,
        Parameter(name="--from", help="Write the page from a file of --store, without measuring."),
    ] = None


def compare(model: ModelFile = None, /, *, options: CompareOptions = CompareOptions()) -> None:
    """Measure cLLM without any option and its peers in turn on one model, and write a page with
    the results.

    Peers: llama-server in its default and in its best settings, llama-batched-bench and, if
    installed, llama-bench, Ollama, llama-cpp-python's example server.
    """
    from cllm.bench.compare.performance import write_page
    from cllm.bench.compare.rounds import Rounds
    from cllm.bench.compare.targets import find_figures

    page = options.out / PAGE.name if options.out.is_dir() else options.out
    check_files(options.store if options.source is None else None, page.with_suffix(".svg"), None)
    if options.source is not None and not options.source.exists():
        raise StartupError(f"{options.source} cannot be read: it does not exist")
    if options.source is None:
        rounds = Rounds(options.store, machine())
        skipped = measure(model, options, rounds)
    else:
        rounds, skipped = Rounds(options.source), {}
    for path in write_page(rounds, page, skipped):
        print(path)
    for figure in find_figures(rounds):
        if figure.met is False:
            print(
                f"missed: {figure.name}: {figure.judged:.3f}{figure.unit}, target "
                f"{figure.target:.3g}{figure.unit}"
            )


def measure(model: Path | None, options: CompareOptions, rounds: Rounds) -> dict[str, str]:
    """Measure what is missing in ``rounds``; return what was skipped, and why."""
    from cllm.bench.compare.measure import ComparisonPlan
    from cllm.bench.compare.measure import compare as run

    if options.build:
        if options.peers != FOLDER:
            raise StartupError(f"--build writes to {FOLDER}, so it cannot be combined with --peers")
        build_peers(BUILT, print)
    what = ComparisonPlan(
        model=model,
        peers=options.peers,
        default_peers=options.default_peers,
        rows=[row for name, row in ROWS.items() if name in options.rows],
        rounds=options.rounds,
        scale=options.scale,
        seconds=None if options.minutes is None else 60 * options.minutes,
        most_others=options.max_busy,
    )
    with closing(open_bar("comparing")) as bar:
        return run(what, rounds, bar.update)


def machine() -> dict[str, str]:
    """Return facts about the machine for readers of the results. Rounds are combined only if the
    facts named in MACHINE are equal.
    """
    host = hashlib.sha256(f"{platform.node()} {uuid.getnode()}".encode()).hexdigest()
    return {
        "host": host[:12],
        "CPU": f"{describe_cpu()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "cLLM": __version__ + commit(),
        "llama.cpp": f"of llama-cpp-python {find_version('llama-cpp-python')}",
        "build": hash_build(),
    }


def hash_build() -> str:
    """Return a hash of what a server runs: cLLM's sources and llama.cpp's libraries."""
    files = [
        path for path in sorted(PACKAGE.rglob("*.py")) if not NOT_SERVED & {path, *path.parents}
    ]
    if (spec := importlib.util.find_spec("llama_cpp")) and spec.origin:
        files += sorted((Path(spec.origin).parent / "lib").glob("*.so*"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the commit of the checkout, if there is one."""
    git = shutil.which("git")
    if git is None:
        return ""
    describe = ("describe", "--always", "--dirty", "--exclude", "*")
    command = [git, "-C", str(Path(__file__).parent), *describe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f", commit {done.stdout.strip()}" if done.returncode == 0 else ""
