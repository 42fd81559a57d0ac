"""Spans arrive at a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import pytest
from conftest import PATIENCE
from span_collector import Collector

from cllm.config.settings import Settings, TraceSettings
from cllm.core.output import SequenceTimes
from cllm.errors import StartupError
from cllm.observe.otel import SpanExporter
from cllm.observe.request_record import RequestRecord

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.close()


def make_record(traceparent: str = "") -> RequestRecord:
    record = RequestRecord("req_1", "POST", "/v1/completions", "OpenAI", arrived=100.0)
    record.created, record.traceparent = 1_000_000.0, traceparent
    record.submitted, record.first_token, record.last_token = 100.5, 101.5, 102.0
    record.ended, record.status, record.outcome, record.model = 102.25, 200, "finished", "m"
    record.prompt_tokens, record.completion_tokens = 20, 5
    record.times = SequenceTimes(0.25, 0.75)
    return record


def export(collector: Collector, *records: RequestRecord, sample: float = 1.0) -> dict:
    exporter = SpanExporter(TraceSettings(endpoint=collector.endpoint, sample=sample), "1.0")
    for record in records:
        exporter.export(record)
    exporter.close()
    return collector.list_spans()


def test_request_is_a_span_with_its_phases(collector):
    spans = export(collector, make_record(f"00-{TRACE}-{PARENT}-01"))
    root = spans.pop("POST /v1/completions")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert [*spans] == ["prepare", "queue", "prefill", "decode", "send"]
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    bounds = [
        (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for span in spans.values()
    ]
    moments = [1_000_000.0 + after for after in (0, 0.5, 0.75, 1.5, 2.0, 2.25)]
    assert bounds == [*pairwise(moments)]
    values = {one.key: one.value.int_value or one.value.string_value for one in root.attributes}
    assert values["gen_ai.request.model"] == "m"
    assert values["gen_ai.usage.output_tokens"] == 5
    assert values["http.response.status_code"] == 200


def test_sampling_follows_the_parent_or_the_share(collector):
    unsampled = make_record(f"00-{TRACE}-{PARENT}-00")
    assert export(collector, unsampled) == {}
    assert export(collector, make_record(), make_record("nonsense"), sample=0.0) == {}
    assert export(collector, make_record(f"00-{TRACE}-{PARENT}-01"), sample=0.0)


def test_questions_about_the_server_have_no_spans(collector):
    record = RequestRecord("req_2", "GET", "/metrics", status=200, ended=1.0)
    assert export(collector, record) == {}


def test_collector_that_is_gone_delays_nothing(collector):
    exporter = SpanExporter(TraceSettings(endpoint="http://127.0.0.1:9/v1/traces", sample=1), "1.0")
    exporter.export(make_record())
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
