"""Traces of requests through a front, and their lines in its log."""

import re
import signal

import pytest
from cluster.conftest import FAKE, start_front
from span_collector import Collector

pytestmark = [pytest.mark.slow, pytest.mark.llama]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STREAM = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.close()


def values_of(span):
    return {one.key: one.value.string_value for one in span.attributes}


@pytest.mark.parametrize("is_sampled", [True, False])
def test_spans_of_replicas_are_parts_of_those_of_the_front(start_server, collector, is_sampled):
    """The stream is continued by another replica than the one that has begun it."""
    options = ("--trace.endpoint", collector.endpoint, "--trace.sample")
    replicas = [start_server(*FAKE, *options, "1", "--server.enable-faults") for _ in range(2)]
    slow = {"kind": "slow", "num_steps": 1_000_000, "seconds": 0.01}
    for one in replicas:
        one.client.post("/faults", json={"faults": [slow]})
    urls = [one.url for one in replicas]
    front = start_front(start_server, *urls, options=(*options, "0"))
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"} if is_sampled else {}
    with front.client.stream("POST", "/v1/completions", json=STREAM, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        busy = next(one for one in replicas if one.stats()["num_running"])
        busy.stop(signal.SIGKILL)
        assert [*lines][-2:] == ["data: [DONE]", ""]
    replicas.remove(busy)
    front.client.get("/v1/models")
    for one in (front, *replicas):
        one.stop()
    spans = collector.take()
    if not is_sampled:  # the front decides for its replicas
        assert spans == []
        return
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    by_id = {span.span_id: span for span in spans}
    [root] = [span for span in spans if span.parent_span_id.hex() == PARENT]
    assert root.name == "POST /v1/completions"
    children = [span for span in spans if span.parent_span_id == root.span_id]
    assert sorted(span.name for span in children) == ["ask", "choose", "choose", "continue"]
    asked = next(values_of(span) for span in children if span.name == "ask")
    assert asked["cllm.event"] == "ended in the middle of its answer"
    again = next(span for span in children if span.name == "continue")
    assert values_of(again)["cllm.event"] == "answered"
    assert values_of(again)["cllm.replica"] != asked["cllm.replica"]
    assert [event.name for event in again.events] == ["sent"]
    [rest] = [span for span in spans if span.parent_span_id == again.span_id]
    assert by_id[rest.parent_span_id] is again
    assert {span.name for span in spans if span.parent_span_id == rest.span_id} >= {
        "queue",
        "prefill",
    }


def test_log_line_of_a_front_has_the_account_of_a_request(start_server):
    replica = start_server(*FAKE)
    front = start_front(start_server, replica.url, options=("--log.slow-seconds", "0"))
    body = STREAM
    front.client.post("/v1/completions", json=body)
    front.client.post("/v1/completions", json=body | {"stream": False})
    assert front.client.post("/v1/completions", json=body | {"top_p": 7}).status_code == 400
    with front.client.stream("POST", "/v1/completions", json=body | {"max_tokens": 30_000}) as one:
        next(one.iter_lines())
    replica.wait_until_idle()
    front.stop()
    lines = front.find_lines("POST /v1/completions")
    stream, whole, wrong, left = (dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines)
    for fields in (stream, whole):
        assert (fields["outcome"], fields["output_tokens"]) == ("finished", "400")
        assert fields["prompt_tokens"] == "1"
        assert fields["priority"] == "normal"
    assert whole["finish"] == "length"
    assert "ttft_ms" in whole
    assert stream.keys() >= {"ttft_ms", "itl_p99_ms", "tokens_per_s", "id", "total_ms"}
    assert " slow=" in lines[0]
    assert (wrong["code"], wrong["field"]) == ("decimal_above_max_value", "top_p")
    assert left["outcome"] == "abort"
