"""Simulate eight engines behind one queue, and compare the pool's choice of an engine with others.

    uv run python benchmarks/routing.py [--engines 8] [--seeds 3] [--requests 1500]

For traces with shared prefixes and with conversations, at three rates: the mean TTFT with the
pool's rule, prefix-window, as a ratio to the better of least-loaded and prefix; and the share of
prompt tokens that were cached, as a ratio to one engine that is as large as all together. Then the
time of one choice. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import msgspec
import numpy as np

from cllm.bench.simulation.simulator import SMALL_MODEL, Course, Setup, simulate
from cllm.bench.simulation.synthetic import synthesize
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.observe.trace_file import TraceEntry
from cllm.process.assignments import BLOCK, describe
from cllm.routing.router import Candidate, Router

RULES = ("least-loaded", "prefix", "prefix-window")
TTFT, HITS, CHOICE = 1.05, 0.9, 50e-6  # targets
RATES = (0.5, 0.8, 1.2)  # of what all engines can serve, about
MAX_NUM_SEQS = 16


def mean_ttft(courses: list[Course]) -> float:
    return statistics.fmean(one.times[0] - one.entry.arrived for one in courses if one.times)


def hit_rate(courses: list[Course]) -> float:
    cached = sum(one.num_cached for one in courses)
    return cached / sum(one.entry.input_length for one in courses)


def make_setup(entries: list[TraceEntry], engines: int, routing: str, seed: int) -> Setup:
    context = max(entry.input_length + entry.output_length for entry in entries) + 16
    return Setup(
        context=context,
        replicas=engines,
        routing=routing,  # type: ignore[arg-type]
        max_num_seqs=MAX_NUM_SEQS,
        num_cells=max(context, 40_000),
        costs=SMALL_MODEL,
        seed=seed,
    )


def measure_rate(entries: list[TraceEntry], engines: int) -> float:
    """Return how many times faster than their own times the entries can be served."""
    at_once = [msgspec.structs.replace(entry, timestamp=0.0) for entry in entries]
    courses, _ = simulate(at_once, make_setup(at_once, engines, "prefix-window", 0))
    return entries[-1].arrived / max(course.ended for course in courses)


def compare(workload: str, engines: int, seeds: int, requests: int) -> bool:
    """Print the figures of one workload. Return whether they reach the targets."""
    reached = True
    for share in RATES:
        ratios, hits = [], []
        for seed in range(seeds):
            entries = synthesize(workload, requests, 1.0, seed)
            factor = share * measure_rate(entries, engines)
            entries = [
                msgspec.structs.replace(entry, timestamp=entry.timestamp / factor)
                for entry in entries
            ]
            courses = {
                rule: simulate(entries, make_setup(entries, engines, rule, seed))[0]
                for rule in RULES
            }
            ttft = {rule: mean_ttft(own) for rule, own in courses.items()}
            ratios.append(ttft["prefix-window"] / min(ttft["least-loaded"], ttft["prefix"]))
            one = make_setup(entries, 1, "least-loaded", seed)
            large = msgspec.structs.replace(
                one,
                max_num_seqs=engines * one.max_num_seqs,
                num_cells=engines * one.cells,
                max_num_batched_tokens=engines * one.max_num_batched_tokens,
                costs=msgspec.structs.replace(
                    SMALL_MODEL,
                    row=SMALL_MODEL.row / engines,
                    token=SMALL_MODEL.token / engines,
                ),
            )
            hits.append(hit_rate(courses["prefix-window"]) / hit_rate(simulate(entries, large)[0]))
        ratio, hit = statistics.median(ratios), statistics.median(hits)
        reached = reached and ratio <= TTFT and hit >= HITS
        print(
            f"{workload} at {share:.0%} of the capacity: mean TTFT {ratio:.3f} "
            f"({min(ratios):.3f}-{max(ratios):.3f}) of the better of the others (target {TTFT}), "
            f"hit rate {hit:.3f} ({min(hits):.3f}-{max(hits):.3f}) of one engine's "
            f"(target {HITS})",
            flush=True,
        )
    return reached


def time_choice(engines: int) -> bool:
    """Print the time of a choice, with the names of a prompt's blocks. Return whether it reaches
    the target.
    """
    router = Router("prefix-window", max_blocks=engines * 40_000 // BLOCK)
    candidates = [Candidate(number, MAX_NUM_SEQS) for number in range(engines)]
    rng = np.random.default_rng(1)
    reached = True
    for length in (500, 2000, 8000):
        shared = rng.integers(0, 30_000, length // 2).tolist()
        prompts = [shared + rng.integers(0, 30_000, length // 2).tolist() for _ in range(300)]
        requests = [Request("", prompt, SamplingParams()) for prompt in prompts]
        seconds = []
        for request in requests:
            begun = time.perf_counter()
            booking = router.choose(describe(request), candidates)
            seconds.append(time.perf_counter() - begun)
            booking.release()
        median = statistics.median(seconds)
        reached = reached and median < CHOICE
        print(
            f"a choice for a prompt of {length} tokens: {median * 1e6:.0f} us "
            f"(target {CHOICE * 1e6:.0f})"
        )
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1500)
    options = parser.parse_args()
    reached = [time_choice(options.engines)]
    reached += [
        compare(workload, options.engines, options.seeds, options.requests)
        for workload in ("shared-prefix", "multi-turn")
    ]
    sys.exit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
