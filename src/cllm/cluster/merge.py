"""Merges the answers of several replicas into the answer of one server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cllm.observe.exposition import render

LABEL = "replica"
# Usage is the front's: it counts every request once, also one that was tried on two replicas.
OF_FRONT = "cllm:account_"


class ReplicaMetrics(Collector):
    """The metrics on the page of one replica, with its name as a label. A page that cannot be read
    has none.
    """

    def __init__(self, name: str, page: str) -> None:
        self._name = name
        try:
            self._families = [*text_string_to_metric_families(page)]
        except (ValueError, LookupError):
            self._families = []

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            if family.name.startswith(OF_FRONT):
                continue
            family.samples = [self._label(sample) for sample in family.samples]
            yield family

    def _label(self, sample: Sample) -> Sample:
        return sample._replace(labels={LABEL: self._name, **sample.labels})


def merge_metrics(own: Iterable[CollectorRegistry], pages: Mapping[str, str]) -> bytes:
    """Return a page with the front's ``own`` metrics and those on the ``pages`` of replicas, which
    get the label ``replica``. Sums over that label are those of the cluster.
    """
    registries = [*own]
    for name, page in pages.items():
        registry = CollectorRegistry()
        registry.register(ReplicaMetrics(name, page))
        registries.append(registry)
    return render(registries)


def merge_named(answers: Iterable[Mapping[str, Any]], field: str, key: str) -> dict[str, Any]:
    """Return the first of ``answers`` with the union of their lists ``field``. Of entries with the
    same ``key``, the first one stays.
    """
    merged: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    for answer in answers:
        merged = merged or {**answer}
        for entry in answer[field]:
            entries.setdefault(entry[key], entry)
    return {**merged, field: [*entries.values()]}


def merge_health(
    answers: Mapping[str, Mapping[str, Any] | None], troubles: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the health of a cluster: healthy if one replica is. ``answers`` has that of each
    replica by name, None for one that does not answer. For level=full, ``troubles`` says why a
    replica gets no requests, "" if it gets some; and the models name their replica.
    """
    known = {name: answer for name, answer in answers.items() if answer is not None}
    merged: dict[str, Any] = {
        "status": "healthy"
        if any(answer["status"] == "healthy" for answer in known.values())
        else "degraded",
        "model_loaded": any(answer["model_loaded"] for answer in known.values()),
    }
    if troubles is not None:
        merged["models"] = [
            {**model, LABEL: name}
            for name, answer in known.items()
            for model in answer.get("models", ())
        ]
        merged["replicas"] = [
            {
                "name": name,
                "status": "unreachable" if answer is None else answer["status"],
                **({"trouble": trouble} if (trouble := troubles.get(name)) else {}),
            }
            for name, answer in answers.items()
        ]
    return merged


def merge_sorted(
    lists: Iterable[Iterable[dict[str, Any]]], key: Callable[[dict[str, Any]], Any]
) -> list[dict[str, Any]]:
    """Return the entries of all lists, in descending order of ``key``. Entries of the same list
    with equal keys keep their order.
    """
    return sorted((entry for entries in lists for entry in entries), key=key, reverse=True)
