"""The load client's HTTP code, against small servers that each do one thing."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import PATIENCE, repeat
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.client import Client, Endpoint, find_model, open_connections
from cllm.bench.load.workload import Task
from cllm.errors import StartupError
from cllm.http_connection import Connection, HTTPClient, Response

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

# Of nobody, for 127.0.0.1, until 2120.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg8JnoKSb3KKfceZKx
xlKPsPFB7x/gDw9ya7p/lW0Q8qehRANCAASXUKGfymbI/FJjuN4nXCe9tS2TfK+O
GyMvYKM3tpyEAu0s9TSDjYkcTS5i8lGKfLJFSdeDJp5EeisHLxdFW0nw
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBbDCCARKgAwIBAgIBATAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABJdQoZ/KZsj8UmO4
3idcJ721LZN8r44bIy9goze2nIQC7Sz1NIONiRxNLmLyUYp8skVJ14MmnkR6Kwcv
F0VbSfCjUzBRMA8GA1UdEQQIMAaHBH8AAAEwDwYDVR0TAQH/BAUwAwEB/zAdBgNV
HQ4EFgQUZi+R6CdbSAZi6oEFbPcKRPqJG84wDgYDVR0PAQH/BAQDAgKEMAoGCCqG
SM49BAMCA0gAMEUCIBpiEixB/FpY601xIBt3kxVJSVSZWPlbfFGsdw2/zIvXAiEA
qQAecob2BkIbIJGILgQyLbdaE/YIQV8XyOnB7LwJWDI=
-----END CERTIFICATE-----
"""

BODY = b"".join(
    b"data: " + json.dumps(event).encode() + b"\n\n"
    for event in (
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
    )
)
FIELDS = b"x: y\r\n" * 200_000
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def with_length(body: bytes, status: str = "200 OK", *fields: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join([*head, "", ""]).encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.fixture(params=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Return a runner for each event loop that the client supports."""
    factory = None if request.param == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        yield runner


@asynccontextmanager
async def serving(
    script: Script, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[str]:
    """Yield the URL of a server that runs ``script`` on every connection and then closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client went away, or the test is over
        finally:
            writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    address, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"{'https' if tls else 'http'}://{f'[{address}]' if ':' in address else address}:{port}"
    finally:
        server.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(
        (int(line[15:]) for line in head.splitlines() if line.startswith("Content-Length:")), 0
    )
    return head, await reader.readexactly(length)


def sends(*pieces: bytes, then: float = 0.0) -> Script:
    """Answer every request with the pieces, each in its own packet, and wait ``then`` seconds
    before closing.
    """

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        await asyncio.sleep(then)

    return script


async def ask(url: str, task: Task | None = None, **options: float) -> TimedAnswer:
    target = Endpoint(url, **options)
    with closing(open_connections(target)) as server:
        answer = TimedAnswer(task or Task(b"{}", 2, "ab"), 0.0)
        await Client(server, target).read(answer)
        return answer


def asked(
    runner: asyncio.Runner, script: Script, task: Task | None = None, **options: float
) -> TimedAnswer:
    async def test() -> TimedAnswer:
        async with serving(script) as url:
            return await ask(url, task, **options)

    return runner.run(test())


# Framing.


@pytest.mark.parametrize(
    "pieces",
    [
        [with_length(BODY)],
        [with_length(BODY)[:20], with_length(BODY)[20:90], with_length(BODY)[90:]],
        [CHUNKED, chunk(BODY), b"0\r\n\r\n"],
        [
            CHUNKED
            + b"5;name=value\r\n"
            + BODY[:5]
            + b"\r\n"
            + chunk(BODY[5:])
            + b"0\r\nTrailer: x\r\n\r\n"
        ],
        [b"HTTP/1.1 200 OK\r\n\r\n", BODY],
        [b"HTTP/1.0 200 OK\r\n\r\n" + BODY],
        [b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n" + chunk(BODY), b"0\r\n\r\n"],
        [b"HTTP/1.1 100 Continue\r\n\r\n" + with_length(BODY)],
    ],
)
def test_body_is_read_for_each_framing(runner: asyncio.Runner, pieces: list[bytes]) -> None:
    """The body has a length, comes in chunks, or ends when the connection is closed."""
    answer = asked(runner, sends(*pieces))
    assert (answer.failure, answer.output_tokens, len(answer.content_times)) == ("", 2, 2)


class Pipe(asyncio.Transport):
    """A connection to which the test feeds an answer by hand, without an event loop."""

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return False


@settings(max_examples=repeat(60, 15), deadline=None)
@given(cuts=st.lists(st.integers(0, 400)), sizes=st.lists(st.integers(1, 60), max_size=8))
def test_chunks_split_anywhere_are_joined(cuts: list[int], sizes: list[int]) -> None:
    """The body does not depend on where the server cuts chunks or where the network cuts packets."""

    async def test() -> None:
        connection = Connection()
        connection.connection_made(Pipe())
        found: list[bytes] = []
        work = asyncio.create_task(
            connection.exchange(b"", lambda data, now: found.append(data) is not None)
        )
        await asyncio.sleep(0)
        rest, stream = BODY, CHUNKED
        for size in sizes:
            stream += chunk(rest[:size]) if rest else b""
            rest = rest[size:]
        stream += (chunk(rest) if rest else b"") + b"0\r\n\r\n"
        places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
        for start, end in pairwise(places):
            if start < end:
                connection.data_received(stream[start:end])
        response = await work
        assert (response.status, b"".join(found), connection.reusable) == (200, BODY, True)

    asyncio.run(test())


def test_request_on_a_connection_that_was_closed_meanwhile_raises_connection_error() -> None:
    connection, transport = Connection(), Mock()
    connection.connection_made(transport)
    transport.is_closing.return_value = True
    transport.write.side_effect = RuntimeError("the handler is closed")
    with pytest.raises(ConnectionError):
        asyncio.run(connection.exchange(b"GET / HTTP/1.1\r\n\r\n", None))
    assert not connection.reusable


def test_body_is_not_written_to_a_connection_that_was_closed_meanwhile() -> None:
    connection, transport = Connection(), Mock()
    connection.connection_made(transport)
    transport.is_closing.return_value = True
    transport.write.side_effect = RuntimeError("the handler is closed")
    asyncio.run(connection.write(b"more"))
    transport.write.assert_not_called()


def test_events_of_one_packet_share_arrival_time(runner: asyncio.Runner) -> None:
    answer = asked(runner, sends(CHUNKED + chunk(BODY[:100]) + chunk(BODY[100:]) + b"0\r\n\r\n"))
    assert answer.content_times[0] == answer.content_times[1] > answer.sent


# Failures.


@pytest.mark.parametrize(
    ("script", "reason", "detail"),
    [
        (sends(with_length(BODY)[:-5]), "connection lost", "before the end of the answer"),
        (sends(CHUNKED, chunk(BODY)), "connection lost", "before the end of the answer"),
        (sends(b"HTTP/1.1 200"), "connection lost", "before the end of the answer"),
        (sends(), "connection lost", "before the end of the answer"),
        (sends(b"\x16\x03\x01 hello\r\n\r\n"), "broken HTTP", "hello"),
        (sends(CHUNKED, b"nonsense\r\n"), "broken HTTP", "nonsense"),
        (
            sends(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n"),
            "broken HTTP",
            "Content-Length",
        ),
        (
            sends(b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"),
            "broken HTTP",
            "websocket",
        ),
        (sends(b"HTTP/1.1 200 OK\r\n" + FIELDS), "broken HTTP", "does not end"),
        (sends(CHUNKED, chunk(BODY), b"0\r\n" + FIELDS), "broken HTTP", "does not end"),
        (sends(with_length(BODY, "302 Found", "Location: /")), "HTTP 302", "data"),
        (sends(with_length(b"", "204 No Content")), "HTTP 204", ""),
        (sends(with_length(b"too much", "500 Oh")), "HTTP 500", "too much"),
        (sends(b"HTTP/1.1 500 Oh\r\nContent-Length: 9\r\n\r\nhalf"), "HTTP 500", "half"),
        (sends(b"HTTP/1.1 500 Oh\r\n\r\n" + b"x" * 5000, then=5), "HTTP 500", "xxx"),
        (sends(CHUNKED, chunk(BODY), then=5), "timeout", ""),
        (sends(then=5), "timeout", ""),
    ],
)
def test_broken_responses_raise_with_reason(
    runner: asyncio.Runner, script: Script, reason: str, detail: str
) -> None:
    """Any bytes from the server lead to a result or to an error with a reason."""
    answer = asked(runner, script, timeout=0.2 if reason == "timeout" else PATIENCE)
    assert answer.failure == reason
    assert detail in answer.detail


def test_refused_connection_is_reported(runner: asyncio.Runner) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        port = taken.getsockname()[1]
        answer = runner.run(ask(f"http://127.0.0.1:{port}"))
    assert answer.failure == "cannot connect"
    assert answer.detail == f"cannot connect to 127.0.0.1:{port}: Connection refused"
    assert runner.run(ask("http://name.invalid")).failure == "cannot connect"


@pytest.mark.parametrize(
    "url", ["", "host", "ftp://host", "http://", "http://:80", "http://host:99999", "http://a..b"]
)
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(ValueError):
        HTTPClient(url, {})


def test_other_protocol_is_reported() -> None:
    """The error is one readable line."""

    async def test() -> None:
        async with serving(sends(b"SSH-2.0-OpenSSH\r\n")) as url:
            await asyncio.to_thread(find_model, Endpoint(url))

    with pytest.raises(StartupError, match=r"cannot be measured: broken HTTP: .*SSH-2.0-OpenSSH"):
        asyncio.run(test())


def test_client_bug_is_raised(runner: asyncio.Runner) -> None:
    def feed(data: bytes, now: float) -> bool:
        raise ZeroDivisionError

    async def test() -> None:
        async with serving(sends(with_length(BODY))) as url:
            with closing(HTTPClient(url, {})) as server:
                await server.request("/", b"{}", feed)

    with pytest.raises(ZeroDivisionError):
        runner.run(test())


# Connections.


class Counting:
    """Answers each request with the next piece. Counts connections and records requests."""

    def __init__(self, *pieces: bytes, closes: bool = False) -> None:
        self.pieces = iter(pieces)
        self.closes = closes  # after each answer, unsaid
        self.heads: list[str] = []
        self.num_connections = self.num_ended = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head, _ = await read_request(reader)
                self.heads.append(head)
                writer.write(piece := next(self.pieces, b""))
                if self.closes or not piece:
                    return
        finally:
            self.num_ended += 1


def requested(
    runner: asyncio.Runner, script: Counting, count: int, *, pause: float = 0.0, **options: bool
) -> None:
    async def test() -> None:
        async with serving(script) as url:
            with closing(HTTPClient(url, {}, **options)) as server:
                for _ in range(count):
                    assert (await server.request("/v1", b"{}")).body == b"good"
                    await asyncio.sleep(pause)
            await asyncio.sleep(0.02)

    runner.run(test())


@pytest.mark.parametrize(
    ("pieces", "num_connections"),
    [
        ([with_length(b"good")] * 3, 1),
        ([CHUNKED + chunk(b"good") + b"0\r\n\r\n"] * 3, 1),
        ([with_length(b"good", "200 OK", "Connection: close")] * 3, 3),
        ([with_length(b"good").replace(b"1.1", b"1.0")] * 3, 3),
        ([with_length(b"good") + b"and garbage"] * 3, 3),
        ([with_length(b"good") + with_length(b"bad")] * 3, 3),
    ],
)
def test_connections_are_reused(
    runner: asyncio.Runner, pieces: list[bytes], num_connections: int
) -> None:
    """A connection is not reused if a side sends "close", or if the server sent more than the
    answer.
    """
    script = Counting(*pieces)
    requested(runner, script, 3)
    assert (script.num_connections, script.num_ended) == (num_connections, num_connections)


def test_keep_alive_can_be_disabled(runner: asyncio.Runner) -> None:
    script = Counting(*[with_length(b"good")] * 3)
    requested(runner, script, 3, keep_alive=False)
    assert (script.num_connections, script.num_ended) == (3, 3)
    assert all("Connection: close\r\n" in head for head in script.heads)


def test_closed_idle_connection_is_replaced(runner: asyncio.Runner) -> None:
    """The client notices the closed connection before it sends the next request."""
    script = Counting(*[with_length(b"good")] * 3, closes=True)
    requested(runner, script, 3, pause=0.02)
    assert (script.num_connections, len(script.heads)) == (3, 3)


def test_request_is_never_sent_twice(runner: asyncio.Runner) -> None:
    """A request that the server may have received fails if its connection breaks."""
    script = Counting(with_length(b"good"))

    async def test() -> None:
        async with serving(script) as url:
            with closing(HTTPClient(url, {})) as server:
                await server.request("/", b"{}")
                with pytest.raises(ConnectionError):
                    await server.request("/", b"{}")

    runner.run(test())
    assert (script.num_connections, len(script.heads)) == (1, 2)


@pytest.mark.parametrize("seconds", [5.0, 0.1])
def test_server_sees_client_disconnect(runner: asyncio.Runner, seconds: float) -> None:
    """The client closes the connection when the task asks for it, or when time is up."""
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED + chunk(BODY[:100]))
        assert await reader.read() == b""
        gone.set()

    async def test() -> TimedAnswer:
        async with serving(script) as url:
            answer = await ask(
                url, Task(b"{}", 2, cancel_after=1 if seconds > 1 else None), timeout=seconds
            )
            await asyncio.wait_for(gone.wait(), PATIENCE)
            return answer

    answer = runner.run(test())
    assert (answer.cancelled, answer.failure) == ((True, "") if seconds > 1 else (False, "timeout"))


# What is sent.


def test_request_has_expected_bytes(runner: asyncio.Runner) -> None:
    """The whole request is compared. Its path begins with the path of the URL."""
    requests: list[tuple[str, bytes]] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            requests.append(await read_request(reader))
            writer.write(with_length(b"good", "200 OK", "Retry-After: 7"))

    async def test() -> Response:
        async with serving(script) as url:
            with closing(open_connections(Endpoint(f"{url}/a b/", "kéy"))) as server:
                await server.request("/v1/models")
                return await server.request("/v1/chat", b"{}")

    assert runner.run(test()).headers[b"retry-after"] == b"7"
    (get, _), (post, body) = requests
    assert get.splitlines()[0] == "GET /a%20b/v1/models HTTP/1.1"
    assert "Content-Length" not in get
    assert post.splitlines()[0] == "POST /a%20b/v1/chat HTTP/1.1"
    assert body == b"{}"
    for line in (
        "Host: 127.0.0.1:",
        "Accept-Encoding: identity\r\n",
        "Authorization: Bearer kéy\r\n",
    ):
        assert line in post
    assert "Content-Type: application/json\r\n" in post


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_ipv6_address_is_supported(runner: asyncio.Runner) -> None:
    script = Counting(with_length(BODY))

    async def test() -> TimedAnswer:
        async with serving(script, host="::1") as url:
            assert "[::1]:" in url
            return await ask(url)

    try:
        assert runner.run(test()).failure == ""
    except OSError:
        pytest.skip("no IPv6")
    assert "Host: [::1]:" in script.heads[0]


# TLS.


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "certificate.pem"
    path.write_text(CERTIFICATE)
    return path


def tls_with(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_tls_connection_works(
    runner: asyncio.Runner, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is verified, and the connection is reused."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    script = Counting(with_length(b"good"), with_length(BODY))

    async def test() -> None:
        async with serving(script, tls_with(certificate)) as url:
            with closing(HTTPClient(url, {})) as server:
                assert (await server.request("/")).body == b"good"
                assert (await server.request("/")).body == BODY

    runner.run(test())
    assert script.num_connections == 1


def test_untrusted_certificate_is_rejected(runner: asyncio.Runner, certificate: Path) -> None:
    async def test() -> TimedAnswer:
        async with serving(sends(with_length(BODY)), tls_with(certificate)) as url:
            return await ask(url)

    answer = runner.run(test())
    assert answer.failure == "cannot connect"
    assert "its certificate is not trusted: self" in answer.detail


def test_https_to_plain_server_is_reported(runner: asyncio.Runner) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read(1)

    async def test() -> TimedAnswer:
        async with serving(script) as url:
            return await ask(url.replace("http:", "https:"))

    answer = runner.run(test())
    assert answer.failure == "cannot connect"
    assert "no TLS: " in answer.detail
