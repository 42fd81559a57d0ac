"""Slow clients, early answers, half-closed connections, and more connections than file descriptors."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import uvicorn
from conftest import PATIENCE
from starlette.requests import Request

from cllm.errors import BadRequest
from cllm.server import body
from cllm.server.body import Pace
from cllm.server.http import protocol
from cllm.server.http.connections import Connections
from cllm.server.http.protocol import Protocol

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
LONG = b'{"prompt": "a", "max_tokens": %d, "ignore_eos": true, "stream": %s}'
# seconds in which everything here happens, on a machine that is busy with something else
LIMIT = 20


@contextlib.asynccontextmanager
async def serving(app, connections=None, **options):
    """Yield the address of ``app`` behind ``Protocol``, and the connections. Afterwards nothing
    listens.
    """
    config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none", **options)
    connections = connections or Connections(10)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        accepting = asyncio.create_task(
            connections.accept(
                listener, lambda: Protocol(config=config, server_state=connections, app_state={})
            )
        )
        try:
            async with asyncio.timeout(LIMIT):
                yield listener.getsockname(), connections
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            for connection in list(connections.connections):
                connection.transport.abort()
            await asyncio.gather(*connections.tasks, return_exceptions=True)


def answering(delay=0.0):
    """Return an application that reads the request, waits, and answers."""

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await asyncio.sleep(delay)
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"ok"})

    return app


async def answer_early(scope, receive, send):
    """Answer at once, without reading the body."""
    headers = [(b"content-length", b"2")]
    if scope["state"]["cllm.is_incomplete"]():
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), LIMIT)


def read_all(connection):
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


# --- slow clients -------------------------------------------------------------------------------


def test_slow_head_gets_408(monkeypatch):
    """It is rejected even if bytes keep arriving. Time for an answer, or before the next request,
    does not count.
    """
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT", 0.2)

    async def run():
        async with serving(answering(0.3)) as (address, _):
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(2):
                writer.write(GET)
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
                await asyncio.sleep(0.3)
            writer.write(GET[:-2])
            answer = asyncio.create_task(reader.read(12))
            while not (await asyncio.wait({answer}, timeout=0.05))[0]:
                writer.write(b"a: b\r\n")
            assert await answer == b"HTTP/1.1 408"
            writer.close()

    asyncio.run(run())


def test_head_timeout_of_a_pipelined_request_starts_after_the_answer(monkeypatch):
    """The timeout starts when the previous request has been answered."""
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT", 0.2)

    async def run():
        async with serving(answering(0.3)) as (address, _):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(GET + GET[:-2])
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"okHTTP/1.1 408 " in answer
            writer.close()

    asyncio.run(run())


def test_silent_connection_is_closed():
    async def run():
        async with serving(answering(), timeout_keep_alive=0.1) as (address, _):
            reader, writer = await asyncio.open_connection(*address)
            assert await reader.read() == b""
            writer.close()

    asyncio.run(run())


def test_client_that_does_not_read_its_answer_is_disconnected(monkeypatch):
    """The answer is not kept in memory for it. A client that reads slowly gets the whole answer."""
    monkeypatch.setattr(protocol, "READ_TIMEOUT", 1.0)

    async def large(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(400):
            await send({"type": "http.response.body", "body": bytes(50_000), "more_body": i < 399})

    async def run():
        loop = asyncio.get_running_loop()
        async with serving(large) as (address, connections):
            with socket.socket() as slow, socket.socket() as dead:
                for connection in (slow, dead):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
                    connection.setblocking(False)
                    await loop.sock_connect(connection, address)
                    await loop.sock_sendall(connection, GET[:-2] + b"Connection: close\r\n\r\n")
                size = 0
                while part := await loop.sock_recv(slow, 200_000):
                    size += len(part)
                    await asyncio.sleep(0.01)
                assert size > 400 * 50_000
                while connections.tasks or connections.connections:  # noqa: ASYNC110  # for this alone an event is too much
                    await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("parts", "deadline"),
    [
        ([], 30),
        ([(1, 5), (1, 10), (1, 15)], 30),
        ([(29_999, 29)], 30),
        ([(30_000, 29)], 59),
        ([(10**9, 1)], 31),
        ([(20_000, 10), (20_000, 20)], 40),
        ([(20_000, 10), (20_000, 20), (10_000, 25)], 50),
        ([(1500, t) for t in range(100)], 110),
        ([(30_000, 29), (30_000, 58), (1, 80)], 88),
    ],
)
def test_body_must_deliver_30_000_bytes_in_every_30_seconds(parts, deadline):
    """There is no limit for the total time."""
    pace = Pace(30_000, 30.0)
    for size, when in parts:
        assert when < pace.deadline
        pace.add(size, when)
    assert pace.deadline == deadline


def test_slow_body_gets_408(monkeypatch):
    """A byte now and then does not keep the connection open."""
    monkeypatch.setattr(body, "PACE_WINDOW", 0.2)

    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def read():
        request = Request({"type": "http", "headers": []}, receive)
        async for _ in body.receive_parts(request, 10**9, BadRequest("too large")):
            pass

    with pytest.raises(BadRequest, match="arrives too slowly: less than 30000 bytes") as caught:
        asyncio.run(read())
    assert caught.value.status == 408


def test_time_between_reads_does_not_count_as_slow(monkeypatch):
    """A client is not disconnected because the server is slow to store its upload."""
    monkeypatch.setattr(body, "PACE_WINDOW", 0.2)
    messages = [
        {"type": "http.request", "body": b" ", "more_body": more}
        for more in (False, True, True, True)
    ]

    async def receive():
        return messages.pop()

    async def read():
        request = Request({"type": "http", "headers": []}, receive)
        size = 0
        async for part in body.receive_parts(request, 10**9, BadRequest("too large")):
            size += len(part)
            await asyncio.sleep(0.1)
        return size

    assert asyncio.run(read()) == 4


# --- answers to requests that have not come whole -----------------------------------------------


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 413), ("/nope", 404), ("/v1/files", 415)]
)
def test_early_answer_reaches_a_client_that_still_sends(fake_server, path, status):
    """The server does not reset the connection while the client still sends."""
    size = 30_000_000
    with connect(fake_server) as connection:
        connection.sendall(POST % (path.encode(), size))
        for _ in range(30):
            connection.sendall(bytes(size // 30))
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b"\r\nconnection: close\r\n" in answer.lower()


def test_rejected_request_keeps_its_connection_if_it_is_complete(fake_server):
    with connect(fake_server) as connection:
        connection.sendall(POST % (b"/nope", 2) + b"{}")
        connection.sendall(b"GET /nope HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 404 ") == 2


@pytest.mark.parametrize(
    ("pause", "timeout", "size"), [(0.05, LIMIT, 10**9), (LIMIT, 0.2, 10**9), (LIMIT, LIMIT, 10**6)]
)
def test_discarding_a_rejected_body_is_limited(monkeypatch, pause, timeout, size):
    """The limits are the pause between two parts, the time, and the bytes."""
    monkeypatch.setattr(protocol, "LINGER_PAUSE", min(pause, timeout))
    monkeypatch.setattr(protocol, "LINGER_TIMEOUT", timeout)
    monkeypatch.setattr(protocol, "LINGER_BYTES", size)

    async def run():
        async with serving(answer_early) as (address, connections):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(POST % (b"/", 10**12))
            assert (await reader.read()).endswith(b"\r\n\r\nno")
            with contextlib.suppress(ConnectionError):
                while connections.connections:
                    if pause == LIMIT:
                        writer.write(bytes(100_000))
                        await writer.drain()
                    await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_failing_application_gets_500(version):
    async def fail(scope, receive, send):
        raise RuntimeError

    async def run():
        async with serving(fail) as (address, _):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(GET.replace(b"1.1", version))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 500 ")
            assert answer.endswith(b"\r\n\r\nInternal Server Error")
            writer.close()

    asyncio.run(run())


# --- half-closed connections --------------------------------------------------------------------


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("delay", [0, 0.1])
def test_half_closed_connection_gets_its_answer(fake_server, stream, delay):
    """The client may close its side in the middle of a stream. Only the request is logged."""
    events = fake_server.events
    request = LONG % (60, stream)
    with connect(fake_server) as connection:
        connection.sendall(POST % (b"/v1/completions", len(request)) + request)
        time.sleep(delay)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    answer = answer.replace(protocol.CONTINUE, b"")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"finish_reason":"length"' in answer
    assert fake_server.events == events


def test_half_closed_connection_gets_all_pipelined_answers():
    """The server then closes it."""

    async def run():
        async with serving(answering(0.1)) as (address, connections):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(GET * 3)
            writer.write_eof()
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1 200 ") == 3
            writer.close()
            while connections.connections:  # noqa: ASYNC110  # the protocol tells nobody
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_half_closed_connection_gets_its_answer_and_the_rejection_of_the_next():
    async def run():
        async with serving(answering(0.1)) as (address, connections):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(GET + POST % (b"/", 2) + b"{}" + b"BAD\r\n\r\n")
            writer.write_eof()
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1 200 ") == 2
            assert b"okHTTP/1.1 400 " in answer
            writer.close()
            while connections.connections:  # noqa: ASYNC110  # the protocol tells nobody
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_invalid_body_after_an_early_answer_closes_the_connection():
    """A second answer inside the first one is not possible."""

    async def begin(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run():
        async with serving(begin) as (address, connections):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(
                b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"zz\r\n")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            while connections.connections:  # noqa: ASYNC110  # the protocol tells nobody
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_half_closed_connection_with_an_incomplete_request_is_closed():
    async def run():
        async with serving(answering()) as (address, connections):
            for data in (b"", GET[:-2], POST % (b"/", 10) + b"{"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(data)
                writer.write_eof()
                assert await reader.read() == b""
                writer.close()
            assert not connections.connections

    asyncio.run(run())


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_closed_connection_cancels_its_request(narrow_server, stream):
    """At first a closed connection looks half-closed. Requests that still wait in the queue are
    cancelled too.
    """
    request = LONG % (1000, stream)

    def aborted():
        return narrow_server.metric("request_outcome_total", 'outcome="abort"')

    before = aborted()
    connections = [connect(narrow_server) for _ in range(6)]
    for connection in connections:
        connection.sendall(POST % (b"/v1/completions", len(request)) + request)
    while narrow_server.stats()["num_waiting"] < 2:
        time.sleep(0.01)
    for connection in connections[::-1]:
        connection.close()
    narrow_server.wait_until_idle(LIMIT)
    assert aborted() - before == 6


def test_closed_connection_cancels_the_running_pipelined_request():
    """Pipelined requests are answered one by one; the first one notices the disconnect too."""

    async def run():
        ended = asyncio.get_running_loop().create_future()

        async def waiting(scope, receive, send):
            await receive()
            ended.set_result((await receive())["type"])

        async with serving(waiting) as (address, connections):
            _, writer = await asyncio.open_connection(*address)
            writer.write(GET * 2)
            while not connections.tasks:  # noqa: ASYNC110  # the protocol tells nobody
                await asyncio.sleep(0.01)
            writer.transport.abort()
            assert await ended == "http.disconnect"

    asyncio.run(run())


# --- file descriptors ---------------------------------------------------------------------------


def test_longest_idle_connection_is_closed_for_a_new_one():
    async def run():
        async with serving(answering(), Connections(3)) as (address, connections):
            opened = []
            for _ in range(8):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(GET)
                await reader.readuntil(b"ok")
                assert len(connections.connections) <= 3
                opened.append((reader, writer))
            assert await opened[0][0].read() == b""
            reader, writer = opened[-1]
            writer.write(GET)
            await reader.readuntil(b"ok")
            for _, writer in opened:
                writer.close()

    asyncio.run(run())


def test_new_connections_wait_while_all_are_busy():
    """No connection is closed or rejected."""

    async def ask(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(GET)
        answer = await reader.readuntil(b"ok")
        writer.close()
        return answer

    async def run():
        async with serving(answering(0.05), Connections(2)) as (address, _):
            answers = await asyncio.gather(*(ask(address) for _ in range(10)))
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)

    asyncio.run(run())


@pytest.mark.slow
def test_120_idle_connections_fit_64_file_descriptors(start_server):
    """The server answers, and can restart a dead engine."""
    server = start_server("--backend.name", "fake", max_files=64)
    idle = [connect(server) for _ in range(120)]
    assert server.client.get("/health").json()["status"] == "healthy"
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    os.kill(server.engine_pid(), signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while not server.metric("engine_restarts_total"):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert server.client.post("/v1/chat/completions", json=chat).status_code == 200
    assert "Too many open files" not in server.log
    for connection in idle:
        connection.close()


def test_soft_limit_of_open_files_is_raised():
    """It is raised to the hard limit, up to a maximum."""
    code = (
        "import resource; from cllm.server.http.connections import raise_descriptor_limit;"
        "print(raise_descriptor_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = ["sh", "-c", f"ulimit -Sn 64; exec {sys.executable} -c '{code}'"]
    raised, soft, hard = map(
        int, subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()
    )
    assert raised == soft == (min(hard, 65_536) if hard >= 0 else 65_536)


@pytest.mark.slow
def test_clients_that_never_read_do_not_stop_a_reader_from_another_address(start_server):
    """Their requests yield their places soon after the system's buffers are full."""
    server = start_server("--backend.name", "fake", "--context", "32768", "--max-num-seqs", "8")
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    endless = {"prompt": "a", "max_tokens": 30_000, "stream": True, "ignore_eos": True}

    def send(source: str, number: int, **more: object) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((source, 0))
        connection.connect(address)
        content = json.dumps({**endless, **more, "seed": number, "temperature": 1}).encode()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            b"\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)
        )
        return connection

    silent = [send("127.0.0.1", i) for i in range(200)]
    try:
        end = time.monotonic() + PATIENCE
        while server.stats()["num_running"] < 8:
            assert time.monotonic() < end
            time.sleep(0.01)
        reader = send("127.0.0.2", 1000, max_tokens=20)
        reader.settimeout(PATIENCE)
        answer = b""
        while not answer.endswith(b"0\r\n\r\n"):
            answer += reader.recv(65_536)
        assert b"[DONE]" in answer
        reader.close()
        stats = server.stats()
        assert stats["num_running"] + stats["num_waiting"] > 150
        # it did not have to wait until the silent ones were cut off
        assert server.metric("request_outcome_total", 'outcome="abort"') == 0
    finally:
        for connection in silent:
            connection.close()
    server.wait_until_idle()
