"""What a replica believes and tells a front, which has the cluster key."""

import json
import time

import msgspec
import pytest
from conftest import PATIENCE

from cllm.cluster.accounts import CHARGED
from cllm.core.account import ANONYMOUS, Account
from cllm.core.carried import Carried, encode_carried
from cllm.core.request import Priority
from cllm.core.stored_ids import find_replica
from cllm.server.app import routes
from cllm.store.charges import UsageCounts
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file
from cllm.store.usage_reports import ReportBatch

KEY = "a-key-of-a-cluster"
FAKE = ("--backend.name", "fake", "--context", "4096", "--kv.max-memory-mb", "64")
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@pytest.fixture(scope="module")
def replica(start_server_once, tmp_path_factory):
    """A replica with the cluster key that also has an account of its own."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    accounts = {"own": AccountRecord(keys=(Key(hash_key("own key"), 0),))}
    write_key_file(path, KeyFile(accounts=accounts))
    return start_server_once(*FAKE, CLLM_SERVER_KEYS_FILE=str(path), CLLM_CLUSTER_KEY=KEY)


def carry(name="ann", request="", front="front1", weight=1.0, **rights):
    account = Account(name, has_key=True, is_carried=True, **rights)
    return encode_carried(Carried(account, account, weight, "r1", front, request))


def headers(**options):
    return {"x-cllm-cluster-key": KEY, "x-cllm-account": carry(**options)}


def read_usage(answer):
    return json.loads(answer.headers["x-cllm-usage"])


def take_reports(server, front, after=0):
    params = {"front": front, "after": after}
    if after:
        params["epoch"] = read_taken(server, {"front": "another one"}).epoch
    return read_taken(server, params).reports


def read_taken(server, params):
    answer = server.client.get(
        "/internal/usage", params=params, headers={"x-cllm-cluster-key": KEY}
    )
    return msgspec.json.decode(answer.content, type=ReportBatch)


def wait_for_reports(server, front, count):
    end = time.monotonic() + PATIENCE
    while len(reports := take_reports(server, front)) < count:
        assert time.monotonic() < end, reports
        time.sleep(0.05)
    return reports


@pytest.mark.parametrize(
    "forged",
    [
        {"x-cllm-account": carry(is_admin=True)},
        {"x-cllm-account": carry(is_admin=True), "x-cllm-cluster-key": ""},
        {"x-cllm-account": carry(is_admin=True), "x-cllm-cluster-key": KEY + "x"},
        {"x-cllm-account": carry(is_admin=True), "authorization": f"Bearer {KEY}"},
    ],
)
def test_carried_account_without_the_cluster_key_is_ignored(replica, forged):
    assert replica.client.post(CHAT, json=HELLO, headers=forged).status_code == 401
    assert replica.client.get("/scheduler", headers=forged).status_code == 401
    forged = {**forged, "authorization": "Bearer own key"}
    answer = replica.client.post(CHAT, json=HELLO, headers=forged)
    assert answer.status_code == 200
    assert "x-cllm-usage" not in answer.headers
    assert replica.client.get("/scheduler", headers=forged).status_code == 403
    assert replica.client.get("/internal/usage?front=front1", headers=forged).status_code == 404


@pytest.mark.parametrize("value", ["", "%", "AAAA", "e30="])
def test_account_that_cannot_be_read_is_rejected(replica, value):
    sent = {"x-cllm-cluster-key": KEY, "x-cllm-account": value}
    assert replica.client.post(CHAT, json=HELLO, headers=sent).status_code == 400


def test_rights_of_the_carried_account_hold(replica):
    assert replica.client.get("/scheduler", headers=headers()).status_code == 403
    assert replica.client.get("/scheduler", headers=headers(is_admin=True)).status_code == 200
    answer = replica.client.post(CHAT, json=HELLO, headers=headers(models=("other",)))
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO),
        ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 3, "n": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
        ("/v1/messages", {**HELLO, "model": "x", "max_tokens": 5}),
        ("/v1/embeddings", {"input": ["one", "two"]}),
        ("/v1/rerank", {"query": "one", "documents": ["two", "three"]}),
    ],
)
def test_complete_answer_says_what_it_cost(replica, path, body):
    if path == "/v1/messages":
        models = replica.client.get("/v1/models", headers=headers()).json()["data"]
        body = {**body, "model": models[0]["id"]}
    answer = replica.client.post(path, json=body, headers=headers())
    assert answer.status_code == 200, answer.text
    told, used = answer.json()["usage"], read_usage(answer)
    assert used["requests"] == 1
    read = told.get("prompt_tokens", told.get("input_tokens"))
    assert used["prompt_tokens"] == read + told.get("cache_read_input_tokens", 0)
    written = told.get("completion_tokens", told.get("output_tokens", 0))
    assert used["completion_tokens"] == written


def test_answers_that_cost_nothing_say_nothing(replica):
    for path, body in (("/tokenize", {"content": "hello"}), (CHAT, {"messages": 7})):
        answer = replica.client.post(path, json=body, headers=headers(front="nothing"))
        assert "x-cllm-usage" not in answer.headers
    assert take_reports(replica, "nothing") == []


def test_streams_and_aborted_requests_are_reported(replica):
    sent = headers(front="front2", request="req_1")
    with replica.client.stream(
        "POST",
        CHAT,
        json={**HELLO, "stream": True, "stream_options": {"include_usage": True}},
        headers=sent,
    ) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: {")]
    told = json.loads(lines[-1][6:])["usage"]
    sent = headers(front="front2", request="req_2")
    endless = {**HELLO, "stream": True, "max_tokens": 4000, "ignore_eos": True}
    with replica.client.stream("POST", CHAT, json=endless, headers=sent) as stream:
        next(line for line in stream.iter_lines() if '"content"' in line)
    first, second = wait_for_reports(replica, "front2", 2)
    assert (first.account, first.request) == ("ann", "req_1")
    assert first.used.prompt_tokens == told["prompt_tokens"]
    assert first.used.completion_tokens == told["completion_tokens"]
    assert second.request == "req_2"
    assert 0 < second.used.completion_tokens < 4000
    other = {"front": "front2", "after": first.number, "epoch": "another one"}
    assert len(read_taken(replica, other).reports) == 2
    assert [one.request for one in take_reports(replica, "front2", first.number)] == ["req_2"]
    assert len(take_reports(replica, "front2")) == 1  # the first has been taken


def test_rejected_request_is_reported_because_its_client_may_have_gone(replica):
    sent = headers(front="front of rejected requests", request="req_1")
    assert replica.client.post(CHAT, json={"messages": 7}, headers=sent).status_code == 400
    (report,) = wait_for_reports(replica, "front of rejected requests", 1)
    assert (report.request, report.used) == ("req_1", UsageCounts())


def test_request_that_needs_more_than_was_reserved_says_how_much(replica):
    answer = replica.client.post(CHAT, json=HELLO, headers=headers(num_reserved=1))
    assert answer.status_code == 429
    needed = int(answer.headers["x-cllm-needed-tokens"])
    answer = replica.client.post(CHAT, json=HELLO, headers=headers(num_reserved=needed))
    assert answer.status_code == 200
    used = read_usage(answer)
    assert used["prompt_tokens"] + HELLO["max_tokens"] == needed


def test_ids_of_stored_data_name_the_replica(replica):
    response = replica.client.post("/v1/responses", json={"input": "hello"}, headers=headers())
    body = response.json()
    assert find_replica(body["id"]) == "r1"
    assert {find_replica(item["id"]) for item in body["output"]} == {"r1"}
    follow = {"input": "go on", "previous_response_id": body["id"]}
    answer = replica.client.post("/v1/responses", json=follow, headers=headers())
    assert answer.json()["previous_response_id"] == body["id"]
    other = replica.client.get(f"/v1/responses/{body['id']}", headers=headers(name="bob"))
    assert other.status_code == 404


def upload(server, lines, sent):
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    files = {"file": ("in.jsonl", content)}
    answer = server.client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=sent)
    return answer.json()["id"]


def wait_for_end(server, path, sent):
    end = time.monotonic() + PATIENCE
    while True:
        batch = server.client.get(path, headers=sent).json()
        if batch.get("status") == "completed" or batch.get("processing_status") == "ended":
            return batch
        assert time.monotonic() < end, batch
        time.sleep(0.05)


def test_usage_of_batches_is_reported(replica):
    sent = headers(front="front3", priority=Priority.BATCH)
    lines = [{"custom_id": str(i), "method": "POST", "url": CHAT, "body": HELLO} for i in range(3)]
    file_id = upload(replica, lines, sent)
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch = replica.client.post("/v1/batches", json=asked, headers=sent).json()
    batch = wait_for_end(replica, f"/v1/batches/{batch['id']}", sent)
    assert {find_replica(batch[one]) for one in ("id", "output_file_id")} == {"r1"}
    assert find_replica(file_id) == "r1"
    reports = wait_for_reports(replica, "front3", 3)
    total = UsageCounts()
    for report in reports:
        assert (report.account, report.request) == ("ann", "")
        total.add(report.used)
    assert total.requests == 3
    assert total.completion_tokens == batch["usage"]["output_tokens"] == 24
    assert total.prompt_tokens == batch["usage"]["input_tokens"]


def test_batches_wait_while_the_front_says_that_a_limit_is_used_up(replica):
    key = {"x-cllm-cluster-key": KEY}
    paused = {"front": "front5", "paused": "ann"}
    replica.client.get("/internal/usage", params=paused, headers=key)
    sent = headers(front="front5")
    lines = [{"custom_id": "a", "method": "POST", "url": CHAT, "body": HELLO}]
    file_id = upload(replica, lines, sent)
    asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    batch = replica.client.post("/v1/batches", json=asked, headers=sent).json()
    path, end = f"/v1/batches/{batch['id']}", time.monotonic() + PATIENCE
    while replica.client.get(path, headers=sent).json()["status"] == "validating":
        assert time.monotonic() < end
    taken = replica.client.get("/internal/usage", params=paused, headers=key).json()
    assert taken["batch_accounts"] == ["ann"]
    assert taken["reports"] == []
    taken = replica.client.get("/internal/usage", params={"front": "front5"}, headers=key).json()
    assert wait_for_end(replica, path, sent)["request_counts"]["completed"] == 1


def test_message_batches_are_reported_too(replica):
    sent = {**headers(front="front4"), "anthropic-version": "2023-06-01"}
    models = replica.client.get("/v1/models", headers=headers()).json()["data"]
    params = {**HELLO, "model": models[0]["id"]}
    asked = {"requests": [{"custom_id": "a", "params": params}]}
    batch = replica.client.post("/v1/messages/batches", json=asked, headers=sent).json()
    assert find_replica(batch["id"]) == "r1"
    wait_for_end(replica, f"/v1/messages/batches/{batch['id']}", sent)
    [report] = wait_for_reports(replica, "front4", 1)
    assert report.used.completion_tokens == 8


def test_requests_are_scheduled_under_the_account_that_the_front_names(start_server):
    options = ("--backend.name", "fake", "--context", "32768", "--max-num-seqs", "1")
    server = start_server(*options, CLLM_CLUSTER_KEY=KEY)
    body = {**HELLO, "stream": True, "max_tokens": 30_000, "ignore_eos": True, "user": "ignored"}
    scheduled = Account("address-10.0.0.7", is_admin=True)
    sent = {
        "x-cllm-cluster-key": KEY,
        "x-cllm-account": encode_carried(Carried(ANONYMOUS, scheduled, replica="r1")),
    }
    with server.client.stream("POST", CHAT, json=body, headers=sent) as first:
        lines = first.iter_lines()  # its end would close the stream
        next(lines)
        body["messages"] = [{"role": "user", "content": "something else"}]
        with server.client.stream("POST", CHAT, json=body, headers=sent):
            page = server.client.get("/scheduler").json()
            assert [one["key"] for one in page["waiting"]] == ["address-10.0.0.7"]


def find_example(document, operation):
    """Return the example of a request body, without a stream; None without an example."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    example = next(iter(schema.get("examples", ())), None)
    if isinstance(example, dict) and "stream" in schema["properties"]:
        return example | {"stream": False}
    return example


def test_front_charges_the_routes_that_replicas_charge(start_server):
    server = start_server(*FAKE, "--model.aliases", "*", CLLM_CLUSTER_KEY=KEY)
    document = server.client.get("/openapi.json").json()
    told = {}
    for path, operations in document["paths"].items():
        body = find_example(document, operations["post"]) if "post" in operations else None
        if isinstance(body, dict):
            answer = server.client.post(path, json=body, headers=headers())
            if answer.status_code == 200:
                told[path] = "x-cllm-usage" in answer.headers
    assert len(told) > 15
    assert {path for path, is_charged in told.items() if is_charged} == CHARGED & told.keys()
    unknown = CHARGED - {route.path for route in routes()}
    assert not unknown
