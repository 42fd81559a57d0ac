"""Figures of load: right answers, exact counts, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import overload
from benchmarks.reliability.client import (
    COMPLETE,
    FAKE,
    NUM_SEQS,
    PATIENCE,
    Answer,
    Client,
    Figure,
    children,
    connect,
    count_descriptors,
    count_on,
    measure_memory,
    serve,
)
from cllm.bench.servers import MODEL
from cllm.observe.cpu_time import read_cpu_seconds
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, make_key, write_key_file


async def measure_success(total: int) -> list[Figure]:
    """Send unique requests, 1, 4, 16 and 50 times as many at once as the server computes."""
    figures = []
    multiples = (1, 4, 16, 50)
    with serve(
        None, *FAKE, "--max-num-seqs", NUM_SEQS, "--scheduler.max-queue-requests", 4000
    ) as server:
        async with connect(server) as client:
            numbers = itertools.count()
            for multiple in multiples:
                right = Counter[bool]()

                async def work(last: int, right: Counter[bool] = right) -> None:
                    while (number := next(numbers)) < last:
                        right[await ask_unique(client, number)] += 1

                first = next(numbers)
                last = first + 1 + total // len(multiples)
                await asyncio.gather(*(work(last) for _ in range(multiple * NUM_SEQS)))
                done = right.total()
                figures.append(
                    Figure(
                        f"right answers with {multiple} times as many clients as sequences",
                        "100 %",
                        f"{right[True]} of {done}",
                        right[True] == done,
                    )
                )
    return figures


async def measure_overload(rounds: int, tokens: int, seqs: int) -> list[Figure]:
    """Send ten times as many requests as can run (``seqs``) and wait (twice as many).
    overload.py's medians over ``rounds``, with answers of about ``tokens`` tokens.
    """
    sizes = {"--tokens": tokens, "--seqs": seqs, "--queue": 2 * seqs}
    options = overload.parse([str(word) for pair in sizes.items() for word in pair])
    with overload.serve(options) as server:
        done = [await overload.one_round(server.url, options, 2 * i) for i in range(rounds)]
    figures = []
    for name, arrivals in (("closed", "all at once"), ("fresh", "and others that follow")):
        goodputs = sorted(one[name].goodput for one in done)
        goodput, target = statistics.median(goodputs), overload.GOODPUT[name]
        rejected = statistics.median(one[name].rejected_s for one in done)
        figures.append(
            Figure(
                f"goodput with ten times as many clients as can run and wait, {arrivals}",
                f"at least {target:.0%} of capacity; rejections in at most 50 ms (p99)",
                f"{goodput:.1%} ({goodputs[0]:.1%}-{goodputs[-1]:.1%}); {rejected * 1000:.0f} ms",
                goodput >= target and rejected <= 0.05,
                is_timed=True,
            )
        )
    return figures


async def ask_unique(client: Client, number: int) -> bool:
    """Return whether the answer of the fake model, which counts on from the prompt, is right."""
    last = 20 + number % 80
    prompt = [number % 256, number // 256 % 256, number // 65536 % 256, last]
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
    }
    answer = await client.send(COMPLETE, body)
    if answer.status != 200:
        return False
    return is_right(answer, last, 8)


def is_right(answer: Answer, last: int, count: int) -> bool:
    """Return whether an answer has ``count`` tokens after a prompt that ends with ``last``."""
    right = answer.usage["completion_tokens"] == count
    return right and answer.content[0].get("text", "") == count_on(last, count)


@contextlib.contextmanager
def accounts(count: int, **limits: Any) -> Iterator[tuple[Path, list[str]]]:
    """Yield a file of keys, and the keys of ``count`` accounts; the first is an administrator."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [make_key() for _ in range(count)]
        records = {
            f"account-{i}": AccountRecord(
                keys=(Key(hash_key(key), int(time.time())),), admin=i == 0, **limits
            )
            for i, key in enumerate(keys)
        }
        path = Path(folder) / "keys.json"
        write_key_file(path, KeyFile(accounts=records))
        yield path, keys


async def measure_ledger(total: int) -> list[Figure]:
    """Compare what the server has counted for each account with what its clients were told."""
    differences, growth = 0, 0.0
    with accounts(5) as (path, keys), serve(None, *FAKE, "--server.keys-file", path) as server:
        told: Counter[str] = Counter()
        numbers = itertools.count()
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(server, key)) for key in keys]

            async def work(index: int, last: int) -> None:
                while (number := next(numbers)) < last:
                    body = {
                        "model": MODEL,
                        "prompt": [number % 256, number // 256 % 256, number // 65536 % 256, 7],
                        "max_tokens": 4 + number % 5,
                        "ignore_eos": True,
                        "stream": number % 2 == 0,
                        "stream_options": {"include_usage": True},
                    }
                    if not body["stream"]:
                        del body["stream_options"]
                    answer = await clients[index].send(COMPLETE, body)
                    assert answer.status == 200, answer.body
                    for name in ("prompt_tokens", "completion_tokens"):
                        told[f"account-{index} {name}"] += answer.usage[name]
                    told[f"account-{index} requests"] += 1

            async def run(last: int) -> None:
                await asyncio.gather(*(work(i % 5, last) for i in range(NUM_SEQS)))

            await run(total // 5)  # caches fill, buffers grow
            before = measure_memory(server.pid or 0)
            await run(total)
            growth = measure_memory(server.pid or 0) - before
            counted: Counter[str] = Counter()
            for day in (await clients[0].get("/usage"))["days"]:
                for name in ("requests", "prompt_tokens", "completion_tokens"):
                    counted[f"{day['account']} {name}"] += day[name]
            differences = sum((counted - told).values()) + sum((told - counted).values())
    return [
        Figure(
            f"differences between the server's counts and the clients', {total:,} requests",
            "0",
            f"{differences}",
            differences == 0,
        ),
        Figure(
            f"growth of the API process's memory over {total - total // 5:,} requests",
            "at most 32 MB",
            f"{growth:.1f} MB",
            growth <= 32,
        ),
    ]


async def measure_aborts(total: int) -> list[Figure]:
    """Abort requests at random moments; nothing may be left of them."""
    rng = random.Random(1)
    with serve(None, *FAKE, "--max-num-seqs", NUM_SEQS) as server:
        async with connect(server) as client:
            await client.send(COMPLETE, {"model": MODEL, "prompt": "a", "max_tokens": 2})
            before = count_descriptors(server.pid or 0)

            async def abort(number: int) -> None:
                async with connect(server) as own:
                    body = {
                        "model": MODEL,
                        "prompt": [number % 256, number // 256 % 256, 9],
                        "max_tokens": 4000,
                        "ignore_eos": True,
                        "stream": number % 2 == 0,
                        "n": 1 + number % 3,
                    }
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(own.send(COMPLETE, body), rng.uniform(0, 0.1))

            for first in range(0, total, 100):
                await asyncio.gather(*map(abort, range(first, first + 100)))
            async with asyncio.timeout(PATIENCE):
                while True:  # a busy server reads the last requests when their clients have gone
                    stats = await client.wait_until_idle()
                    page = await client.get("/scheduler")
                    if not page["running"] and not page["num_waiting"]:
                        break
            left = {
                "ids": stats["num_seq_ids_in_use"],
                "cells": stats["num_cells_held"],
                "requests": len(page["running"]) + page["num_waiting"],
                "descriptors": max(0, count_descriptors(server.pid or 0) - before - 2),
                "processes": max(0, len(children(server.pid or 0, "cllm")) - 2),
            }
    measured = ", ".join(f"{count} {name}" for name, count in left.items())
    return [Figure(f"left of {total:,} aborted requests", "0", measured, not sum(left.values()))]


async def measure_cancellation(total: int) -> list[Figure]:
    """Time from the disconnect of the only request to its free slot, streaming or not."""
    seconds = []
    with serve(None, *FAKE, "--max-num-seqs", 1) as server:
        async with connect(server) as client:
            for number in range(total):
                body = {"model": MODEL, "prompt": [number % 256, 3], "max_tokens": 8000}
                body |= {"ignore_eos": True, "stream": number % 2 == 0}
                own = Client(server)
                asked = asyncio.create_task(own.send(COMPLETE, body))
                await client.wait_for_ids(1)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                begun = time.perf_counter()
                await client.wait_for_ids(0)
                seconds.append(time.perf_counter() - begun)
                own.close()
    worst = max(seconds) * 1000
    return [
        Figure(
            f"from a disconnect to the free slot, {total} streams and others",
            "at most a step + 250 ms",
            f"median {statistics.median(seconds) * 1000:.0f} ms, at most {worst:.0f} ms",
            worst <= 250 + 20,
            is_timed=True,
        )
    ]


async def measure_cost(rounds: int, num_tokens: int = 400) -> list[Figure]:
    """CPU time of the API process for a token: with keys and limits, and without, in turns."""
    ratios = []
    limits = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "tokens_per_month": 10**12}
    with contextlib.ExitStack() as stack:
        path, (key,) = stack.enter_context(accounts(1, **limits))
        plain = stack.enter_context(serve(None, *FAKE))
        keyed = stack.enter_context(serve(None, *FAKE, "--server.keys-file", path))
        async with connect(plain) as one, connect(keyed, key) as other:
            for number in range(rounds + 1):
                turns = (one, other) if number % 2 else (other, one)
                cost = {c: await cpu_per_token(c, num_tokens, number) for c in turns}
                if number:  # the first round warms up
                    ratios.append(cost[other] / cost[one])
    ratio = statistics.median(ratios)
    return [
        Figure(
            f"CPU time of a token with keys and limits / without, 32 streams, {rounds} rounds",
            "at most 1.02",
            f"{ratio:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
            ratio <= 1.02,
            is_timed=True,
        )
    ]


async def cpu_per_token(client: Client, num_tokens: int, number: int) -> float:
    pid = client.server.pid or 0
    before = read_cpu_seconds(pid)
    bodies = [
        {
            "model": MODEL,
            "prompt": [number % 256, i + 1, 5],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        for i in range(NUM_SEQS)
    ]
    answers = await asyncio.gather(*(client.send(COMPLETE, body) for body in bodies))
    assert {answer.status for answer in answers} == {200}
    return (read_cpu_seconds(pid) - before) / (NUM_SEQS * num_tokens)
