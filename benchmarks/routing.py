"""Simulate replicas behind one front, and compare the product's choice of a replica with others.

    uv run python benchmarks/routing.py results.jsonl [--replicas 8,64] [--loads 0.5,0.8,1.2]
        [--seeds 5] [--requests 150] [--seconds 150] [--workers 2]

Each case is one of five workloads at a load, which is the share of what all replicas can serve,
about. Its line in the file has, for each rule, the mean TTFT, the share of prompt tokens that were
cached, the largest load of a replica relative to the mean, Jain's index of two accounts, and the
good requests per replica and second. The accounts are compared at a load of 8 only: they have a
right to equal shares as long as both want more, and one of them sends a tenth of the requests.
Cases in the file are not computed again, and no case begins after ``--seconds``: run the command
until it prints the table. Then it checks the targets. Exit code 1 if one is missed, 2 if cases are
missing.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from cllm.bench.simulation.baselines import Routing
from cllm.bench.simulation.replica import Course
from cllm.bench.simulation.report import summarize
from cllm.bench.simulation.setup import SMALL_MODEL, Setup
from cllm.bench.simulation.simulator import simulate
from cllm.bench.simulation.synthetic import synthesize
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.observe.trace_file import TraceEntry
from cllm.process.assignments import BLOCK, describe
from cllm.routing.router import Candidate, Router, RoutingRequest

OURS: Routing = "prefix-window"
RULES: tuple[Routing, ...] = ("least-loaded", "prefix", OURS)
WORKLOADS = ("chat", "shared-prefix", "multi-turn", "hot-prefix", "two-keys")
# targets: mean TTFT to that of the best rule, hits to those of an infinite replica, the largest
# load to the mean, Jain's index, goodput per replica of many replicas to that of the fewest
TTFT, HITS, SPREAD, JAIN, SCALING = 1.05, 0.9, 1.3, 0.95, 0.95
CHOICE, MANY_CHOICE = 50e-6, 1e-3  # seconds of a choice in a pool, and of 1,000 replicas
GOOD_TTFT = 5.0  # seconds
MAX_NUM_SEQS = 16
FAIR_LOAD, FAIR_REQUESTS = 8.0, 3  # times the requests of other cases: the accounts must wait long


class Figures(msgspec.Struct):
    """The results of one rule."""

    ttft: float
    hits: float
    spread: float
    jain: float | None
    good: float


class Case(msgspec.Struct, frozen=True):
    workload: str
    load: float
    seed: int
    replicas: int


class Result(msgspec.Struct):
    """``possible`` is the hit rate of a replica with an infinite cache."""

    case: Case
    possible: float
    rules: dict[str, Figures]


def make_setup(entries: list[TraceEntry], replicas: int, routing: Routing, seed: int) -> Setup:
    context = max(entry.input_length + entry.output_length for entry in entries) + 16
    return Setup(
        context=context,
        replicas=replicas,
        routing=routing,
        lease_seconds=1.0,
        max_num_seqs=MAX_NUM_SEQS,
        num_cells=max(context, 40_000),
        costs=SMALL_MODEL,
        seed=seed,
    )


def measure_capacity(workload: str) -> float:
    """Return how many requests per second a replica can serve, about."""
    entries = synthesize(workload, 400, 1.0, 0)
    at_once = [msgspec.structs.replace(entry, timestamp=0.0) for entry in entries]
    courses, _ = simulate(at_once, make_setup(at_once, 8, OURS, 0))
    # the time until nine of ten have ended: the last ones leave most places empty
    ends = sorted(course.ended for course in courses)
    return 0.9 * len(ends) / ends[len(ends) * 9 // 10] / 8


def count_possible(entries: list[TraceEntry]) -> float:
    """Return the hit rate of an infinite cache that has every prompt as soon as it arrives."""
    known: set[int] = set()
    cached = 0
    for entry in entries:
        shared = sum(1 for _ in itertools.takewhile(known.__contains__, entry.hash_ids))
        cached += min(shared * entry.block_size, entry.input_length - 1)
        known.update(entry.hash_ids)
    return cached / sum(entry.input_length for entry in entries)


def measure_spread(courses: list[Course], num: int) -> float:
    """Return the largest mean load of one of ``num`` replicas, relative to that of all."""
    seconds: defaultdict[int, float] = defaultdict(float)
    for course in courses:
        seconds[course.replica] += course.ended - course.entry.arrived
    return max(seconds.values()) * num / sum(seconds.values())


def measure(case: Case, rate: float, num_requests: int) -> Result:
    entries = synthesize(case.workload, num_requests, rate, case.seed)
    rules: dict[str, Figures] = {}
    for rule in RULES:
        setup = make_setup(entries, case.replicas, rule, case.seed)
        courses, replicas = simulate(entries, setup)
        waits = [course.times[0] - course.entry.arrived for course in courses]
        jain = None
        if case.load == FAIR_LOAD:
            fairness = summarize(courses, replicas, trace="", settings={}).fairness
            jain = None if fairness is None else fairness.jain_index
        num_good = sum(wait <= GOOD_TTFT for wait in waits)
        rules[rule] = Figures(
            statistics.fmean(waits),
            sum(course.num_cached for course in courses)
            / sum(entry.input_length for entry in entries),
            measure_spread(courses, case.replicas),
            jain,
            num_good / (entries[-1].arrived - entries[0].arrived) / case.replicas,
        )
    return Result(case, count_possible(entries), rules)


def measure_in_time(part: tuple[Case, float, int, float]) -> Result | None:
    """Return the result of a case, at a multiple of the capacity of a replica. The last number is
    the time after which no case begins.
    """
    case, capacity, num_requests, until = part
    if time.monotonic() > until:
        return None
    if case.load == FAIR_LOAD:
        num_requests *= FAIR_REQUESTS
    return measure(case, case.load * capacity * case.replicas, num_requests * case.replicas)


def print_table(results: list[Result]) -> bool:
    """Print a row for each workload, load and number of replicas. Return whether all targets are
    reached.
    """
    reached = True
    groups: defaultdict[tuple[str, float, int], list[Result]] = defaultdict(list)
    for result in results:
        case = result.case
        groups[case.workload, case.load, case.replicas].append(result)
    print(
        "| workload | load | replicas | seeds | TTFT s | to best | hits | spread | Jain | goodput |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    good: dict[tuple[str, float], float] = {}
    for (workload, load, replicas), group in sorted(groups.items(), key=lambda item: item[0][::-1]):
        ours = [result.rules[OURS] for result in group]
        ttft = statistics.fmean(one.ttft for one in ours)
        best = min(statistics.fmean(one.rules[rule].ttft for one in group) for rule in RULES)
        possible = statistics.fmean(one.possible for one in group)
        hits = statistics.fmean(one.hits for one in ours) / possible if possible else None
        spread = statistics.fmean(one.spread for one in ours)
        jains = [one.jain for one in ours if one.jain is not None]
        jain = statistics.fmean(jains) if jains else None
        per_replica = statistics.fmean(one.good for one in ours)
        scaling = per_replica / good.setdefault((workload, load), per_replica)
        cells = [
            mark(f"{ttft / best:.3f}", ttft <= TTFT * best),
            "" if hits is None else mark(f"{hits:.3f}", workload != "multi-turn" or hits >= HITS),
            mark(f"{spread:.2f}", spread <= SPREAD),
            "" if jain is None else mark(f"{jain:.3f}", jain >= JAIN),
            mark(f"{scaling:.3f}", scaling >= SCALING),
        ]
        reached = reached and "**" not in "".join(cells)
        head = f"{workload} | {load} | {replicas} | {len(group)} | {ttft:.3f}"
        print(f"| {head} | {' | '.join(cells)} |")
    return reached


def mark(text: str, is_reached: bool) -> str:
    return text if is_reached else f"**{text}**"


def time_choice(engines: int) -> bool:
    """Print the time of a choice, with the names of a prompt's blocks. Return whether it reaches
    the target.
    """
    router = Router(max_blocks=engines * 40_000 // BLOCK)
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


def time_choice_of_many() -> bool:
    """Print the time of a choice among 1,000 replicas. Return whether it reaches the target."""
    router = Router(max_blocks=1_000_000)
    candidates = [Candidate(number, MAX_NUM_SEQS) for number in range(1000)]
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 1 << 62, 128).tolist()
    seconds = []
    for at in range(1500):
        blocks = shared[: at % 129] + rng.integers(0, 1 << 62, 256 - at % 129).tolist()
        request = RoutingRequest(blocks, range(16, 4112, 16), 4096)
        begun = time.thread_time()
        booking = router.choose(request, candidates)
        seconds.append(time.thread_time() - begun)
        if at % 3 == 0:
            booking.release()
    median = statistics.median(seconds[500:])
    print(
        f"a choice among 1,000 replicas, with 256 blocks: {median * 1e6:.0f} us of CPU time "
        f"(target {MANY_CHOICE * 1e6:.0f})"
    )
    return median < MANY_CHOICE


def read_list(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--replicas", type=read_list, default=[8])
    parser.add_argument("--loads", type=read_list, default=[0.5, 0.8, 1.2])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=150, help="per replica")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    lines = options.file.read_bytes().splitlines() if options.file.exists() else []
    results = [msgspec.json.decode(line, type=Result) for line in lines]
    known = {result.case for result in results}
    cases = [
        Case(workload, load, seed, replicas)
        for replicas in map(int, options.replicas)
        for seed in range(options.seeds)
        for workload, load in [
            *itertools.product(WORKLOADS, options.loads),
            ("two-keys", FAIR_LOAD),
        ]
    ]
    missing = [case for case in cases if case not in known]
    with ProcessPoolExecutor(options.workers) as pool:
        rates = dict(zip(WORKLOADS, pool.map(measure_capacity, WORKLOADS), strict=True))
        parts = [(case, rates[case.workload], options.requests, until) for case in missing]
        for result in pool.map(measure_in_time, parts):
            if result is not None:
                results.append(result)
                with options.file.open("ab") as file:
                    file.write(msgspec.json.encode(result) + b"\n")
    if len(results) < len(known) + len(missing):
        print(f"{len(results)} cases are known, others are missing", file=sys.stderr)
        sys.exit(2)
    reached = [time_choice(8), time_choice_of_many(), print_table(results)]
    sys.exit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()
