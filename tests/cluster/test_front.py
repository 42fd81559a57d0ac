"""A front with real replicas: what clients see is what a single server would answer."""

from __future__ import annotations

import json
import re
import signal
import time

import httpx2
import pytest
from cluster.conftest import FAKE, start_front
from conftest import PATIENCE

JSON = {"content-type": "application/json"}
REQUESTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6},
    "/v1/completions": {"prompt": "hello", "max_tokens": 6},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16, "store": False},
    "/v1/messages": {
        "model": "fake",
        "max_tokens": 6,
        "messages": [{"role": "user", "content": "hi"}],
    },
    "/api/chat": {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "options": {"num_predict": 6},
    },
    "/completion": {"prompt": "hello", "n_predict": 6},
    "/generate": {"prompt": "hello", "sampling": {"max_tokens": 6}},
}
VOLATILE = {
    *("id", "created", "created_at", "request_id", "timings", "item_id", "completed_at"),
    *(
        "response_time",
        "tokens_per_second",
        "total_duration",
        "load_duration",
        "prompt_eval_duration",
        "eval_duration",
    ),
    *("cached_tokens", "cache_read_input_tokens", "input_tokens", "tokens_cached", "cache_n"),
}


def without_volatile(value):
    """Return JSON without what differs between two equal requests."""
    if isinstance(value, dict):
        return {k: without_volatile(v) for k, v in value.items() if k not in VOLATILE}
    return [*map(without_volatile, value)] if isinstance(value, list) else value


def read_events(text: str) -> list[object]:
    """Return the JSON values in a stream of events or lines."""
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    return [without_volatile(json.loads(line)) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_a_replica_in_all_dialects(front_server, replicas, path, stream):
    body = {**REQUESTS[path], "stream": stream}
    direct, passed = (one.client.post(path, json=body) for one in (replicas[0], front_server))
    assert passed.status_code == direct.status_code == 200, passed.text
    assert passed.headers["content-type"] == direct.headers["content-type"]
    assert passed.headers.keys() == direct.headers.keys()
    assert read_events(passed.text) == read_events(direct.text)
    assert ("[DONE]" in passed.text) == ("[DONE]" in direct.text)


def test_conversation_returns_to_the_replica_that_knows_it(front_server, replicas):
    messages = [{"role": "user", "content": "a long question " * 100}]
    cached = []
    for _ in range(6):
        answer = front_server.client.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 4}
        ).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages.append(answer["choices"][0]["message"] | {"content": "an answer"})
        messages.append({"role": "user", "content": "and more?"})
    assert all(count > 1000 for count in cached[1:]), cached


def test_each_of_two_fronts_computes_a_conversation_at_most_once(
    start_server, front_server, replicas
):
    fronts = [front_server, start_front(start_server, *(one.url for one in reversed(replicas)))]
    for name in ("apples", "pears", "plums", "figs"):
        messages = [{"role": "user", "content": f"a question about {name} " * 100}]
        for turn in range(4):
            body = {"messages": messages, "max_tokens": 4}
            answer = fronts[turn % 2].client.post("/v1/chat/completions", json=body).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            # the second front may see another load than the first, and choose another replica
            assert turn < 2 or cached > 2000, (name, turn)
            messages += [
                {"role": "assistant", "content": "an answer"},
                {"role": "user", "content": "and more?"},
            ]


def test_front_that_dies_cuts_its_streams_and_the_other_front_goes_on(
    start_server, front_server, replicas
):
    dying = start_front(start_server, *(one.url for one in replicas))
    message = {"role": "user", "content": "a question about nuts"}
    body = {"messages": [message], "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    with dying.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        dying.process.send_signal(signal.SIGKILL)
        with pytest.raises(httpx2.RemoteProtocolError):
            list(lines)
    for replica in replicas:
        replica.wait_until_idle()  # the request has ended
    answer = front_server.client.post(
        "/v1/chat/completions", json=body | {"stream": False, "max_tokens": 4}
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/internal/lease", "//internal/lease", "/internal//lease", "/internal/lease/"),
        *("/v1/internal/lease", "/v1/v1/internal/lease", "/x/../internal/lease"),
        *("/%69nternal/lease", "/internal%2flease", "/%2e%2e/internal/lease", "/internal/"),
        *("/v1/models/../../internal/lease", "/v1/models/..%2f..%2finternal/lease"),
        *("/./internal/lease", "/internal/lease?x=1", "/internal\\lease", "/internal;x/lease"),
    ],
)
def test_no_spelling_of_an_internal_path_reaches_a_replica(front_server, raw_request, path):
    for fields in ("", "x-cllm-cluster-key: the-key-of-the-test-cluster\r\n"):
        status, _, body = raw_request(front_server, path, fields)
        assert status == 404
        assert b"epoch" not in body


def test_unknown_model_gets_the_words_of_its_dialect(front_server):
    body = {"model": "nope", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = front_server.client.post("/v1/messages", json=body)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    answer = front_server.client.post("/api/chat", json=body)
    assert answer.status_code == 404
    assert isinstance(answer.json()["error"], str)


def test_body_over_the_limit_is_rejected_by_the_front(front_server):
    answer = front_server.client.post("/v1/completions", content=b"[" * 4_000_001, headers=JSON)
    assert answer.status_code == 413


def test_files_are_passed_on_as_they_arrive(front_server):
    content = b"x" * 6_000_000
    made = front_server.client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("a", content)}
    )
    assert made.status_code == 200, made.text
    assert made.json()["bytes"] == len(content)


def test_log_of_the_front_names_the_replica_of_a_request(front_server, replicas):
    """Its line has the id that the client got, which is also in the log of the replica."""
    body = {"prompt": "ab", "max_tokens": 2, "user": "alice"}
    answer = front_server.client.post("/v1/completions", json=body)
    name = answer.headers["x-request-id"]
    end = time.monotonic() + PATIENCE
    logs: list[str] = []
    while sum(f"id={name} " in one for one in logs) < 2 and time.monotonic() < end:
        time.sleep(0.01)
        logs = [one.log for one in (front_server, *replicas)]
    [line] = front_server.find_lines(f"id={name} ")
    assert re.search(r" POST /v1/completions 200 .* model=\S+ .* replica=\S+ retries=0$", line), (
        line
    )
    assert " account=user-alice " in line
    assert sum(f"id={name} " in one for one in logs) == 2


def test_metrics_of_the_front(front_server):
    assert front_server.client.get("/ready").status_code == 200
    page = front_server.client.get("/metrics").text
    assert 'cllm:http_requests_total{route="/ready",status="200"}' in page
    assert re.search(r'cllm:step_time_seconds_count{.*replica="\w+".*stage="forward"} ', page)
    assert 'cllm:front_replicas{state="listed"} 2.0' in page
    assert "cllm:front_requests_running 0.0" in page


@pytest.mark.slow
def test_replica_with_https_needs_a_certificate_that_the_front_trusts(start_server, certificate):
    chain, key = map(str, certificate)
    tls = ("--server.tls-certificate", chain, "--server.tls-key", key)
    replica = start_server(*FAKE, *tls)
    front = start_front(start_server, replica.url, SSL_CERT_FILE=chain)
    body = {"prompt": "a", "max_tokens": 5, "temperature": 0}
    for _ in range(2):
        answer = front.client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == "bcdef"
        answer = front.client.post("/v1/completions", json=body | {"stream": True})
        assert answer.text.rstrip().endswith("data: [DONE]")
    file = {"file": ("in.jsonl", b"x" * 3_000_000)}
    answer = front.client.post("/v1/files", files=file, data={"purpose": "batch"})
    assert answer.json()["bytes"] == 3_000_000, answer.text

    front = start_front(start_server, replica.url)
    trouble = (
        f"cannot connect to {replica.url.removeprefix('https://')}: its certificate is not trusted"
    )
    lines = front.find_lines("gets no requests")
    assert len(lines) == 1
    assert f"the replica at {replica.url} gets no requests: {trouble}" in lines[0]
    [told] = front.client.get("/health?level=full").json()["replicas"]
    assert told["status"] == "unreachable"
    assert told["trouble"].startswith(trouble)
    assert front.client.post("/v1/completions", json=body).status_code == 503
