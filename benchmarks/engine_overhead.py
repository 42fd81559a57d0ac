"""Measure what the engine adds to llama.cpp: its decoding speed divided by that of
llama-batched-bench.

    make bench ARGS="--model 0.6b.gguf --sizes 1 8"

Both decode N sequences with the same model, threads, context and KV layout. They alternate in one
run, and each is idle while the other runs. llama-batched-bench neither samples nor reads logits.
The engine schedules, samples greedily and checks for the end of each sequence. The speeds are
tokens per second of the steps in which all N sequences decode. Exit code 1 if a median ratio is
below --least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cllm.backends.llama_cpp.options import Options
from cllm.bench.bare_engine import closed_loop
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_backend, build_engine
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams


def make_engine(model: Path, num_seqs: int, length: int, threads: int, layout: str) -> Engine:
    params = EngineParams(
        path=str(model),
        context_length=length,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=2048,
        layout=layout,
        kv_memory=1 << 40,
        options=Options(n_threads=threads).model_dump(),
        speculation="off",
    )
    return build_engine(build_backend(params), params)


def engine_speed(engine: Engine, num_seqs: int, num_prompt: int, num_decode: int) -> float:
    """Return tokens per second of the decoding steps."""
    vocabulary = engine.backend.info.vocabulary_size
    params = SamplingParams(temperature=0, max_tokens=num_decode, ignore_eos=True)
    prompts = [
        [(7919 * (i + 1) * (j + 1)) % (vocabulary - 300) for j in range(num_prompt)]
        for i in range(num_seqs)
    ]
    requests = [
        Request(f"r{i}-{time.monotonic_ns()}", prompt, params) for i, prompt in enumerate(prompts)
    ]
    return closed_loop(engine, requests, num_seqs)[0]


def peer_speed(options: argparse.Namespace, num_seqs: int) -> float:
    """Return tokens per second that llama-batched-bench reports for decoding."""
    length = options.prompt + options.decode
    command = [options.peer, "-m", options.model, "-c", num_seqs * length, "-b", 2048, "-ub", 512]
    command += [
        "-npp",
        options.prompt,
        "-ntg",
        options.decode,
        "-npl",
        num_seqs,
        "--output-format",
        "jsonl",
    ]
    command += ["-t", options.threads, "-tb", options.threads] + (
        ["-kvu"] if options.layout == "unified" else []
    )
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return float(lines[-1]["speed_tg"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/qwen3-0.6b.gguf"))
    parser.add_argument(
        "--peer", type=Path, default=Path(".tools/peers/build/bin/llama-batched-bench")
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=48)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--layout", choices=["partitioned", "unified"], default="partitioned")
    parser.add_argument("--least", type=float, default=0.95)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for needed in (options.model, options.peer):
        if not needed.exists():
            sys.exit(
                f"{needed} is missing; make bench makes what --model and --peer are without "
                f"being given"
            )

    results, worst = [], 1e9
    print("sequences   engine tok/s   peer tok/s   ratio: median (min-max)")
    for num_seqs in options.sizes:
        engine = make_engine(
            options.model,
            num_seqs,
            options.prompt + options.decode,
            options.threads,
            options.layout,
        )
        engine_speed(engine, num_seqs, options.prompt, 8)  # touches every page once
        pairs = []
        for i in range(options.rounds):
            measures: dict[str, Callable[[], float]] = {
                "engine": partial(engine_speed, engine, num_seqs, options.prompt, options.decode),
                "peer": partial(peer_speed, options, num_seqs),
            }
            order = sorted(measures, reverse=bool(i % 2))
            found = {name: measures[name]() for name in order}
            pairs.append((found["engine"], found["peer"]))
        engine.backend.close()
        ratios = [ours / theirs for ours, theirs in pairs]
        median = statistics.median(ratios)
        worst = min(worst, median)
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{num_seqs:9}   {ours:12.1f}   {theirs:10.1f}   {median:.3f} "
            f"({min(ratios):.3f}-{max(ratios):.3f})",
            flush=True,
        )
        results.append(
            {
                "sequences": num_seqs,
                "engine": ours,
                "peer": theirs,
                "ratios": ratios,
                "median": median,
            }
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    sys.exit(1 if worst < options.least else 0)


if __name__ == "__main__":
    main()
