"""Prometheus metrics, named as in vLLM for its dashboards, with the prefix ``cllm:`` instead of
``vllm:``.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    disable_created_metrics,
)

from cllm.core.output import STAGES, Stats
from cllm.observe.collectors import (
    EngineCollector,
    EngineFigures,
)
from cllm.observe.exposition import Histogram, Value, Values
from cllm.observe.request_record import RequestRecord
from cllm.observe.step_histograms import (
    PREFILL_BOUNDS,
    ROW_BOUNDS,
    STAGE_BOUNDS,
    TOKEN_BOUNDS,
)

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
ITL_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
GRAMMAR_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2)
WAIT_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
LENGTH_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),
)
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
    "num_cells_shared": (
        "kv_cells_shared",
        "KV cells that running sequences save, because they share those of a common prefix",
    ),
    "num_ram_tokens": ("ram_cache_tokens", "tokens of the prefixes in RAM"),
    "num_disk_tokens": ("disk_cache_tokens", "tokens of the prefixes on disk"),
    "num_checkpoint_bytes": (
        "checkpoint_bytes",
        "size of the states of hybrid models saved at message boundaries",
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
    "num_thoughts_ended": (
        "reasoning_ended",
        "finished sequences whose reasoning was ended by its budget or on request",
    ),
    "num_rows": ("decode_rows", "rows of sequences that decode, one for each in each step"),
    "num_cache_queries": (
        "prefix_cache_queries",
        "prompt tokens of sequences that started to run, which the prefix cache was asked for",
    ),
    "decode_cpu_seconds": (
        "decode_cpu_seconds",
        "CPU time of the engine process inside llama_decode, of all threads",
    ),
}


Kind = Literal["counter", "gauge"]
VALUES: dict[str, tuple[Kind, str]] = {
    "num_preemptions": ("counter", "the same as cllm:parked_total"),
    "engine_ready": ("gauge", "1 if the engine accepts requests"),
    "engine_restarts": ("counter", "times the engine died and was restarted"),
    "kv_cache_usage_perc": ("gauge", "share of the KV cells that running sequences use, 0 to 1"),
    "model_memory_bytes": (
        "gauge",
        "memory that the model's engines take, or took when they were loaded last",
    ),
    "model_loads": ("counter", "times the model was loaded, restarts not included"),
    "requests": ("counter", "accepted requests"),
    "grammar_cache_hits": ("counter", "grammars and schemas found in the cache of checks"),
    "prompt_tokens": ("counter", "prompt tokens of accepted requests"),
    "prompts_shared": ("counter", "prompts that shared the computation of an identical request"),
    "result_cache_hits": ("counter", "prompts answered from the result cache"),
    "embeddings": ("counter", "texts to embed"),
    "embedding_tokens": ("counter", "tokens of the texts to embed"),
    "generation_tokens": ("counter", "generated tokens"),
}

HISTOGRAMS = {
    "grammar_check_seconds": ("checks of grammars and schemas", GRAMMAR_BUCKETS),
    "time_to_first_token_seconds": ("from submission to the first token", TTFT_BUCKETS),
    "inter_token_latency_seconds": ("between the tokens of a request", ITL_BUCKETS),
    "request_time_per_output_token_seconds": (
        "mean time of the tokens of a request after its first one",
        ITL_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("from submission to the end", E2E_BUCKETS),
    "request_queue_time_seconds": ("time that a request waited in its engine", WAIT_BUCKETS),
    "request_prefill_time_seconds": (
        "from the start of a request's prompt to its first token",
        WAIT_BUCKETS,
    ),
    "request_decode_time_seconds": (
        "from the first token of a request to its last one",
        WAIT_BUCKETS,
    ),
    "request_prompt_tokens": ("prompt tokens of a request", LENGTH_BUCKETS),
    "request_generation_tokens": ("generated tokens of a request", LENGTH_BUCKETS),
    "step_decode_rows": ("sequences that decode in a step", ROW_BOUNDS),
    "step_prefill_tokens": ("prompt tokens that a step computes", PREFILL_BOUNDS),
    "iteration_tokens_total": ("tokens that a step computes", TOKEN_BOUNDS),
}

# Counters with a label besides the model's name.
LABELLED = {
    "unenforced_keywords": (
        "schema keywords that could not be enforced and were dropped",
        "keyword",
    ),
    "request_outcome": (
        "how requests ended: finished, abort (the client disconnected), error, timeout",
        "outcome",
    ),
    "queue_reservations": (
        "places reserved for rejected clients: issued, honoured (they were admitted), expired",
        "event",
    ),
    "skipped_parts": (
        "tools, items and blocks that cannot be served and were left out, by type",
        "type",
    ),
    "request_success": ("finished choices, by reason", "finished_reason"),
    "adapter_requests": ("requests that have ended, by their LoRA adapters", "adapter"),
}

# by the field with the number, the place that the tokens were in
HITS = {"num_cell_hits": "cells", "num_ram_hits": "ram", "num_disk_hits": "disk"}

# The metrics that vLLM has too, with the same meaning.
VLLM_NAMES = tuple(
    f"cllm:{name}"
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "request_prompt_tokens",
        "request_generation_tokens",
        "iteration_tokens_total",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
    )
)


class Metrics:
    """The metrics of one model. Every observation costs about a microsecond."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # time stamps that no dashboard reads
        self._registry = registry = CollectorRegistry()
        self._model_name = model_name
        labels = {"model_name": model_name}
        values = Values(labels)
        registry.register(values)
        self._stats = {
            field: values.add("gauge", f"cllm:{name}", text)
            for field, (name, text) in GAUGES.items()
        }
        self._totals = {
            field: values.add("counter", f"cllm:{name}", text)
            for field, (name, text) in COUNTERS.items()
        }
        self._values = {
            name: values.add(kind, f"cllm:{name}", text) for name, (kind, text) in VALUES.items()
        }
        self._hits: dict[str, Value] = {}
        for field, tier in HITS.items():
            hits = Values(labels | {"tier": tier})
            registry.register(hits)
            text = "prompt tokens that the prefix cache had, by where they were: cells, ram, disk"
            self._hits[field] = hits.add("counter", "cllm:prefix_cache_hits", text)
        self._engines = EngineCollector(model_name)
        registry.register(self._engines)
        self._histograms = {
            name: Histogram(f"cllm:{name}", text, bounds, labels)
            for name, (text, bounds) in HISTOGRAMS.items()
        }
        self._stages = {
            stage: Histogram(
                "cllm:step_time_seconds",
                "time of a step by stage: schedule, forward (the model computes), sample, update, "
                "side_job (grammars, embeddings, disk)",
                STAGE_BOUNDS,
                labels | {"stage": stage.removesuffix("_seconds")},
            )
            for stage in STAGES
        }
        for histogram in (*self._histograms.values(), *self._stages.values()):
            registry.register(histogram)
        self._labelled = {
            name: Counter(f"cllm:{name}", text, ("model_name", label), registry=registry)
            for name, (text, label) in LABELLED.items()
        }
        self._refused = make_rejection_counter(registry)
        self._num_reservations = Counts[str]()  # what the counter of reservations has counted

    def _count(self, name: str, label: str, count: float = 1.0) -> None:
        """Add to the counter of LABELLED with this name and label."""
        self._labelled[name].labels(self._model_name, label).inc(count)

    @property
    def num_generated(self) -> float:
        """The number of tokens generated so far."""
        return self._values["generation_tokens"].value

    def count_request(self, num_prompt_tokens: int, num_shared: int, num_recalled: int) -> None:
        self._values["requests"].inc()
        self._values["prompt_tokens"].inc(num_prompt_tokens)
        self._values["prompts_shared"].inc(num_shared)
        self._values["result_cache_hits"].inc(num_recalled)

    def count_embedding_request(self, num_texts: int, num_tokens: int) -> None:
        self._values["requests"].inc()
        self._values["embeddings"].inc(num_texts)
        self._values["embedding_tokens"].inc(num_tokens)

    def count_skipped_part(self, kind: str) -> None:
        self._count("skipped_parts", kind)

    def observe_grammar_check(self, seconds: float | None) -> None:
        """Count a grammar that was checked in ``seconds``; None means that it was known before."""
        if seconds is None:
            self._values["grammar_cache_hits"].inc()
        else:
            self._histograms["grammar_check_seconds"].observe(seconds)

    def count_unenforced_keywords(self, keywords: Iterable[str]) -> None:
        for keyword in keywords:
            self._count("unenforced_keywords", keyword)

    def count_rejection(self, reason: str) -> None:
        self._refused.labels(self._model_name, reason).inc()

    def observe_tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Count tokens that arrived ``seconds`` after the last ones, or after the submission if
        they are the first.
        """
        name = "time_to_first_token_seconds" if first else "inter_token_latency_seconds"
        self._histograms[name].observe(seconds)
        self._values["generation_tokens"].value += count

    def count_finish(self, reason: str) -> None:
        self._count("request_success", reason)

    def observe_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._count("request_outcome", record.outcome)
        histograms = self._histograms
        seconds = record.seconds - (record.preparation or 0.0)
        histograms["e2e_request_latency_seconds"].observe(seconds)
        histograms["request_prompt_tokens"].observe(record.prompt_tokens)
        if record.adapter:
            self._count("adapter_requests", record.adapter)
        times = record.times
        if times.queued is not None:
            histograms["request_queue_time_seconds"].observe(times.queued)
        if times.prefill is not None:
            histograms["request_prefill_time_seconds"].observe(times.prefill)
        if (decoding := record.decoding) is not None:
            histograms["request_generation_tokens"].observe(record.completion_tokens)
            histograms["request_decode_time_seconds"].observe(decoding)
            if record.completion_tokens > 1:
                mean = decoding / (record.completion_tokens - 1)
                histograms["request_time_per_output_token_seconds"].observe(mean)

    def update(
        self,
        stats: Stats,
        *,
        ready: bool,
        num_restarts: int,
        reservations: Mapping[str, int],
        num_loads: int = 1,
        num_bytes: int = 0,
        engines: Sequence[EngineFigures] = (),
    ) -> CollectorRegistry:
        """Return the metrics with the current figures of the engines. ``num_bytes`` is the memory
        that they take.

        The totals of ``stats``, ``num_restarts``, ``num_loads`` and ``reservations`` (counts by
        event) must never decrease.
        """
        for values in (self._stats, self._totals, self._hits):
            for field, value in values.items():
                value.set(getattr(stats, field))
        for name, figure in (
            ("num_preemptions", stats.num_parked),
            (
                "kv_cache_usage_perc",
                stats.num_cells_held / stats.num_cells if stats.num_cells else 0,
            ),
            ("model_memory_bytes", num_bytes),
            ("engine_ready", ready),
            ("engine_restarts", num_restarts),
            ("model_loads", num_loads),
        ):
            self._values[name].set(figure)
        self._engines.engines = engines
        if steps := [engine.steps for engine in engines]:
            self._histograms["step_decode_rows"].parts = [one.rows for one in steps]
            self._histograms["step_prefill_tokens"].parts = [one.prefill for one in steps]
            self._histograms["iteration_tokens_total"].parts = [one.tokens for one in steps]
            for stage, histogram in self._stages.items():
                histogram.parts = [one.stages[stage] for one in steps]
        for event, count in reservations.items():
            self._count("queue_reservations", event, count - self._num_reservations[event])
            self._num_reservations[event] = count
        return self._registry


def make_rejection_counter(registry: CollectorRegistry) -> Counter:
    return Counter(
        "cllm:requests_refused",
        "rejected requests: a queue limit (requests, tokens, seconds), large (large requests "
        "wait to be read or tokenized), not_ready, draining, memory (none for another model)",
        ("model_name", "reason"),
        registry=registry,
    )
