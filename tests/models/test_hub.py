"""Downloads against a small server on this machine that speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

from cllm.errors import StartupError
from cllm.models import hub
from cllm.models.catalog import model_name

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
TOKEN = "hf_a_token"


class FakeHub(ThreadingHTTPServer):
    """Repositories: ``o/models`` with FILES, ``o/gated`` for who has TOKEN, ``o/broken`` answers 503, ``o/empty``.

    break_off_at: a file that is asked for from its beginning ends after so many bytes.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.break_off_at: int | None = None
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
        elif repo not in ("o/models", "o/gated", "o/empty"):
            self.reply(404, headers={"X-Error-Code": "RepoNotFound"})
        elif file is None:
            files = {} if repo == "o/empty" else FILES
            siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
            body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
            self.reply(200, body, {"Content-Type": "application/json"})
        else:
            self.send_file(FILES[file], file)

    def send_file(self, content: bytes, name: str) -> None:
        headers = {
            "ETag": f'"{hashlib.sha1(name.encode()).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.reply(206 if start else 200, content[start:], headers, None if start else self.server.break_off_at)

    def reply(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The hub that huggingface_hub talks to, with an empty cache; its constants were read at import."""
    server = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()


def quiet(file: str, done: int, total: int) -> None:
    pass


def refusal(repo: str, quantization: str | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        hub.download(repo, quantization, quiet)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_download_and_cache(fake_hub: FakeHub) -> None:
    seen: list[tuple[str, int, int]] = []
    path = hub.download("o/models", None, lambda *report: seen.append(report))
    assert path.read_bytes() == SMALL
    assert path.name == "m-Q4_0.gguf"
    assert model_name(path) == "o/models"
    assert seen[-1] == ("m-Q4_0.gguf", len(SMALL), len(SMALL))
    downloads = len([request for request in fake_hub.requests if request[0] == "GET"])
    assert hub.download("o/models", "Q4_0", quiet) == path
    again = [request for request in fake_hub.requests if request[0] == "GET"][downloads:]
    assert all("/api/" in request[1] for request in again)


def test_split_model(fake_hub: FakeHub) -> None:
    path = hub.download("o/models", "f16", quiet)
    assert path.name == "m-F16-00001-of-00002.gguf"
    assert path.read_bytes() == SMALL
    assert path.with_name("m-F16-00002-of-00002.gguf").read_bytes() == SMALL[::-1]


def test_broken_download_is_resumed(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    fake_hub.break_off_at = 400_000
    assert hub.download("o/models", "Q8_0", quiet).read_bytes() == LARGE
    ranges = [request[2] for request in fake_hub.requests if request[0] == "GET" and "/resolve/" in request[1]]
    assert ranges == [None, f"bytes={400_000 // (1 << 16) << 16}-"]


@pytest.mark.parametrize(
    ("repo", "quantization", "words"),
    [
        ("o/missing", None, "There is no model o/missing"),
        ("o/gated", None, "is gated: accept its terms"),
        ("o/empty", None, "has no complete GGUF model"),
        ("o/models", "Q6_K", "o/models has no Q6_K; it has F16, Q4_0, Q8_0"),
        ("o/broken", None, "answered 503"),
        ("o/--x..y", None, "not the name of a repository"),
    ],
)
def test_refusals(fake_hub: FakeHub, repo: str, quantization: str | None, words: str) -> None:
    assert words in refusal(repo, quantization)


def test_token_opens_a_gated_repository(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.download("o/gated", "Q4_0", quiet).read_bytes() == SMALL


def test_without_a_network(fake_hub: FakeHub) -> None:
    path = hub.download("o/models", "Q4_0", quiet)
    fake_hub.shutdown()
    fake_hub.server_close()
    assert hub.download("o/models", "q4_0", quiet) == path
    assert hub.download("o/models", None, quiet) == path
    assert "The cached part of o/models has no Q8_0; it has Q4_0" in refusal("o/models", "Q8_0")
    assert "Cannot reach http://127.0.0.1" in refusal("o/other")


def test_offline(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.download("o/models", "Q4_0", quiet)
    fake_hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.download("o/models", None, quiet) == path
    assert "HF_HUB_OFFLINE is set" in refusal("o/other")
    assert not fake_hub.requests


def test_full_disk(fake_hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "needs 1.0 MB" in refusal("o/models", "Q8_0")


def test_environment_is_honoured(fake_hub: FakeHub, tmp_path: Path) -> None:
    """In a process of its own, as a user runs it: HF_ENDPOINT, HF_HOME, HF_TOKEN; progress lines without a terminal."""
    code = "from cllm.models.catalog import resolve; print(resolve('hf:o/gated:q8_0'))"
    hidden = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HF_ENDPOINT": fake_hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.is_relative_to(tmp_path / "home" / "hub")
    assert path.read_bytes() == LARGE
    assert "Downloading m-Q8_0.gguf: 1.0 MB of 1.0 MB" in done.stderr
