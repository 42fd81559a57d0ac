"""A soak test: clients of all kinds at once, faults, and a ledger of every token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import time
from collections import Counter

from benchmarks.reliability.client import (
    CHAT,
    COMPLETE,
    FAKE,
    Client,
    Figure,
    connect,
    count_descriptors,
    find_engine,
    measure_memory,
    serve,
)
from benchmarks.reliability.load import accounts, is_right
from cllm.bench.servers import MODEL, RunningServer

NUM_CLIENTS = 24  # 80 % of the sequences
ABORTS, HOSTILE = 0.10, 0.05  # shares of all requests
KILL_EVERY = 120.0  # seconds, at most
HOSTILE_BODIES: list[bytes] = [
    b"",
    b"{",
    b"[" * 10_000,
    b"\xff\xfe",
    b'{"model": "m", "prompt": NaN}',
    b'{"model": "m", "prompt": [-1]}',
    b'{"model": "m", "prompt": "a", "max_tokens": -5}',
    b'{"model": "m", "prompt": "a", "n": 1000000}',
    b'{"model": "m", "prompt": "a", "temperature": 1e999}',
    b'{"model": "m", "prompt": "\\ud800"}',
    b'{"model": "m", "prompt": "a", "grammar": "((((("}',
    b'{"model": "m", "prompt": "a", "logit_bias": {"99999999": 1}}',
    b'{"model": "m", "prompt": "a", "stop": [1, 2]}',
    b'{"model": "other", "prompt": "a"}',
]


class Seen:
    """What clients have seen."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()


class Soak:
    """All clients of one server."""

    def __init__(self, server: RunningServer, clients: list[Client], end: float) -> None:
        self._server, self._clients, self._end = server, clients, end
        self._numbers = itertools.count()
        self._random = random.Random(7)
        self.seen = Seen()

    async def run(self) -> None:
        workers = [self._work(i) for i in range(NUM_CLIENTS)]
        await asyncio.gather(*workers, self._kill(), *(self._read_slowly() for _ in range(4)))

    async def _work(self, index: int) -> None:
        client = self._clients[1 + index % (len(self._clients) - 1)]
        account = f"account-{1 + index % (len(self._clients) - 1)}"
        rng = random.Random(index)
        while time.monotonic() < self._end:
            chance = rng.random()
            if chance < HOSTILE:
                await self._send_hostile(client, rng.choice(HOSTILE_BODIES))
            elif chance < HOSTILE + ABORTS:
                await self._abort(index, rng)
            else:
                await self._ask(client, account, rng)

    async def _ask(self, client: Client, account: str, rng: random.Random) -> None:
        number = next(self._numbers)
        salt = [number % 256, number // 256 % 256, number // 65536 % 256]
        first, count = rng.randrange(20, 100), rng.randrange(1, 60)
        body = {
            "model": MODEL,
            "prompt": [*salt, *[first] * rng.choice([1, 1, 1, 200, 800])],
            "max_tokens": count,
            "ignore_eos": True,
            "temperature": 0,
            "stream": number % 2 == 0,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        answer = await client.send(COMPLETE, body)
        self.seen.counts[f"{answer.status}"] += 1
        if answer.status != 200:
            self.seen.errors[f"{answer.status}: {answer.body[:80]!r}"] += 1
            return
        for name in ("prompt_tokens", "completion_tokens"):
            self.seen.tokens[f"{account} {name}"] += answer.usage[name]
        if not is_right(answer, first, count):
            self.seen.errors["wrong tokens"] += 1

    async def _send_hostile(self, client: Client, body: bytes) -> None:
        status = await client.send_raw(COMPLETE, body)
        self.seen.counts["hostile"] += 1
        if not 400 <= status < 500:
            self.seen.errors[f"{status} for {body[:60]!r}"] += 1

    async def _abort(self, index: int, rng: random.Random) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"{next(self._numbers)} {index}"}],
            "max_tokens": 2000,
            "stream": rng.random() < 0.5,
        }
        key = self._clients[0].key
        async with connect(self._server, key) as own:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(own.send(CHAT, body), rng.uniform(0, 0.3))
        self.seen.counts["aborted"] += 1

    async def _read_slowly(self) -> None:
        """Ask for a long stream and read a kilobyte a second of it."""
        loop = asyncio.get_running_loop()
        while time.monotonic() < self._end:
            body = {
                "model": MODEL,
                "prompt": [next(self._numbers) % 256, 4],
                "max_tokens": 3000,
                "ignore_eos": True,
                "stream": True,
            }
            content = json.dumps(body).encode()
            head = (
                f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Authorization: Bearer {self._clients[0].key}\r\n"
                f"Content-Length: {len(content)}\r\n\r\n"
            )
            with socket.socket() as connection:
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                host, _, port = self._server.url.removeprefix("http://").partition(":")
                await loop.sock_connect(connection, (host, int(port)))
                await loop.sock_sendall(connection, head.encode() + content)
                last = min(self._end, time.monotonic() + 20)
                while time.monotonic() < last:
                    if not await loop.sock_recv(connection, 1024):
                        break
                    await asyncio.sleep(1)
            self.seen.counts["slow readers"] += 1

    async def _kill(self) -> None:
        """Kill the engine now and then."""
        pause = min(KILL_EVERY, (self._end - time.monotonic()) / 3)
        while time.monotonic() + pause < self._end:
            await asyncio.sleep(pause)
            with contextlib.suppress(ValueError, ProcessLookupError):  # no engine just now
                os.kill(find_engine(self._server), signal.SIGKILL)
                self.seen.counts["kills"] += 1


async def measure_soak(minutes: float) -> list[Figure]:
    """Run all kinds of clients and faults at once."""
    with accounts(6) as (path, keys), serve(None, *FAKE, "--server.keys-file", path) as server:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(server, key)) for key in keys]
            before = measure_memory(server.pid or 0)
            soak = Soak(server, clients, time.monotonic() + minutes * 60)
            await soak.run()
            await clients[0].wait_until_ready()
            stats = await clients[0].wait_until_idle()
            counted: Counter[str] = Counter()
            for day in (await clients[0].get("/usage"))["days"]:
                if day["account"] != "account-0":  # whose clients abort
                    for name in ("prompt_tokens", "completion_tokens"):
                        counted[f"{day['account']} {name}"] += day[name]
            seen = soak.seen
            differences = sum((counted - seen.tokens).values())
            differences += sum((seen.tokens - counted).values())
            left = stats["num_seq_ids_in_use"] + stats["num_cells_held"]
            growth = measure_memory(server.pid or 0) - before
            descriptors = count_descriptors(server.pid or 0)
    summary = ", ".join(f"{count:,} {name}" for name, count in sorted(seen.counts.items()))
    errors = sum(seen.errors.values())
    for error, count in seen.errors.most_common(10):
        print(f"  {count} x {error}")
    return [
        Figure(
            f"unexplained errors in {minutes:g} minutes ({summary})",
            "0",
            f"{errors}; {differences} tokens counted differently, {left} ids and cells left, "
            f"memory grew by {growth:.0f} MB, {descriptors} descriptors",
            errors == differences == left == 0,
        )
    ]
