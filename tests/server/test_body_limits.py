"""Limits of a request body (messages and parts, objects, values), and reading large bodies off the
event loop.
"""

import asyncio
import contextlib
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
from conftest import PATIENCE
from starlette.datastructures import State
from starlette.requests import Request

from cllm.errors import BadRequest, EngineError
from cllm.server import body, off_loop
from cllm.server.body_limits import (
    MAX_PARTS,
    MAX_STRUCTURE,
    MAX_VALUES,
    check_parts,
    check_structure,
    count_parts,
)
from cllm.server.call import Call
from cllm.server.http.sse import ClientGone

USER = {"role": "user", "content": "a"}
TEXT = {"type": "text", "text": "a"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT] * MAX_PARTS}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER] * (MAX_PARTS + 1)}, "messages"),
        ("/v1/chat/completions", {"messages": [USER] * 80_000}, "body"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [TEXT] * MAX_PARTS}]},
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * MAX_PARTS}]},
            "messages",
        ),
        ("/v1/responses", {"input": [USER] * (MAX_PARTS + 1)}, "input"),
        ("/v1/responses", {"input": [{"role": "user", "content": [TEXT] * MAX_PARTS}]}, "input"),
        ("/v1/responses/input_tokens", {"input": [USER] * (MAX_PARTS + 1)}, "input"),
        (
            "/v1/messages",
            {"model": "", "max_tokens": 1, "messages": [USER] * (MAX_PARTS + 1)},
            "messages",
        ),
        (
            "/v1/messages",
            {"model": "", "max_tokens": 1, "messages": [USER], "system": [TEXT] * 10_001},
            "system",
        ),
        (
            "/v1/messages/count_tokens",
            {"model": "", "messages": [{"role": "user", "content": [RESULT]}]},
            "messages",
        ),
        (
            "/v1/messages",
            {"model": "", "messages": [{"role": "assistant", "content": [USE] * MAX_PARTS}]},
            "messages",
        ),
        ("/api/chat", {"model": "fake", "messages": [USER] * (MAX_PARTS + 1)}, "messages"),
        ("/apply-template", {"messages": [USER] * (MAX_PARTS + 1)}, "messages"),
        ("/tokenize", {"messages": [USER] * (MAX_PARTS + 1)}, "messages"),
    ],
)
def test_more_than_10_000_messages_and_parts_get_400_with_the_limit(
    narrow_server, path, body, param
):
    headers = {"anthropic-version": "2023-06-01"} if path.startswith("/v1/messages") else {}
    answer = narrow_server.client.post(path, json=body, headers=headers)
    assert answer.status_code == 400
    message = answer.json()["error"]
    message = message if isinstance(message, str) else message["message"]
    assert f"at most {MAX_PARTS} messages and parts" in message
    assert param in message


def test_10_000_messages_and_parts_are_accepted():
    check_parts(
        {"messages": [{"role": "user", "content": [TEXT] * (MAX_PARTS - 1)}], "input": [1] * 20_000}
    )
    assert (
        count_parts(
            [
                USER,
                {"content": [TEXT, {"content": [TEXT]}], "tool_calls": [CALL], "other": [TEXT]},
                "a",
            ]
        )
        == 6
    )


@pytest.mark.parametrize(
    "data",
    [
        b"[" * (MAX_STRUCTURE + 1),
        b'{"a":1,' * MAX_STRUCTURE,
        b'{"a":[' + b"1," * (MAX_VALUES + 1) + b"1]}",
        b'{"a":[' + b'"\\\\",' * (MAX_VALUES + 1) + b'"x"]}',
        b'{"a":[' + b'"{"' * 2 * MAX_VALUES + b"]}",
    ],
)
def test_too_many_values_are_rejected_before_parsing(data):
    with pytest.raises(
        BadRequest,
        match=f"{MAX_STRUCTURE} objects, lists and members of objects, {MAX_VALUES} values",
    ):
        check_structure(data)


@pytest.mark.parametrize("text", [b"{[:,", b'\\"{', b'\\\\\\"{:', b"\\\\", b"{}"])
def test_brackets_and_commas_inside_strings_are_not_counted(text):
    check_structure(b'{"messages": [{"role": "user", "content": "' + text * MAX_VALUES + b'"}]}')


# --- large requests that wait to be read --------------------------------------------------------


class Client:
    """Sends a request of ``size`` bytes; ``leave`` disconnects."""

    def __init__(self, size=off_loop.LARGE + 1):
        self._has_left = asyncio.Event()
        self.leave = self._has_left.set
        self.call = Call(State(), "", Request({"type": "http"}, self._receive))
        off_loop.admit(self.call, size)

    async def _receive(self):
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    def start(self, work):
        return asyncio.create_task(off_loop.off_loop(self.call, work))


@contextlib.contextmanager
def busy_thread():
    """Keep the thread for large requests busy until the context ends."""
    free = threading.Event()
    blocked = off_loop.thread.submit(free.wait, PATIENCE)
    try:
        yield
    finally:
        free.set()
        assert blocked.result()


def test_large_requests_are_read_in_another_thread():
    async def run():
        client = Client(off_loop.LARGE)
        assert await client.start(threading.current_thread) is threading.main_thread()
        assert await Client().start(threading.current_thread) is not threading.main_thread()

    asyncio.run(run())


def test_queued_work_of_a_disconnected_client_is_dropped_and_freed():
    class Body:
        done = False

        def read(self):
            Body.done = True

    async def run():
        with busy_thread():
            client, body = Client(), Body()
            freed = weakref.ref(body)
            reading = client.start(body.read)
            del body
            await asyncio.sleep(0)
            assert client.call in off_loop.waiting
            client.leave()
            await asyncio.wait([reading])
            assert isinstance(reading.exception(), ClientGone)
            del reading
            gc.collect()
            assert freed() is None, "although the thread is still busy"
            assert not off_loop.waiting
        await Client().start(lambda: None)
        assert not Body.done

    asyncio.run(run())


def test_bytes_of_unfinished_bodies_are_limited(monkeypatch):
    """Small bodies pass, and a body that has ended no longer counts."""
    monkeypatch.setattr(body, "MAX_RECEIVING_BYTES", 100_000)
    rejections = []
    state = State(
        {
            "settings": SimpleNamespace(server=SimpleNamespace(max_body_mb=0.09)),
            "registry": SimpleNamespace(metrics=SimpleNamespace(count_rejection=rejections.append)),
        }
    )

    class Sender:
        def __init__(self):
            self.parts = asyncio.Queue()
            app = SimpleNamespace(state=state)
            request = Request({"type": "http", "headers": [], "app": app}, self.parts.get)
            self.reading = asyncio.create_task(body.read_bytes(request))

        async def send(self, size, *, more=True):
            await self.parts.put({"type": "http.request", "body": b"a" * size, "more_body": more})
            for _ in range(20):
                await asyncio.sleep(0)

    async def run():
        first, second, small = Sender(), Sender(), Sender()
        await first.send(60_000)
        await second.send(60_000)
        assert isinstance(second.reading.exception(), EngineError)
        assert rejections == ["large"]
        await small.send(off_loop.LARGE, more=False)
        assert len(await small.reading) == off_loop.LARGE
        await first.send(10_000, more=False)
        assert len(await first.reading) == 70_000
        assert not body.receiving

    asyncio.run(run())
