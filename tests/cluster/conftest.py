"""Fronts and replicas as real processes, on free loopback ports."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from server.conftest import Server, starter

KEY = "the-key-of-the-test-cluster"
FAKE = ("--backend.name", "fake", "--context", "32768")


@pytest.fixture(scope="module", autouse=True)
def cluster_key() -> Iterator[None]:
    """Give all servers of these tests the same key, and none to those of other folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLLM_CLUSTER_KEY", KEY)
        yield


start_server = pytest.fixture(starter)  # for one test
start_server_once = pytest.fixture(starter, scope="module")


def start_front(start: Callable[..., Server], *urls: str, options: Any = (), **more: Any) -> Server:
    """Return a running front of the replicas at ``urls``."""
    arguments = ["--urls", ",".join(urls), *options]
    return start(*arguments, command=("cluster", "front"), **more)


@pytest.fixture(scope="module")
def replicas(start_server_once: Callable[..., Server]) -> list[Server]:
    """Two replicas with the fake backend."""
    return [start_server_once(*FAKE) for _ in range(2)]


@pytest.fixture(scope="module")
def front_server(start_server_once: Callable[..., Server], replicas: list[Server]) -> Server:
    """A front of the two replicas."""
    return start_front(start_server_once, *(one.url for one in replicas))


RawRequest = Callable[..., tuple[int, bytes, bytes]]


@pytest.fixture
def raw_request() -> RawRequest:
    """Return a function that sends a GET with a path as it is, and returns status, head and body."""

    def send(server: Server, path: str, fields: str = "") -> tuple[int, bytes, bytes]:
        host, _, port = server.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{fields}\r\n"
            connection.sendall(head.encode())
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head_bytes, _, body = answer.partition(b"\r\n\r\n")
        return int(head_bytes.split()[1]), head_bytes, body

    return send
