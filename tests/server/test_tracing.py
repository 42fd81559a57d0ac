"""GET /debug/trace, and the command that writes its answer to a file."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from span_collector import Collector

from cllm.cli.main import main


@pytest.fixture(scope="module")
def server(start_server_once):
    return start_server_once(
        *("--backend.name", "fake", "--context", "4096", "--max-num-seqs", "2"),
        *("--engine.count", "2", "--scheduler.max-queue-requests", "100"),
    )


def test_trace_has_requests_steps_and_sequences_of_all_engines(server, tmp_path):
    file = tmp_path / "trace.json"
    body = {"max_tokens": 40, "ignore_eos": True}

    def ask(i: int) -> int:
        return server.client.post("/v1/completions", json=body | {"prompt": f"{i}"}).status_code

    with ThreadPoolExecutor(9) as pool:
        recording = pool.submit(main, ["trace", str(file), "--url", server.url, "--seconds", "2"])
        rounds = 0
        while not recording.done():
            rounds += 1
            assert set(pool.map(ask, range(8))) == {200}
        recording.result()
    events = json.loads(file.read_bytes())["traceEvents"]
    processes = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert processes == ["cLLM server", "engine 0 of fake", "engine 1 of fake"]
    for pid in (2, 3):
        names = {one["name"] for one in events if one["pid"] == pid and one["ph"] == "X"}
        assert names >= {"step", "schedule", "forward", "sample", "update", "queued", "decode"}
        counters = {one["name"] for one in events if one["pid"] == pid and one["ph"] == "C"}
        assert counters == {"cells", "sequences"}
    requests = [one for one in events if one["name"] == "POST /v1/completions 200"]
    assert 0 < len(requests) <= 8 * rounds


def test_traces_are_bounded_and_one_at_a_time(server):
    for seconds in ("0", "61", "nan", "x"):
        answer = server.client.get("/debug/trace", params={"seconds": seconds})
        assert answer.status_code == 400, seconds
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(server.client.get, "/debug/trace", params={"seconds": 1}) for _ in range(2)
        ]
        answers = [one.result() for one in asked]
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    assert server.client.get("/debug/trace", params={"seconds": 0.01}).status_code == 200


def test_unwritable_file_is_one_line(server, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(tmp_path), "--url", server.url, "--seconds", "0.01"])
    assert ended.value.code == 2
    assert "cannot be written" in capsys.readouterr().err


def test_spans_of_a_stream_belong_to_the_trace_of_its_client(start_server):
    """They are sent at the latest when the server ends."""
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    collector = Collector()
    try:
        options = ("--trace.endpoint", collector.endpoint, "--trace.sample", "0")
        server = start_server("--backend.name", "fake", *options)
        body = {"prompt": "a", "max_tokens": 5, "stream": True}
        for flag in ("00", "01"):
            headers = {"traceparent": f"00-{trace}-{parent}-{flag}"}
            server.client.post("/v1/completions", json=body, headers=headers)
        server.stop()
        spans = collector.list_spans()
    finally:
        collector.close()
    root = spans["POST /v1/completions"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (trace, parent)
    assert {"prefill", "decode"} < spans.keys()


def test_spans_show_each_step_of_a_chat(start_server):
    """Of a prompt in two chunks, because a step computes at most 64 tokens of it."""
    collector = Collector()
    try:
        options = ("--trace.endpoint", collector.endpoint, "--trace.sample", "1")
        server = start_server(
            *("--backend.name", "fake", "--max-num-batched-tokens", "64", "--context", "256"),
            *options,
        )
        messages = [{"role": "user", "content": "x" * 90}]
        body = {"messages": messages, "max_tokens": 5, "stream": True, "ignore_eos": True}
        answer = server.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        server.stop()
        spans = collector.take()
    finally:
        collector.close()
    names = {span.name for span in spans}
    assert names >= {"accept", "render", "tokenize", "queue", "prefill", "decode"}
    assert names >= {"detokenize", "send"}
    values = [(span, {one.key: one.value.int_value for one in span.attributes}) for span in spans]
    chunks = [found["cllm.tokens"] for span, found in values if span.name == "prefill chunk"]
    [prompt] = [found["cllm.prompt_tokens"] for _, found in values if "cllm.prompt_tokens" in found]
    assert sum(chunks) == prompt
    assert len(chunks) >= 2
    [send] = [found for span, found in values if span.name == "send"]
    assert send["cllm.count"] >= 5
    inside = {span.span_id: span for span in spans}
    for span in spans:
        if (parent := inside.get(span.parent_span_id)) is not None:
            assert parent.start_time_unix_nano <= span.start_time_unix_nano, span.name
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, span.name
