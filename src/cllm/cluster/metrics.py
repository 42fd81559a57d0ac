"""The metrics of a front itself."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from cllm.cluster.leases import Replicas
from cllm.observe.collectors import AccountCounts
from cllm.observe.server_metrics import ServerMetrics


class FrontMetrics:
    """What a front counts; ``server`` has what all servers count."""

    def __init__(self, replicas: Replicas) -> None:
        self.server = ServerMetrics()
        self.registry = CollectorRegistry()
        self.retries = Counter(
            "cllm:front_retries",
            "Requests that a replica refused, or did not begin to answer, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.cut = Counter(
            "cllm:front_cut_streams",
            "Streams that ended with an error because their replica ended",
            registry=self.registry,
        )
        self.continued = Counter(
            "cllm:front_continued_streams",
            "Times that a replica was asked to continue the stream of another one",
            registry=self.registry,
        )
        self.running = Gauge(
            "cllm:front_requests_running", "Requests in progress", registry=self.registry
        )
        listed = Gauge(
            "cllm:front_replicas",
            "Replicas that get requests, and all replicas",
            ["state"],
            registry=self.registry,
        )
        listed.labels("listed").set_function(lambda: sum(1 for _ in replicas.listed()))
        listed.labels("all").set_function(lambda: len(replicas.all))

    def list_registries(
        self, usage: Mapping[str, AccountCounts], num_failed_writes: int
    ) -> list[CollectorRegistry]:
        """Return the metrics. The arguments are those of ``ServerMetrics.update``."""
        return [self.server.update(usage, num_failed_writes), self.registry]
