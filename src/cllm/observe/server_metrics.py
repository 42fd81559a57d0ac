"""The Prometheus metrics of a whole server, beside those of its models (metrics.py)."""

from __future__ import annotations

import platform
from collections import Counter as Counts
from collections.abc import Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
)

from cllm import __version__
from cllm.observe.collectors import AccountCounts, AccountUsageCollector, MachineCollector
from cllm.observe.exposition import Histogram, Values
from cllm.observe.machine import UNKNOWN, MachineUse
from cllm.observe.metrics import make_rejection_counter
from cllm.observe.request_record import RequestRecord

LAG_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
STATES = ("loaded", "loading", "unloaded")


class ServerMetrics:
    """The metrics that concern the whole server and no model, so they have no model's name."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        labels = {"version": __version__, "python": platform.python_version()}
        values = Values(labels)
        registry.register(values)
        values.add("gauge", "cllm:build_info", "1; the labels name the versions").set(1)
        self._responses = Counter(
            "cllm:http_requests",
            "HTTP requests that have ended, by route and status (499: the client has left)",
            ("route", "status"),
            registry=registry,
        )
        self._models = Gauge(
            "cllm:models",
            "models of this server: loaded, loading, unloaded",
            ("state",),
            registry=registry,
        )
        self.connections = Gauge(
            "cllm:http_connections", "open HTTP connections", registry=registry
        )
        self.event_loop_lag = Histogram(
            "cllm:event_loop_lag_seconds",
            "how late the event loop of the API process runs what is due, ten times a second",
            LAG_BUCKETS,
        )
        registry.register(self.event_loop_lag)
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
        self.load_runs = Counter(
            "cllm:load_runs",
            "load runs of the page /bench that have ended: completed, cancelled or failed",
            ("result",),
            registry=registry,
        )
        self._account_usage = AccountUsageCollector()
        registry.register(self._account_usage)
        self._machine = MachineCollector()
        registry.register(self._machine)

    def limit_accounts(self, max_accounts: int) -> None:
        """Show at most ``max_accounts`` accounts under their names."""
        self._account_usage.max_accounts = max_accounts

    def count_response(self, record: RequestRecord) -> None:
        """Count an HTTP request that has ended, with the path of its route."""
        if not record.batch_id:
            self._responses.labels(record.route, str(record.status)).inc()

    def count_unknown_parameters(self, count: int) -> None:
        self._unknown.inc(count)

    def count_rejection(self, reason: str) -> None:
        """Count a request that was rejected before its model was known, or loaded."""
        self._refused.labels("", reason).inc()

    def update(
        self,
        usage: Mapping[str, AccountCounts],
        num_failed_writes: int,
        models: Iterable[str] = (),
        machine: MachineUse = UNKNOWN,
    ) -> CollectorRegistry:
        """Return the metrics. ``usage`` has the accounts that are shown, ``models`` the state of
        each model. ``num_failed_writes`` must never decrease.
        """
        self._machine.use = machine
        for state, count in {**dict.fromkeys(STATES, 0), **Counts(models)}.items():
            self._models.labels(state).set(count)
        self._failed_writes.inc(num_failed_writes - self._num_failed_writes)
        self._num_failed_writes = num_failed_writes
        self._account_usage.usage = usage
        return self._registry
