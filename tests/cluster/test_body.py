"""What a front reads in request bodies, and in which thread."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from cllm.cluster import forwarding
from cllm.cluster.body import NOTHING, read_fields
from cllm.cluster.forwarding import LARGE, Forwarding
from cllm.server.body_limits import MAX_STRUCTURE
from cllm.server.http.sse import ClientGone


def make_body(num_bytes: int) -> bytes:
    return json.dumps({"model": "m", "prompt": "x" * num_bytes}).encode()


async def read(body: bytes, receive: Any) -> Any:
    """Return what a front reads in the body of a request."""
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    front = SimpleNamespace(spans=None)
    forwarded = Forwarding(front, Request(scope, receive), None)
    forwarded._body = body
    return await forwarded._read_fields()


async def stay() -> None:
    """Receive nothing further from the client."""
    await asyncio.Event().wait()


@pytest.mark.parametrize(("num_bytes", "is_here"), [(100, True), (LARGE, False)])
def test_large_bodies_are_read_in_another_thread(monkeypatch, num_bytes, is_here):
    threads = []
    for name in ("read_fields", "list_parts"):
        original = getattr(forwarding, name)

        def recorded(value: Any, original: Any = original) -> Any:
            threads.append(threading.current_thread())
            return original(value)

        monkeypatch.setattr(forwarding, name, recorded)
    fields, parts = asyncio.run(read(make_body(num_bytes), stay))
    assert (fields.model, parts) == ("m", [b"x" * num_bytes])
    assert [one is threading.main_thread() for one in threads] == [is_here] * 2


def test_client_that_leaves_is_noticed_while_its_body_is_read(monkeypatch):
    finish = threading.Event()
    monkeypatch.setattr(forwarding, "read_fields", lambda _: finish.wait() and NOTHING)

    async def leave() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            with pytest.raises(ClientGone):
                await read(make_body(LARGE), leave)
        finally:
            finish.set()

    asyncio.run(run())


def test_body_with_too_many_values_is_left_to_the_replica_that_rejects_it():
    """To read the million lists that fit into a body takes a second."""
    assert read_fields(json.dumps({"model": "m", "input": [[]] * 1000}).encode()).model == "m"
    assert (
        read_fields(json.dumps({"model": "m", "input": [[]] * MAX_STRUCTURE}).encode()) is NOTHING
    )
