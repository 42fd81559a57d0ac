"""A client that compares answers, and what the measurements need to know about a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cllm.bench.servers import RunningServer, cllm
from cllm.http_connection import HTTPClient, Response

FAKE = ("--backend.name", "fake", "--context", "8192")
END, ANSWER_LENGTH = (
    256,
    16,
)  # of the fake model: it ends its answers, unless the client ignores that
NUM_SEQS = 32
CHAT, COMPLETE, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
PATIENCE = 300.0  # seconds for one measurement's wait


@dataclass(frozen=True)
class Figure:
    """A promise, its target and what was measured. is_timed: a busy machine may miss the target."""

    promise: str
    target: str
    measured: str
    is_met: bool
    is_timed: bool = False


@dataclass
class Answer:
    """The answer to one request. content: what must be the same in every run. times: of the parts
    of the body, seconds of time.perf_counter.
    """

    status: int = 0
    content: Any = None
    usage: dict[str, int] = field(default_factory=dict)
    body: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)


@contextlib.contextmanager
def serve(model: Path | None, *flags: object) -> Iterator[RunningServer]:
    """Start a server with its own files, so that it knows no keys of the user."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--storage.folder", folder]
        if "--server.keys-file" not in flags:
            own += ["--server.keys-file", f"{folder}/keys.json"]
        with cllm(model, *own, *flags) as server:
            yield server


@contextlib.asynccontextmanager
async def connect(server: RunningServer, key: str = "") -> AsyncIterator[Client]:
    client = Client(server, key)
    try:
        yield client
    finally:
        client.close()


class Client:
    """Sends requests to one server and reads their answers, streams included."""

    def __init__(self, server: RunningServer, key: str = "") -> None:
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self.server, self.key = server, key
        self._connections = HTTPClient(server.url, headers)

    def close(self) -> None:
        self._connections.close()

    async def send(self, path: str, body: dict[str, Any] | None = None) -> Answer:
        """Send a request and return its answer."""
        answer = Answer()

        def feed(data: bytes, now: float) -> bool:
            answer.body += data
            answer.times.append(now)
            return False

        content = None if body is None else json.dumps(body).encode()
        response: Response = await self._connections.request(path, content, feed)
        answer.status, answer.headers = response.status, response.headers
        answer.body = answer.body or response.body
        if answer.status == 200 and body is not None:
            answer.content, answer.usage = read(answer.body, streamed=bool(body.get("stream")))
        return answer

    async def send_raw(self, path: str, body: bytes) -> int:
        """Send any bytes as the body, and return the status."""
        return (await self._connections.request(path, body, lambda *_: False)).status

    async def get(self, path: str) -> Any:
        answer = await self.send(path)
        return json.loads(answer.body)

    async def metric(self, name: str, label: str = "") -> float:
        """Return the sum over all labels, or over those that contain ``label``."""
        page = (await self.send("/metrics")).body.decode()
        return sum(
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith(f"cllm:{name}{{") and label in line
        )

    async def wait_until_idle(self) -> dict[str, Any]:
        """Return the statistics when nothing runs or waits."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            stats: dict[str, Any] = (await self.get("/model/info"))["stats"]
            if not stats["num_running"] and not stats["num_waiting"]:
                return stats
            await asyncio.sleep(0.02)
        raise TimeoutError("the server is still busy")

    async def wait_until_ready(self) -> None:
        end = time.monotonic() + PATIENCE
        while (await self.send("/ready")).status != 200:
            if time.monotonic() > end:
                raise TimeoutError("the server is not ready again")
            await asyncio.sleep(0.02)

    async def wait_until_unready(self) -> None:
        while (await self.send("/ready")).status == 200:  # noqa: ASYNC110  # it is polled
            await asyncio.sleep(0.005)

    async def wait_for_ids(self, count: int) -> None:
        """Wait until ``count`` sequence ids are in use."""
        while (await self.get("/model/info"))["stats"]["num_seq_ids_in_use"] != count:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def cause(self, *faults: dict[str, Any]) -> None:
        body = json.dumps({"faults": list(faults)}).encode()
        assert await self.send_raw("/faults", body) == 200


def read(body: bytes, *, streamed: bool) -> tuple[Any, dict[str, int]]:
    """Return what an answer says, in the same form for streams and others, and its usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage: dict[str, int] = {}
    if streamed:
        events = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
        assert events[-1:] == ["[DONE]"], body[-200:]
        parts = [json.loads(event) for event in events[:-1]]
    else:
        parts = [json.loads(body)]
    for part in parts:
        assert "error" not in part, part
        if "data" in part:  # embeddings
            return [one["embedding"] for one in part["data"]], part["usage"]
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            merge(choices.setdefault(choice["index"], {}), choice)
    return [choices[index] for index in sorted(choices)], usage


def merge(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a choice, or a chunk of one, to what has arrived of it."""
    delta = part.get("delta") or part.get("message") or part
    for name in ("text", "content", "reasoning_content"):
        if delta.get(name):
            whole[name] = whole.get(name, "") + delta[name]
    for position, call in enumerate(delta.get("tool_calls") or ()):
        known = whole.setdefault(f"call {call.get('index', position)}", {})
        for name in ("name", "arguments"):
            known[name] = known.get(name, "") + (call["function"].get(name) or "")
    if (logprobs := part.get("logprobs")) is not None:
        tokens = logprobs.get("content") or logprobs.get("tokens") or []
        words = (token if isinstance(token, str) else token["token"] for token in tokens)
        whole.setdefault("tokens", []).extend(words)
    if part.get("finish_reason"):
        whole["finish_reason"] = part["finish_reason"]


def count_on(last: int, count: int) -> str:
    """Return what the fake model generates after a prompt that ends with the token ``last``, which
    must be less than 100.
    """
    text = ""
    for i in range(count):
        last = END if i == ANSWER_LENGTH else (last + 1) % END
        text += "" if last == END else chr(last)
    return text


def children(parent: int, word: str) -> list[int]:
    """Return the processes of ``parent`` that have ``word`` in their command (Linux)."""
    pids = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        pids += [int(one) for one in (task / "children").read_text().split()]
    return [pid for pid in pids if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]


def find_engine(server: RunningServer) -> int:
    (engine,) = children(server.pid or 0, "cllm.process.child")
    return engine


def measure_memory(pid: int) -> float:
    """Return the resident memory of a process in MB (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def count_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
