"""A server with OpenAI's API whose streams a test controls: /v1/models and chat completions."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote

USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 5},
}


class Reasoning(NamedTuple):
    """A piece of reasoning in an answer."""

    text: str


class OpenAIServer(ThreadingHTTPServer):
    """answers: what the next chats are answered with, in turn; the last one is repeated. An answer
    is a list of texts, Reasoning, events to wait for, and None, which ends the connection.

    bodies: the requests. gone: set when a client leaves a stream that waits.
    """

    daemon_threads = True

    def __init__(self, *answers: list[Any], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answers = list(answers) or [["Yes."]]
        self.models = ["m", "other/model:Q4"]
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.gone = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: OpenAIServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply(200, {"data": [{"id": name} for name in self.server.models]})
        else:
            name = unquote(self.path.removeprefix("/v1/models/"))
            self.reply(200 if name in self.server.models else 404, {"id": name})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.paths.append(self.path)
        if self.path != "/v1/chat/completions":
            self.reply(200, {"status": "success"})
            return
        answers = self.server.answers
        pieces = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(200)
        self.end_headers()
        for piece in pieces:
            if isinstance(piece, threading.Event):
                if not self.wait(piece):
                    return
            elif piece is None:
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            else:
                self.send(piece)
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": USAGE}
        self.write(end)
        self.wfile.write(b"data: [DONE]\n\n")

    def wait(self, event: threading.Event) -> bool:
        """Return True when the event is set, and False if the client leaves before."""
        while not event.wait(0.02):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.server.gone.set()
                return False
        return True

    def send(self, piece: str | Reasoning) -> None:
        is_text = isinstance(piece, str)
        delta = {"content": piece} if is_text else {"reasoning_content": piece.text}
        self.write({"choices": [{"delta": delta, "finish_reason": None}]})

    def write(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def reply(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def openai_server(*answers: list[Any], port: int = 0) -> Iterator[OpenAIServer]:
    """Run a server in a thread."""
    with OpenAIServer(*answers, port=port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
