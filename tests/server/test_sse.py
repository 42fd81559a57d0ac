"""Streams and plain answers end with their clients. Work starts at once, and becomes a task only if
it has to wait.
"""

import asyncio
from typing import Any

import pytest

from cllm.observe.request_record import RequestRecord
from cllm.server.http import sse
from cllm.server.http.sse import (
    HEARTBEAT_BYTES,
    PROBE,
    ClientGone,
    EventStream,
    begin,
    streaming,
    until_disconnect,
)


def test_work_that_never_waits_needs_no_task():
    done = []

    async def work():
        done.append(1)

    async def test():
        assert begin(work()) is None
        assert done == [1]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(test())


def test_error_before_the_first_wait_is_raised_at_once():
    async def work():
        raise OSError("gone")

    async def test():
        with pytest.raises(OSError, match="gone"):
            begin(work())

    asyncio.run(test())


def test_waiting_work_continues_in_a_task_when_its_future_is_done():
    """The work gets the results of its futures, and does not run before they are done."""
    seen = []

    async def test():
        futures = [asyncio.get_running_loop().create_future() for _ in range(3)]

        async def work():
            for future in futures:
                result = await future
                seen.append(result)

        task = begin(work())
        for i, future in enumerate(futures):
            await asyncio.sleep(0.01)
            assert seen == list(range(i))
            future.set_result(i)
        await task
        assert seen == [0, 1, 2]

    asyncio.run(test())


def test_error_of_a_future_reaches_the_work_and_its_task():
    async def test():
        future = asyncio.get_running_loop().create_future()

        async def work():
            try:
                await future
            except OSError as error:
                raise ValueError("the work has seen it") from error

        task = begin(work())
        future.set_exception(OSError("gone"))
        with pytest.raises(ValueError, match="has seen it"):
            await task

    asyncio.run(test())


def test_cancelled_task_closes_the_work():
    """Its ``finally`` runs, and no callback remains on the future."""
    closed = []

    async def test():
        future = asyncio.get_running_loop().create_future()

        async def work():
            try:
                await future
            finally:
                closed.append(True)

        task = begin(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed == [True]
        assert not future.cancelled()

    asyncio.run(test())


# --- streams ------------------------------------------------------------------------------------


class FakeAnswer:
    """Chunks from the test; each is a list of deltas or an error."""

    delivered = None

    def __init__(self, *chunks) -> None:
        self.chunks = list(chunks)
        self.record = RequestRecord()
        self.finished = False
        self.is_closed = False
        self.on_news: Any = None

    def listen(self, on_news) -> None:
        self.on_news = on_news

    def put(self, chunk, *, last: bool = False) -> None:
        self.chunks.append(chunk)
        self.finished = last
        self.on_news()

    def take(self):
        """Return what arrived since the last call, as one list."""
        if not self.chunks:
            return None
        chunks, self.chunks = self.chunks, []
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
        return [delta for chunk in chunks for delta in chunk]

    def close(self) -> None:
        self.is_closed = True


class Lines:
    """A dialect with readable events."""

    def begin(self) -> bytes:
        return b"<"

    def deltas(self, deltas) -> bytes:
        return ("+".join(deltas) + ",").encode()

    def end(self) -> bytes:
        return b">"

    def fault(self, error: Exception) -> bytes:
        return f"!{error}!".encode()


class Client:
    """The other end of a stream. It reads while ``reads`` is set."""

    def __init__(self) -> None:
        self.messages = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message) -> None:
        await self.reads.wait()
        self.messages.append(message)

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:]]

    @property
    def more(self) -> list[bool]:
        return [message["more_body"] for message in self.messages[1:]]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def stream(test, answer: FakeAnswer, scope=None, **options) -> Client:
    """Run ``test(client, scope)`` alongside a stream until both have ended."""

    async def run() -> Client:
        client = Client()
        called = {"type": "http", "state": {}} if scope is None else scope
        response = EventStream(answer, Lines(), {"x-mine": "1"}, **options)
        running = asyncio.create_task(response(called, client.receive, client.send))
        await settle()
        await test(client, called)
        await asyncio.wait_for(running, 10)
        return client

    client = asyncio.run(run())
    assert answer.is_closed
    assert answer.on_news is None
    return client


def test_stream_sends_all_deltas_and_then_the_end():
    answer = FakeAnswer(["a", "b"])

    async def test(client, scope) -> None:
        assert client.bodies == [b"<", b"a+b,"]
        answer.put(["c"])
        assert client.bodies[2:] == [b"c,"], "in the call that delivers it"
        answer.put(["d"], last=True)

    client = stream(test, answer)
    assert client.bodies == [b"<", b"a+b,", b"c,", b"d,>"]
    assert client.more == [True, True, True, False]
    start = client.messages[0]
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    headers = dict(start["headers"])
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"x-mine"] == b"1"
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers


def test_deltas_without_text_send_nothing():
    answer = FakeAnswer()

    async def test(client, scope) -> None:
        answer.put([])
        answer.put([], last=True)

    assert stream(test, answer).bodies == [b"<", b">"]


def test_late_error_is_sent_in_the_stream_and_ends_it():
    answer = FakeAnswer()

    async def test(client, scope) -> None:
        answer.put(["a"])
        answer.put(ValueError("broken"))
        answer.put(["after the end"])

    client = stream(test, answer)
    assert client.bodies == [b"<", b"a,", b"!broken!"]
    assert client.more == [True, True, False]


def test_deltas_are_merged_while_the_client_does_not_read():
    answer = FakeAnswer()

    async def test(client, scope) -> None:
        client.reads.clear()
        for delta in "abc":
            answer.put([delta])
        assert client.bodies == [b"<"]
        client.reads.set()
        await settle()
        assert client.bodies == [b"<", b"a,", b"b+c,"]
        answer.put(["d"], last=True)

    assert stream(test, answer).bodies[-1] == b"d,>"


def test_disconnect_ends_the_stream_and_closes_the_answer():
    answer = FakeAnswer(["a"])

    async def test(client, scope) -> None:
        client.gone.set()

    client = stream(test, answer)
    assert client.bodies == [b"<", b"a,"]
    assert client.more == [True, True], "nobody reads an end"


def test_disconnect_of_a_client_that_does_not_read_ends_the_stream():
    answer = FakeAnswer()

    async def test(client, scope) -> None:
        client.reads.clear()
        answer.put(["a"])
        client.gone.set()

    assert stream(test, answer).bodies == [b"<"]


@pytest.mark.parametrize("waits", [False, True])
def test_write_error_is_raised(waits):
    answer = FakeAnswer()

    class Reset(Client):
        async def send(self, message) -> None:
            if len(self.messages) == 2:
                if waits:
                    await asyncio.sleep(0.01)
                raise OSError("reset")
            await super().send(message)

    async def run() -> None:
        client = Reset()
        response = EventStream(answer, Lines(), {})
        running = asyncio.create_task(response({"type": "http"}, client.receive, client.send))
        await settle()
        answer.put(["a"])
        with pytest.raises(OSError, match="reset"):
            await asyncio.wait_for(running, 10)

    asyncio.run(run())
    assert answer.is_closed


@pytest.mark.parametrize("heartbeat", [b": ping\n\n", b" "])
def test_heartbeats_are_sent_while_nothing_else_is(heartbeat, monkeypatch):
    """Heartbeats stop at the end of the stream."""
    monkeypatch.setattr(sse, "HEARTBEAT", 0.02)
    answer = FakeAnswer()

    async def test(client, scope) -> None:
        for _ in range(1000):
            if client.bodies.count(heartbeat) < 2:
                await asyncio.sleep(0.01)
        answer.put(["a"], last=True)

    client = stream(test, answer, heartbeat=heartbeat)
    assert client.bodies[0] == b"<"
    assert set(client.bodies[1:-1]) == {heartbeat}
    assert client.bodies[-1] == b"a,>"


def test_probe_writes_a_heartbeat_unless_a_write_is_waiting():
    answer = FakeAnswer()
    scope = {"type": "http", "state": {}}

    async def test(client, called) -> None:
        called["state"][PROBE]()
        assert client.bodies == [b"<", HEARTBEAT_BYTES]
        client.reads.clear()
        answer.put(["a"])
        called["state"][PROBE]()
        client.reads.set()
        await settle()
        assert client.bodies == [b"<", HEARTBEAT_BYTES, b"a,"]
        answer.put([], last=True)

    stream(test, answer, scope)


def test_stream_bypasses_the_middleware():
    """The middleware sees the start of the answer; the server sees all of it."""
    layer, server, answer = [], Client(), FakeAnswer(["a"])
    answer.finished = True

    async def app(scope, receive, send) -> None:
        async def seen(message) -> None:
            layer.append(message["type"])
            await send(message)

        await EventStream(answer, Lines(), {})(scope, receive, seen)

    asyncio.run(streaming(app)({"type": "http"}, server.receive, server.send))
    assert layer == ["http.response.start"]
    assert [message["type"] for message in server.messages] == [
        "http.response.start",
        "http.response.body",
        "http.response.body",
    ]


# --- plain answers ------------------------------------------------------------------------------


class Asked:
    """A request whose client disconnects after ``messages`` parts of its body."""

    def __init__(self, messages: int | None) -> None:
        self.left = messages

    async def receive(self):
        if self.left is None:
            await asyncio.Event().wait()
        if self.left:
            self.left -= 1
            return {"type": "http.request"}
        return {"type": "http.disconnect"}


def test_work_returns_its_result_if_the_client_stays():
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    assert asyncio.run(until_disconnect(Asked(None), work())) == 3


def test_work_raises_its_error_if_the_client_stays():
    async def work() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        asyncio.run(until_disconnect(Asked(None), work()))


def test_disconnect_is_noticed_by_work_within_and_after_other_work():
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    async def wait(request) -> None:
        assert await until_disconnect(request, work()) == 3
        await until_disconnect(request, asyncio.Event().wait())

    async def main() -> None:
        request = Asked(10)
        with pytest.raises(ClientGone):
            await until_disconnect(request, wait(request))
        with pytest.raises(ClientGone):
            await wait(request)

    asyncio.run(main())


def test_work_is_cancelled_when_its_client_disconnects():
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(ClientGone):
        asyncio.run(until_disconnect(Asked(2), work()))
    assert ended == [True]
