"""What accounts pay when a replica dies."""

import asyncio
import concurrent.futures
import json
import re
import signal
import time
from collections import Counter

import fake_replica
import pytest
from cluster.conftest import FAKE, KEY, start_front
from conftest import PATIENCE
from fake_replica import FakeReplica, make_lease

from cllm.cluster.leases import Replicas
from cllm.core.stored_ids import find_replica
from cllm.routing.router import Router
from cllm.server.cluster.lease import Lease
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file

CHAT = "/v1/chat/completions"
ENDLESS = {"ignore_eos": True, "stream": True}
BEARER = {"authorization": "Bearer key of ann"}


def is_running(replica):
    lease = replica.client.get("/internal/lease", headers={"x-cllm-cluster-key": KEY}).json()
    return lease["models"][0]["num_running"] > 0


@pytest.fixture
def start_cluster(start_server, tmp_path):
    """Return a function that starts a front with the account "ann", and its replicas."""

    def start(count, *options, urls=()):
        accounts = {"ann": AccountRecord(keys=(Key(hash_key("key of ann"), 0),))}
        write_key_file(tmp_path / "keys.json", KeyFile(accounts=accounts))
        replicas = [start_server(*FAKE) for _ in range(count)]
        front = start_front(
            start_server,
            *(one.url for one in replicas),
            *urls,
            CLLM_SERVER_KEYS_FILE=str(tmp_path / "keys.json"),
            CLLM_STORAGE_FOLDER=str(tmp_path),
            options=options,
        )
        front.client.headers.update(BEARER)
        return front, replicas

    return start


def count_usage(front):
    """Return what the account has used today."""
    [day] = front.client.get("/usage").json()["days"] or [Counter()]
    return day


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_a_dead_replica_had_begun_is_paid_once(start_cluster, stream):
    front, replicas = start_cluster(2)

    def ask(i):
        message = {"role": "user", "content": f"{i} question"}
        body = {"messages": [message], "max_tokens": 400, "ignore_eos": True}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return front.client.post(CHAT, json=body)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, i) for i in range(8)]
        end = time.monotonic() + PATIENCE
        while not is_running(replicas[0]):
            assert time.monotonic() < end
        replicas[0].stop(signal.SIGKILL)
        told = Counter(requests=len(answers))
        for answer in answers:
            result = answer.result()
            assert result.status_code == 200, result.text
            lines = [line for line in result.text.splitlines() if line.startswith("data: {")]
            whole = json.loads(lines[-1][6:]) if stream else result.json()
            usage = whole["usage"]
            told.update({kind: usage[kind] for kind in ("prompt_tokens", "completion_tokens")})
    assert told["completion_tokens"] == 8 * 400
    [day] = front.client.get("/usage").json()["days"]
    assert {kind: day[kind] for kind in told} == told
    if not stream:
        assert front.metric("front_retries_total", "lost") > 0


def test_client_of_a_stream_that_no_replica_continues_pays_what_it_has_received(start_cluster):
    front, [replica] = start_cluster(1, "--cluster.continue-seconds", "1")
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30_000}
    with front.client.stream("POST", CHAT, json=body | ENDLESS) as stream:
        lines = (line for line in stream.iter_lines() if re.search(r'"content":"[^"]', line))
        seen = [next(lines) for _ in range(5)]
        replica.stop(signal.SIGKILL)
        seen += lines
    end = time.monotonic() + PATIENCE
    while count_usage(front)["completion_tokens"] < len(seen):
        assert time.monotonic() < end
        time.sleep(0.1)
    assert count_usage(front)["requests"] == 1


def test_client_that_leaves_a_hung_replica_pays_what_it_has_received(start_cluster):
    front, [replica] = start_cluster(1)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30_000}
    with front.client.stream("POST", CHAT, json=body | ENDLESS) as stream:
        lines = (line for line in stream.iter_lines() if re.search(r'"content":"[^"]', line))
        seen = [next(lines) for _ in range(5)]
        replica.process.send_signal(signal.SIGSTOP)
    replica.stop(signal.SIGKILL)  # it has not reported the request
    end = time.monotonic() + PATIENCE
    while count_usage(front)["completion_tokens"] < len(seen):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_front_that_is_killed_has_counted_its_streams(start_cluster):
    front, [replica] = start_cluster(1)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 30_000}
    with front.client.stream("POST", CHAT, json=body | ENDLESS) as stream:
        lines = (line for line in stream.iter_lines() if '"content"' in line)
        next(lines)
        end = time.monotonic() + PATIENCE
        while not (counted := count_usage(front)["completion_tokens"]):
            assert time.monotonic() < end
            next(lines)
        front.stop(signal.SIGKILL)
    front, _ = start_cluster(0, urls=[replica.url])
    assert count_usage(front)["completion_tokens"] >= counted


def test_request_that_must_reserve_more_is_sent_to_replicas_as_they_are_then(
    start_server, tmp_path
):
    replica = FakeReplica("a")

    def change_and_refuse(connection, request):
        replica.lease = make_lease("a", "other")
        until = replica.num_leases + 2  # the front knows the first of them
        end = time.monotonic() + PATIENCE
        while replica.num_leases < until:
            assert time.monotonic() < end
            time.sleep(0.02)
        refuse = fake_replica.answer(429, fields="x-cllm-needed-tokens: 900\r\n")
        refuse(connection, request)

    ann = AccountRecord(keys=(Key(hash_key("key of ann"), 0),), tokens_per_minute=1000)
    write_key_file(tmp_path / "keys.json", KeyFile(accounts={"ann": ann}))
    try:
        replica.steps = [change_and_refuse]
        keys = {"CLLM_SERVER_KEYS_FILE": str(tmp_path / "keys.json")}
        front = start_front(start_server, replica.url, **keys)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
        got = front.client.post(CHAT, json=body, headers=BEARER)
        assert got.json() == {"object": "answer"}
    finally:
        replica.close()


def test_object_on_a_replica_that_may_come_back_is_unavailable(start_server):
    replicas = [start_server(*FAKE) for _ in range(2)]
    front = start_front(start_server, *(one.url for one in replicas))
    paths = {}
    while len(paths) < 2:
        body = {"input": f"{time.monotonic()} question", "max_output_tokens": 2}
        name = front.client.post("/v1/responses", json=body).json()["id"]
        paths[find_replica(name)] = f"/v1/responses/{name}"
    lease = replicas[0].client.get("/internal/lease", headers={"x-cllm-cluster-key": KEY})
    replicas[0].stop(signal.SIGKILL)
    path = paths.pop(lease.json()["name"])
    end = time.monotonic() + PATIENCE
    while "does not answer" not in (answer := front.client.get(path)).text:
        assert answer.status_code == 503, answer.text  # the front has not noticed yet
        assert time.monotonic() < end
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    [other] = paths.values()
    assert front.client.get(other).status_code == 200


def test_replica_is_expected_to_come_back_for_a_minute():
    async def check(age):
        urls = ["http://127.0.0.1:1"]
        replicas = Replicas(urls, None, Router(10), lease_seconds=3)
        [replica] = replicas.all
        replica.lease = Lease("r1", "e1", "1", "ready", [])
        replica.received = asyncio.get_running_loop().time() - age
        return replicas.is_expected("r1"), replicas.is_expected("r2")

    assert asyncio.run(check(10)) == (True, False)
    assert asyncio.run(check(61)) == (False, False)
