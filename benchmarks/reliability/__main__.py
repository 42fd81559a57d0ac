"""Measure the promises of docs/reliability.md, and write the page.

    uv run python -m benchmarks.reliability [--scale 1] [--only kill,hang] [--minutes 480]
        [--out FILE]

Exit code 1 if a target is missed. --scale: the share of the full number of requests and rounds.
--minutes: of the soak test, 0 leaves it out. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from benchmarks.reliability.client import Figure
from benchmarks.reliability.measures import list_measures
from benchmarks.reliability.soak import measure_soak
from cllm import __version__
from cllm.cli.bench.compare import commit
from cllm.cli.doctor import describe_cpu
from cllm.cli.main import install_signal_handlers

HEAD = """\
# Reliability

What cLLM promises, and what was measured. `make reliability` measures all of it and writes this
page; the tests measure the same with fewer requests. What the promises mean:
[scheduling](scheduling.md), [access](access.md).

Measured on {date}, {cpu}, {cores} cores, with `--scale {scale:g}` of
the full size{soak}. Requests are unique, because identical ones would share
one computation. The kill is measured with the built-in model, the rest with the fake backend, which
only takes time. Version {version}.

| Promise | Target | Measured | |
|---|---|---|---|
"""


MARKS = {True: "", False: "missed"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    install_signal_handlers()
    measures = list_measures(options.scale)
    if options.minutes:
        measures["soak"] = lambda: measure_soak(options.minutes)
    chosen = options.only.split(",") if options.only else [*measures]
    figures: list[Figure] = []

    async def measure(name: str) -> list[Figure]:
        return await measures[name]()

    for name in chosen:
        for figure in asyncio.run(measure(name)):
            verdict = "reached" if figure.is_met else "MISSED"
            print(f"{figure.promise}: {figure.measured} (target {figure.target}): {verdict}")
            figures.append(figure)
    if options.out:
        soak = f", a soak test of {options.minutes:g} minutes" if "soak" in chosen else ""
        head = HEAD.format(
            date=time.strftime("%Y-%m-%d"),
            cpu=describe_cpu(),
            cores=os.cpu_count(),
            scale=options.scale,
            version=__version__ + commit(),
            soak=soak,
        )
        rows = (
            f"| {one.promise} | {one.target} | {one.measured} | {MARKS[one.is_met]} |\n"
            for one in figures
        )
        options.out.write_text(head + "".join(rows))
    return 0 if all(figure.is_met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
