"""Hostile inputs at random: damaged examples of the API's own document, requests that schemathesis
makes from it, and bytes that are no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import hypothesis
import schemathesis

from benchmarks.reliability import watched_serve
from benchmarks.reliability.client import CHAT, Figure, find_engine, serve
from cllm.bench.servers import MODEL, RunningServer, running

NUM_WORKERS = 6
# Seconds after which the server ends a request with 504, and after which a client gives up.
TIMEOUT, PATIENCE = 60, 120.0
# Of these, the operator allows none by default.
OFF = {"/benchmark", "/api/pull", "/faults", "/lora-adapters"}
QUESTION, RIGHT = "What is 27 plus 45?", "72"

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 2**31, 2**63, 2**70, -(2**63), 1e308, 5e-324),
    *("", "a", "\0", "\u202e", "a" * 100_000, "é̂" * 3000, "👩‍👩‍👧" * 500, "{{7*7}}"),
    *("<|im_start|>", "../../etc/passwd", "http://127.0.0.1/", "data:image/png;base64,AAAA"),
    *("%s%n", "auto", "json"),
    *([], {}, [[]], [None], [1] * 10_000, ["a"] * 3000, {"a": {}}, {"": None}, {"type": "object"}),
    *({"type": "json_schema"}, {"$ref": "#"}, {"type": "function", "function": {}}, {"id": 1}),
]  # fmt: skip
# Written into the body as they are, because no JSON library writes them.
RAW = [
    "NaN",
    "-Infinity",
    "1e999",
    r'"\ud800"',
    "9" * 5000,
    "[" * 2000 + "]" * 2000,
    "",
    "nul",
    "'a'",
]
LIMITS = ["--scheduler.request-timeout", TIMEOUT]
HEADERS: list[dict[str, str]] = [
    *({} for _ in range(12)),
    {"content-type": "text/plain"},
    {"content-type": "application/json; charset=latin1"},
    {"content-encoding": "gzip"},
    {"content-encoding": "zstd"},
    {"accept": "image/png"},
    {"authorization": "Bearer \x7f"},
    {"x-request-id": "x" * 5000},
    {"expect": "100-continue"},
    {"origin": "http://evil.example"},
    {"host": "evil.example"},
    {"x-forwarded-for": "127.0.0.1"},
]


class Findings:
    """How many inputs were sent, what was answered, and what should not have been."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.num_faults = 0

    @property
    def num_inputs(self) -> int:
        return sum(self.statuses.values())

    def judge(self, answer: httpx2.Response, what: str) -> None:
        """Note an answer. It may have no trace, and no 5xx but that of a deadline, and of a full
        queue in Ollama's and Anthropic's form.
        """
        self.statuses[f"{answer.status_code // 100}xx"] += 1
        is_late = answer.status_code == 504
        is_overload = answer.status_code in (503, 529) and "queue is full" in answer.text
        is_fault = answer.status_code >= 500 and not is_late and not is_overload
        if is_fault or "Traceback" in answer.text:
            self.report(f"{answer.status_code} for {what[:300]}: {answer.text[:200]}")

    def report(self, fault: str) -> None:
        print(f"  {fault}", flush=True)
        self.num_faults += 1


class Mutator:
    """Damages bodies: one to three values are replaced, removed, or added."""

    def __init__(self, document: dict[str, Any], rng: random.Random) -> None:
        schemas = document["components"]["schemas"]
        self._rng = rng
        self._targets: list[tuple[str, dict[str, Any], list[str]]] = []
        for path, verbs in document["paths"].items():
            content = verbs.get("post", {}).get("requestBody", {}).get("content", {})
            if path in OFF or "application/json" not in content:
                continue
            schema = schemas[content["application/json"]["schema"]["$ref"].rpartition("/")[2]]
            for example in schema["examples"]:
                self._targets.append((path, example, [*schema["properties"]]))
        self._parts = [part for _, example, _ in self._targets for *_, part in places(example)]

    def make(self) -> tuple[str, bytes]:
        """Return a path and a body."""
        path, example, names = self._rng.choice(self._targets)
        body = copy.deepcopy(example)
        if "model" in body and self._rng.random() < 0.9:
            body["model"] = MODEL
        holes: list[str] = []
        for _ in range(self._rng.choice([1, 1, 2, 3])):
            value = self._choose_value(holes)
            if self._rng.random() < 0.4:
                body[self._rng.choice(names)] = value
                continue
            container, key, _ = self._rng.choice([*places(body)] or [(body, "a", None)])
            if self._rng.random() < 0.1 and isinstance(container, dict):
                container.pop(key, None)
            else:
                container[key] = value
        content = json.dumps(body, ensure_ascii=self._rng.random() < 0.5)
        for hole in holes:
            content = content.replace(json.dumps(hole), self._rng.choice(RAW), 1)
        return path, self._damage(content.encode("utf-8", "surrogatepass"))

    def _choose_value(self, holes: list[str]) -> Any:
        chance = self._rng.random()
        if chance < 0.2:
            return copy.deepcopy(self._rng.choice(self._parts))
        if chance < 0.3:
            holes.append(f"hole {len(holes)}")
            return holes[-1]
        return copy.deepcopy(self._rng.choice(VALUES))

    def _damage(self, content: bytes) -> bytes:
        """Change a few bytes of one body in ten."""
        if self._rng.random() > 0.1:
            return content
        damaged = bytearray(content)
        for _ in range(self._rng.randrange(1, 4)):
            at = self._rng.randrange(len(damaged) + 1)
            end = at + self._rng.choice([0, 1, 1, 5, len(damaged)])
            damaged[at:end] = self._rng.randbytes(self._rng.choice([0, 1, 1, 4]))
        return bytes(damaged)


def places(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each container, key and value in a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(pairs):
        yield value, key, part
        if isinstance(part, dict | list):
            yield from places(part)


class Attack:
    """Sends hostile inputs to one server until ``end``, seconds of time.monotonic."""

    def __init__(self, server: RunningServer, end: float) -> None:
        self.findings = Findings()
        self._server, self._end = server, end
        self._client = httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE)

    async def run(self) -> None:
        async with self._client, asyncio.TaskGroup() as tasks:
            document = (await self._client.get("/openapi.json")).json()
            for seed in range(NUM_WORKERS):
                tasks.create_task(self._mutate(Mutator(document, random.Random(seed)), seed))
            tasks.create_task(asyncio.to_thread(self._generate, document))
            tasks.create_task(self._send_bytes())
            tasks.create_task(self._ask())

    def _turns(self) -> Iterator[int]:
        return itertools.takewhile(lambda _: time.monotonic() < self._end, itertools.count())

    async def _mutate(self, mutator: Mutator, seed: int) -> None:
        rng = random.Random(-seed - 1)
        for _ in self._turns():
            path, content = mutator.make()
            headers = {"content-type": "application/json", **rng.choice(HEADERS)}
            try:
                answer = await self._client.post(path, content=content, headers=headers)
            except httpx2.HTTPError as error:
                # Refused before the whole body was read: the connection is closed meanwhile.
                self.findings.statuses[type(error).__name__] += 1
                if isinstance(error, httpx2.TimeoutException):
                    self.findings.report(f"no answer in {PATIENCE} s for {path} {content[:200]!r}")
                continue
            self.findings.judge(answer, f"{path} {content!r}")

    def _generate(self, document: dict[str, Any]) -> None:
        """Send requests that follow the document, and some that break it."""
        api = schemathesis.openapi.from_dict(document)
        results: list[Any] = [*api.get_all_operations()]
        operations = [result.ok() for result in results]
        for turn in self._turns():
            for operation, mode in itertools.product(operations, schemathesis.GenerationMode):
                negative = mode is schemathesis.GenerationMode.NEGATIVE
                if operation.path in OFF or (negative and not operation.body):
                    continue
                try_out(operation.as_strategy(generation_mode=mode), turn, self._check_case)
                if time.monotonic() > self._end:
                    return

    def _check_case(self, case: Any) -> None:
        what = f"{case.method} {case.path} {case.body!r}"
        try:
            answer = case.call(base_url=self._server.url, timeout=PATIENCE)
        except OSError as error:  # the exceptions of its HTTP client are that, too
            self.findings.report(f"{error} for {what[:300]}")
        else:
            self.findings.judge(answer, what)

    async def _send_bytes(self) -> None:
        """Send requests whose head is damaged, and close."""
        rng = random.Random(0)
        address = urlsplit(self._server.url)
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a"}]}).encode()
        whole = (
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        for _ in self._turns():
            damaged = bytearray(whole)
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(damaged))
                damaged[at : at + rng.choice([0, 1, 1, 20])] = rng.randbytes(rng.choice([0, 1, 30]))
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(damaged)
            with contextlib.suppress(TimeoutError, ConnectionError):
                line = await asyncio.wait_for(reader.readline(), 0.5)
                status = int(line.split()[1]) if line else 0
                self.findings.statuses[f"{status // 100}xx"] += 1
                if status >= 500 and status not in (501, 505):
                    self.findings.report(f"{status} for {bytes(damaged)!r}")
            writer.close()

    async def _ask(self) -> None:
        """A good request gets the right answer meanwhile, and the engine stays."""
        engine = find_engine(self._server)
        for _ in self._turns():
            body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
            answer = await self._client.post(CHAT, json=body)
            if answer.status_code != 200 or RIGHT not in answer.text:
                self.findings.report(f"a good request got {answer.text[:200]}")
            page = (await self._client.get("/metrics")).content
            if odd := [line for line in page.split(b"\n") if re.search(rb"[\x00-\x1f\x7f]", line)]:
                self.findings.report(f"control characters in /metrics: {odd[0]!r}")
            if find_engine(self._server) != engine:
                engine = find_engine(self._server)
                self.findings.report("the engine was replaced")
            await asyncio.sleep(1)


def try_out(cases: Any, seed: int, check: Callable[[Any], None], count: int = 10) -> None:
    """Run ``check`` on ``count`` of schemathesis' ``cases``, the same ones for the same seed."""

    @hypothesis.seed(seed)
    @hypothesis.given(cases)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=[*hypothesis.HealthCheck],
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    def run(case: Any) -> None:
        check(case)

    run()


async def attack(server: RunningServer, minutes: float) -> Findings:
    one = Attack(server, time.monotonic() + minutes * 60)
    await one.run()
    return one.findings


@contextlib.contextmanager
def serve_watched() -> Iterator[tuple[RunningServer, Path]]:
    """Start a server that reports slow callbacks of its event loop into a file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        report.touch()
        command = [sys.executable, watched_serve.__file__, report, "serve", "--port", "PORT"]
        own = ["--storage.folder", folder, "--server.keys-file", f"{folder}/keys.json"]
        with running([*command, "--model.name", MODEL, *own, *LIMITS], "/ready") as server:
            yield server, report


async def measure_hostile(minutes: float) -> list[Figure]:
    """Send hostile inputs to the built-in model, then a tenth as long to a watched event loop."""
    with serve(None, *LIMITS) as server:
        findings = await attack(server, minutes)
    with serve_watched() as (server, report):
        seen = len(report.read_text())  # what the start has taken is nobody's
        watched_findings = await attack(server, minutes / 10)
        lines = report.read_text()[seen:].splitlines()
    worst = max((float(line.split()[0]) for line in lines), default=0.0)
    summary = ", ".join(f"{count:,} {name}" for name, count in sorted(findings.statuses.items()))
    faults = findings.num_faults + watched_findings.num_faults
    return [
        Figure(
            f"5xx, wrong answers and restarts in {minutes:g} minutes of hostile inputs ({summary})",
            "0",
            str(faults),
            faults == 0,
        ),
        Figure(
            "CPU time of one callback on the event loop under "
            f"{watched_findings.num_inputs:,} hostile inputs",
            "at most 0.2 s",
            f"at most {worst:.2f} s; {len(lines)} took more than {watched_serve.LEAST} s",
            worst <= 0.2,
        ),
    ]
