"""Replicas die while they stream. The client only sees a pause."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cluster.conftest import FAKE, start_front
from conftest import PATIENCE, repeat
from framed_streams import read_events
from server.conftest import Server

from cllm.bench.make_adapter import write_adapter
from cllm.core.stored_ids import find_replica
from cllm.models.builtin.questions import Question
from cllm.models.catalog import BUILTIN

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 60, "maxLength": 90}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "f", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
CHAT = {"messages": MESSAGES, "stream": True, "max_tokens": 150}
LONG = {"ignore_eos": True, "seed": 5, "temperature": 1.0}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | LONG | {"n": 2, "logprobs": True, "top_logprobs": 1}),
    ("/v1/chat/completions", CHAT | {"response_format": FORMAT, "seed": 1, "temperature": 1.0}),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "temperature": 0,
            "tools": [{"type": "function", "function": TOOL}],
            "tool_choice": "required",
        },
    ),
    ("/v1/completions", {"prompt": ["ab", "q"], "stream": True, "max_tokens": 150, **LONG}),
    ("/v1/responses", {"input": "hello", "stream": True, "max_output_tokens": 150, **LONG}),
    (
        "/v1/messages",
        CHAT
        | {
            "model": "fake",
            "temperature": 0,
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    (
        "/api/chat",
        {
            "model": "fake",
            "messages": MESSAGES,
            "options": {"num_predict": 150, "seed": 3, "temperature": 1.0},
            "format": SCHEMA,
        },
    ),
    ("/api/generate", {"model": "fake", "prompt": "a", "options": {"num_predict": 150}}),
]
# what differs between two requests
OWN = {"id", "item_id", "created", "created_at", "call_id", "usage", "system_fingerprint"}
OWN |= {"prompt_eval_count"}


def without_own(value: Any) -> Any:
    """Return what ``read_events`` has returned without the fields in OWN."""
    if not isinstance(value, tuple | list):
        return value
    is_own = [isinstance(one, tuple) and isinstance(one[0], str) and one[0] in OWN for one in value]
    return [without_own(one) for one, own in zip(value, is_own, strict=True) if not own]


def read(data: bytes) -> Any:
    return without_own(read_events(data))


# Streams take long enough to kill a replica meanwhile.
SLOWLY = (
    *("--server.enable-faults", "--scheduler.speculation", "off"),
    *("--cache.max-results", "0"),
)


class Cluster:
    """A front and its replicas, of which some will be killed."""

    def __init__(
        self,
        start: Callable[..., Server],
        number: int,
        model: Any = FAKE,
        seconds: float = 600,
        lease_seconds: float = 3,
    ) -> None:
        """A stream waits ``seconds`` for a replica that can continue."""
        self.replicas = [start(*model, *SLOWLY) for _ in range(number)]
        options = ["--cluster.continue-seconds", str(seconds)]
        options += ["--cluster.lease-seconds", str(lease_seconds)]
        self.front = start_front(start, *(one.url for one in self.replicas), options=options)

    def slow_down(self, seconds: float = 0.02) -> None:
        """Let each step take long enough to kill a replica in the middle of a stream."""
        for replica in self.replicas:
            slow_down(replica, seconds)

    def find_busy(self) -> Server | None:
        """Return a replica that computes."""
        for replica in self.replicas:
            if replica.process.poll() is None and replica.stats()["num_running"]:
                return replica
        return None

    def kill_busy(self) -> None:
        """Kill a replica that computes."""
        end = time.monotonic() + PATIENCE
        while (victim := self.find_busy()) is None:
            assert time.monotonic() < end
        victim.stop(signal.SIGKILL)

    @property
    def num_continued(self) -> float:
        return self.metric("front_continued_streams_total")

    def metric(self, name: str) -> float:
        """Return a metric of the front that has no labels."""
        lines = self.front.client.get("/metrics").text.splitlines()
        [line] = [line for line in lines if line.startswith(f"cllm:{name} ")]
        return float(line.rpartition(" ")[2])


def slow_down(replica: Server, seconds: float = 0.02) -> None:
    slow = {"kind": "slow", "seconds": seconds, "num_steps": 1_000_000}
    replica.client.post("/faults", json={"faults": [slow]}).raise_for_status()


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
        yield client


async def follow(client: httpx2.AsyncClient, path: str, body: Any, at: int, reached: Any) -> bytes:
    """Return a stream. Call ``reached`` once when ``at`` bytes have arrived."""
    data = b""
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for part in answer.aiter_bytes():
            data += part
            if reached is not None and len(data) >= at:
                await asyncio.to_thread(reached)
                reached = None
    return data


@pytest.mark.parametrize("kind", range(repeat(len(KINDS), 1)))
def test_stream_is_the_same_although_its_replica_is_killed(start_server, kind):
    path, body = KINDS[kind]

    async def test() -> None:
        cluster = Cluster(start_server, 2)
        whole = cluster.replicas[0].client.post(path, json=body).content
        cluster.slow_down(0.05)  # there is time to kill it during a short stream
        async with opened(cluster.front) as client:
            at = random.randint(1, len(whole) // 2)
            data = await follow(client, path, body, at, cluster.kill_busy)
        assert read(data) == read(whole), f"killed after {at} bytes"
        assert cluster.num_continued >= 1

    asyncio.run(test())


@pytest.mark.parametrize("victim", ["server", "engine"])
def test_64_streams_of_all_kinds_end_right_although_a_replica_is_killed(start_server, victim):
    """The other replicas continue those of a server. A server continues those of its engine."""
    jobs = [(path, {**body, "cache_salt": f"salt{i}"}) for i in range(8) for path, body in KINDS]

    async def test() -> None:
        cluster = Cluster(start_server, 3)
        wholes = [cluster.replicas[0].client.post(path, json=body).content for path, body in KINDS]
        cluster.slow_down()
        waiting = len(jobs) // 2

        def reach() -> None:
            """Kill one when half of the streams have got this far."""
            nonlocal waiting
            waiting -= 1
            if waiting == 0 and victim == "server":
                cluster.kill_busy()
            elif waiting == 0:
                busy = cluster.find_busy()
                assert busy is not None
                os.kill(busy.engine_pid(), signal.SIGKILL)

        async with opened(cluster.front) as client:
            streams = [
                follow(client, path, body, random.randint(1, len(whole) // 3), reach)
                for (path, body), whole in zip(jobs, wholes * 8, strict=True)
            ]
            answers = await asyncio.gather(*streams)
        for (path, _), data, whole in zip(jobs, answers, wholes * 8, strict=True):
            assert read(data) == read(whole), path
        assert (cluster.num_continued > 0) == (victim == "server")
        assert cluster.metric("front_cut_streams_total") == 0

    asyncio.run(test())


def test_stream_is_the_same_although_its_replica_falls_silent(start_server):
    """As if the network between them had been cut: no connection ends, but nothing is answered."""
    path, body = KINDS[0]

    async def test() -> None:
        cluster = Cluster(start_server, 2, lease_seconds=1.5)
        whole = cluster.replicas[0].client.post(path, json=body).content
        cluster.slow_down()
        silent: list[Server] = []

        def silence() -> None:
            busy = cluster.find_busy()
            assert busy is not None
            silent.append(busy)
            busy.process.send_signal(signal.SIGSTOP)

        try:
            async with opened(cluster.front) as client:
                data = await follow(client, path, body, len(whole) // 3, silence)
        finally:
            for one in silent:
                one.process.send_signal(signal.SIGCONT)
        assert read(data) == read(whole)
        assert cluster.num_continued >= 1

    asyncio.run(test())


@pytest.mark.parametrize("trouble", ["drain", "faults"])
def test_stream_is_the_same_although_its_replica_ends_it_with_an_error(start_server, trouble):
    """The error of the replica is not shown, because another one can continue."""
    path, body = KINDS[0]
    drain = ("--server.drain-timeout", "0")

    async def test() -> None:
        cluster = Cluster(start_server, 2, model=(*FAKE, *drain))
        whole = cluster.replicas[0].client.post(path, json=body).content
        cluster.slow_down()

        def cause() -> None:
            busy = cluster.find_busy()
            assert busy is not None
            if trouble == "drain":
                busy.process.send_signal(signal.SIGTERM)
            else:
                fault = {"kind": "raise", "num_steps": 1_000_000}
                busy.client.post("/faults", json={"faults": [fault]}).raise_for_status()

        async with opened(cluster.front) as client:
            data = await follow(client, path, body, len(whole) // 3, cause)
        assert read(data) == read(whole)
        assert cluster.num_continued >= 1

    asyncio.run(test())


def test_stream_survives_one_replica_after_the_other(start_server):
    path, body = KINDS[0]

    async def test() -> None:
        cluster = Cluster(start_server, 4)
        whole = cluster.replicas[0].client.post(path, json=body).content
        cluster.slow_down()
        data, deaths = b"", 0
        async with (
            opened(cluster.front) as client,
            client.stream("POST", path, json=body) as answer,
        ):
            async for part in answer.aiter_bytes():
                data += part
                if deaths < 3 and len(data) > (deaths + 1) * len(whole) // 5:
                    await asyncio.to_thread(cluster.kill_busy)
                    deaths += 1
        assert read(data) == read(whole)
        assert deaths == 3

    asyncio.run(test())


ERRORS = {  # how the error of a kind begins
    0: b'{"error":',
    4: b"event: error",
    5: b"event: error",
    6: b'{"error":',
}


def test_streams_without_a_replica_that_can_continue_end_with_one_error(start_server):
    async def test() -> None:
        cluster = Cluster(start_server, 1, seconds=0)
        cluster.slow_down()
        waiting = len(ERRORS)

        def reach() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                cluster.kill_busy()

        async with opened(cluster.front) as client:
            streams = [follow(client, *KINDS[kind], 1, reach) for kind in ERRORS]
            answers = await asyncio.gather(*streams)
        for data, error in zip(answers, ERRORS.values(), strict=True):
            assert data.count(error) == 1, data[-300:]
            assert data.count(b"no other one can continue") == 1
        assert cluster.metric("front_cut_streams_total") == len(ERRORS)

    asyncio.run(test())


def write_adapters(folder: Path, seed: int) -> str:
    """Return the path of a configuration with an adapter, whose file is made from ``seed``."""
    write_adapter(folder / f"{seed}.gguf", BUILTIN, seed=seed)
    path = folder / f"{seed}.yaml"
    path.write_text(f"adapters: {{poet: {{path: {folder}/{seed}.gguf, scale: 2}}}}")
    return str(path)


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        *(({"model": "poet"}, other) for other in ("the same", "none", "another")),
        *(({"lora": [{"id": 0, "scale": 2}]}, other) for other in ("the same", "another")),
    ],
)
def test_stream_with_an_adapter_goes_on_where_the_same_one_is(start_server, tmp_path, asked, other):
    """Elsewhere it ends with an error that says why."""
    first = write_adapters(tmp_path, 1)
    second = {"the same": first, "another": write_adapters(tmp_path, 2)}.get(other)
    body = {"prompt": "ab", "stream": True, "max_tokens": 1000, **LONG, **asked}

    async def test() -> None:
        dying = start_server(*FAKE, *SLOWLY, "--config", first)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        urls = dying.url, f"http://127.0.0.1:{port}"
        options = ("--cluster.continue-seconds", "1")
        front = start_front(start_server, *urls, options=options)
        whole = dying.client.post("/v1/completions", json=body).content
        slow_down(dying, 0.1)

        def kill() -> None:
            """Start the other replica, so that it does not get the request at first."""
            start_server(*FAKE, *(("--config", second) if second else ()), port=port)
            end = time.monotonic() + PATIENCE
            while len(name_healthy(front)) < 2:
                assert time.monotonic() < end
            dying.stop(signal.SIGKILL)

        async with opened(front) as client:
            data = await follow(client, "/v1/completions", body, 1, kill)
        if other == "the same":
            assert read(data) == read(whole)
        else:
            assert data.count(b"no other one has the same model and adapters") == 1, data[-500:]

    asyncio.run(test())


def test_stream_waits_for_its_only_replica_to_be_started_again(start_server):
    path, body = KINDS[0]

    async def test() -> None:
        cluster = Cluster(start_server, 1)
        [replica] = cluster.replicas
        whole = replica.client.post(path, json=body).content
        cluster.slow_down()
        port = int(replica.url.rpartition(":")[2])

        def restart() -> None:
            cluster.kill_busy()
            start_server(*FAKE, port=port)

        async with opened(cluster.front) as client:
            data = await follow(client, path, body, len(whole) // 3, restart)
        assert read(data) == read(whole)

    asyncio.run(test())


def test_response_is_found_on_the_replica_that_has_continued_it(start_server):
    """Its id has the name of the first one, which is started again without its responses."""
    path, body = "/v1/responses", {"input": "hello", "stream": True, "max_output_tokens": 150}
    cluster = Cluster(start_server, 2)
    cluster.slow_down()
    first: list[Server] = []

    def kill() -> None:
        first.append(cluster.find_busy())
        cluster.kill_busy()

    async def run() -> bytes:
        async with opened(cluster.front) as client:
            return await follow(client, path, body | LONG, 2000, kill)

    last = asyncio.run(run()).rpartition(b"data: ")[2]
    response = json.loads(last)["response"]
    item, client = response["output"][0]["id"], cluster.front.client

    def check() -> None:
        assert client.get(f"{path}/{response['id']}").json()["output"] == response["output"]
        more = {"max_output_tokens": 4}
        bodies = [
            {"input": "go on", "previous_response_id": response["id"], **more},
            {"input": [{"type": "item_reference", "id": item}], **more},
        ]
        for one in bodies:
            answer = client.post(path, json=one)
            assert answer.status_code == 200, answer.text
            assert find_replica(answer.json()["id"]) != find_replica(response["id"])
        answer = client.get(f"{path}/{response['id']}", headers={"authorization": "Bearer x"})
        assert answer.status_code in (404, 503), "of another account"

    check()
    folder, port = str(first[0].keys.parent / "state"), int(first[0].url.rpartition(":")[2])
    start_server(*FAKE, port=port, CLLM_STORAGE_FOLDER=folder)
    end = time.monotonic() + PATIENCE
    while find_replica(response["id"]) not in name_healthy(cluster.front):
        assert time.monotonic() < end
    check()


def name_healthy(front: Server) -> set[str]:
    """Return the names of the replicas that get requests."""
    replicas = front.client.get("/health?level=full").json()["replicas"]
    return {one["name"] for one in replicas if one["status"] == "healthy"}


def check_answer(question: Question, data: bytes) -> None:
    text, names, arguments = "", [], ""
    for line in data.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            names += [call["function"]["name"]] if "name" in call["function"] else []
            arguments += call["function"]["arguments"]
    if not question.answer.startswith("<tool_call>"):
        assert (text, names) == (question.answer, [])
        return
    call = json.loads(question.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert (names, json.loads(arguments)) == ([call["name"]], call["arguments"])


@pytest.mark.llama
def test_questions_are_answered_right_although_a_replica_is_killed(start_server, known_questions):
    questions = known_questions(repeat(48, 16), seed=44)

    async def test() -> None:
        cluster = Cluster(start_server, 2, model=("--context", "1024"))
        cluster.slow_down()
        waiting = len(questions) // 2

        def reach() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                cluster.kill_busy()

        async with opened(cluster.front) as client:
            streams = []
            for question in questions:
                body = {"messages": question.messages, "temperature": 0, "stream": True}
                if question.tools:
                    body["tools"] = question.tools
                streams.append(follow(client, KINDS[0][0], body, 1, reach))
            answers = await asyncio.gather(*streams)
        for question, data in zip(questions, answers, strict=True):
            check_answer(question, data)
        assert cluster.num_continued > 0

    asyncio.run(test())
