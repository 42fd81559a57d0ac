"""Replicas die while they stream. The client only sees a pause."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from cluster.conftest import FAKE, start_front
from conftest import PATIENCE
from framed_streams import read_events
from server.conftest import Server

MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 60, "maxLength": 90}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
CHAT = {"messages": MESSAGES, "stream": True, "max_tokens": 150}
LONG = {"ignore_eos": True, "seed": 5, "temperature": 1.0}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | LONG | {"n": 2, "logprobs": True, "top_logprobs": 1}),
    ("/v1/chat/completions", CHAT | {"response_format": FORMAT, "seed": 1, "temperature": 1.0}),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "temperature": 0,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
        },
    ),
    ("/v1/completions", {"prompt": ["ab", "q"], "stream": True, "max_tokens": 150, **LONG}),
    ("/v1/responses", {"input": "hello", "stream": True, "max_output_tokens": 150, **LONG}),
    (
        "/v1/messages",
        CHAT
        | {
            "model": "fake",
            "temperature": 0,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    (
        "/api/chat",
        {
            "model": "fake",
            "messages": MESSAGES,
            "options": {"num_predict": 150, "seed": 3, "temperature": 1.0},
            "format": SCHEMA,
        },
    ),
    ("/api/generate", {"model": "fake", "prompt": "a", "options": {"num_predict": 150}}),
]
# what differs between two requests
OWN = {"id", "item_id", "created", "created_at", "call_id", "usage", "system_fingerprint"}
OWN |= {"prompt_eval_count"}
SLOW = {"faults": [{"kind": "slow", "seconds": 0.05, "num_steps": 1_000_000}]}


def without_own(value: Any) -> Any:
    """Return what ``read_events`` has returned without the fields in OWN."""
    if not isinstance(value, tuple | list):
        return value
    is_own = [isinstance(one, tuple) and isinstance(one[0], str) and one[0] in OWN for one in value]
    return [without_own(one) for one, own in zip(value, is_own, strict=True) if not own]


def read(data: bytes) -> Any:
    return without_own(read_events(data))


# Streams take long enough to kill a replica meanwhile.
SLOWLY = (
    *("--server.enable-faults", "true", "--scheduler.speculation", "off"),
    *("--cache.max-results", "0"),
)


class Cluster:
    """A front and its replicas, of which some will be killed."""

    def __init__(self, start: Callable[..., Server], number: int, *options: str) -> None:
        self.replicas = [start(*FAKE, *SLOWLY, *options) for _ in range(number)]
        self.front = start_front(start, *(one.url for one in self.replicas))

    def slow_down(self) -> None:
        """Let each step take long enough to kill a replica in the middle of a stream."""
        for replica in self.replicas:
            replica.client.post("/faults", json=SLOW).raise_for_status()

    def find_busy(self) -> Server | None:
        """Return a replica that computes."""
        for replica in self.replicas:
            if replica.process.poll() is None and replica.stats()["num_running"]:
                return replica
        return None

    def metric(self, name: str) -> float:
        lines = self.front.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "_"))


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        yield client


async def follow(client: httpx2.AsyncClient, path: str, body: Any, at: int, reached: Any) -> bytes:
    """Return a stream. Call ``reached`` once when ``at`` bytes have arrived."""
    data = b""
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for part in answer.aiter_bytes():
            data += part
            if reached is not None and len(data) >= at:
                await asyncio.to_thread(reached)
                reached = None
    return data


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_stream_is_the_same_although_its_replica_is_killed(start_server, kind):
    path, body = KINDS[kind]

    async def test() -> None:
        cluster = Cluster(start_server, 2)
        whole = cluster.replicas[0].client.post(path, json=body).content
        cluster.slow_down()

        def kill() -> None:
            victim = cluster.find_busy()
            assert victim is not None, [one.stats() for one in cluster.replicas]
            victim.process.send_signal(signal.SIGKILL)

        async with opened(cluster.front) as client:
            at = random.randint(1, len(whole) // 2)
            data = await follow(client, path, body, at, kill)
        assert read(data) == read(whole), f"killed after {at} bytes"
        assert cluster.metric("cllm:front_continued_streams") >= 1

    asyncio.run(test())
