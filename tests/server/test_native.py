"""The native routes, on the fake backend, which counts on from the prompt's last byte."""

import json
import re

import pytest


def events(text):
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def test_generate_returns_text_times_and_counts(fake_server):
    answer = fake_server.client.post(
        "/generate", json={"prompt": "a", "max_tokens": 5, "temperature": 0}
    ).json()
    assert answer["text"] == "bcdef"
    assert (answer["generated_tokens"], answer["prompt_tokens"], answer["max_tokens"]) == (5, 1, 5)
    assert answer["finish_reason"] == "length"
    assert answer["tokens_per_second"] == pytest.approx(5 / answer["response_time"])


def test_generate_stops_at_the_end_token(fake_server):
    """The fake backend writes 16 tokens and an end token, which is counted but is not part of the
    text.
    """
    answer = fake_server.client.post("/generate", json={"prompt": "0", "temperature": 0}).json()
    assert answer["text"] == "123456789:;<=>?@"
    assert (answer["generated_tokens"], answer["finish_reason"]) == (17, "stop")


@pytest.mark.parametrize(
    ("route", "more"), [("/generate_stream", {}), ("/generate", {"stream": True})]
)
def test_generate_streams_an_event_for_each_token(fake_server, route, more):
    """The last event has done: true. Both routes can stream."""
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0, **more}
    answer = fake_server.client.post(route, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *tokens, last = events(answer.text)
    assert [event["token"] for event in tokens] == ["b", "c", "d"]
    assert {event["done"] for event in tokens} == {False}
    assert last["done"]
    assert last["finish_reason"] == "length"
    assert len({event["id"] for event in [*tokens, last]}) == 1


def test_encode_returns_token_ids_and_their_number(fake_server):
    answer = fake_server.client.post("/encode", json={"text": "AB"}).json()
    assert answer == {"tokens": [65, 66], "length": 2}
    assert fake_server.client.post("/encode", json={"text": ""}).status_code == 400


def test_root_names_the_routes(fake_server):
    """Users may open the address in a browser."""
    answer = fake_server.client.get("/").json()
    assert answer["model"] == "fake"
    assert {"/v1/chat/completions", "/generate", "/metrics"} <= set(answer["paths"])


def test_model_info_has_sizes_and_engine_state(fake_server):
    answer = fake_server.client.get("/model/info").json()
    assert (answer["context_length"], answer["max_num_seqs"], answer["vocabulary_size"]) == (
        512,
        4,
        260,
    )
    assert answer["stats"]["num_seq_ids"] == 4


def test_scheduler_route_returns_the_last_steps_and_the_step_cost(fake_server):
    fake_server.client.post("/generate", json={"prompt": "why", "max_tokens": 5})
    answer = fake_server.client.get("/scheduler", params={"steps": 3}).json()
    assert [step["num_running"] for step in answer["steps"]] == [1, 1, 0]
    assert answer["running"] == answer["waiting"] == []
    assert answer["row_seconds"]["1"] > 0
    assert len(fake_server.client.get("/scheduler").json()["steps"]) <= 20


def test_metrics_count_requests_tokens_times_and_engine_states(fake_server):

    metric = fake_server.metric
    names = [
        "requests_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "request_success_total",
    ]
    before = [metric(name) for name in names]
    fake_server.client.post("/generate", json={"prompt": "aaa", "max_tokens": 5})
    assert [metric(name) - old for name, old in zip(names, before, strict=True)] == [
        1,
        3,
        5,
        1,
        4,
        1,
    ]
    assert metric("seq_ids") == 4
    assert metric("engine_ready") == 1
    assert metric("prefill_tokens_computed_total") > 0
    for name in (
        "parked_total",
        "checkpoint_bytes",
        "ram_cache_bytes",
        "disk_cache_bytes",
        "waiting_tokens",
        "estimated_waiting_seconds",
    ):
        assert metric(name) == 0
    assert metric("spec_decode_num_draft_tokens_total") >= metric(
        "spec_decode_num_accepted_tokens_total"
    )
    assert (
        metric("kv_cells_held")
        == metric("num_requests_running")
        == metric("num_requests_waiting")
        == 0
    )


def test_openapi_document_resolves_every_reference(fake_server):
    document = fake_server.client.get("/openapi.json")
    defined = set(document.json()["components"]["schemas"])
    used = set(re.findall(r"#/components/schemas/(\w+)", document.text))
    assert used <= defined
    assert {"AssistantMessage", "Benchmark"} <= defined


@pytest.mark.slow
def test_slow_request_times_out(start_server):
    """504, or an error event in a stream. The sequence is freed."""
    server = start_server("--backend.name", "fake", "--scheduler.request-timeout", "0.3")
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "request_timeout"
    text = server.client.post("/v1/completions", json={**body, "stream": True}).text
    assert "request_timeout" in text
    assert text.endswith("data: [DONE]\n\n")
    assert server.wait_until_idle(1)["num_seq_ids_in_use"] == 0


def test_decode_reverses_encode(fake_server):
    assert fake_server.client.post("/decode", json={"tokens": [65, 66, 258]}).json() == {
        "text": "AB",
        "length": 3,
    }
    assert fake_server.client.post("/decode", json={"tokens": [65, 260]}).status_code == 400
    assert fake_server.client.post("/decode", json={"tokens": []}).status_code == 400


@pytest.mark.parametrize("name", ["prompt", "prompts"])
def test_several_prompts_get_one_answer_in_order(fake_server, name):
    """The counts are totals."""
    body = {name: ["a", "c", "0"], "max_tokens": 3, "temperature": 0}
    answer = fake_server.client.post("/generate", json=body).json()
    assert [result["text"] for result in answer["results"]] == ["bcd", "def", "123"]
    assert [result["generated_tokens"] for result in answer["results"]] == [3, 3, 3]
    assert (answer["generated_tokens"], answer["prompt_tokens"]) == (9, 3)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "'prompt' or 'prompts'"),
        ({"prompt": "a", "prompts": ["a"]}, "prompts", "Only one of 'prompt' and 'prompts'"),
        ({"prompts": []}, "prompts", "at least 1 item"),
        ({"prompts": ["a", ""]}, "prompts[1]", "at least 1 character"),
        ({"prompt": ["a", ""]}, "prompt[1]", "at least 1 character"),
        ({"prompts": ["a"] * 129}, "prompts", "at most 128 items"),
        ({"prompts": ["a"], "stream": True}, "stream", "cannot be streamed"),
        ({"prompt": ["a"], "stream": True}, "stream", "cannot be streamed"),
    ],
)
def test_exactly_one_of_prompt_and_prompts_is_required(fake_server, body, param, words):
    """The error names the parameter."""
    answer = fake_server.client.post("/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["prompt", "prompts"])
def test_streaming_a_list_of_prompts_is_rejected(fake_server, name):
    answer = fake_server.client.post("/generate_stream", json={name: ["a"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_benchmark_is_off_by_default(fake_server):
    """The error names the option that allows it."""
    answer = fake_server.client.post("/benchmark", json={})
    assert answer.status_code == 403
    assert "server.benchmark" in answer.json()["error"]["message"]


def test_benchmark_reports_consistent_counts_and_times(start_server):
    server = start_server(
        "--backend.name", "fake", "--server.benchmark", "true", "--max-num-seqs", "4"
    )
    body = {"requests": 6, "concurrency": 3, "prompt_tokens": 10, "max_tokens": 8}
    answer = server.client.post("/benchmark", json=body).json()
    assert (answer["total_requests"], answer["successful_requests"], answer["success_rate"]) == (
        6,
        6,
        1,
    )
    assert (answer["total_prompt_tokens"], answer["total_generated_tokens"]) == (60, 48)
    assert answer["throughput"] == pytest.approx(48 / answer["total_time"])
    assert (
        answer["minimum_response_time"]
        <= answer["average_response_time"]
        <= answer["maximum_response_time"]
    )
    assert 1 < answer["average_batch_size"] <= 3
    assert (
        answer["average_time_to_first_token"]
        < answer["average_response_time"]
        < answer["total_time"]
    )
    for wrong in ({"requests": 0}, {"concurrency": 65}, {"prompt_tokens": 1020, "max_tokens": 5}):
        assert server.client.post("/benchmark", json=wrong).status_code == 400
