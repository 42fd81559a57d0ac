"""The figures of docs/reliability.md. Each function measures one promise on a server of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reliability.client import (
    FAKE,
    Answer,
    Client,
    children,
    connect,
    count_on,
    descriptors_of,
    engine_of,
    memory_of,
    serve,
)
from cllm.bench.servers import MODEL
from cllm.models.builtin.questions import held_out_questions
from cllm.observe.cpu_time import read_cpu_seconds
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, make_key, write_key_file

NUM_SEQS = 32
CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@dataclass(frozen=True)
class Figure:
    """A promise, its target and what was measured. is_timed: a busy machine may miss the target."""

    promise: str
    target: str
    measured: str
    is_met: bool
    is_timed: bool = False


Requests = list[tuple[str, dict[str, Any]]]


# --- a death of the engine -----------------------------------------------------------------------


def mixed_requests(count: int, seed: int = 0) -> Requests:
    """Return requests of all kinds to the built-in model, whose answers are far from ties."""
    rng = random.Random(seed)
    questions = held_out_questions(seed)
    tools = held_out_questions(seed, ["tools"])
    objects = held_out_questions(seed, ["json"])
    long = held_out_questions(seed, ["stories", "counting"])
    base = {"model": MODEL, "max_tokens": 120}

    def chat(one: Any, **more: Any) -> tuple[str, dict[str, Any]]:
        body = {**base, "messages": one.messages, "temperature": 1, "seed": rng.getrandbits(31)}
        return CHAT, {**body, **({"tools": one.tools} if one.tools else {}), **more}

    def cut(one: Any) -> tuple[str, dict[str, Any]]:
        """The answer ends in the middle of a word."""
        words = one.answer.split(" ")
        word = words[len(words) * 2 // 3]
        return chat(one, stop=[word[: max(1, len(word) // 2)] if len(word) > 3 else word])

    def complete(one: Any, **more: Any) -> tuple[str, dict[str, Any]]:
        prompt = f"{one.messages[0]['content']} salt {rng.getrandbits(30)}"
        body = {**base, "prompt": prompt, "temperature": 0, "max_tokens": 30}
        return COMPLETE, {**body, **more}

    shared = chat(next(long))
    kinds: list[Callable[[], tuple[str, dict[str, Any]]]] = [
        lambda: chat(next(long)),
        lambda: chat(next(questions), n=3),
        lambda: cut(next(long)),
        lambda: chat(next(tools)),
        lambda: chat(next(tools), stream=True),
        lambda: chat(next(objects), response_format={"type": "json_object"}),
        lambda: chat(next(long), presence_penalty=0.1, frequency_penalty=0.1, temperature=0),
        lambda: chat(next(long), dry_multiplier=0.8, temperature=0),
        lambda: chat(next(long), mirostat_mode=2, mirostat_tau=1.0),
        lambda: chat(next(questions), logprobs=True, top_logprobs=3),
        lambda: complete(next(questions), echo=True, logprobs=2),
        lambda: chat(
            next(held_out_questions(rng.getrandbits(20), ["sums"])),
            chat_template_kwargs={"enable_thinking": True},
            reasoning_budget=12,
        ),
        lambda: shared,
        lambda: (EMBED, {"model": MODEL, "input": [f"text {rng.getrandbits(30)}"] * 3}),
        lambda: chat(next(long), stream=True, stream_options={"include_usage": True}),
        lambda: chat(next(long), stream=True, logprobs=True, n=2),
    ]
    return [kind() for kind, _ in zip(itertools.cycle(kinds), range(count), strict=False)]


def lines_of(count: int, seed: int) -> bytes:
    """Return the file of a batch with ``count`` requests."""
    long = held_out_questions(seed, ["stories"])
    bodies = [
        {"model": MODEL, "messages": one.messages, "temperature": 0, "max_tokens": 120}
        for one, _ in zip(long, range(count), strict=False)
    ]
    return b"".join(
        json.dumps({"custom_id": str(i), "method": "POST", "url": CHAT, "body": body}).encode()
        + b"\n"
        for i, body in enumerate(bodies)
    )


async def run_batch(client: Client, lines: bytes) -> list[Any]:
    """Return the answers of a batch, in the order of its lines."""
    import httpx2

    async with httpx2.AsyncClient(base_url=client.server.url, timeout=300) as http:
        file = await http.post(
            "/v1/files", files={"file": ("lines.jsonl", lines)}, data={"purpose": "batch"}
        )
        body = {
            "input_file_id": file.json()["id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        batch = (await http.post("/v1/batches", json=body)).json()
        while batch["status"] != "completed":
            assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
            await asyncio.sleep(0.05)
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
        text = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    answers = sorted(map(json.loads, text.splitlines()), key=lambda one: int(one["custom_id"]))
    return [one["response"]["body"]["choices"][0]["message"]["content"] for one in answers]


async def measure_kill(rounds: int, count: int = 88, num_lines: int = 8) -> list[Figure]:
    """Kill the engine while 32 sequences run and others wait; compare with undisturbed answers."""
    same, total, longest, load = 0, 0, 0.0, 0.0
    flags = ("--max-num-seqs", NUM_SEQS, "--context", 1024, "--server.enable-faults")
    for number in range(rounds):
        requests, lines = mixed_requests(count, number), lines_of(num_lines, 100 + number)
        with serve(None, *flags) as server:
            async with connect(server) as client:
                load = max(load, server.start_s)
                calm = await asyncio.gather(*(client.send(*one) for one in requests))
                calm_batch = await run_batch(client, lines)
                # every step takes longer, so that the engine dies with all of them in flight
                slow = {"kind": "slow", "seconds": 0.02, "num_steps": 100_000}
                await client.cause(slow, {"kind": "kill", "after_steps": 10 + 5 * number})
                begun = asyncio.gather(*(client.send(*one) for one in requests))
                batch = asyncio.create_task(run_batch(client, lines))
                await client.wait_until_unready()
                killed = time.perf_counter()
                await client.wait_until_ready()
                longest = max(longest, time.perf_counter() - killed)
                found = await begun
                total += count + num_lines
                same += sum(map(are_same, calm, found))
                same += sum(map(str.__eq__, calm_batch, await batch))
                assert await client.metric("engine_restarts_total") == 1
    return [
        Figure(
            f"kill -9 of the engine with {NUM_SEQS} sequences running and others waiting, of all "
            "kinds: answers that are the same as undisturbed",
            "all",
            f"{same} of {total}",
            same == total,
        ),
        Figure(
            "the pause that its clients see",
            f"at most {load:.1f} s (the start) + 2 s",
            f"at most {longest:.1f} s",
            longest <= load + 2,
            is_timed=True,
        ),
    ]


def are_same(calm: Answer, found: Answer) -> bool:
    if calm.status != 200 or found.status != 200:
        return False
    if isinstance(calm.content[0], list):  # embeddings: rounded differently in another batch
        pairs = zip(calm.content, found.content, strict=True)
        return all(
            abs(a - b) < 0.01 for one, other in pairs for a, b in zip(one, other, strict=True)
        )
    same_usage = calm.usage.get("completion_tokens") == found.usage.get("completion_tokens")
    return bool(calm.content == found.content) and same_usage


async def measure_hang() -> list[Figure]:
    """A hung engine is replaced, and its request continues."""
    with serve(None, *FAKE, "--server.enable-faults") as server:
        async with connect(server) as client:
            await client.cause({"kind": "hang", "after_steps": 40})
            body = {"model": MODEL, "prompt": "a", "max_tokens": 200, "ignore_eos": True}
            answer = await client.send(COMPLETE, {**body, "stream": True})
            gaps = [b - a for a, b in itertools.pairwise(answer.times)]
    return [
        Figure(
            "a hung engine is replaced, and the stream continues",
            "at most 30 s",
            f"{max(gaps):.1f} s",
            max(gaps) <= 30 and answer.status == 200,
            is_timed=True,
        )
    ]


async def measure_false_alarms(seconds: float) -> list[Figure]:
    """A long legal prefill, whose steps take longer and longer, raises no alarm."""
    with serve(None, *FAKE, "--server.enable-faults") as server:
        async with connect(server) as client:
            pause = min(12.0, seconds / 10)
            steps = int(seconds / pause)
            await client.cause({"kind": "slow", "seconds": pause, "num_steps": steps})
            body = {"model": MODEL, "prompt": list(range(100, 220)) * 40, "max_tokens": 2}
            begun = time.perf_counter()
            answer = await client.send(COMPLETE, body)
            took = time.perf_counter() - begun
            while took < seconds:
                answer = await client.send(COMPLETE, {**body, "prompt": [int(took) + 1]})
                took = time.perf_counter() - begun
            alarms = await client.metric("engine_restarts_total")
    return [
        Figure(
            f"false alarms in {seconds / 60:.1f} minutes of steps of {pause:g} s",
            "0",
            f"{alarms:.0f}",
            alarms == 0 and answer.status == 200,
        )
    ]


async def measure_deadline(rounds: int) -> list[Figure]:
    """Requests end at their deadline while the engine is stopped (SIGSTOP)."""
    late = []
    with serve(None, *FAKE) as server:
        async with connect(server) as client:
            engine = engine_of(server)
            for number in range(rounds):
                body = {"model": MODEL, "max_tokens": 4000, "ignore_eos": True, "deadline_ms": 1500}
                begun = time.perf_counter()
                streaming = asyncio.create_task(
                    client.send(COMPLETE, {**body, "prompt": [number + 1], "stream": True})
                )
                await asyncio.sleep(0.3)
                os.kill(engine, signal.SIGSTOP)
                try:
                    waiting = client.send(COMPLETE, {**body, "prompt": [number + 100]})
                    with contextlib.suppress(AssertionError):  # an error event, which is right
                        await streaming
                    late.append(time.perf_counter() - begun - 1.5)
                    begun_waiting = begun + 0.3
                    answer = await waiting
                    late.append(time.perf_counter() - begun_waiting - 1.5 - 1.2)
                    assert answer.status == 504, answer.body
                finally:
                    os.kill(engine, signal.SIGCONT)
                await client.wait_until_idle()
    return [
        Figure(
            "lateness of a deadline while the engine is stopped",
            "at most 0.5 s",
            f"at most {max(late):.2f} s in {len(late)}",
            max(late) <= 0.5,
            is_timed=True,
        )
    ]


# --- load ----------------------------------------------------------------------------------------


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
            before = memory_of(server.pid or 0)
            await run(total)
            growth = memory_of(server.pid or 0) - before
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
            before = descriptors_of(server.pid or 0)

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
            stats = await client.wait_until_idle()
            page = await client.get("/scheduler")
            left = {
                "ids": stats["num_seq_ids_in_use"],
                "cells": stats["num_cells_held"],
                "requests": len(page["running"]) + page["num_waiting"],
                "descriptors": max(0, descriptors_of(server.pid or 0) - before - 2),
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
                pair = [await cpu_per_token(c, num_tokens, number) for c in (one, other)]
                if number:  # the first round warms up
                    ratios.append(pair[1] / pair[0])
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


Measure = Callable[[], Awaitable[list[Figure]]]


def list_measures(scale: float) -> dict[str, Measure]:
    """Return all measurements; ``scale`` 1 is the full size."""

    def size(full: int, least: int) -> int:
        return max(least, int(full * scale))

    return {
        "kill": lambda: measure_kill(size(5, 1)),
        "hang": measure_hang,
        "false-alarms": lambda: measure_false_alarms(600 * scale),
        "deadline": lambda: measure_deadline(size(20, 2)),
        "success": lambda: measure_success(size(10_000, 800)),
        "ledger": lambda: measure_ledger(size(100_000, 1000)),
        "aborts": lambda: measure_aborts(size(10_000, 500)),
        "cancellation": lambda: measure_cancellation(size(200, 10)),
        "cost": lambda: measure_cost(size(15, 3)),
    }
