"""API keys, tenants and limits of a running server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import io
import json
import os
import socket
import ssl
import sys
import time
from collections import Counter
from pathlib import Path

import httpx2
import preloaded
import pytest
from conftest import PATIENCE

from cllm.store.keys import (
    AccountRecord,
    Key,
    KeyFile,
    edit_key_file,
    hash_key,
    write_key_file,
)

FAKE = ("--backend.name", "fake", "--context", "4096", "--kv.max-memory-mb", "64")
ADMIN = {
    *("/scheduler", "/benchmark", "/faults", "/debug/trace", "/models/load", "/models/unload"),
    *("/api/pull", "/api/create", "/api/copy", "/api/delete"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "POST /lora-adapters"),
    *("GET /bench/run", "POST /bench/run", "DELETE /bench/run", "/bench/run/events"),
    *("GET /bench/reports", "POST /bench/reports", "/bench/reports/{before}/compare/{after}"),
    *("GET /bench/reports/{report_id}", "DELETE /bench/reports/{report_id}"),
}
PUBLIC = {"/", "/health", "/ready"}
OBJECTS = ("{file_id}", "{batch_id}", "{response_id}")


def record(name, **more):
    return AccountRecord(keys=(Key(hash_key(f"key of {name}"), 0),), **more)


def bearer(name):
    return {"authorization": f"Bearer key of {name}"}


ACCOUNTS = {
    "root": record("root", admin=True),
    "ann": record("ann"),
    "bob": record("bob"),
    "cat": record("cat", tenant="ann"),
    "few": record("few", requests_per_minute=5, tokens_per_minute=10_000),
    "one": record("one", concurrent_requests=1),
    "poor": record("poor", tokens_per_month=100),
    "narrow": record("narrow", routes=("/v1/chat/*", "/v1/models"), models=("other",)),
    "embed": record("embed", routes=("/v1/embeddings",)),
}


@pytest.fixture(scope="module")
def server(start_server_once, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_key_file(path, KeyFile(accounts=ACCOUNTS))
    server = start_server_once(*FAKE, CLLM_SERVER_KEYS_FILE=str(path))
    server.client.headers.update(bearer("root"))
    server.path = path
    return server


def complete(server, name, prompt="hello", **more):
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    return server.client.post("/v1/completions", json=body, headers=bearer(name))


def usage(server, name, **query):
    answer = server.client.get("/usage", params=query, headers=bearer(name))
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(server, name):
    days = usage(server, "root", account=name)["days"]
    return [sum(day[f"{kind}_tokens"] for day in days) for kind in ("prompt", "completion")]


@pytest.fixture(scope="module")
def operations(server):
    document = server.client.get("/openapi.json").json()
    return [
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    ]


@pytest.mark.parametrize("key", ["", "Bearer wrong", "Bearer", "Basic a2V5", "Bearer key of an"])
def test_every_route_needs_a_key(server, operations, key):
    """Each dialect has its own form of the error."""
    assert len(operations) > 40
    headers = {"authorization": key} if key else {"authorization": ""}
    statuses = Counter()
    for method, path in operations:
        answer = server.client.request(
            method, path.replace("{", "").replace("}", ""), headers=headers
        )
        if path in PUBLIC:
            assert answer.status_code == 200, path
            continue
        statuses[answer.status_code] += 1
        assert answer.status_code in (401, 429), path
        assert "x-request-id" in answer.headers
        if answer.status_code == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        if path.startswith("/api/"):
            assert isinstance(error, str)
        elif path.startswith("/v1/messages"):
            assert error["type"] in ("authentication_error", "rate_limit_error")
        else:
            assert error["code"] in ("invalid_api_key", "too_many_wrong_keys")
    if key in ("", "Bearer"):  # without a key, nothing is throttled
        assert set(statuses) == {401}


def test_unknown_paths_need_a_key_too(server):
    paths = (
        "/nothing",
        "/v1/scheduler",
        "//metrics",
        "/metrics/",
        "/%2e%2e/x",
        "/HEALTH",
        "/x/../metrics",
    )
    for path in paths:
        assert get(server, {"host": "localhost"}, path).status == 401, path


def test_root_tells_nothing_without_a_key(server):
    answer = server.client.get("/", headers={"authorization": ""}).json()
    assert set(answer) == {"name", "version", "docs"}
    assert "model" in server.client.get("/").json()


@pytest.mark.parametrize("name", ["x-api-key", "api-key"])
def test_key_is_read_from_other_headers_too(server, name):
    headers = {name: "key of ann", "authorization": ""}
    assert server.client.get("/v1/models", headers=headers).status_code == 200
    headers[name] = "wrong"
    for path in ("/v1/completions", "/completions", "//v1/chat/completions", "/v1/responses"):
        error = server.client.post(f"{server.url}{path}", headers=headers).json()["error"]
        assert error["code"] in ("invalid_api_key", "too_many_wrong_keys"), path
    for path in ("/v1/messages", "/messages", "//v1//messages"):
        error = server.client.post(f"{server.url}{path}", headers=headers).json()["error"]
        assert error["type"] in ("authentication_error", "rate_limit_error"), path


def test_wrong_keys_are_throttled_but_valid_ones_served(server):
    """Other clients may have the same address."""
    answers = [
        server.client.get("/v1/models", headers={"x-api-key": f"{i}", "authorization": ""})
        for i in range(30)
    ]
    statuses = [answer.status_code for answer in answers]
    assert statuses == sorted(statuses)
    assert statuses[-1] == 429
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert server.client.get("/v1/models", headers=bearer("ann")).status_code == 200


# --- tenants -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects(server):
    """The ids of a file, a batch and a response of ann."""
    client, headers = server.client, bearer("ann")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    files = {"file": ("lines.jsonl", io.BytesIO(json.dumps(line).encode() + b"\n"))}
    file = client.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers).json()
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = client.post("/v1/batches", json=body, headers=headers).json()
    response = client.post("/v1/responses", json={"input": "hi"}, headers=headers).json()
    return dict(zip(OBJECTS, (file["id"], batch["id"], response["id"]), strict=True))


def test_second_tenant_walks_all_routes(server, operations, objects):
    """It finds no object of the first one, and nothing that concerns all accounts."""
    seen = Counter()
    for method, template in operations:
        if template == "/models/sse":  # it never ends, and tells only how far models are loaded
            continue
        named = [name for name in OBJECTS if name in template]
        path = template
        for name, value in objects.items():
            path = path.replace(name, value)
        body = {"json": {}} if method == "POST" else {}
        answer = server.client.request(method, path, headers=bearer("bob"), **body)
        if named:
            assert answer.status_code == 404, (method, path, answer.text)
            seen["object"] += 1
        elif {path, f"{method} {path}"} & ADMIN:
            assert answer.status_code == 403, (method, path, answer.text)
            seen["admin"] += 1
        else:
            assert answer.status_code in (200, 400, 404, 415, 422), (method, path, answer.text)
            if path != "/openapi.json":
                for value in (*objects.values(), "ann", "key of"):
                    assert f'"{value}' not in answer.text, (method, path)
    assert seen == {"object": 13, "admin": len(ADMIN)}


def test_owner_finds_its_objects(server, objects):
    for path, name in (
        ("files", "{file_id}"),
        ("batches", "{batch_id}"),
        ("responses", "{response_id}"),
    ):
        answer = server.client.get(f"/v1/{path}/{objects[name]}", headers=bearer("ann"))
        assert answer.status_code == 200, answer.text
        other = server.client.get(f"/v1/{path}/{objects[name]}", headers=bearer("cat"))
        assert other.status_code == 404  # objects are of an account, caches of a tenant


def test_previous_response_of_another_tenant_is_unknown(server, objects):
    body = {"input": "hi", "previous_response_id": objects["{response_id}"]}
    assert server.client.post("/v1/responses", json=body, headers=bearer("bob")).status_code == 404
    assert server.client.post("/v1/responses", json=body, headers=bearer("ann")).status_code == 200


def cached_tokens(server, name, prompt):
    details = complete(server, name, prompt).json()["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens", 0)


def test_prefixes_are_shared_within_a_tenant_only(server):
    prompt = "a long prompt that nobody else has sent so far " * 20
    assert cached_tokens(server, "ann", prompt) == 0
    assert cached_tokens(server, "bob", prompt) == 0
    assert cached_tokens(server, "ann", prompt) > 500
    assert cached_tokens(server, "cat", prompt) > 500


def test_equal_requests_of_two_tenants_do_not_share_a_computation(server):
    """The second one would otherwise learn that the first is being computed."""
    before = server.metric("prompts_shared_total")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = [
            pool.submit(complete, server, name, "x", max_tokens=300) for name in ("ann", "bob")
        ]
        usages = [answer.result().json()["usage"] for answer in answers]
    assert server.metric("prompts_shared_total") == before
    assert [one.get("prompt_tokens_details", {}).get("cached_tokens", 0) for one in usages] == [
        0,
        0,
    ]


# --- rights --------------------------------------------------------------------------------------


def test_account_uses_only_its_routes_and_models(server):
    client, headers = server.client, bearer("narrow")
    assert client.get("/v1/models", headers=headers).json()["data"] == []
    body = {"messages": [{"role": "user", "content": "hi"}]}
    answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert client.get("/health", headers=headers).status_code == 200
    assert errors_hide_the_served_model(client, headers)
    for path in ("/v1/completions", "/tokenize", "/api/chat", "/v1/api/chat", "/v1/tokenize"):
        assert client.post(path, json=body, headers=headers).status_code == 403, path
    for path in ("//v1/completions", "/v1//completions", "//v1//api//chat", "//usage"):
        answer = client.post(f"{server.url}{path}", json=body, headers=headers)
        assert answer.status_code == 403, path
    for path in ("/v1/embeddings", "/embeddings", "/v1//embeddings"):
        answer = client.post(f"{server.url}{path}", json={"input": "a"}, headers=bearer("embed"))
        assert answer.status_code == (200 if path.startswith("/v1") else 403), answer.text


def errors_hide_the_served_model(client, headers):
    """Return whether the errors hide the served model."""
    served = client.get("/v1/models").json()["data"][0]["id"]
    message = {"messages": [{"role": "user", "content": "hi"}]}
    for name in (None, "unknown", served):
        body = message if name is None else {"model": name, **message}
        answer = client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 404
        text = answer.json()["error"]["message"].replace(repr(name), "")
        if served in text or "other" not in text:
            return False
    return True


def test_routes_of_an_account_hold_for_its_batches_too(server):
    """The file needs another route, so the account has both."""
    with edit_key_file(server.path) as accounts:
        accounts["files"] = record("files", routes=("/v1/files*", "/v1/batches*"))
    end = time.monotonic() + PATIENCE
    while (answer := server.client.get("/v1/files", headers=bearer("files"))).status_code != 200:
        assert time.monotonic() < end, answer.text
        time.sleep(0.02)
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    files = {"file": ("lines.jsonl", io.BytesIO(json.dumps(line).encode() + b"\n"))}
    file = server.client.post(
        "/v1/files", files=files, data={"purpose": "batch"}, headers=bearer("files")
    ).json()
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    answer = server.client.post("/v1/batches", json=body, headers=bearer("files"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "route_not_allowed")


def test_change_of_an_account_keeps_its_responses(server):
    with edit_key_file(server.path) as accounts:
        accounts["dan"] = record("dan", requests_per_minute=60)
    end = time.monotonic() + PATIENCE
    while complete(server, "dan").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.02)
    response = server.client.post(
        "/v1/responses", json={"input": "hi"}, headers=bearer("dan")
    ).json()
    with edit_key_file(server.path) as accounts:
        accounts["dan"] = record("dan", requests_per_minute=90)
    while usage(server, "dan")["accounts"][0]["limits"]["requests_per_minute"] != 90:
        assert time.monotonic() < end
        time.sleep(0.02)
    path = f"/v1/responses/{response['id']}"
    assert server.client.get(path, headers=bearer("dan")).status_code == 200


def test_usage_of_others_needs_an_administrator(server):
    complete(server, "ann")
    answer = server.client.get("/usage", params={"account": "ann"}, headers=bearer("bob"))
    assert answer.status_code == 403
    assert {day["account"] for day in usage(server, "bob")["days"]} <= {"bob"}
    assert "ann" in {day["account"] for day in usage(server, "root")["days"]}
    page = server.client.get("/metrics", headers=bearer("bob")).text
    assert 'account="' not in page
    assert 'cllm:account_requests_total{account="ann"}' in server.client.get("/metrics").text


# --- limits --------------------------------------------------------------------------------------


def test_limits_hold_under_parallel_requests(server):
    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda i: complete(server, "few", f"{i}"), range(200)))
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses == {200: 5, 429: 195}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "5 requests per minute" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-limit-requests"] == "5"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-limit-tokens"] == "10000"
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) > 9000
    assert refused.headers["x-ratelimit-reset-requests"].endswith("s")


def test_limit_of_concurrent_requests(server):
    headers = bearer("one")
    body = {"prompt": "a", "max_tokens": 4000, "n": 8, "stream": True, "ignore_eos": True}
    with server.client.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
        next(stream.iter_bytes())
        refused = complete(server, "one")
        assert refused.status_code == 429
        assert "1 concurrent requests" in refused.json()["error"]["message"]
    end = time.monotonic() + PATIENCE
    while complete(server, "one").status_code != 200:  # the place is free soon after the abort
        assert time.monotonic() < end
        time.sleep(0.05)


def test_budget_of_the_month_ends(server):
    answer = complete(server, "poor", "a" * 50, max_tokens=40)
    assert answer.status_code == 200
    refused = complete(server, "poor", "a" * 50, max_tokens=40)
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert refused.headers["x-should-retry"] == "false"
    messages = {"model": "", "max_tokens": 400, "messages": [{"role": "user", "content": "hi"}]}
    refused = server.client.post("/v1/messages", json=messages, headers=bearer("poor"))
    assert refused.json()["error"]["type"] == "rate_limit_error"


def test_usage_equals_what_clients_were_told(server):
    """In all dialects, streams and embeddings included."""
    client, headers, told = server.client, bearer("cat"), [0, 0]
    before = tokens_of(server, "cat")

    def add(prompt, completion):
        told[0] += prompt
        told[1] += completion

    for i in range(3):
        one = complete(server, "cat", f"{i} and more", max_tokens=5 + i, n=2).json()["usage"]
        add(one["prompt_tokens"], one["completion_tokens"])
    body = {
        "prompt": "a",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = client.post("/v1/completions", json=body, headers=headers).text
    last = json.loads(text.split("data: ")[-2])["usage"]
    add(last["prompt_tokens"], last["completion_tokens"])
    chat = {"model": "", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    one = client.post("/v1/messages", json=chat, headers=headers).json()["usage"]
    add(one["input_tokens"] + one.get("cache_read_input_tokens", 0), one["output_tokens"])
    chat |= {"model": client.get("/v1/models").json()["data"][0]["id"], "stream": False}
    one = client.post("/api/chat", json=chat, headers=headers).json()
    add(one["prompt_eval_count"], one["eval_count"])
    one = client.post("/v1/responses", json={"input": "hi"}, headers=headers).json()["usage"]
    add(one["input_tokens"], one["output_tokens"])
    one = client.post("/v1/embeddings", json={"input": ["a", "b c"]}, headers=headers).json()[
        "usage"
    ]
    add(one["prompt_tokens"], 0)
    after = tokens_of(server, "cat")
    assert [now - then for now, then in zip(after, before, strict=True)] == told


def test_usage_as_csv(server):
    complete(server, "bob")
    answer = server.client.get("/usage", params={"format": "csv"}, headers=bearer("bob"))
    head, *rows = answer.text.splitlines()
    assert head == "account,day,model,requests,prompt_tokens,cached_tokens,completion_tokens"
    assert rows[0].startswith("bob,")
    assert answer.headers["content-type"].startswith("text/csv")
    wrong = server.client.get("/usage", params={"begin": "2026-02-31"}, headers=bearer("bob"))
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "begin")


# --- changes while the server runs ---------------------------------------------------------------


def test_revoked_key_ends_new_requests_and_streams(server):
    with edit_key_file(server.path) as accounts:
        accounts["eve"] = record("eve")
    end = time.monotonic() + PATIENCE
    while complete(server, "eve").status_code != 200:
        assert time.monotonic() < end
        time.sleep(0.02)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    body |= {"prompt": list(range(100, 140))}
    with server.client.stream(
        "POST", "/v1/completions", json=body, headers=bearer("eve")
    ) as stream:
        chunks = stream.iter_lines()
        next(chunks)
        with edit_key_file(server.path) as accounts:
            accounts["eve"] = AccountRecord()
        rest = list(chunks)
    assert complete(server, "eve").status_code in (401, 429)
    (shown,) = usage(server, "root", account="eve")["accounts"]
    assert shown["tokens_of_month"] > 0  # it is known although it has no key
    assert any('"invalid_api_key"' in line for line in rest)
    assert rest[-2 if rest[-1] == "" else -1] == "data: [DONE]"


@pytest.mark.slow
def test_usage_survives_a_kill(start_server, tmp_path):
    path = tmp_path / "keys.json"
    write_key_file(path, KeyFile(accounts=ACCOUNTS))
    settings = {
        "CLLM_SERVER_KEYS_FILE": str(path),
        "CLLM_STORAGE_FOLDER": str(tmp_path / "state"),
    }
    first = start_server(*FAKE, **settings)
    told = [complete(first, "few", f"{i}").json()["usage"]["total_tokens"] for i in range(5)]
    time.sleep(1.2)
    first.process.kill()
    first.process.wait()
    second = start_server(*FAKE, **settings)
    second.client.headers.update(bearer("root"))
    assert sum(tokens_of(second, "few")) == sum(told)
    assert complete(second, "few").status_code == 429
    assert (tmp_path / "state" / "usage.db").stat().st_mode & 0o077 == 0


# --- the start -----------------------------------------------------------------------------------


def start_fails(tmp_path, *arguments, **environment):
    environment.setdefault("CLLM_SERVER_KEYS_FILE", str(tmp_path / "none.json"))
    result = preloaded.run("serve", "--port", "0", *FAKE, *arguments, **environment)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.slow
def test_other_machines_are_not_served_without_keys(tmp_path):
    assert "--insecure" in start_fails(tmp_path, "--host", "0.0.0.0")
    assert "cllm keys add" in start_fails(tmp_path, "--host", "::")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--server.tls-key", "x"), "need each other"),
        (("--server.tls-key", "/none", "--server.tls-certificate", "/none"), "No such file"),
        (("--api-key", "a key"), "--server.api-key must be a key without spaces"),
        (("--server.trusted-proxies", "nonsense"), "not an address or a network"),
        (("--server.cors-origins", "evil.com"), "not an origin such as"),
        (("--api-key", "secret", "--server.enable-faults"), "cannot be used with API keys"),
    ],
)
def test_settings_that_cannot_work_are_one_line(tmp_path, arguments, expected):
    line = start_fails(tmp_path, *arguments)
    assert expected in line
    assert "a key with spaces" not in line


@pytest.mark.slow
def test_certificate_cannot_be_a_pipe(tmp_path):
    """It would be read twice, and reading waits for a writer."""
    os.mkfifo(tmp_path / "pipe")
    tls = ("--server.tls-certificate", tmp_path / "pipe", "--server.tls-key", tmp_path / "pipe")
    assert "is a pipe" in start_fails(tmp_path, *map(str, tls))


def test_single_key_from_the_environment(start_server):
    server = start_server(*FAKE, "--host", "0.0.0.0", CLLM_API_KEY="one,single-key")
    url = server.url
    server.wait_for_log("has only 14 characters")
    server.wait_for_log("with its comma is one key")
    server.wait_for_log('-H "Authorization: Bearer $CLLM_API_KEY"')
    assert "anyone who reaches" not in server.log
    assert httpx2.get(f"{url}/v1/models").status_code == 401
    headers = {"authorization": "Bearer one,single-key"}
    assert httpx2.get(f"{url}/v1/models", headers=headers).status_code == 200
    assert httpx2.get(f"{url}/scheduler", headers=headers).status_code == 200
    # any Host is accepted with keys
    assert httpx2.get(f"{url}/v1/models", headers={**headers, "host": "x.com"}).status_code == 200
    if sys.platform == "linux":
        environment = Path(f"/proc/{server.engine_pid()}/environ").read_bytes()
        assert b"PATH=" in environment
        assert b"single-key" not in environment


# --- hosts, origins, proxies, TLS ----------------------------------------------------------------


def get(server, headers, path="/v1/models", method="GET"):
    address = server.url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(address)) as connection:
        connection.putrequest(method, path, skip_host=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        answer.read()
    return answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8000", 200),
        ("app.localhost:1", 200),
        ("127.0.0.1:8000", 200),
        ("127.9.9.9", 200),
        ("[::1]:8000", 200),
        ("evil.com", 403),
        ("localhost.evil.com", 403),
        ("127.0.0.1.evil.com:80", 403),
        ("evil.com:127", 403),
        ("192.168.1.5", 403),
        ("[::2]", 403),
        ("", 200),  # no browser sends that
    ],
)
def test_only_loopback_hosts_without_keys(fake_server, host, status):
    """A page of another site cannot reach the server by a name that it resolves to 127.0.0.1."""
    assert get(fake_server, {"host": host}).status == status


def test_insecure_server_is_open_and_says_so(start_server):
    """A name of another site is still not served: only addresses, and the machine's own name."""
    server = start_server(*FAKE, "--host", "0.0.0.0", "--insecure")
    server.wait_for_log("anyone who reaches this address may use the server")
    for host, status in (
        ("192.168.1.5:8000", 200),
        ("[fe80::1]", 200),
        (socket.gethostname(), 200),
        ("localhost", 200),
        ("evil.com", 403),
    ):
        assert get(server, {"host": host}).status == status, host


def test_allowed_hosts_and_origins(start_server):
    server = start_server(
        *FAKE,
        "--server.allowed-hosts",
        "llm.example.com,*.internal",
        "--server.cors-origins",
        "https://chat.example.com",
    )
    for host, status in (("llm.example.com:80", 200), ("a.internal", 200), ("internal", 403)):
        assert get(server, {"host": host}).status == status, host
    preflight = {
        "host": "localhost",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }
    allowed = get(
        server,
        {**preflight, "origin": "https://chat.example.com"},
        "/v1/chat/completions",
        "OPTIONS",
    )
    assert allowed.status == 200
    assert allowed.getheader("access-control-allow-origin") == "https://chat.example.com"
    for origin in ("https://evil.com", "https://chat.example.com.evil.com", "null"):
        refused = get(server, {**preflight, "origin": origin}, "/v1/chat/completions", "OPTIONS")
        assert refused.getheader("access-control-allow-origin") is None
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    answer = server.client.post(
        "/v1/completions", json=body, headers={"origin": "https://chat.example.com"}
    )
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
    assert "[DONE]" in answer.text


def test_no_origin_is_allowed_by_default(fake_server, server):
    for one in (fake_server, server):
        answer = get(
            one,
            {
                "host": "localhost",
                "origin": "http://localhost",
                "access-control-request-method": "GET",
            },
            "/v1/models",
            "OPTIONS",
        )
        assert answer.getheader("access-control-allow-origin") is None
        assert answer.status in (404, 405)  # a preflight has no key, so it gets no 401


# --- TLS, proxies and connections ----------------------------------------------------------------


@pytest.mark.slow
def test_https(start_server, certificate):
    """Streams too. A client that never finishes its handshake does not stop others."""
    chain, key = map(str, certificate)
    server = start_server(*FAKE, "--server.tls-certificate", chain, "--server.tls-key", key)
    assert server.url.startswith("https://")
    port = int(server.url.rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    context = ssl.create_default_context(cafile=chain)
    with httpx2.Client(base_url=server.url, verify=context, timeout=PATIENCE) as client:
        body = {"prompt": "a", "max_tokens": 5, "temperature": 0}
        for stream in (False, True, False):
            answer = client.post("/v1/completions", json={**body, "stream": stream})
            assert answer.status_code == 200
            assert "[DONE]" in answer.text or answer.json()["choices"][0]["text"] == "bcdef"
        large = client.post("/v1/completions", content=b"x" * 5_000_000)
        assert large.status_code in (413, 415)
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as left:
            next(left.iter_bytes())
    with socket.create_connection(("127.0.0.1", port)) as plain:  # a client without TLS
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        plain.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            assert b"200" not in plain.recv(1000)
    for connection in silent:
        connection.close()
    server.client.close()
    server.client = httpx2.Client(base_url=server.url, verify=context, timeout=PATIENCE)
    server.wait_until_idle()
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log


def test_forwarded_address_is_believed_from_trusted_proxies_only(start_server, tmp_path):
    """The address counts for wrong keys."""
    path = tmp_path / "keys.json"
    write_key_file(path, KeyFile(accounts=ACCOUNTS))
    trusting = start_server(
        *FAKE, "--server.trusted-proxies", "127.0.0.1", CLLM_SERVER_KEYS_FILE=str(path)
    )
    wary = start_server(*FAKE, CLLM_SERVER_KEYS_FILE=str(path))

    def ask(server, address):
        headers = {"x-api-key": "wrong", "x-forwarded-for": address}
        return server.client.get("/v1/models", headers=headers).status_code

    for server in (trusting, wary):
        assert {ask(server, "10.0.0.1") for _ in range(20)} == {401}
        assert ask(server, "10.0.0.1") == 429
    assert ask(trusting, "10.0.0.2") == 401
    assert ask(wary, "10.0.0.2") == 429


def test_connections_of_one_address_are_limited(start_server):
    server = start_server(*FAKE, "--server.max-connections-per-address", "5")
    port = int(server.url.rpartition(":")[2])
    server.client.close()
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    for connection in held:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in connection.recv(1000)
    with socket.create_connection(("127.0.0.1", port)) as further:
        further.settimeout(PATIENCE)
        assert further.recv(1000) == b""
    with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) as other:
        other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in other.recv(1000)
    for connection in held:
        connection.close()
    end = time.monotonic() + PATIENCE
    while True:  # the server may not have seen yet that they are closed
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            assert get(server, {"host": "localhost"}).status == 200
            break
        assert time.monotonic() < end
    assert server.log.count("127.0.0.1 has 5 connections") == 1
    server.client = httpx2.Client(base_url=server.url)


def test_account_sees_and_loads_only_its_models(start_server, tmp_path):
    """In a server of several models: lists, metrics, batches, the default model and errors."""
    path, config = tmp_path / "keys.json", tmp_path / "c.yaml"
    accounts = {"root": record("root", admin=True), "bob": record("bob", models=("small",))}
    write_key_file(path, KeyFile(accounts=accounts))
    config.write_text("models: {secret: {preload: true}, small: {}}\nbackend: {name: fake}\n")
    server = start_server("--config", str(config), CLLM_SERVER_KEYS_FILE=str(path))

    def get(name, where):
        return server.client.get(where, headers=bearer(name))

    def names(name):
        return [model["id"] for model in get(name, "/v1/models").json()["data"]]

    assert (names("root"), names("bob")) == (["secret", "small"], ["small"])
    assert [model["name"] for model in get("bob", "/api/tags").json()["models"]] == ["small:latest"]
    assert get("bob", "/api/ps").json()["models"] == []
    assert complete(server, "bob").json()["model"] == "small", "it is the default for this account"
    for asked in ("secret", "nothing"):
        refused = complete(server, "bob", model=asked)
        assert refused.status_code == 404
        message = f"The model {asked!r} does not exist; this server has 'small'."
        assert refused.json()["error"]["message"] == message
    assert "secret" in get("root", "/metrics").text
    page = get("bob", "/metrics").text
    assert 'model_name="small"' in page
    assert "secret" not in page
    for where in ("/model/info", "/props", "/v1/models/small"):
        assert "secret" not in get("bob", where).text
        assert get("bob", f"{where.replace('small', 'secret')}?model=secret").status_code == 404
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate([{"prompt": "x"}, {"prompt": "x", "model": "secret"}])
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    headers = bearer("bob")
    file = server.client.post(
        "/v1/files", files={"file": ("in", content)}, data={"purpose": "batch"}, headers=headers
    ).json()
    body = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = server.client.post("/v1/batches", json=body, headers=headers).json()
    end = time.monotonic() + PATIENCE
    while batch["status"] not in ("completed", "failed"):
        assert time.monotonic() < end
        time.sleep(0.05)
        batch = get("bob", f"/v1/batches/{batch['id']}").json()
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}


def test_account_uses_no_adapters_of_others(start_server, tmp_path):
    """Neither by their names nor by their numbers, and the base only if it may."""
    path, config = tmp_path / "keys.json", tmp_path / "c.yaml"
    accounts = {
        "root": record("root", admin=True),
        "bob": record("bob", models=("base",)),
        "cat": record("cat", models=("two",)),
    }
    write_key_file(path, KeyFile(accounts=accounts))
    (tmp_path / "x").write_bytes(b"x")
    config.write_text(
        "model: {name: base}\nbackend: {name: fake}\n"
        f"adapters: {{one: {{path: {tmp_path}/x}}, two: {{path: {tmp_path}/x, scale: 2}}}}\n"
    )
    server = start_server("--config", str(config), CLLM_SERVER_KEYS_FILE=str(path))

    def text(name, model, **more):
        answer = complete(server, name, [65], model=model, **more)
        return answer.json()["choices"][0]["text"] if answer.is_success else answer.status_code

    def listed(name, model):
        where = f"/lora-adapters?model={model}"
        return [entry["path"] for entry in server.client.get(where, headers=bearer(name)).json()]

    assert (text("root", "base"), text("root", "one"), text("root", "two")) == (
        *("BCDE", "CEGI", "DGJM"),
    )
    assert text("root", "base", lora=[{"id": 1, "scale": 2}]) == "DGJM"
    assert text("bob", "base") == "BCDE"
    assert text("cat", "two") == "DGJM"
    assert text("bob", "one") == text("cat", "base") == 404
    assert text("bob", "base", lora=[{"id": 0}]) == text("cat", "two", lora=[{"id": 0}]) == 400
    assert text("cat", "two", lora=[]) == text("cat", "two", lora=[{"id": 1, "scale": 0}]) == 400
    assert text("cat", "two", lora=[{"id": 1, "scale": 2}]) == "DGJM"
    assert (listed("root", "base"), listed("bob", "base"), listed("cat", "two")) == (
        *(["one", "two"], [], ["two"]),
    )
