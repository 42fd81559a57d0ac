"""Prometheus metrics, named as in vLLM for its dashboards, with the prefix ``cllm:`` instead of
``vllm:``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from cllm.core.output import Stats

# CPUs take minutes where GPUs take milliseconds, so the buckets reach further than usual.
TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
    160,
    320,
    640,
)
LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
ITL_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
GRAMMAR_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)

GAUGES = {
    "num_running": ("num_requests_running", "running sequences"),
    "num_waiting": ("num_requests_waiting", "sequences waiting for a slot or for cells"),
    "num_seq_ids": ("seq_ids", "number of sequence slots"),
    "num_seq_ids_in_use": ("seq_ids_in_use", "sequence slots of running sequences"),
    "num_cells": ("kv_cells", "number of KV cells (tokens)"),
    "num_cells_held": ("kv_cells_held", "KV cells of running sequences"),
    "num_cells_idle": (
        "kv_cells_idle",
        "KV cells with prefixes of finished sequences, which can be evicted",
    ),
    "num_ram_bytes": ("ram_cache_bytes", "size of the prefixes in RAM"),
    "num_disk_bytes": ("disk_cache_bytes", "size of the prefixes on disk"),
    "num_waiting_tokens": (
        "waiting_tokens",
        "tokens to compute for waiting sequences, without those that were cached when they arrived",
    ),
    "waiting_seconds": (
        "estimated_waiting_seconds",
        "time until all waiting requests are served, by recent step costs",
    ),
}

COUNTERS = {
    "num_steps": ("engine_steps", "steps computed"),
    "num_parked": (
        "parked",
        "times that a sequence was parked: it gave up its cells, to continue later",
    ),
    "num_prefill_tokens": ("prefill_tokens_computed", "prompt tokens computed"),
    "num_guesses": ("spec_decode_num_draft_tokens", "draft tokens"),
    "num_accepted": ("spec_decode_num_accepted_tokens", "accepted draft tokens"),
    "num_embedding_tokens": ("embedding_tokens_computed", "tokens of texts embedded"),
    "num_disk_failures": (
        "disk_cache_failures",
        "prefixes that could not be written to the folder kv.disk_cache or read from it",
    ),
    "decode_cpu_seconds": (
        "decode_cpu_seconds",
        "CPU time of the engine process inside llama_decode, of all threads",
    ),
}


class TokenHistogram(Collector):
    """A histogram that is updated with every token.

    It has no locks and takes a tenth of the library's time.
    """

    def __init__(self, name: str, text: str, model_name: str, buckets: tuple[float, ...]) -> None:
        self._family = name, text
        self._model_name = model_name
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._family, labels=["model_name"])
        bounds = [*(str(float(bucket)) for bucket in self._buckets), "+Inf"]
        cumulated = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric([self._model_name], cumulated, self._sum)
        yield family


class AccountCounts(Protocol):
    """The usage of an account since the start."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


NO_USAGE: Mapping[str, AccountCounts] = {}


class AccountUsageCollector(Collector):
    """The usage of each account in ``usage``."""

    def __init__(self) -> None:
        self.usage = NO_USAGE

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "cllm:account_requests", "requests of each account with API keys", labels=["account"]
        )
        tokens = CounterMetricFamily(
            "cllm:account_tokens",
            "tokens of each account with API keys, by kind: prompt (cached ones included), cached, "
            "completion",
            labels=["account", "kind"],
        )
        for name, used in self.usage.items():
            requests.add_metric([name], used.requests)
            for kind in ("prompt", "cached", "completion"):
                tokens.add_metric([name, kind], getattr(used, f"{kind}_tokens"))
        yield requests
        yield tokens


class EngineCollector(Collector):
    """The figures of each of several engines that share a model's requests: whether it is ready,
    its restarts, and its statistics.
    """

    def __init__(self, model_name: str) -> None:
        self.engines: Sequence[tuple[bool, int, Stats]] = ()
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        if len(self.engines) < 2:  # the other metrics have the same figures
            return
        labels = ("model_name", "engine")
        ready = GaugeMetricFamily(
            "cllm:pool_engine_ready", "1 if the engine is ready", labels=labels
        )
        restarts = CounterMetricFamily(
            "cllm:pool_engine_restarts", "times the engine was restarted", labels=labels
        )
        requests = GaugeMetricFamily(
            "cllm:pool_engine_sequences", "sequences of the engine", labels=(*labels, "state")
        )
        cells = GaugeMetricFamily(
            "cllm:pool_engine_kv_cells", "KV cells of the engine", labels=(*labels, "state")
        )
        for number, (is_ready, num_restarts, stats) in enumerate(self.engines):
            own = [self._model_name, str(number)]
            ready.add_metric(own, is_ready)
            restarts.add_metric(own, num_restarts)
            requests.add_metric([*own, "running"], stats.num_running)
            requests.add_metric([*own, "waiting"], stats.num_waiting)
            cells.add_metric([*own, "held"], stats.num_cells_held)
            cells.add_metric([*own, "idle"], stats.num_cells_idle)
        yield from (ready, restarts, requests, cells)


class Metrics:
    """The metrics of one model. Every observation costs about a microsecond."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # time stamps that no dashboard reads
        self._registry = CollectorRegistry()
        registry, labels = self._registry, ("model_name",)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"cllm:{name}", text, labels, registry=registry).labels(model_name)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"cllm:{name}", text, labels, registry=registry).labels(model_name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(
                f"cllm:{name}_seconds", text, labels, registry=registry, buckets=buckets
            )
            return family.labels(model_name)

        self._stats = {field: gauge(name, text) for field, (name, text) in GAUGES.items()}
        self._totals = {field: counter(name, text) for field, (name, text) in COUNTERS.items()}
        self._counted = Stats()  # the totals that ``_totals`` has counted
        self._ready = gauge("engine_ready", "1 if the engine accepts requests")
        self._restarts = counter("engine_restarts", "times the engine died and was restarted")
        self._num_restarts = 0  # the number that ``_restarts`` has counted
        self._engines = EngineCollector(model_name)
        registry.register(self._engines)
        self._usage = gauge(
            "kv_cache_usage_perc", "share of the KV cells that running sequences use, 0 to 1"
        )
        self._requests = counter("requests", "accepted requests")
        self._grammars = histogram(
            "grammar_check", "checks of grammars and schemas", GRAMMAR_BUCKETS
        )
        self._known_grammars = counter(
            "grammar_cache_hits", "grammars and schemas found in the cache of checks"
        )
        self._unenforced = Counter(
            "cllm:unenforced_keywords",
            "schema keywords that could not be enforced and were dropped",
            ("model_name", "keyword"),
            registry=self._registry,
        )
        self._prompt_tokens = counter("prompt_tokens", "prompt tokens of accepted requests")
        self._shared = counter(
            "prompts_shared", "prompts that shared the computation of an identical request"
        )
        self._recalled = counter("result_cache_hits", "prompts answered from the result cache")
        self._embedded = counter("embeddings", "texts to embed")
        self._embedded_tokens = counter("embedding_tokens", "tokens of the texts to embed")
        self._generation_tokens = counter("generation_tokens", "generated tokens")
        self._num_generated = 0  # not yet counted in ``_generation_tokens``
        self._ttft = histogram(
            "time_to_first_token", "from submission to the first token", TTFT_BUCKETS
        )
        self._itl = TokenHistogram(
            "cllm:inter_token_latency_seconds",
            "between the tokens of a request",
            model_name,
            ITL_BUCKETS,
        )
        registry.register(self._itl)
        self._e2e = histogram("e2e_request_latency", "from submission to the end", E2E_BUCKETS)
        self._outcome = Counter(
            "cllm:request_outcome",
            "how requests ended: finished, abort (the client disconnected), error, timeout",
            ("model_name", "outcome"),
            registry=self._registry,
        )
        self._refused = make_rejection_counter(registry)
        self._reservations = Counter(
            "cllm:queue_reservations",
            "places reserved for rejected clients: issued, honoured (the client returned and was "
            "admitted), expired",
            ("model_name", "event"),
            registry=self._registry,
        )
        self._num_reservations = Counts[str]()  # what ``_reservations`` has counted
        self._skipped = Counter(
            "cllm:skipped_parts",
            "tools, items and blocks that cannot be served and were left out, by type",
            ("model_name", "type"),
            registry=self._registry,
        )
        self._finish = Counter(
            "cllm:request_success",
            "finished choices, by reason",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._loads = counter("model_loads", "times the model was loaded, restarts not included")
        self._num_loads = 0
        self._model_name = model_name

    def count_request(self, num_prompt_tokens: int, num_shared: int, num_recalled: int) -> None:
        self._requests.inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._shared.inc(num_shared)
        self._recalled.inc(num_recalled)

    def count_embedding_request(self, num_texts: int, num_tokens: int) -> None:
        self._requests.inc()
        self._embedded.inc(num_texts)
        self._embedded_tokens.inc(num_tokens)

    def count_skipped_part(self, kind: str) -> None:
        self._skipped.labels(self._model_name, kind).inc()

    def observe_grammar_check(self, seconds: float | None) -> None:
        """Count a grammar that was checked in ``seconds``; None means that it was known before."""
        if seconds is None:
            self._known_grammars.inc()
        else:
            self._grammars.observe(seconds)

    def count_unenforced_keywords(self, keywords: Iterable[str]) -> None:
        for keyword in keywords:
            self._unenforced.labels(self._model_name, keyword).inc()

    def count_rejection(self, reason: str) -> None:
        self._refused.labels(self._model_name, reason).inc()

    def observe_tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Count tokens that arrived ``seconds`` after the last ones, or after the submission if
        they are the first.
        """
        (self._ttft if first else self._itl).observe(seconds)
        self._num_generated += count

    def count_finish(self, reason: str) -> None:
        self._finish.labels(self._model_name, reason).inc()

    def count_outcome(self, outcome: str, seconds: float) -> None:
        self._outcome.labels(self._model_name, outcome).inc()
        self._e2e.observe(seconds)

    def update(
        self,
        stats: Stats,
        *,
        ready: bool,
        num_restarts: int,
        reservations: Mapping[str, int],
        num_loads: int = 1,
        engines: Sequence[tuple[bool, int, Stats]] = (),
    ) -> CollectorRegistry:
        """Return the metrics with the current figures of the engines. ``engines`` has those of each
        engine, for EngineCollector.

        The totals of ``stats``, ``num_restarts``, ``num_loads`` and ``reservations`` (counts by
        event) must never decrease.
        """
        self._generation_tokens.inc(self._num_generated)
        self._num_generated = 0
        for field, gauge in self._stats.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._totals.items():
            counter.inc(getattr(stats, field) - getattr(self._counted, field))
        self._counted = stats
        self._usage.set(stats.num_cells_held / stats.num_cells if stats.num_cells else 0)
        self._ready.set(ready)
        self._restarts.inc(num_restarts - self._num_restarts)
        self._num_restarts = num_restarts
        self._loads.inc(num_loads - self._num_loads)
        self._num_loads = num_loads
        self._engines.engines = engines
        for event, count in reservations.items():
            self._reservations.labels(self._model_name, event).inc(
                count - self._num_reservations[event]
            )
            self._num_reservations[event] = count
        return self._registry


class ServerMetrics:
    """The metrics that concern the whole server and no model, so they have no model's name."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self.connections = Gauge(
            "cllm:http_connections", "open HTTP connections", registry=registry
        )
        self.event_loop_lag = Histogram(
            "cllm:event_loop_lag_seconds",
            "how late the event loop of the API process runs what is due, ten times a second",
            registry=registry,
            buckets=LAG_BUCKETS,
        )
        self._unknown = Counter(
            "cllm:unknown_parameters",
            "unknown request parameters, which were ignored",
            registry=registry,
        )
        self._refused = make_rejection_counter(registry)
        self._failed_writes = Counter(
            "cllm:usage_write_failures",
            "times that the usage of accounts could not be written",
            registry=registry,
        )
        self._num_failed_writes = 0
        self.received_prefixes = Counter(
            "cllm:prefixes_received",
            "saved prefixes that other replicas have handed over: stored, or refused as damaged",
            ("result",),
            registry=registry,
        )
        self._account_usage = AccountUsageCollector()
        registry.register(self._account_usage)

    def count_unknown_parameters(self, count: int) -> None:
        self._unknown.inc(count)

    def count_rejection(self, reason: str) -> None:
        """Count a request that was rejected before its model was known, or loaded."""
        self._refused.labels("", reason).inc()

    def update(
        self, usage: Mapping[str, AccountCounts], num_failed_writes: int
    ) -> CollectorRegistry:
        """Return the metrics. ``usage`` has the accounts that are shown. ``num_failed_writes`` must
        never decrease.
        """
        self._failed_writes.inc(num_failed_writes - self._num_failed_writes)
        self._num_failed_writes = num_failed_writes
        self._account_usage.usage = usage
        return self._registry


def make_rejection_counter(registry: CollectorRegistry) -> Counter:
    return Counter(
        "cllm:requests_refused",
        "rejected requests: a queue limit (requests, tokens, seconds), large (large requests "
        "wait to be read or tokenized), not_ready, draining, memory (none for another model)",
        ("model_name", "reason"),
        registry=registry,
    )


class MergedRegistries(Collector):
    """The metrics of several registries. Families with the same name become one."""

    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples.extend(family.samples)
        yield from families.values()


def render(registries: Iterable[CollectorRegistry]) -> bytes:
    """Return the page that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(MergedRegistries(registries))
    return generate_latest(registry)
