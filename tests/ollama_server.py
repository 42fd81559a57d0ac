"""A server with Ollama's API: /api/tags and /api/chat, streamed as NDJSON."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "good:latest"


def line(**fields: Any) -> bytes:
    """Return ``data`` as Go's encoder writes it: no spaces, and <, > and & escaped."""
    text = json.dumps(
        {"model": MODEL, "created_at": "2025-01-01T00:00:00.000000001Z", **fields},
        ensure_ascii=False,
        separators=(",", ":"),
    )
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode() + b"\n"


def chunk(text: str, **fields: Any) -> bytes:
    return line(message={"role": "assistant", "content": text, **fields}, done=False)


def last(reason: str | None, tokens: int, prompt: int = 9) -> bytes:
    """Counts of 0 are left out."""
    fields = {"done_reason": reason} if reason else {}
    counts = {
        name: count
        for name, count in (("prompt_eval_count", prompt), ("eval_count", tokens))
        if count
    }
    message = {"role": "assistant", "content": ""}
    return line(
        message=message,
        **fields,
        done=True,
        total_duration=5,
        load_duration=1,
        **counts,
        eval_duration=3,
    )


class OllamaServer(ThreadingHTTPServer):
    """``answer`` is what every chat is answered with; None counts to the tokens that were asked
    for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: list[bytes] | None = None
        self.status = 200
        self.piece = 1 << 20  # bytes that are sent at a time
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: OllamaServer

    def do_GET(self) -> None:
        found = self.path == "/api/tags"
        self.reply(
            200 if found else 404,
            {"models": [{"name": MODEL, "model": MODEL, "size": 1}]} if found else {},
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.path != "/api/chat":
            self.reply(404, {})
        elif body["model"] != MODEL:
            self.reply(404, {"error": f"model '{body['model']}' not found"})
        elif self.server.status != 200:
            self.reply(self.server.status, {"error": "server busy, please try again"})
        else:
            count = body["options"]["num_predict"]
            lines = [*(chunk(f" {i}") for i in range(count)), last("length", count)]
            self.stream(b"".join(lines if self.server.answer is None else self.server.answer))

    def reply(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json; charset=utf-8")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/x-ndjson")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for at in range(0, len(data), self.server.piece):
            piece = data[at : at + self.server.piece]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving_ollama() -> Iterator[OllamaServer]:
    with OllamaServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
