"""A small server on this machine that implements the hub's protocol."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from checkpoints import CONFIG, TENSORS, pack_tensors

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = bytes(range(256)) * 40
LARGE = bytes(range(251)) * 4000
FILES = {
    "README.md": b"hello",
    "m-Q4_0.gguf": SMALL,
    "m-Q8_0.gguf": LARGE,
    "big/m-F16-00001-of-00002.gguf": SMALL,
    "big/m-F16-00002-of-00002.gguf": SMALL[::-1],
}
CHECKPOINT = {
    "README.md": b"hello",
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer_config.json": b"{}",
    "pytorch_model.bin": LARGE,
    "model.safetensors": pack_tensors(TENSORS),
}
REPOSITORIES = {
    "o/models": FILES,
    "o/gated": FILES,
    "o/tuned": CHECKPOINT,
    "o/both": CHECKPOINT | FILES,
    "o/empty": {},
}
TOKEN = "hf_a_token"
PIECE = 1 << 16


class FakeHub(ThreadingHTTPServer):
    """A hub with REPOSITORIES: ``o/gated`` is for clients with TOKEN. ``o/broken`` answers 503.

    break_off_at: a file that is asked for from its beginning ends after so many bytes. pause:
    seconds before each PIECE of an answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.break_off_at: int | None = None
        self.pause = 0.0
        self.requests: list[tuple[str, str, str | None]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, path, self.headers["Range"]))
        parts = path.removeprefix("/api/models").strip("/").split("/", 4)
        repo, file = "/".join(parts[:2]), parts[4] if len(parts) > 4 else None
        if repo == "o/broken":
            self.reply(503)
        elif repo == "o/gated" and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.reply(401, headers={"X-Error-Code": "GatedRepo"})
        elif repo not in REPOSITORIES:
            self.reply(404, headers={"X-Error-Code": "RepoNotFound"})
        elif file is None:
            siblings = [
                {"rfilename": name, "size": len(content)}
                for name, content in REPOSITORIES[repo].items()
            ]
            body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
            self.reply(200, body, {"Content-Type": "application/json"})
        else:
            self.send_file(REPOSITORIES[repo][file], file)

    def send_file(self, content: bytes, name: str) -> None:
        headers = {
            "ETag": f'"{hashlib.sha1(name.encode()).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.reply(
            206 if start else 200,
            content[start:],
            headers,
            None if start else self.server.break_off_at,
        )

    def reply(
        self,
        status: int,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(body[:cut]), PIECE) if self.command == "GET" else ():
                time.sleep(self.server.pause)
                self.wfile.write(body[:cut][start : start + PIECE])
