"""Measure the CPU time of the API process per streamed token, in microseconds, with the fake
backend.

    python benchmarks/api_cost.py --streams 64 --tokens 512

The engine process takes as long as a model but computes nothing. The load client runs alongside
both processes. Exit code 1 if the median is above --most.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from cllm.bench.load.workload import RequestSpec, word_tasks
from cllm.bench.servers import MODEL, cllm, load
from cllm.cli.main import install_signal_handlers
from cllm.observe.cpu_time import read_cpu_seconds


def main() -> None:
    install_signal_handlers()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=30.0)
    options = parser.parse_args()
    costs = []
    flags = (
        "--backend.name",
        "fake",
        "--max-num-seqs",
        options.streams,
        "--context",
        options.tokens + 256,
    )
    with cllm(None, *flags) as target:
        for i in range(-1, options.rounds):
            tasks = word_tasks(
                options.streams,
                RequestSpec(model=MODEL, prompt_words=4, max_tokens=options.tokens, seed=i + 1),
            )
            begun = read_cpu_seconds(target.pid)
            outcome = load(target, tasks, options.streams)
            cost = (read_cpu_seconds(target.pid) - begun) / (options.streams * options.tokens) * 1e6
            client = outcome.cpu / (options.streams * options.tokens) * 1e6
            print(
                f"{cost:.1f} us a token in the API process, {client:.1f} in the client", flush=True
            )
            if i >= 0:
                costs.append(cost)
    median = statistics.median(costs)
    print(f"median {median:.1f} us a token ({min(costs):.1f}-{max(costs):.1f})")
    sys.exit(1 if median > options.most else 0)


if __name__ == "__main__":
    main()
