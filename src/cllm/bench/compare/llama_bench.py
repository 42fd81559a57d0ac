"""Runs llama.cpp's own benchmarks, llama-bench and llama-batched-bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cllm.bench.programs import run_program
from cllm.errors import StartupError

TRIES = 20


def llama_bench(
    program: Path, model: Path, *, threads: int, num_tokens: int
) -> dict[str, list[float]]:
    """Run each test once. Return its name, such as pp512 or tg64 -> tokens/s.

    Raises StartupError if the program fails.
    """
    flags = ("-m", model, "-t", threads, "-p", 512, "-n", num_tokens, "-r", 1, "-o", "json")
    return {
        f"pp{test['n_prompt']}" if test["n_prompt"] else f"tg{test['n_gen']}": test["samples_ts"]
        for test in msgspec.json.decode(read_output(program, *flags))
    }


def batched_bench(
    program: Path,
    model: Path,
    *,
    threads: int,
    context: int,
    prompt_tokens: int,
    num_tokens: int,
    num_seqs: list[int],
    shared_prompt: bool = False,
) -> list[dict[str, Any]]:
    """Return the line that llama-batched-bench prints for each of ``num_seqs``.

    ``context`` counts the tokens of all sequences together. With ``shared_prompt``, the prompt is
    computed once and copied.

    The program prints in a separate thread and may exit before this thread has finished, so
    incomplete output is retried. Raises StartupError if it fails, or after TRIES attempts.
    """
    sizes = ("-c", context, "-npp", prompt_tokens, "-ntg", num_tokens)
    flags = (*sizes, "-npl", ",".join(map(str, num_seqs)), *(["-pps"] if shared_prompt else []))
    common = ("-m", model, "-b", 2048, "-ub", 512, "-t", threads, "-tb", threads)
    for _ in range(TRIES):
        output = read_output(program, *common, "--output-format", "jsonl", *flags)
        lines = [msgspec.json.decode(line) for line in output.splitlines() if line.startswith("{")]
        if len(lines) == len(num_seqs):
            return lines
    raise StartupError(f"{program} printed no result for {' '.join(map(str, flags))}")


def read_output(program: Path, *flags: object) -> str:
    """Return what a program prints on stdout. Raises StartupError if it fails."""
    return run_program(program.name, [str(program), *map(str, flags)])
