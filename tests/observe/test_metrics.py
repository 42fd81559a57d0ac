"""The page that Prometheus reads."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cllm.core.output import STAGES, TOTALS, SequenceTimes, Stats
from cllm.observe.collectors import AccountUsageCollector, EngineFigures
from cllm.observe.exposition import render
from cllm.observe.metrics import COUNTERS, GAUGES, HITS, VLLM_NAMES, Metrics
from cllm.observe.request_record import RequestRecord
from cllm.observe.server_metrics import ServerMetrics
from cllm.observe.step_histograms import StepHistograms
from cllm.store.usage import UsageCounts

NAMES = [name for name, _ in COUNTERS.values()]


def read(page: bytes) -> dict[str, tuple[str, float]]:
    """Return the type and the value of each metric with one sample, by its name without "cllm:"."""
    families = text_string_to_metric_families(page.decode())
    return {
        family.name.removeprefix("cllm:"): (family.type, family.samples[0].value)
        for family in families
        if len(family.samples) == 1
    }


def test_totals_are_rendered_as_counters() -> None:
    """Their names have the suffix _total, and rendering the page repeatedly does not change the
    values.
    """
    metrics = Metrics("m")
    for factor in (1, 1, 3):
        stats = Stats(**{field: factor * i for i, field in enumerate(COUNTERS, start=1)})
        page = render([metrics.update(stats, ready=True, num_restarts=factor, reservations={})])
    found = read(page)
    assert [found[name] for name in NAMES] == [
        ("counter", 3.0 * i) for i in range(1, len(NAMES) + 1)
    ]
    assert found["engine_restarts"] == ("counter", 3.0)
    for name in [*NAMES, "engine_restarts"]:
        assert f'cllm:{name}_total{{model_name="m"}}'.encode() in page


def test_every_total_is_a_counter_and_not_a_gauge() -> None:
    """Those of stages are histograms."""
    assert {*COUNTERS} | {*HITS} == {*TOTALS} - {*STAGES}
    assert not {*GAUGES} & {*TOTALS}


def make_page(num_models: int = 1, num_accounts: int = 0, aliases: tuple[str, ...] = ()) -> bytes:
    """Return the page of models that have computed, and of accounts that have used them."""
    registries = [server.update(usage_of(num_accounts), 0, ["loaded"] * num_models)]
    for metrics in models[:num_models]:
        engine = EngineFigures(True, 0, Stats(num_cells=1000), STEPS, 1.0, 1 << 30)
        current: dict[str, Any] = {"ready": True, "num_restarts": 0, "engines": [engine]}
        registries.append(metrics.update(Stats(), reservations={"issued": 1}, **current))
    return render(registries, aliases, "vllm:")


def usage_of(num_accounts: int) -> dict[str, UsageCounts]:
    return {f"account-{i}": UsageCounts(9, 1000 + i, 10, 99) for i in range(num_accounts)}


def make_record(**fields: object) -> RequestRecord:
    record = RequestRecord("req", "POST", "/v1/completions", arrived=0.0, status=200)
    record.submitted, record.first_token, record.last_token = 1.0, 6.0, 8.0
    record.outcome, record.prompt_tokens, record.completion_tokens = "finished", 30, 5
    record.times, record.ended = SequenceTimes(2.0, 3.0), 8.5
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def make_steps() -> StepHistograms:
    """Return those of one step with two decoding sequences and 100 prompt tokens."""
    steps = StepHistograms()
    after = Stats(num_steps=1, num_rows=2, num_prefill_tokens=100, forward_seconds=0.02)
    steps.observe(Stats(), after)
    steps.observe(after, after)  # a message without a step
    return steps


STEPS = make_steps()
server = ServerMetrics()
models = [Metrics(f"a-model-of-8B-{i}-Q4_K_M") for i in range(8)]
for metrics in models:
    metrics.observe_request(make_record())
    for reason in ("requests", "tokens", "seconds", "not_ready"):
        metrics.count_rejection(reason)
    metrics.count_finish("stop")
for path in ("/v1/chat/completions", "/v1/completions", "/health", "/metrics", "other"):
    for status in (200, 400, 404, 429):
        server.count_response(make_record(route=path, status=status))


def read_samples(page: bytes) -> dict[tuple[str, str], float]:
    """Return the value of each sample of the first model, by its name and other labels."""
    return {
        (
            one.name,
            ",".join(v for k, v in one.labels.items() if k not in ("model_name", "engine")),
        ): (one.value)
        for family in text_string_to_metric_families(page.decode())
        for one in family.samples
    }


def test_request_is_observed_by_its_parts() -> None:
    found = read_samples(make_page())
    sums = {
        "request_queue_time_seconds": 2.0,
        "request_prefill_time_seconds": 3.0,
        "request_decode_time_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 7.5,
        "request_prompt_tokens": 30.0,
        "request_generation_tokens": 5.0,
    }
    for name, value in sums.items():
        assert found[f"cllm:{name}_count", ""] == 1, name
        assert found[f"cllm:{name}_sum", ""] == value, name
    assert found["cllm:request_queue_time_seconds_bucket", "1.0"] == 0
    assert found["cllm:request_queue_time_seconds_bucket", "2.5"] == 1
    assert found["cllm:request_queue_time_seconds_bucket", "+Inf"] == 1


def test_steps_are_observed_by_stage_and_content() -> None:
    found = read_samples(make_page())
    assert found["cllm:step_decode_rows_sum", ""] == 2
    assert found["cllm:step_prefill_tokens_sum", ""] == 100
    assert found["cllm:iteration_tokens_total_sum", ""] == 102
    assert found["cllm:iteration_tokens_total_count", ""] == 1
    assert found["cllm:step_time_seconds_sum", "forward"] == 0.02
    assert found["cllm:step_time_seconds_count", "schedule"] == 0


def test_responses_are_counted_by_route_and_status() -> None:
    found = read_samples(make_page())
    assert found["cllm:http_requests_total", "/health,404"] == 1


def test_vllm_names_are_on_the_page_only_if_asked_for() -> None:
    assert b"vllm:" not in make_page()
    page = make_page(aliases=VLLM_NAMES)
    for name in VLLM_NAMES:
        ours, theirs = (page.count(f"\n{one}".encode()) for one in (name, f"v{name[1:]}"))
        assert ours == theirs > 0, name
    assert read_samples(page)["vllm:request_queue_time_seconds_sum", ""] == 2.0


def test_accounts_beyond_the_limit_are_added_up() -> None:
    """No counter decreases when other accounts become the ones that use most."""
    collector = AccountUsageCollector()
    collector.max_accounts = 2
    registry = CollectorRegistry()
    registry.register(collector)
    collector.usage = usage_of(4)
    first = read_samples(render([registry]))
    assert first["cllm:account_tokens_total", "account-3,prompt"] == 1003
    assert first["cllm:account_tokens_total", "other,prompt"] == 2001
    assert first["cllm:account_requests_total", "other"] == 18
    collector.usage = {**usage_of(4), "account-0": UsageCounts(9, 99_999, 10, 99)}
    second = read_samples(render([registry]))
    assert {key for key, value in second.items() if value < first[key]} == set()
    assert second["cllm:account_tokens_total", "other,prompt"] == 99_999 + 1001


def test_account_called_other_is_counted_with_the_others() -> None:
    collector = AccountUsageCollector()
    registry = CollectorRegistry()
    collector.max_accounts = 1
    registry.register(collector)
    collector.usage = {"ann": UsageCounts(1), "bob": UsageCounts(1), "other": UsageCounts(2, 50)}
    page = render([registry]).decode()
    lines = [line for line in page.splitlines() if line.startswith("cllm:account_requests_total")]
    assert lines == [
        'cllm:account_requests_total{account="ann"} 1.0',
        'cllm:account_requests_total{account="other"} 3.0',
    ]


def test_label_values_are_escaped() -> None:
    name = 'a"b\\c'
    page = render([Metrics(name).update(Stats(), ready=True, num_restarts=0, reservations={})])
    families = text_string_to_metric_families(page.decode())
    assert {s.labels["model_name"] for f in families for s in f.samples} == {name}


def test_page_of_many_models_and_accounts_is_small_and_fast() -> None:
    """At most 300 KB and 5 ms of CPU time with 8 models and 100 accounts; the limit here is twice
    that, because other tests compete for the CPU's caches.
    """
    page = make_page(8, 100)
    assert len(page) < 300_000
    seconds = []
    for _ in range(20):
        begun = time.thread_time()
        make_page(8, 100)
        seconds.append(time.thread_time() - begun)
    assert min(seconds) < 0.010, seconds
