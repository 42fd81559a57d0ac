"""Measure what a front costs: CPU time per streamed token, time to first token, and the CPU time
of choosing one of 1,000 replicas for a body of 200 KB.

    uv run python benchmarks/front_cost.py --streams 16 --tokens 256

The same requests go to a server with the fake backend directly and through a front, in turns. The
fake engine takes as long as a model between two tokens, so tokens arrive one by one, as in real
decoding; measured flat out, several would share one read. The CPU time is that of the server's API
process and of the front. Exit code 1 if the ratio of the medians is above --most, or a front adds
more than --most-ms, or a choice takes a millisecond of CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time

import msgspec

from cllm.bench.load.workload import RequestSpec, word_tasks
from cllm.bench.servers import MODEL, RunningServer, cllm, load, running
from cllm.cli.main import install_signal_handlers
from cllm.cluster.body import read_fields
from cllm.cluster.leases import Replicas
from cllm.cluster.prefixes import list_parts, make_routing_request
from cllm.config.settings import Settings
from cllm.http_connection import HTTPClient
from cllm.observe.cpu_time import read_cpu_seconds
from cllm.routing.router import Router
from cllm.server.cluster.key import ClusterKey
from cllm.server.cluster.lease import Lease, ModelLease

KEY = {"CLLM_CLUSTER_KEY": "the-key-of-a-benchmark"}
BODY = b'{"model":"%s","prompt":"hello","max_tokens":2,"stream":true}'


def measure_tokens(target: RunningServer, pids: list[int], streams: int, tokens: int) -> float:
    """Return the CPU time of the processes in microseconds per token."""
    tasks = word_tasks(streams, RequestSpec(model=MODEL, prompt_words=4, max_tokens=tokens))
    begun = sum(map(read_cpu_seconds, pids))
    load(target, tasks, streams)
    return (sum(map(read_cpu_seconds, pids)) - begun) / (streams * tokens) * 1e6


class TimesOfParts:
    """Notes when the parts of a body arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def take(self, _: bytes, now: float) -> bool:
        self.times.append(now)
        return False


async def measure_ttft(url: str, requests: int) -> float:
    """Return the median time to the first byte of a stream in milliseconds, one at a time."""
    client = HTTPClient(url, {"Content-Type": "application/json"})
    times = []
    for _ in range(requests):
        begun, arrived = time.perf_counter(), TimesOfParts()
        await client.request("/v1/completions", BODY % MODEL.encode(), arrived.take)
        times.append(arrived.times[0] - begun)
    client.close()
    return statistics.median(times) * 1e3


def measure_choice(num_replicas: int = 1000, rounds: int = 40) -> float:
    """Return the median CPU time in milliseconds of reading a body and choosing a replica."""
    router = Router(1_000_000)
    urls = [f"http://10.0.{i // 250}.{i % 250}:8000" for i in range(num_replicas)]
    replicas = Replicas(urls, ClusterKey(Settings()), router, 3.0)
    model = ModelLease(MODEL, [], "chat", MODEL, "f", True, 16, 100_000, 0, 0, 0.0, 0.001)
    for number, replica in enumerate(replicas.all):
        replicas.take(replica, Lease(f"r{number}", "0", "1", "ready", [model]))
    times = []
    for number in range(rounds):
        text = f"{number % 8} " + "abcdefgh " * 1111
        messages = [{"role": "user", "content": text} for _ in range(20)]
        body = msgspec.json.encode({"model": MODEL, "messages": messages})
        begun = time.process_time()
        asked = read_fields(body)
        request = make_routing_request(asked, list_parts(asked), MODEL, "", "account")
        candidates = [one.candidate for one in replicas.find(asked.find_model_name())]
        router.choose(request, candidates).release()
        times.append(time.process_time() - begun)
    return statistics.median(times) * 1e3


def main() -> None:
    install_signal_handlers()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=2.0)
    parser.add_argument("--most-ms", type=float, default=5.0)
    options = parser.parse_args()
    os.environ |= KEY
    flags = ("--backend.name", "fake", "--max-num-seqs", options.streams)
    context = ("--context", options.tokens + 256)
    front = [sys.executable, "-m", "cllm", "cluster", "front", "--port", "PORT", "--urls"]
    costs: dict[str, list[float]] = {"direct": [], "front": []}
    ttft: dict[str, list[float]] = {"direct": [], "front": []}
    with (
        cllm(None, *flags, *context, environment=KEY) as direct,
        running([*front, direct.url], "/ready", environment=KEY) as behind,
    ):
        for number in range(options.rounds + 1):  # the first one warms up
            for name, target, pids in (
                ("direct", direct, [direct.pid]),
                ("front", behind, [direct.pid, behind.pid]),
            ):
                cost = measure_tokens(target, pids, options.streams, options.tokens)
                seconds = asyncio.run(measure_ttft(target.url, 50))
                print(f"{name}: {cost:.1f} us a token, TTFT {seconds:.2f} ms", flush=True)
                if number:
                    costs[name].append(cost)
                    ttft[name].append(seconds)
    ratio = statistics.median(costs["front"]) / statistics.median(costs["direct"])
    added = statistics.median(ttft["front"]) - statistics.median(ttft["direct"])
    print(f"{ratio:.2f} times the CPU time per token of direct requests; {added:+.2f} ms TTFT")
    choice = measure_choice()
    print(f"{choice:.2f} ms of CPU time to choose one of 1,000 replicas for 200 KB")
    sys.exit(ratio > options.most or added > options.most_ms or choice > 1.0)


if __name__ == "__main__":
    main()
