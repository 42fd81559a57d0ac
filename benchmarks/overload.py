"""Measure how many rejected clients are served on their retry, with ten times as many clients as
can run and wait.

    uv run python benchmarks/overload.py [--mock] [--no-tickets] [--rounds 3] [--json out.json]

Each client sends one request of its own. If it is rejected, it retries once after Retry-After and
up to a tenth more, with the ticket that it got. In the first measurement ("closed"), all clients
send at the start and no others follow. In the second ("fresh"), new clients also arrive at twice
the rate that can be served. Exit code 1 if a target is missed.

Goodput: tokens/s of complete answers, divided by those of the same server with as many clients as
can run and wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from cllm.bench.servers import MODEL, RunningServer, cllm
from cllm.cli.main import install_signal_handlers
from cllm.http_connection import HTTPClient, Response

TIMES = 10  # number of clients, as a multiple of those that can run and wait
FRESH = 2.0  # rate of new requests, as a multiple of the rate that can be served
# the least share of rejected clients that is served on the retry
SERVED = {"closed": 0.8, "fresh": 0.8}
GOODPUT = {"closed": 0.95, "fresh": 0.9}
TICKET = b"x-cllm-retry-ticket"


@dataclass
class Client:
    """One request.

    served: seconds of time.perf_counter at which its answer was complete; 0 if there is no answer.
    """

    body: bytes
    num_tokens: int
    num_tries: int = 0
    served: float = 0.0


@dataclass
class Result:
    """num_rejected: clients. served: the share of them that was served on the retry. rejected_s:
    p99 of the seconds until a rejection.
    """

    num_rejected: int
    served: float
    goodput: float
    rejected_s: float


class Crowd:
    """Clients of one server."""

    def __init__(self, url: str, options: argparse.Namespace, seed: int) -> None:
        self._url = url
        self.options = options
        self.random = random.Random(seed)
        self.clients: list[Client] = []
        self.rejections: list[float] = []  # seconds until each

    def add(self) -> Client:
        # unique to the client
        words = " ".join(f"{self.random.getrandbits(32):x}" for _ in range(6))
        num_tokens = self.random.randint(self.options.tokens // 2, self.options.tokens * 3 // 2)
        body = {"model": MODEL, "prompt": words, "max_tokens": num_tokens, "ignore_eos": True}
        self.clients.append(Client(json.dumps(body).encode(), num_tokens))
        return self.clients[-1]

    async def ask(self, client: Client) -> None:
        """Send the client's request, and retry it once after Retry-After if it is rejected."""
        response = await self._send(client, {})
        if response.status == 429:
            ticket = {}
            if TICKET in response.headers and not self.options.no_tickets:
                ticket = {TICKET.decode(): response.headers[TICKET].decode()}
            await asyncio.sleep(
                int(response.headers[b"retry-after"]) * self.random.uniform(1.0, 1.1)
            )
            response = await self._send(client, ticket)
        assert response.status in (200, 429), response.body
        if response.status == 200:
            assert json.loads(response.body)["usage"]["completion_tokens"] == client.num_tokens
            client.served = time.perf_counter()

    async def _send(self, client: Client, headers: dict[str, str]) -> Response:
        client.num_tries += 1
        headers = {"Content-Type": "application/json", **headers}
        begun = time.perf_counter()
        with closing(HTTPClient(self._url, headers, keep_alive=False)) as server:
            response = await server.request("/v1/completions", client.body)
        if response.status != 200:
            self.rejections.append(time.perf_counter() - begun)
        return response

    def tokens(self, begin: float, end: float) -> int:
        return sum(client.num_tokens for client in self.clients if begin <= client.served <= end)


async def measure_rate(crowd: Crowd, num_clients: int, num_requests: int) -> float:
    """Return tokens/s with ``num_clients`` clients.

    Each sends its next request when it has its answer.
    """

    async def take_turns(clients: Iterator[Client]) -> None:
        for client in clients:
            await crowd.ask(client)

    clients = [crowd.add() for _ in range(num_requests)]
    waiting = iter(clients)
    begun = time.perf_counter()
    await asyncio.gather(*(take_turns(waiting) for _ in range(num_clients)))
    # after this time, fewer clients are left than can run and wait
    end = sorted(client.served for client in clients)[-num_clients]
    return crowd.tokens(begun, end) / (end - begun)


async def measure(crowd: Crowd, num_clients: int, rate: float, fresh: float) -> Result:
    """Let ``num_clients`` clients begin at once, and ``fresh`` times as many follow in the time
    that these take at ``rate`` tokens/s.
    """
    begun = time.perf_counter()
    seconds = num_clients * crowd.options.tokens / rate
    async with asyncio.TaskGroup() as group:
        for _ in range(num_clients):
            group.create_task(crowd.ask(crowd.add()))
        while fresh and time.perf_counter() < begun + seconds:
            await asyncio.sleep(crowd.random.expovariate(fresh * num_clients / seconds))
            group.create_task(crowd.ask(crowd.add()))
    end = begun + seconds if fresh else max(client.served for client in crowd.clients)
    rejected = [client for client in crowd.clients if client.num_tries > 1]
    share = sum(client.served > 0 for client in rejected) / max(1, len(rejected))
    return Result(
        len(rejected),
        share,
        crowd.tokens(begun, end) / (end - begun) / rate,
        sorted([0.0, *crowd.rejections])[len(crowd.rejections) * 99 // 100],
    )


async def one_round(url: str, options: argparse.Namespace, seed: int) -> dict[str, Result]:
    num_places = options.seqs + options.queue
    rate = await measure_rate(Crowd(url, options, seed), num_places, 4 * num_places)
    print(f"  {rate:.0f} tokens/s with {num_places} clients", flush=True)
    results = {}
    for name, fresh in (("closed", 0.0), ("fresh", FRESH)):
        result = results[name] = await measure(
            Crowd(url, options, seed + 1), TIMES * num_places, rate, fresh
        )
        print(
            f"  {name}: {result.num_rejected} rejected in {result.rejected_s:.3f} s (p99), "
            f"{result.served:.3f} of them served at the next try, goodput {result.goodput:.3f}",
            flush=True,
        )
    return results


def serve(options: argparse.Namespace) -> contextlib.AbstractContextManager[RunningServer]:
    flags = ["--max-num-seqs", options.seqs, "--scheduler.max-queue-requests", options.queue]
    backend = ["--backend.name", "fake"] if options.mock else []
    return cllm(options.model, *flags, "--context", 1024, *backend)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a GGUF file; the built-in model by default")
    parser.add_argument(
        "--mock", action="store_true", help="no model: steps take as long as the fake backend says"
    )
    parser.add_argument(
        "--no-tickets", action="store_true", help="clients do not send their tickets"
    )
    parser.add_argument("--seqs", type=int, default=4, help="requests that run at once")
    parser.add_argument("--queue", type=int, default=8, help="requests that may wait")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer, on average")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    install_signal_handlers()
    options = parse(sys.argv[1:])
    with serve(options) as server:
        rounds = [
            asyncio.run(one_round(server.url, options, options.seed + 2 * i))
            for i in range(options.rounds)
        ]
    missed = False
    for name, least_share in SERVED.items():
        results = [one[name] for one in rounds]
        for what, values, target in (
            ("served at the next try", [one.served for one in results], least_share),
            ("goodput", [one.goodput for one in results], GOODPUT[name]),
        ):
            median = statistics.median(values)
            missed = missed or median < target
            verdict = "reached" if median >= target else "MISSED"
            print(
                f"{name}, {what}: {median:.3f} ({min(values):.3f}-{max(values):.3f})  target >= "
                f"{target:g}: {verdict}"
            )
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=2, default=vars) + "\n")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
