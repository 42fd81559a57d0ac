"""However a request ends, the front gives back what it has booked for it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fake_replica import FakeReplica, Received, answer, chunk, closes, sends, stream_head

from cllm.cluster.app import FrontApp
from cllm.cluster.front import Front
from cllm.config.settings import Settings
from cllm.errors import EngineError
from cllm.server.access import Access

PATH = "/v1/chat/completions"
BODY = json.dumps({"messages": [{"role": "user", "content": "x" * 5000}], "n": 3}).encode()
STREAM = stream_head() + chunk(b"data: 1\n\n")


def hangs(connection: socket.socket, _: Received) -> None:
    """Begin a stream and wait until the front closes the connection."""
    connection.sendall(STREAM)
    connection.recv(1)


@pytest.fixture
def replicas(home: Any) -> Iterator[list[FakeReplica]]:
    made = [FakeReplica("a"), FakeReplica("b")]
    yield made
    for one in made:
        one.close()


class Client:
    """One request to the application of a front. It disconnects when ``leaves`` is set."""

    def __init__(self, body: bytes = BODY, *, fails: bool = False, path: str = PATH) -> None:
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "state": {},
        }
        self._parts = [body]
        self._fails = fails
        self.leaves = asyncio.Event()
        self.got_body = asyncio.Event()
        self.status = 0

    async def receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.got_body.set()
            if self._fails:
                raise RuntimeError("the connection failed")


async def leave(client: Client, front: Front) -> None:
    await client.got_body.wait()
    booked = [front.router.booked(number) for number in front.replicas.by_number]
    assert sum(one.num_seqs for one in booked) == 3
    assert sum(one.num_tokens for one in booked) == 0, "the prompt has been computed"
    client.leaves.set()


async def shut_down(client: Client, front: Front) -> None:
    await client.got_body.wait()
    for end in [*front.running]:
        end(EngineError("The server is shutting down."))


async def nothing(client: Client, front: Front) -> None:
    pass


@pytest.mark.parametrize(
    ("steps", "happens", "options", "status"),
    [
        ([answer()], nothing, {}, 200),
        ([answer(400)], nothing, {}, 400),
        ([answer(503), answer(503)], nothing, {}, 503),
        ([answer(429), closes], nothing, {}, 429),
        ([closes, closes], nothing, {}, 503),
        ([closes, answer()], nothing, {}, 200),
        ([sends(STREAM)], nothing, {}, 200),
        ([sends(STREAM + chunk(b""), closes=False)], nothing, {}, 200),
        ([hangs], leave, {}, 200),
        ([hangs], shut_down, {}, 200),
        ([sends(STREAM + chunk(b""))], nothing, {"fails": True}, 200),
        ([answer()], nothing, {"body": b"x" * 5_000_000}, 413),
        ([answer()], nothing, {"body": b"{"}, 200),
        ([answer()], nothing, {"path": "/internal/lease"}, 404),
        ([closes], nothing, {"path": "/v1/batches"}, 502),
    ],
)
def test_booked_load_returns_to_zero(replicas, steps, happens, options, status):
    async def run() -> None:
        urls = [one.url for one in replicas]
        settings = Settings.model_validate({"cluster": {"urls": urls, "key": "k" * 16}})
        front = Front(settings, Access(settings, is_of_front=True))
        await front.open()
        for one in replicas:
            one.steps = steps
        client = Client(**options)
        try:
            app = FrontApp(front)
            running = asyncio.create_task(app(client.scope, client.receive, client.send))
            await happens(client, front)
            await asyncio.wait([running])
            if options.get("fails"):
                assert isinstance(running.exception(), RuntimeError)
            else:
                running.result()
            assert client.status == status
            for number in front.replicas.by_number:
                booked = front.router.booked(number)
                assert (booked.num_seqs, booked.num_tokens, booked.accounts) == (0, 0, {})
            assert (front.num_held_bytes, front.running) == (0, set())
            assert all(not one.running for one in front.replicas.all)
        finally:
            await front.close()

    asyncio.run(run())
