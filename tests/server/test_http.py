"""HTTP itself: methods, invalid or too large heads, requests that arrive in pieces."""

import json
import re
import socket
import time

import pytest

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


def read_all(connection):
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/models", "/docs", "/api/version", "/api/tags", "/nope"]
)
def test_head_is_get_without_a_body(fake_server, path):
    head, get = fake_server.client.head(path), fake_server.client.get(path)
    assert head.status_code == get.status_code
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/files", "GET, HEAD, POST"),
        ("OPTIONS", "/v1/files/a", "DELETE, GET, HEAD"),
    ],
)
def test_wrong_method_gets_405_with_the_allowed_methods(fake_server, method, path, allowed):
    answer = fake_server.client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


def test_no_path_is_redirected(fake_server):
    """A redirect would follow the Host header that the client sent."""
    answer = fake_server.client.post(
        "/v1/completions/", json={"prompt": "a"}, headers={"host": "other.localhost"}
    )
    assert answer.status_code == 200
    assert "location" not in answer.headers


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.0\r\nHost: localhost\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a:b\r\n\r\n",
        HEAD + b"Content-Length: -4\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_invalid_http_gets_400_with_a_request_id(fake_server, data):
    with connect(fake_server) as connection:
        connection.sendall(data)
        answer = read_all(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert re.search(rb"\r\nx-request-id: req_[0-9a-f]{24}\r\n", head)
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.0\r\n\r\n",
        *(
            b"GET /health HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host
            for host in (
                b"",
                b"example.com",
                b"example.com:",
                b"127.0.0.1:80",
                b"[::1]:80",
                b"[fe80::1%25eth0]",
                b"a_b",
            )
        ),
    ],
)
def test_valid_hosts_are_understood(fake_server, head):
    """Those that are not loopback names are not allowed."""
    with connect(fake_server) as connection:
        connection.sendall(head)
        is_other = b"example" in head or b"fe80" in head or b"a_b" in head
        assert read_all(connection).startswith(b"HTTP/1.1 %d " % (403 if is_other else 200))


MORE = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"x-large: " + b"y" * 66_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 66_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        HEAD + b"a: b\r\n" * 200 + b"\r\n",
        HEAD + b"a: b\r\n" * 10_000 + b"\r\n",
        HEAD + MORE + b"a: b\r\n" * 200 + b"\r\n",
    ],
)
def test_too_large_head_gets_431_in_any_number_of_reads(fake_server, data):
    """Trailer fields count too."""
    with connect(fake_server) as connection:
        connection.sendall(data)
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


def test_200_header_fields_are_served(fake_server):
    with connect(fake_server) as connection:
        connection.sendall(
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            + b"a: b\r\n" * 198
            + b"\r\n"
        )
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_endless_head_gets_431(fake_server):
    """The answer comes before the head ends, because the server keeps the head in memory."""
    with connect(fake_server) as connection:
        connection.sendall(HEAD + b"x-large: ")
        for _ in range(1000):
            connection.sendall(b"y" * 10_000)
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"BAD\r\n\r\n", 400),
        (HEAD + b"a: b\r\n" * 300 + b"\r\n", 431),
        (HEAD + b"x-large: " + b"y" * 10_000_000, 431),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)
def test_garbage_after_complete_requests_is_rejected_after_their_answers(
    fake_server, stream, garbage, status
):
    body = b'{"prompt": "a", "max_tokens": 100, "ignore_eos": true, "stream": %s}' % stream
    with connect(fake_server) as connection:
        request = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        connection.sendall(request + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + garbage)
        answers = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d+) ", answers) == [b"200", b"200", b"%d" % status]
    assert answers.count(b'"finish_reason":"length"') == 1
    assert answers.count(b'"code":"invalid_http"') == 1


def test_requests_arrive_in_any_pieces_and_pipelined(fake_server):
    body = b'{"prompt": "a", "max_tokens": 2}'
    request = HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    for size in (1, 7, len(request) + 5, 3 * len(request)):
        with connect(fake_server) as connection:
            data = (
                request + b"\r\n" + request + request.replace(b"Host", b"Connection: close\r\nHost")
            )
            for i in range(0, len(data), size):
                connection.sendall(data[i : i + size])
            assert read_all(connection).count(b"HTTP/1.1 200 ") == 3


def test_body_does_not_count_as_head(fake_server):
    """In whatever pieces it arrives, on a connection that has served requests before."""
    for size in (60_000, 200_000, 900_000):
        answer = fake_server.client.post("/encode", json={"text": "a" * size})
        assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"anything"])
@pytest.mark.parametrize("size", [10, 10_000])
def test_upgrade_is_ignored_and_the_body_is_read(fake_server, protocol, size):
    """Java's client offers HTTP/2 with each request. Pipelined requests are answered too, in
    whatever pieces they arrive.
    """
    events = fake_server.events
    body = b'{"prompt": "a", "max_tokens": 2}'
    fields = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAEAAEAAAA\r\n"
        % protocol
    )
    framings = [
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
    ]
    data = b"".join(HEAD + fields + framing for framing in framings)
    data += b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + fields + b"\r\n"
    data += b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with connect(fake_server) as connection:
        for i in range(0, len(data), size):
            connection.sendall(data[i : i + size])
        answers = read_all(connection)
    assert answers.count(b"HTTP/1.1 200 ") == 4
    assert answers.count(b'"finish_reason":"length"') == 2
    assert fake_server.events == events


def test_limits_apply_to_a_head_with_an_upgrade(fake_server):
    upgrade = HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    for data in (
        upgrade + b"a: b\r\n" * 200 + b"\r\n",
        upgrade + b"x-large: " + b"y" * 66_000 + b"\r\n\r\n",
    ):
        with connect(fake_server) as connection:
            connection.sendall(data)
            assert read_all(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("target", [b"example.com:443", b"/"])
def test_connect_gets_501(fake_server, target):
    with connect(fake_server) as connection:
        connection.sendall(b"CONNECT %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 501 ")


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_http_1_0_gets_an_unchunked_answer(fake_server, stream):
    body = b'{"prompt": "a", "max_tokens": 30, "ignore_eos": true, "stream": %s}' % stream
    with connect(fake_server) as connection:
        connection.sendall(
            HEAD.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        answer = read_all(connection)
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    if stream == b"true":
        assert content.startswith(b"data: {")
        assert content.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert b"\r\ncontent-length: %d\r\n" % len(content) in head
        assert json.loads(content)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("codings", [b"gzip, chunked", b"gzip"])
def test_unknown_transfer_coding_gets_501_with_its_name(fake_server, codings):
    with connect(fake_server) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: %s\r\n\r\n2\r\n{}\r\n0\r\n\r\n" % codings)
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert b"Transfer-Encoding '%s' is not supported" % codings in answer


@pytest.mark.parametrize("charset", ["utf-8", "UTF8", '"utf-8"', "utf_8", "U8; version=1"])
@pytest.mark.parametrize("coding", [None, "identity", "Identity, identity"])
def test_all_names_of_utf_8_and_identity_are_accepted(fake_server, charset, coding):
    headers = {"content-type": f"Application/JSON ; Charset={charset}"}
    if coding is not None:
        headers["content-encoding"] = coding
    answer = fake_server.client.post("/encode", content=b'{"text": "a"}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("content-type", f"application/json; charset={charset}")
            for charset in ("latin1", "utf-16", "utf-8-sig", "")
        ),
        ("content-type", "application/json; charset=utf-8; charset=latin1"),
        ("content-encoding", "gzip"),
        ("content-encoding", "identity, gzip"),
    ],
)
def test_other_charsets_and_compressions_get_415(fake_server, name, value):
    headers = {"content-type": "application/json", name: value}
    assert (
        fake_server.client.post("/encode", content=b'{"text": "a"}', headers=headers).status_code
        == 415
    )


@pytest.mark.parametrize("at_once", [True, False])
def test_trailer_fields_are_no_header_fields(fake_server, at_once):
    """Otherwise a client could set after a proxy's checks what the proxy sets."""
    head = HEAD_OF_POST + b"Transfer-Encoding: chunked\r\n\r\n"
    body = b'{"model": "fake", "prompt": "a", "stream": false}'
    trailer = b"%x\r\n%s\r\n0\r\nX-CLLM-Retry-Ticket: x\r\nOrigin: http://evil\r\n\r\n" % (
        len(body),
        body,
    )
    with connect(fake_server) as connection:
        connection.sendall(head + (trailer if at_once else b""))
        if not at_once:
            time.sleep(0.1)
            connection.sendall(trailer)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


HEAD_OF_POST = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
