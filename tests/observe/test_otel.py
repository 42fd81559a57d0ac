"""Spans arrive at a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import sys
import time

import pytest
from conftest import PATIENCE
from span_collector import Collector

from cllm.config.settings import Settings, TraceSettings
from cllm.core.output import PrefillChunk, SequenceTimes
from cllm.errors import StartupError
from cllm.observe.otel import SpanExporter
from cllm.observe.request_record import RequestRecord

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


def make_record() -> RequestRecord:
    """Return the record of a request that has just arrived."""
    record = RequestRecord("req_1", "POST", "/v1/completions", "OpenAI", arrived=100.0)
    record.created = 1_000_000.0
    return record


def end_record(record: RequestRecord) -> None:
    record.submitted, record.first_token, record.last_token = 100.5, 101.5, 102.0
    record.ended, record.status, record.outcome, record.model = 102.25, 200, "finished", "m"
    record.prompt_tokens, record.completion_tokens = 20, 5
    record.times = SequenceTimes(0.25, 0.75)


def export(collector: Collector, *traceparents: str, sample: float = 1.0) -> dict:
    """Return the spans of requests with these headers, by name."""
    exporter = SpanExporter(TraceSettings(endpoint=collector.endpoint, sample=sample), "1.0")
    for traceparent in traceparents:
        record = make_record()
        exporter.begin(record, traceparent)
        end_record(record)
        exporter.export(record)
    exporter.close()
    return collector.list_spans()


def describe(spans: list) -> dict:
    """Return the parent's name, begin and end of each span, in seconds after the arrival."""
    names = {span.span_id: span.name for span in spans}
    return {
        span.name: (
            names.get(span.parent_span_id, ""),
            round(span.start_time_unix_nano / 1e9 - 1_000_000.0, 3),
            round(span.end_time_unix_nano / 1e9 - 1_000_000.0, 3),
        )
        for span in spans
    }


def read_attributes(span) -> dict:
    return {
        one.key: one.value.int_value or one.value.double_value or one.value.string_value
        for one in span.attributes
    }


def test_request_is_a_span_with_its_phases(collector):
    spans = export(collector, f"00-{TRACE}-{PARENT}-01")
    root = spans["POST /v1/completions"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert describe([*spans.values()]) == {
        "POST /v1/completions": ("", 0, 2.25),
        "prepare": (root.name, 0, 0.5),
        "accept": ("prepare", 0, 0.5),
        "queue": (root.name, 0.5, 0.75),
        "prefill": (root.name, 0.75, 1.5),
        "decode": (root.name, 1.5, 2.0),
        "detokenize": ("decode", 1.5, 2.0),
        "send": (root.name, 2.0, 2.25),
    }
    values = read_attributes(root)
    assert values["gen_ai.request.model"] == "m"
    assert values["gen_ai.usage.output_tokens"] == 5
    assert values["http.response.status_code"] == 200


def test_parts_of_phases_are_spans_within_them(collector):
    exporter = SpanExporter(TraceSettings(endpoint=collector.endpoint, sample=1), "1.0")
    record = make_record()
    exporter.begin(record, "")
    steps = record.steps
    assert steps is not None
    steps.preparation = [("render", 100.125, 100.25), ("tokenize", 100.25, 100.375)]
    for work in (steps.detokenizing, steps.formatting, steps.sending):
        work.add(0.25)
        work.add(0.125)
    end_record(record)
    chunks = PrefillChunk(0.125, 0.25, 16), PrefillChunk(0.5, 9.0, 4)
    record.times = SequenceTimes(0.25, 0.75, chunks=chunks)
    exporter.export(record)
    exporter.close()
    spans = collector.take()
    places = describe(spans)
    assert places["accept"] == ("prepare", 0, 0.125)
    assert places["render"] == ("prepare", 0.125, 0.25)
    assert places["tokenize"] == ("prepare", 0.25, 0.375)
    assert places["send"] == ("POST /v1/completions", 1.5, 2.25)  # from the first token on
    computed = [span for span in spans if span.name == "prefill chunk"]
    assert [read_attributes(span)["cllm.tokens"] for span in computed] == [16, 4]
    assert [describe([span])["prefill chunk"][1:] for span in computed] == [
        (0.875, 1.0),
        (1.25, 1.5),  # another clock: never longer than its phase
    ]
    attributes = {span.name: read_attributes(span) for span in spans}
    assert attributes["detokenize"] == {"cllm.count": 2, "cllm.busy_ms": 375.0}
    assert attributes["send"] == attributes["detokenize"] | {"cllm.format_ms": 375.0}


def test_sampling_follows_the_parent_or_the_share(collector):
    assert export(collector, f"00-{TRACE}-{PARENT}-00") == {}
    assert export(collector, "", "nonsense", sample=0.0) == {}
    assert export(collector, f"00-{TRACE}-{PARENT}-01", sample=0.0)


def test_questions_about_the_server_have_no_spans(collector):
    exporter = SpanExporter(TraceSettings(endpoint=collector.endpoint, sample=1), "1.0")
    record = RequestRecord("req_2", "GET", "/metrics")
    exporter.begin(record, "")
    record.status, record.ended = 200, 1.0
    exporter.export(record)
    exporter.close()
    assert collector.list_spans() == {}


def test_collector_that_is_gone_delays_nothing(collector):
    exporter = SpanExporter(TraceSettings(endpoint="http://127.0.0.1:9/v1/traces", sample=1), "1.0")
    record = make_record()
    exporter.begin(record, "")
    end_record(record)
    exporter.export(record)
    begun = time.monotonic()
    exporter.close()
    assert time.monotonic() - begun < PATIENCE


def test_missing_package_and_wrong_address_are_one_line(monkeypatch):
    with pytest.raises(StartupError, match="must be an HTTP address"):
        SpanExporter(TraceSettings(endpoint="localhost:4317"), "1.0")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartupError, match=r"pip install 'cllm\[otel\]'"):
        SpanExporter(TraceSettings(endpoint="http://127.0.0.1:4318/v1/traces"), "1.0")


def test_tracing_is_off_by_default():
    assert Settings().trace == TraceSettings(endpoint=None, sample=0.01)
