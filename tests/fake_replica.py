"""A replica whose answers the test decides, down to the bytes and the end of the connection."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from cllm.server.cluster.continuation import CONTINUE_PATH
from cllm.server.cluster.key import INTERNAL
from cllm.server.cluster.lease import LEASE_PATH
from cllm.server.cluster.routes import USAGE_PATH

DONE = b"data: [DONE]\n\n"


class Received(NamedTuple):
    """A request: method and path, header fields by lower-case names, and body."""

    line: str
    fields: dict[str, str]
    body: bytes


Step = Callable[[socket.socket, Received], None]
"""Answers one request. The connection stays open afterwards, unless the step closes it."""


def answer(status: int = 200, content: object = None, fields: str = "") -> Step:
    """Answer with JSON."""
    body = json.dumps({"object": "answer"} if content is None else content).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{fields}"
    return lambda connection, _: connection.sendall(
        f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream_head(media_type: str = "text/event-stream") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {media_type}\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode()


def sends(data: bytes, *, closes: bool = True) -> Step:
    """Send bytes as they are, and close the connection."""

    def step(connection: socket.socket, _: Received) -> None:
        connection.sendall(data)
        if closes:
            connection.close()

    return step


def closes(connection: socket.socket, _: Received) -> None:
    """Close the connection without an answer."""
    connection.close()


class FakeReplica:
    """A replica named ``name``. ``steps`` answer its next requests; without one, it answers 200.
    ``metrics`` answers requests for ``/metrics``, ``reports`` those for the usage of accounts. ``lease`` is answered to the front, if it is bytes as they are, and with 503 if it is None.
    """

    def __init__(self, name: str, port: int = 0, model: str = "m") -> None:
        self.name = name
        self.steps: list[Step] = []
        self.metrics = answer(404)
        self.reports = answer(404)
        self.received: list[Received] = []
        self.lease: dict[str, Any] | bytes | None = make_lease(name, model)
        self.is_silent = False  # it reads requests and answers none, not even for leases
        self.has_ended = threading.Event()
        self.num_leases = 0
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End it: connections are closed, and none is accepted any more."""
        if self.has_ended.is_set():
            return
        self.has_ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in [*self._connections]:
            end(connection)

    def _accept(self) -> None:
        while not self.has_ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while (request := read_request(connection)) is not None:
                self._answer(connection, request)
        except OSError:  # the front or the step has closed it
            pass
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, request: Received) -> None:
        if self.is_silent:
            return
        path = request.line.split()[1]
        if path.partition("?")[0] == LEASE_PATH:
            self.num_leases += 1
            if self.lease is None:
                answer(503)(connection, request)
            elif isinstance(self.lease, bytes):
                head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(self.lease)
                connection.sendall(head + self.lease)
            else:
                answer(200, self.lease)(connection, request)
            return
        if path == "/metrics":
            self.metrics(connection, request)
            return
        if path.startswith(INTERNAL) and path != CONTINUE_PATH:  # what fronts ask for
            (self.reports if path.startswith(USAGE_PATH) else answer(404))(connection, request)
            return
        self.received.append(request)
        (self.steps.pop(0) if self.steps else answer())(connection, request)


def end(connection: socket.socket) -> None:
    """Close a connection that another thread may be reading."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def make_lease(name: str, model: str = "m", **fields: Any) -> dict[str, Any]:
    """Return a lease with one model, whose ``fields`` differ from the usual ones."""
    usual = {
        "name": model,
        "aliases": [],
        "task": "chat",
        "origin": model,
        "fingerprint": "f",
        "is_loaded": True,
        "max_num_seqs": 4,
        "num_cells": 1000,
        "num_running": 0,
        "num_waiting": 0,
        "waiting_seconds": 0.0,
        "prompt_token_seconds": 0.001,
    }
    return {
        "name": name,
        "epoch": "1",
        "version": "1",
        "status": "ready",
        "models": [usual | fields],
    }


def read_request(connection: socket.socket) -> Received | None:
    """Return the next request, None at the end of the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    line, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
    while len(body) < int(fields.get("content-length", "0")):
        body += connection.recv(65536)
    return Received(line, fields, body)
