"""A front with accounts: clients see one server, whichever replica answers them."""

import concurrent.futures
import contextlib
import itertools
import json
import socket
import time
from collections import Counter

import pytest
from cluster.conftest import FAKE, KEY, start_front
from conftest import PATIENCE

from cllm.cli.explain import explain
from cllm.core.account import Account
from cllm.core.carried import Carried, encode_carried
from cllm.core.stored_ids import find_replica
from cllm.store.keys import AccountRecord, Key, KeyFile, edit_key_file, hash_key, write_key_file

CHAT = "/v1/chat/completions"
INNER = {
    *("x-cllm-usage", "x-cllm-needed-tokens", "x-cllm-framed", "x-cllm-account"),
    "x-cllm-computed",
}
ANTHROPIC = {"anthropic-version": "2023-06-01"}


def record(name, **more):
    return AccountRecord(keys=(Key(hash_key(f"key of {name}"), 0),), **more)


def bearer(name):
    return {"authorization": f"Bearer key of {name}"}


ACCOUNTS = {
    "root": record("root", admin=True),
    **{name: record(name) for name in ("ann", "bob", "cat", "dan", "eve", "fay")},
    "few": record("few", requests_per_minute=5),
    "poor": record("poor", tokens_per_minute=200),
    "rich": record("rich", tokens_per_minute=100_000),
    "one": record("one", concurrent_requests=1),
    "slow": record("slow", requests_per_minute=3),
    "small": record("small", models=("other",)),
}


@pytest.fixture(scope="module")
def cluster(start_server_once, replicas, tmp_path_factory):
    """A front with accounts, of two replicas without any."""
    folder = tmp_path_factory.mktemp("front")
    write_key_file(folder / "keys.json", KeyFile(accounts=ACCOUNTS))

    def start():
        server = start_front(
            start_server_once,
            *(one.url for one in replicas),
            CLLM_SERVER_KEYS_FILE=str(folder / "keys.json"),
            CLLM_STORAGE_FOLDER=str(folder),
        )
        vars(server).update(start_again=start, replicas=replicas, path=folder / "keys.json")
        return server

    return start()


def ask(words, **more):
    return {"messages": [{"role": "user", "content": words}], "max_tokens": 8, **more}


def use(server, name, body, path=CHAT, **headers):
    return server.client.post(path, json=body, headers=bearer(name) | headers)


def read_usage(server, name):
    """Return the requests, prompt tokens and completion tokens of an account at the front."""
    answer = server.client.get("/usage", params={"account": name}, headers=bearer("root"))
    total = Counter()
    for day in answer.json()["days"]:
        total.update({kind: day[kind] for kind in KINDS})
    return total


KINDS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


def read_replica_usage(server, name):
    """Return the same as the replicas have counted it."""
    account = Account("x", is_admin=True, has_key=True, is_carried=True)
    headers = {
        "x-cllm-cluster-key": KEY,
        "x-cllm-account": encode_carried(Carried(account, account)),
    }
    total = Counter()
    for replica in server.replicas:
        for line in replica.client.get("/metrics", headers=headers).text.splitlines():
            if f'account="{name}"' not in line:
                continue
            value = int(float(line.rpartition(" ")[2]))
            for kind in ("prompt", "cached", "completion"):
                if f'kind="{kind}"' in line:
                    total[f"{kind}_tokens"] += value
            if line.startswith("cllm:account_requests_total"):
                total["requests"] += value
    return total


def wait_for_usage(server, name, expected):
    end = time.monotonic() + PATIENCE
    while (used := read_usage(server, name)) != expected():
        assert time.monotonic() < end, (used, expected())
        time.sleep(0.05)
    return used


def read_lease(server, number):
    """Return the lease of a replica."""
    answer = server.replicas[number].client.get(
        "/internal/lease", headers={"x-cllm-cluster-key": KEY}
    )
    return answer.json()


def name_replica(server, number):
    return read_lease(server, number)["name"]


# --- who may ask ---------------------------------------------------------------------------------


def test_headers_of_clients_cannot_forge_an_account(cluster):
    admin = Account("root", is_admin=True, has_key=True, is_carried=True)
    carried = encode_carried(Carried(admin, admin, replica="x", front="y"))
    for name, value in (("x-cllm-account", carried), ("X-CLLM-Account", carried)):
        for key in ({}, {"x-cllm-cluster-key": "wrong"}, {"x-cllm-cluster-key": ""}):
            forged = {name: value, **key}
            assert cluster.client.post(CHAT, json=ask("hi"), headers=forged).status_code == 401
            answer = cluster.client.get("/scheduler", headers=forged | bearer("ann"))
            assert answer.status_code == 403
            answer = use(cluster, "ann", {"input": "hi"}, "/v1/responses", **forged)
            assert find_replica(answer.json()["id"]) not in ("", "x")


def test_clients_do_not_see_what_replicas_tell_the_front(cluster):
    for body in (ask("hi"), ask("hi", stream=True), {"messages": 7}):
        answer = use(cluster, "ann", body, **{"x-cllm-progress": "1"})
        assert not INNER & {name.lower() for name in answer.headers}
    answer = use(cluster, "poor", ask("hi", max_tokens=4000))
    assert answer.status_code == 429
    assert not INNER & {name.lower() for name in answer.headers}


def test_rights_of_accounts_hold_behind_the_front(cluster):
    assert use(cluster, "small", ask("hi", model="fake")).status_code == 404
    assert cluster.client.get("/v1/models", headers=bearer("small")).json()["data"] == []
    assert cluster.client.get("/scheduler", headers=bearer("ann")).status_code == 403
    assert cluster.client.get("/scheduler", headers=bearer("root")).status_code == 200


# --- what they pay -------------------------------------------------------------------------------


def read_told(answer):
    """Return the usage that an answer tells its client."""
    if "data: " in answer.text:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        values = [json.loads(line) for line in lines]
        return next(one["usage"] for one in reversed(values) if one.get("usage"))
    return answer.json()["usage"]


def test_usage_equals_what_clients_were_told(cluster):
    requests = [
        *((CHAT, ask(f"chat {i}")) for i in range(4)),
        *(
            (CHAT, ask(f"stream {i}", stream=True, stream_options={"include_usage": True}))
            for i in range(4)
        ),
        ("/v1/completions", {"prompt": ["one", "two"], "n": 2, "max_tokens": 4}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
        ("/v1/embeddings", {"input": ["one", "two three"]}),
        ("/v1/rerank", {"query": "one", "documents": ["two", "three"]}),
    ]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = [*pool.map(lambda one: use(cluster, "bob", one[1], one[0]), requests)]
    told = Counter(requests=len(requests))
    for answer in answers:
        assert answer.status_code == 200, answer.text
        usage = read_told(answer)
        told["prompt_tokens"] += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        told["completion_tokens"] += usage.get("completion_tokens", usage.get("output_tokens", 0))
    used = wait_for_usage(cluster, "bob", lambda: read_replica_usage(cluster, "bob"))
    assert {kind: used[kind] for kind in told} == told
    # rejected and uncharged requests cost nothing
    assert use(cluster, "bob", {"messages": 7}).status_code == 400
    assert use(cluster, "bob", {"content": "hi"}, "/tokenize").status_code == 200
    assert read_usage(cluster, "bob") == used


def leave_before_the_answer(server, name):
    """Ask for an answer that is no stream, and disconnect while it is computed."""
    body = json.dumps(ask("leave", max_tokens=30_000, ignore_eos=True, n=8)).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer key of {name}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        end = time.monotonic() + PATIENCE
        while not sum(count_running(server, number) for number in range(2)):
            assert time.monotonic() < end


def count_running(server, number):
    return read_lease(server, number)["models"][0]["num_running"]


def test_clients_that_leave_pay_what_was_computed(cluster):
    for i in range(3):
        body = ask(f"leave {i}", stream=True, max_tokens=30_000, ignore_eos=True)
        with cluster.client.stream("POST", CHAT, json=body, headers=bearer("cat")) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if '"content"' in line)
    leave_before_the_answer(cluster, "cat")
    end = time.monotonic() + PATIENCE
    while read_replica_usage(cluster, "cat")["requests"] < 4:
        assert time.monotonic() < end
        time.sleep(0.05)
    used = wait_for_usage(cluster, "cat", lambda: read_replica_usage(cluster, "cat"))
    assert used["requests"] == 4
    assert used["completion_tokens"] > 0


def test_limits_hold_over_all_replicas(cluster):
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        answers = [*pool.map(lambda i: use(cluster, "few", ask(f"few {i}")), range(10))]
    assert Counter(one.status_code for one in answers) == {200: 5, 429: 5}
    error = next(one for one in answers if one.status_code == 429)
    assert "requests per minute" in error.json()["error"]["message"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "5"


def test_token_limits_hold_for_parallel_requests(cluster):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        bodies = [ask(f"poor {i}", max_tokens=40) for i in range(8)]
        answers = [*pool.map(lambda body: use(cluster, "poor", body), bodies)]
    codes = Counter(one.status_code for one in answers)
    assert codes.keys() == {200, 429}
    used = read_usage(cluster, "poor")
    assert used["prompt_tokens"] + used["completion_tokens"] <= 200
    assert used["requests"] == codes[200]


def test_request_within_a_token_limit_is_not_rejected_for_an_estimate(cluster):
    body = ask("word " * 3000, max_tokens=600)
    answer = use(cluster, "rich", body)
    assert answer.status_code == 200, answer.text
    needed = answer.json()["usage"]["prompt_tokens"] + 600
    assert needed > len(json.dumps(body)) / 4 + 512  # more than the front has reserved at first


def test_limit_of_concurrent_requests_holds_over_all_replicas(cluster):
    body = ask("long", stream=True, max_tokens=30_000, ignore_eos=True)
    with cluster.client.stream("POST", CHAT, json=body, headers=bearer("one")) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if '"content"' in line)
        assert use(cluster, "one", ask("second")).status_code == 429
    end = time.monotonic() + PATIENCE
    while (answer := use(cluster, "one", ask("third"))).status_code == 429:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert answer.status_code == 200


def test_revoked_key_ends_streams(cluster):
    with edit_key_file(cluster.path) as accounts:
        accounts["gone"] = record("gone")
    body = ask("long", stream=True, max_tokens=30_000, ignore_eos=True)
    with wait_for_stream(cluster, "gone", body) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if '"content"' in line)
        with edit_key_file(cluster.path) as accounts:
            del accounts["gone"]
        assert any("revoked" in line for line in lines)
    assert use(cluster, "gone", ask("again")).status_code == 401


@contextlib.contextmanager
def wait_for_stream(server, name, body):
    """Yield a stream, once the account may use the server."""
    end = time.monotonic() + PATIENCE
    while True:
        with server.client.stream("POST", CHAT, json=body, headers=bearer(name)) as stream:
            if stream.status_code == 200:
                yield stream
                return
        assert time.monotonic() < end
        time.sleep(0.05)


# --- what they store -----------------------------------------------------------------------------


def test_responses_are_continued_where_they_are_stored(cluster):
    ids = []
    for i in range(6):
        answer = use(
            cluster, "dan", {"input": f"{i} " * 50, "max_output_tokens": 4}, "/v1/responses"
        )
        ids.append(answer.json()["id"])
    assert {find_replica(one) for one in ids} <= {name_replica(cluster, i) for i in range(2)}
    for one in ids:
        answer = cluster.client.get(f"/v1/responses/{one}", headers=bearer("dan"))
        assert answer.json()["id"] == one
        follow = {"input": "go on", "previous_response_id": one, "max_output_tokens": 4}
        answer = use(cluster, "dan", follow, "/v1/responses")
        assert answer.status_code == 200, answer.text
        assert find_replica(answer.json()["id"]) == find_replica(one)
        other = cluster.client.get(f"/v1/responses/{one}", headers=bearer("ann"))
        assert other.status_code == 404
    answer = cluster.client.delete(f"/v1/responses/{ids[0]}", headers=bearer("dan"))
    assert answer.json()["deleted"] is True


def upload(server, name, *words):
    lines = [
        {"custom_id": word, "method": "POST", "url": CHAT, "body": ask(word)} for word in words
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    answer = server.client.post(
        "/v1/files",
        files={"file": ("in.jsonl", content)},
        data={"purpose": "batch"},
        headers=bearer(name),
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def wait_for_batch(server, name, path, **headers):
    end = time.monotonic() + PATIENCE
    while True:
        batch = server.client.get(path, headers=bearer(name) | headers).json()
        if batch.get("status") == "completed" or batch.get("processing_status") == "ended":
            return batch
        assert time.monotonic() < end, batch
        time.sleep(0.05)


def test_batch_runs_where_its_file_is_and_is_paid_at_the_front(cluster):
    file_id = upload(cluster, "eve", "a", "b", "c")
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch = use(cluster, "eve", asked, "/v1/batches").json()
    assert find_replica(batch["id"]) == find_replica(file_id) != ""
    batch = wait_for_batch(cluster, "eve", f"/v1/batches/{batch['id']}")
    content = cluster.client.get(
        f"/v1/files/{batch['output_file_id']}/content", headers=bearer("eve")
    )
    assert len(content.text.splitlines()) == 3
    used = wait_for_usage(cluster, "eve", lambda: read_replica_usage(cluster, "eve"))
    assert (used["requests"], used["completion_tokens"]) == (3, 24)
    assert batch["usage"]["output_tokens"] == 24


def test_batch_waits_while_its_account_has_used_up_a_limit(cluster):
    file_id = upload(cluster, "slow", *"abcdefgh")
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch = use(cluster, "slow", asked, "/v1/batches").json()
    path = f"/v1/batches/{batch['id']}"
    end = time.monotonic() + PATIENCE
    while read_usage(cluster, "slow")["requests"] < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert use(cluster, "slow", ask("second")).status_code == 429
    batch = cluster.client.get(path, headers=bearer("slow")).json()
    assert batch["request_counts"] == {"total": 8, "completed": 3, "failed": 0}
    answer = cluster.client.post(f"{path}/cancel", headers=bearer("slow"))
    assert answer.status_code == 200


def test_message_batch_has_results_at_the_address_of_the_front(cluster):
    params = {**ask("hello"), "model": "fake"}
    asked = {"requests": [{"custom_id": "a", "params": params}]}
    batch = use(cluster, "eve", asked, "/v1/messages/batches", **ANTHROPIC).json()
    path = f"/v1/messages/batches/{batch['id']}"
    batch = wait_for_batch(cluster, "eve", path, **ANTHROPIC)
    assert batch["results_url"] == f"{cluster.url}{path}/results"
    answer = cluster.client.get(f"{path}/results", headers=bearer("eve") | ANTHROPIC)
    assert json.loads(answer.text)["custom_id"] == "a"


def test_lists_have_the_objects_of_all_replicas_in_pages(cluster):
    """Files that an account has on several replicas, because replicas have come and gone."""
    ids = []
    for number in (0, 1, 0, 1, 1):
        account = Account("fay", has_key=True, is_carried=True)
        carried = Carried(account, account, replica=name_replica(cluster, number))
        answer = cluster.replicas[number].client.post(
            "/v1/files",
            files={"file": ("in.jsonl", b"{}")},
            data={"purpose": "batch"},
            headers={"x-cllm-cluster-key": KEY, "x-cllm-account": encode_carried(carried)},
        )
        ids.append(answer.json()["id"])
    whole = cluster.client.get("/v1/files", headers=bearer("fay")).json()
    assert {one["id"] for one in whole["data"]} == {*ids}
    assert whole["has_more"] is False
    times = [one["created_at"] for one in whole["data"]]
    assert times == sorted(times, reverse=True)
    seen, after = [], None
    for size in itertools.repeat(2):
        query = {"limit": size} | ({"after": after} if after else {})
        page = cluster.client.get("/v1/files", params=query, headers=bearer("fay")).json()
        seen += [one["id"] for one in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break
    assert seen == [one["id"] for one in whole["data"]]
    ascending = cluster.client.get(
        "/v1/files", params={"order": "asc", "limit": 3}, headers=bearer("fay")
    ).json()
    assert [one["id"] for one in ascending["data"]] == seen[::-1][:3]
    for query in ({"limit": 0}, {"after": "file-none"}, {"order": "up"}):
        answer = cluster.client.get("/v1/files", params=query, headers=bearer("fay"))
        assert answer.status_code == 400, query
    assert cluster.client.get("/v1/files", headers=bearer("ann")).json()["data"] == []


def test_objects_are_found_again_after_the_front_restarts(cluster):
    file_id = upload(cluster, "ann", "a")
    response = use(cluster, "ann", {"input": "hello"}, "/v1/responses").json()["id"]
    used = read_usage(cluster, "ann")
    another = cluster.start_again()
    for path in (f"/v1/files/{file_id}", f"/v1/responses/{response}"):
        assert another.client.get(path, headers=bearer("ann")).status_code == 200
    assert used["requests"] > 0
    another.stop()


def test_object_on_a_replica_that_is_gone_is_not_found(cluster):
    for path, code in (
        ("/v1/responses/resp_gone1_00", "response_id"),
        ("/v1/files/file-gone1_00/content", "file_id"),
        ("/v1/batches/batch_gone1_00", "batch_id"),
    ):
        answer = cluster.client.get(path, headers=bearer("ann"))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "replica_gone", code)
        assert "'gone1', which is not running" in error["message"]
    path = "/v1/messages/batches/msgbatch_gone1_00"
    answer = cluster.client.get(path, headers=bearer("ann") | ANTHROPIC)
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    body = {"input": "go on", "previous_response_id": "resp_gone1_00"}
    answer = use(cluster, "ann", body, "/v1/responses")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "replica_gone")


# --- what the front answers itself ---------------------------------------------------------------


def test_routes_about_the_server_are_about_the_cluster(cluster):
    names = sorted(name_replica(cluster, number) for number in range(2))
    root, get = bearer("root"), cluster.client.get
    models = get("/v1/models", headers=root).json()["data"]
    assert [one["id"] for one in models] == ["fake"]
    anthropic = get("/v1/models", headers=root | ANTHROPIC).json()
    assert (anthropic["first_id"], anthropic["has_more"]) == ("fake", False)
    assert get("/v1/models/fake", headers=root).json()["id"] == "fake"
    assert get("/v1/models/none", headers=root).status_code == 404
    assert [one["name"] for one in get("/api/tags", headers=root).json()["models"]] == [
        "fake:latest"
    ]
    assert len(get("/api/ps", headers=root).json()["models"]) == 1
    full = get("/health", params={"level": "full"}, headers=root).json()
    assert sorted(one["name"] for one in full["replicas"]) == names
    assert sorted(one["replica"] for one in full["models"]) == names
    assert get("/health").json() == {"status": "healthy", "model_loaded": True}
    assert get("/health", params={"level": "full"}, headers=bearer("ann")).status_code == 403
    assert get("/ready").status_code == 200
    assert get("/version", headers=root).json()["version"]
    run = cluster.client.post("/bench/run", json={}, headers=root)
    assert (run.status_code, "a replica" in run.text) == (404, True)
    assert get("/props", headers=root).json()["endpoint_bench"] is False
    assert get("/", headers=root | {"accept": "text/html"}).text.startswith("<!doctype html>")


def test_schedulers_of_all_replicas_are_explained_or_the_one_that_is_named(cluster, capsys):
    names = sorted(name_replica(cluster, number) for number in range(2))
    root, get = bearer("root"), cluster.client.get
    answer = get("/scheduler", params={"steps": 1}, headers=root).json()
    assert [*answer["replicas"]] == names
    assert all(len(one["steps"]) <= 1 and "cells" in one for one in answer["replicas"].values())
    assert "steps" in get("/scheduler", params={"replica": names[1]}, headers=root).json()
    for params in ({"replica": "none"}, {"model": "none"}):
        assert get("/scheduler", params=params, headers=root).status_code == 404
    assert get("/scheduler", params={"engine": 7}, headers=root).status_code == 400
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLLM_API_KEY", root["authorization"].removeprefix("Bearer "))
        explain(cluster.url)
        said = capsys.readouterr().out
        assert [line for line in said.splitlines() if line.startswith("Replica")] == [
            f"Replica {name}:" for name in names
        ]
        explain(cluster.url, replica=names[1])
        assert "Replica" not in capsys.readouterr().out


def test_metrics_have_all_replicas_and_sums_of_accounts(cluster):
    names = {name_replica(cluster, number) for number in range(2)}
    assert use(cluster, "bob", ask("hi")).status_code == 200
    page = cluster.client.get("/metrics", headers=bearer("root")).text
    lines = [line for line in page.splitlines() if line.startswith("cllm:prompt_tokens_total{")]
    assert {line.partition('replica="')[2].partition('"')[0] for line in lines} == names
    usage = [line for line in page.splitlines() if 'account="bob"' in line]
    assert usage
    assert not any("replica=" in line for line in usage)
    assert "account=" not in cluster.client.get("/metrics", headers=bearer("ann")).text


def test_changes_need_what_they_need_on_every_replica(cluster):
    answer = use(cluster, "root", {"model": "fake"}, "/models/load")
    assert answer.status_code == 403  # as every replica says
    assert "allow_model_changes" in answer.json()["error"]["message"]
    assert use(cluster, "ann", {"model": "fake"}, "/models/load").status_code == 403


def test_changes_reach_all_replicas_or_the_one_that_is_named(start_server):
    replicas = [start_server(*FAKE, "--server.allow-model-changes", "true") for _ in range(2)]
    front = start_front(start_server, *(one.url for one in replicas))

    def change(what, **query):
        answer = front.client.post(f"/models/{what}", json={"model": "fake"}, params=query)
        assert answer.json() == {"success": True}
        page = front.client.get("/health", params={"level": "full"}).json()
        return {one["replica"]: one["status"] for one in page["models"]}

    names = [*change("unload")]
    assert change("unload") == dict.fromkeys(names, "unloaded")
    assert change("load", replica=names[0]) == {names[0]: "loaded", names[1]: "unloaded"}
    assert change("load") == dict.fromkeys(names, "loaded")
    answer = front.client.post("/models/load", json={"model": "fake"}, params={"replica": "none"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "replica_gone")
