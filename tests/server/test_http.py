"""HTTP itself: methods, heads without end, clients that are slow to speak."""

import asyncio
import json
import socket
import time

import pytest
import uvicorn
from starlette.requests import Request
from uvicorn.server import ServerState

from cllm.errors import BadRequest
from cllm.server import body, http_protocol

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


def read_all(connection):
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/docs", "/api/version", "/api/tags", "/nope"])
def test_head_is_get_without_a_body(fake_server, path):
    head, get = fake_server.client.head(path), fake_server.client.get(path)
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/completions", "POST"), ("PUT", "/v1/files", "GET, POST"), ("OPTIONS", "/v1/files/a", "DELETE, GET")],
)
def test_a_wrong_method_is_told_which_ones_there_are(fake_server, method, path, allowed):
    answer = fake_server.client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_nobody_is_sent_elsewhere(fake_server):
    """A redirect would go where the client's own Host header says."""
    answer = fake_server.client.post("/v1/completions/", json={"prompt": "a"}, headers={"host": "evil.example"})
    assert answer.status_code == 404
    assert "location" not in answer.headers


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        HEAD + b"Content-Length: -4\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_400_in_the_usual_form(fake_server, data):
    with connect(fake_server) as connection:
        connection.sendall(data)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}


def test_a_head_without_end_is_refused(fake_server):
    """Instead of being kept in memory until there is none; also behind a request that is being answered."""
    body = b'{"prompt": "a", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    for before in (b"", HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)):
        with connect(fake_server) as connection, pytest.raises(OSError):  # noqa: PT012  # sooner or later
            connection.sendall(before + HEAD)
            for _ in range(1000):
                connection.sendall(b"x-more: " + b"y" * 10_000 + b"\r\n")
                time.sleep(0.001)
    with connect(fake_server) as connection:
        connection.sendall(HEAD + b"x-large: ")
        time.sleep(0.1)
        connection.sendall(b"y" * 70_000)
        assert connection.recv(100).startswith(b"HTTP/1.1 431 ")


def test_requests_may_come_in_any_pieces_and_before_they_are_asked_for(fake_server):
    body = b'{"prompt": "a", "max_tokens": 2}'
    request = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    for size in (1, 7, len(request) + 5, 3 * len(request)):
        with connect(fake_server) as connection:
            data = request + b"\r\n" + request + request.replace(b"Host", b"Connection: close\r\nHost")
            for i in range(0, len(data), size):
                connection.sendall(data[i : i + size])
            assert read_all(connection).count(b"HTTP/1.1 200 ") == 3


def test_a_body_is_no_head(fake_server):
    """Whatever part of it comes at once, on a connection that has served before."""
    for size in (60_000, 200_000, 900_000):
        answer = fake_server.client.post("/encode", json={"text": "a" * size})
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(0.3)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def test_a_head_that_does_not_come_to_its_end_is_408(monkeypatch):
    """However steadily it comes; an answer may take as long as it takes, and so may the next request."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT", 0.2)
    asyncio.run(speak_slowly())


async def speak_slowly():
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=1)
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(
        lambda: http_protocol.Protocol(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
    )
    async with listening:
        port = listening.sockets[0].getsockname()[1]

        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await asyncio.wait_for(reader.readuntil(b"ok"), 5)).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(0.3)
        writer.write(b"GET / HTTP/1.1\r\n")
        answer = asyncio.create_task(reader.read(12))
        for _ in range(20):
            if (await asyncio.wait({answer}, timeout=0.05))[0]:
                break
            writer.write(b"a: b\r\n")
        assert await answer == b"HTTP/1.1 408"
        writer.close()

        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(), 5) == b"", "who says nothing is not kept"
        writer.close()


async def large(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for i in range(400):
        await send({"type": "http.response.body", "body": bytes(50_000), "more_body": i < 399})


def test_who_does_not_read_his_answer_is_left(monkeypatch):
    """It is not kept for him; who reads slowly gets all of it, however long that takes."""
    monkeypatch.setattr(http_protocol, "READ_TIMEOUT", 0.2)
    asyncio.run(read_slowly())


async def read_slowly():
    config, state = uvicorn.Config(large, lifespan="off", log_config=None), ServerState()
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(
        lambda: http_protocol.Protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with listening:
        address = listening.sockets[0].getsockname()
        with socket.socket() as slow, socket.socket() as dead:
            for connection in (slow, dead):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
                connection.setblocking(False)
                await loop.sock_connect(connection, address)
                await loop.sock_sendall(connection, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            size = 0
            while part := await loop.sock_recv(slow, 200_000):
                size += len(part)
                await asyncio.sleep(0.01)
            assert size > 400 * 50_000
            assert not state.tasks
            assert not state.connections


def test_a_body_that_does_not_come_is_408(monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT", 0.05)
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive():
        return pieces.pop() if pieces else await asyncio.Future()

    async def read():
        request = Request({"type": "http", "headers": []}, receive)
        async for _ in body.parts_of(request, 100, BadRequest("too large")):
            pass

    with pytest.raises(BadRequest, match="Nothing of the body") as caught:
        asyncio.run(read())
    assert caught.value.status == 408
