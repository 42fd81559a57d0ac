"""Replicas that die, refuse, hang or lie: what their front does, and what clients see."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from cluster.conftest import KEY, start_front
from conftest import PATIENCE
from fake_replica import (
    DONE,
    FakeReplica,
    answer,
    chunk,
    closes,
    make_lease,
    sends,
    stream_head,
)
from server.conftest import Server, starter

from cllm.cluster.ask import ask
from cllm.cluster.leases import Replicas
from cllm.config.settings import Settings
from cllm.routing.router import Router
from cllm.server.cluster.key import ClusterKey

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
CHAT_PATH = "/v1/chat/completions"
EVENT = b'data: {"a": 1}\n\n'


class Cluster:
    """Fake replicas ``a`` and ``b``, and a front."""

    def __init__(self, start: Callable[..., Server], count: int = 2, *options: str) -> None:
        self.replicas = [FakeReplica(name) for name in "abcdef"[:count]]
        self.front = start_front(
            start,
            *(one.url for one in self.replicas),
            options=["--cluster.lease-seconds", "1.5", *options],
        )

    def post(self, path: str = CHAT_PATH, **body: Any) -> Any:
        return self.front.client.post(path, json=body or CHAT)

    def next_steps(self, *steps: Any) -> None:
        """Let both replicas answer the next requests like this, whichever gets them."""
        shared = [*steps]
        for one in self.replicas:
            one.steps = shared

    def received(self) -> list[str]:
        """Return the names of the replicas that got requests, in their order."""
        return [one.name for one in self.replicas for _ in one.received]

    def metric(self, name: str) -> float:
        page = self.front.client.get("/metrics").text
        return sum(
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith(f"cllm:front_{name}")
        )

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        end = time.monotonic() + PATIENCE
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.02)

    def wait_for_listed(self, count: int) -> None:
        self.wait(lambda: self.metric('replicas{state="listed"}') == count)

    def close(self) -> None:
        for one in self.replicas:
            one.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    starting = starter()
    made = Cluster(next(starting))
    yield made
    made.close()
    next(starting, None)


SHORT = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"


@pytest.mark.parametrize(
    "first",
    [closes, sends(b"HTTP/1.1 200 OK\r\ncont"), sends(SHORT), sends(b"no HTTP\r\n\r\n")],
    ids=["no-byte", "half-a-head", "half-a-body", "no-http"],
)
def test_request_whose_replica_dies_before_it_answers_is_sent_to_another(cluster, first):
    cluster.next_steps(first)
    got = cluster.post()
    assert (got.status_code, got.json()) == (200, {"object": "answer"})
    assert sorted(cluster.received()) == ["a", "b"]
    assert cluster.metric("retries_total{") == 1
    cluster.wait(lambda: cluster.metric("requests_running") == 0)


def test_request_is_sent_again_only_once(cluster):
    cluster.next_steps(closes, closes)
    got = cluster.post()
    assert got.status_code == 503
    assert got.headers["retry-after"]
    assert len(cluster.received()) == 2


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/batches/x/cancel"])
def test_request_that_may_have_changed_something_is_not_sent_again(cluster, path):
    cluster.next_steps(closes)
    got = cluster.post(path, name="x")
    assert got.status_code == 502
    assert len(cluster.received()) == 1


def test_front_tells_its_own_metrics_when_no_replica_answers(cluster):
    cluster.wait_for_listed(2)
    for one in cluster.replicas:
        one.metrics = closes
    assert cluster.metric('replicas{state="listed"}') == 2


def test_503_and_connection_refused_lead_to_another_replica(cluster):
    cluster.next_steps(answer(503, fields="retry-after: 7\r\n"))
    assert cluster.post().status_code == 200
    assert len(cluster.received()) == 2
    cluster.replicas[0].close()
    for _ in range(4):
        assert cluster.post().status_code == 200
    cluster.wait_for_listed(1)


def test_client_errors_are_passed_on(cluster):
    for status in (400, 404, 413, 422, 500):
        cluster.next_steps(answer(status, {"error": status}))
        got = cluster.post()
        assert (got.status_code, got.json()) == (status, {"error": status})
    assert len(cluster.received()) == 5


def refuse(seconds: int) -> Any:
    return answer(429, {"error": seconds}, f"retry-after: {seconds}\r\n")


def test_429_goes_to_another_replica_only_if_that_one_is_free_sooner(cluster):
    cluster.next_steps(refuse(9))
    assert cluster.post().status_code == 200
    assert len(cluster.received()) == 2
    cluster.next_steps(refuse(9), refuse(4))
    got = cluster.post()
    assert (got.status_code, got.json(), got.headers["retry-after"]) == (429, {"error": 4}, "4")
    for one in cluster.replicas:
        one.lease = make_lease(one.name, waiting_seconds=60.0, num_waiting=9)
    seen = [one.num_leases for one in cluster.replicas]
    cluster.wait(
        lambda: all(
            one.num_leases > before + 1 for one, before in zip(cluster.replicas, seen, strict=True)
        )
    )
    num_before = len(cluster.received())
    cluster.next_steps(refuse(9))
    assert cluster.post().json() == {"error": 9}
    assert len(cluster.received()) == num_before + 1


STREAMS = {
    CHAT_PATH: ("text/event-stream", b'data: {"error"'),
    "/v1/responses": ("text/event-stream", b'event: error\ndata: {"type":"error"'),
    "/v1/messages": ("text/event-stream", b'event: error\ndata: {"type":"error"'),
    "/completion": ("text/event-stream", b'data: {"error"'),
    "/api/chat": ("application/x-ndjson", b'{"error":'),
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("is_cut_within", [False, True])
def test_stream_whose_replica_dies_ends_with_one_error_of_its_dialect(cluster, path, is_cut_within):
    kind, error = STREAMS[path]
    part = b'{"a": 1}\n' if kind == "application/x-ndjson" else EVENT
    sent = part + part[:-5] if is_cut_within else part
    cluster.next_steps(sends(stream_head(kind) + chunk(sent)))
    got = cluster.post(path, **CHAT, stream=True)
    assert got.status_code == 200
    assert got.content.startswith(sent)
    rest = got.content.removeprefix(sent)
    assert rest.count(error) == 1
    assert rest.lstrip(b"\n").startswith(error)
    assert rest.endswith(b"\n")
    assert len(cluster.received()) == 1
    assert cluster.metric("cut_streams_total") == 1
    cluster.wait(lambda: cluster.metric("requests_running") == 0)


def test_replica_that_hangs_leaves_and_its_requests_go_elsewhere(cluster):
    first, second = cluster.replicas
    second.lease = None
    cluster.wait_for_listed(1)
    arrived = threading.Event()

    def hangs(connection: socket.socket, request: Any) -> None:
        first.is_silent = True
        second.lease = make_lease("b")
        arrived.set()

    first.steps = [hangs]
    got = cluster.post()
    assert arrived.is_set()
    assert got.status_code == 200
    assert [one.name for one in cluster.replicas if one.received] == ["a", "b"]
    cluster.wait_for_listed(1)
    first.is_silent = False
    cluster.wait_for_listed(2)


@pytest.mark.parametrize("is_silent", [False, True])
def test_only_requests_of_a_silent_replica_are_given_up(is_silent):
    """One that drains accepts no connections while it ends its requests."""
    settings = Settings.model_validate({"cluster": {"key": KEY}})

    async def pull() -> Mock:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            if not is_silent:
                listener.close()
            router = Router(10)
            replicas = Replicas([url], ClusterKey(settings), router, lease_seconds=1)
            [replica] = replicas.all
            running = Mock()
            replica.running = {running}
            replica.heard = asyncio.get_running_loop().time() - 100
            await replicas.pull(replica)
        assert not replica.is_listed
        return running.close

    assert asyncio.run(pull()).called == is_silent


def test_change_is_not_asked_for_on_a_connection_that_may_be_about_to_close() -> None:
    taken = []

    async def take(*, is_new: bool) -> None:
        taken.append(is_new)
        raise ConnectionError

    replica: Any = Mock()
    replica.client.take = take
    key = ClusterKey(Settings.model_validate({"cluster": {"key": KEY}}))
    replica.client.write_head.return_value = b""
    for method in ("GET", "POST"):
        assert asyncio.run(ask(replica, key, method, "/models/load")) is None
    assert taken == [False, True]


LIES: list[Any] = [
    b"no json",
    b"{}",
    b"[" * 100_000,
    b"x" * 5_000_000,
    {**make_lease("a"), "name": "../x"},
    {**make_lease("a"), "name": "a\n"},
    {**make_lease("a"), "status": "best"},
    make_lease("a", max_num_seqs=0),
    make_lease("a", waiting_seconds=-1.0),
    make_lease("a", prompt_token_seconds=1e300),
    make_lease("a", aliases=[""]),
    {**make_lease("a"), "models": []},
    make_lease("b"),  # the other one's name
    None,
]


@pytest.mark.parametrize("lie", LIES, ids=[str(lie)[:30] for lie in LIES])
def test_replica_with_a_lease_that_cannot_be_used_gets_no_requests(cluster, lie):
    cluster.replicas[0].lease = lie
    cluster.wait_for_listed(1)
    for _ in range(3):
        assert cluster.post().status_code == 200
    assert cluster.received() == ["b"] * 3
    cluster.replicas[0].lease = make_lease("a")
    cluster.wait_for_listed(2)


def with_body(head: str) -> bytes:
    return f"HTTP/1.1 {head}\r\ncontent-length: 2\r\n\r\n{{}}".encode()


@pytest.mark.parametrize(
    "data",
    [
        with_body("999 X"),
        with_body("101 X\r\nupgrade: x\r\nconnection: upgrade"),
        with_body("200 OK\r\nx y: 1"),
        with_body("200 OK\r\nx: a\rb"),
        with_body("200 OK\r\nx: \x00\x07"),
        with_body("200 OK\r\ncontent-length: 3"),
        with_body("200 OK\r\ntransfer-encoding: chunked"),
        with_body("204 No Content"),
        with_body("304 Not Modified"),
        with_body("302 Found\r\nlocation: http://127.0.0.1:1/internal/lease"),
        with_body("200 OK") + with_body("200 OK"),
        b"HTTP/1.1 100 Continue\r\n\r\n" * 100 + with_body("200 OK"),
        b"HTTP/1.0 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-cllm-framed: 1\r\n"
        b"transfer-encoding: chunked\r\n\r\n" + chunk(b"\xff" * 100) + chunk(b""),
        b"\x00" * 100_000,
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 90\r\n"
        b"x-cllm-framed: 1\r\n\r\n" + b"\x00" * 90,
        b"HTTP/1.1 503 X\r\ncontent-length: 2000000\r\n\r\n" + b"x" * 2_000_000,
        with_body("429 X\r\nretry-after: " + "9" * 5000),
        with_body("200 OK\r\nx-cllm-needed-tokens: " + "9" * 5000),
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1_000_000,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1_000_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50_000 + with_body("200 OK"),
    ],
    ids=lambda data: str(data[9:40]),
)
def test_strange_answers_of_a_replica_do_no_harm(cluster, data):
    for stream in (False, True):
        cluster.next_steps(sends(data), sends(data))
        got = cluster.post(**CHAT, stream=stream)
        assert got.status_code < 600
        assert "x y" not in got.headers
        cluster.wait_for_listed(2)
        cluster.next_steps()
        assert cluster.post().json() == {"object": "answer"}
    assert "Traceback" not in cluster.front.log


def test_stream_of_a_replica_that_vanishes_ends_with_an_error(cluster):
    def vanishes(connection: socket.socket, _: Any) -> None:
        connection.sendall(stream_head() + chunk(EVENT))
        for one in cluster.replicas:
            one.is_silent = True

    cluster.next_steps(vanishes)
    got = cluster.post(**CHAT, stream=True)
    assert got.content.startswith(EVENT)
    assert got.content.count(b'{"error"') == 1
    cluster.wait_for_listed(0)


def test_draining_replica_leaves_and_cluster_without_replicas_answers_503(cluster):
    cluster.replicas[0].lease = {**make_lease("a"), "status": "draining"}
    cluster.wait_for_listed(1)
    assert cluster.post().status_code == 200
    assert cluster.received() == ["b"]
    cluster.replicas[1].lease = {**make_lease("b"), "status": "draining"}
    cluster.wait_for_listed(0)
    got = cluster.post()
    assert (got.status_code, got.json()["error"]["code"]) == (503, "engine_unavailable")
    assert got.headers["retry-after"]
    assert "error" in cluster.post("/api/chat", **CHAT).json()
    assert cluster.front.client.get("/ready").status_code == 503


def test_another_replica_at_the_same_port_is_used(cluster):
    port = cluster.replicas[0].port
    cluster.replicas[0].close()
    cluster.wait_for_listed(1)
    cluster.replicas[0] = FakeReplica("c", port, "n")
    cluster.wait_for_listed(2)
    assert cluster.post(**CHAT, model="n").status_code == 200
    assert cluster.post(**CHAT, model="m").status_code == 200
    assert cluster.received() == ["c", "b"]


def test_replicas_get_the_requests_for_their_models(cluster):
    cluster.replicas[0].lease = make_lease("a", "small", aliases=["s*"])
    cluster.wait(
        lambda: cluster.post(**CHAT, model="sx").json() and cluster.received()[:1] == ["a"]
    )
    for one in cluster.replicas:
        one.received.clear()
    for model in ("small", "small:latest", "super", "m", "m"):
        cluster.post(**CHAT, model=model)
    assert cluster.received() == ["a"] * 3 + ["b"] * 2


def test_header_fields_of_fronts_and_of_one_connection_are_not_passed_on(cluster):
    fields = "connection: x-mine\r\nx-mine: 1\r\nx-kept: 1\r\nx-cllm-usage: {}\r\nkeep-alive: 5\r\n"
    cluster.next_steps(answer(200, {}, fields))
    sent = {
        "connection": "x-secret",
        "x-secret": "1",
        "te": "trailers",
        "x-cllm-account": "e30=",
        "X-CLLM-Cluster-Key": "guess",
        "x-cllm-progress": "2",
        "x_cllm_account": "e30=",
        "x-forwarded-for": "10.0.0.1",
        "x-own": "1",
        "accept": "a/b",
    }
    got = cluster.front.client.post(CHAT_PATH, json=CHAT, headers=sent)
    (request,) = [one for replica in cluster.replicas for one in replica.received]
    passed = request.fields.keys()
    assert {"x-own", "accept", "host", "content-length", "content-type"} <= passed
    dropped = {"x-secret", "te", "x-forwarded-for", "connection", "x_cllm_account"}
    assert not dropped & passed
    assert request.fields.get("x-cllm-account") != "e30="
    assert request.fields.get("x-cllm-cluster-key") != "guess"
    assert request.fields.get("x-cllm-progress") != "2"
    assert request.fields["host"] in [one.url.removeprefix("http://") for one in cluster.replicas]
    assert got.headers["x-kept"] == "1"
    assert not {"x-mine", "x-cllm-usage", "keep-alive"} & got.headers.keys()


@pytest.mark.parametrize("name", ["authorization", "api-key", "x-api-key"])
def test_credentials_of_clients_are_not_passed_on(cluster, name):
    cluster.front.client.post(CHAT_PATH, json=CHAT, headers={name: "Bearer secret"})
    (request,) = [one for replica in cluster.replicas for one in replica.received]
    assert "secret" not in str(request.fields)
    # the field makes the replica write errors in Anthropic's form
    assert ("x-api-key" in request.fields) == (name == "x-api-key")


def test_reports_that_cannot_be_read_cause_one_warning(cluster):
    def count(text):
        return cluster.front.log.count(text)

    pulled = []

    def report_nonsense(connection, request):
        pulled.append(request)
        answer(200, {"epoch": 7})(connection, request)

    cluster.replicas[0].reports = report_nonsense
    cluster.wait(lambda: len(pulled) >= 3)
    assert count("the usage that") == 1
    assert count("Traceback") == 0
    cluster.replicas[0].reports = answer(200, {"epoch": "e"})  # for another reason
    cluster.wait(lambda: count("the usage that") == 2)
    assert count("missing required field `reports`") == 1


def test_what_a_proxy_before_a_replica_could_misread_is_not_passed_on(cluster):
    """It could shorten the path, or answer TRACE with the header fields, which have the key."""
    for path in (
        "..;/..;x=1/internal/lease",
        "..%5c..%5cinternal%5clease",
        "%2e%2e;/internal/lease",
    ):
        assert cluster.front.client.get(f"/v1/models/{path}").status_code == 404
    assert cluster.front.client.request("TRACE", CHAT_PATH).status_code == 405
    assert not cluster.received()
    assert cluster.front.client.get("/v1/models/a..b;c").status_code == 200


def test_ticket_returns_to_the_replica_that_reserved_the_place(cluster):
    cluster.next_steps(
        answer(429, {}, "retry-after: 0\r\nx-cllm-retry-ticket: t1\r\n"),
    )
    ticket = cluster.post().headers["x-cllm-retry-ticket"]
    (home,) = cluster.received()
    assert ticket == f"{home}.t1"
    for number in range(5):
        body = {**CHAT, "messages": [{"role": "user", "content": f"{number}" * 3000}]}
        headers = {"x-cllm-retry-ticket": ticket}
        cluster.front.client.post(CHAT_PATH, json=body, headers=headers)
    assert cluster.received() == [home] * 6
    (replica,) = [one for one in cluster.replicas if one.received]
    assert {one.fields["x-cllm-retry-ticket"] for one in replica.received[1:]} == {"t1"}


def open_stream(front: Server) -> socket.socket:
    """Send a request for a stream and return its connection."""
    host, _, port = front.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def test_front_reads_no_further_than_a_client_that_does_not_read(cluster):
    sent = [0]
    is_full = threading.Event()

    def floods(connection: socket.socket, _: Any) -> None:
        connection.sendall(stream_head())
        connection.settimeout(2.0)
        part = chunk(b"data: " + b"x" * 10_000 + b"\n\n")
        try:
            while sent[0] < 200_000_000:
                connection.sendall(part)
                sent[0] += len(part)
        except TimeoutError:
            is_full.set()
        connection.close()

    cluster.next_steps(floods)
    with open_stream(cluster.front) as client:
        cluster.wait(is_full.is_set)
        assert sent[0] < 30_000_000  # what the system buffers
        assert cluster.post().status_code == 200
        num_read = 0
        while part := client.recv(1 << 20):
            num_read += len(part)
            if b"event: error" in part or b'{"error"' in part:
                break
        assert num_read >= sent[0]


def test_replica_learns_that_a_client_has_gone(cluster):
    has_ended = threading.Event()

    def waits(connection: socket.socket, _: Any) -> None:
        connection.sendall(stream_head() + chunk(EVENT))
        if connection.recv(1) == b"":
            has_ended.set()

    cluster.next_steps(waits)
    with open_stream(cluster.front) as client:
        data = b""
        while EVENT not in data:
            data += client.recv(1000)
    cluster.wait(has_ended.is_set)
    cluster.wait(lambda: cluster.metric("requests_running") == 0)


def test_client_that_shuts_down_its_sending_side_gets_its_answer(cluster):
    may_end = threading.Event()

    def streams(connection: socket.socket, _: Any) -> None:
        connection.sendall(stream_head() + chunk(EVENT))
        may_end.wait(PATIENCE)
        connection.sendall(chunk(DONE) + chunk(b""))

    cluster.next_steps(streams)
    with open_stream(cluster.front) as client:
        client.shutdown(socket.SHUT_WR)
        data = b""
        while b": ping" not in data:  # the front finds out whether the client still reads
            data += client.recv(1000)
        assert EVENT in data
        may_end.set()
        data += b"".join(iter(lambda: client.recv(65536), b""))
        assert DONE in data
        assert data.endswith(b"\r\n0\r\n\r\n")  # perhaps after another ping


def test_streams_of_a_front_that_shuts_down_finish(cluster):
    has_begun, may_end = threading.Event(), threading.Event()

    def streams(connection: socket.socket, _: Any) -> None:
        connection.sendall(stream_head() + chunk(EVENT))
        has_begun.set()
        may_end.wait(PATIENCE)
        connection.sendall(chunk(DONE) + chunk(b""))

    cluster.next_steps(streams)
    with open_stream(cluster.front) as client:
        cluster.wait(has_begun.is_set)
        cluster.front.process.send_signal(15)
        cluster.wait(lambda: "the server shuts down with 1 request;" in cluster.front.log)
        may_end.set()
        assert b"".join(iter(lambda: client.recv(65536), b"")).endswith(DONE + b"\r\n0\r\n\r\n")
    assert cluster.front.process.wait(PATIENCE) == 0


def test_connection_with_half_an_upload_is_not_used_again(cluster):
    """A replica that has answered early would take the next request for a part of the upload."""
    rest, may_answer = bytearray(), threading.Event()

    def answers_early(connection: socket.socket, request: Any) -> None:
        answer()(connection, request)
        while (part := connection.recv(65536)) and b"POST" not in part:
            pass
        rest.extend(part)
        connection.close()

    def waits(connection: socket.socket, request: Any) -> None:
        may_answer.wait(PATIENCE)
        answer()(connection, request)

    replica = cluster.replicas[0]
    cluster.replicas[1].lease = None
    cluster.wait_for_listed(1)
    replica.steps = [answers_early, waits, waits, waits]
    host, _, port = cluster.front.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.sendall(head.encode() + chunk(b"x" * 10))
        assert client.recv(65536).startswith(b"HTTP/1.1 200")
        streams = [open_stream(cluster.front) for _ in range(3)]  # on all connections there are
        cluster.wait(lambda: rest or len(replica.received) == 4)
        may_answer.set()
        assert not rest
        for stream in streams:
            assert stream.recv(65536).startswith(b"HTTP/1.1 200")
            stream.close()


RIGHT = {
    "/v1/models": {"object": "list", "data": [{"id": "m"}]},
    "/api/tags": {"models": [{"name": "m"}]},
    "/health?level=full": {"status": "healthy", "model_loaded": True, "models": [{"id": "m"}]},
    "/v1/files": {"data": [{"id": "m", "created_at": 1}], "has_more": False, "last_id": "m"},
    "/v1/messages/batches": {
        "data": [{"id": "m", "created_at": "2026-01-01T00:00:00Z"}],
        "has_more": False,
        "last_id": "m",
    },
}
NONSENSE = [
    b"no json",
    b"{}",
    b"[]",
    b"\xff",
    b'{"data":[{}],"models":[7],"has_more":0}',
    b"\x1f\x8b",
]
NONSENSE += [b"[" * 100_000, b'{"data":[{"id":7,"created_at":null}],"models":7,"status":[]}']
NONSENSE += [
    b'{"status":"healthy","model_loaded":true}',
    b'a{b="',
    b"# TYPE a histogram\na 1 2 3 4\n",
]


def sends_body(body: bytes) -> Any:
    return sends(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def test_answers_of_other_replicas_count_if_one_sends_nonsense(cluster):
    liar, honest = cluster.replicas
    for body in NONSENSE:
        for path, content in RIGHT.items():
            liar.steps, honest.steps = [sends_body(body)], [answer(200, content)]
            got = cluster.front.client.get(path)
            assert got.status_code == 200, (path, body)
            assert '"m"' in got.text or path == "/api/tags"
        right = b'# HELP a_b what\n# TYPE a_b gauge\na_b{replica="b"} 7.0\n'
        liar.metrics, honest.metrics = sends_body(body), sends_body(right)
        page = cluster.front.client.get("/metrics")
        assert page.status_code == 200
        assert 'a_b{replica="b"} 7.0' in page.text
    assert "Traceback" not in cluster.front.log


def test_answer_without_an_end_is_none(cluster):
    """It would fill the memory of the front."""
    sent = [0]

    def floods(connection: socket.socket, _: Any) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while sent[0] < 200:
            connection.sendall(b"x" * 1_000_000)
            sent[0] += 1

    liar, honest = cluster.replicas
    liar.steps, honest.steps = [floods], [answer(200, RIGHT["/v1/models"])]
    assert cluster.front.client.get("/v1/models").json() == RIGHT["/v1/models"]
    assert 0 < sent[0] < 100
