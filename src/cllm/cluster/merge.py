"""Merges the answers of several replicas into the answer of one server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

LABEL = "replica"
# What the front counts itself for all replicas, so that each request counts once
OF_FRONT = (b"cllm:account_", b"cllm:http_requests")
HELP, TYPE = b"# HELP ", b"\n# TYPE "


def merge_metrics(own: bytes, pages: Iterable[bytes]) -> bytes:
    """Return a page with the front's ``own`` metrics and those on the ``pages`` of replicas, whose
    samples have the label ``replica``. Sums over that label are those of all replicas.
    """
    families: dict[bytes, list[memoryview]] = {}
    for name, head, samples in list_families(own):
        families[name] = [head, samples]
    for page in pages:
        for name, head, samples in list_families(page):
            if not name.startswith(OF_FRONT):
                families.setdefault(name, [head]).append(samples)
    return b"".join(part for parts in families.values() for part in parts)


def list_families(page: bytes) -> Iterator[tuple[bytes, memoryview, memoryview]]:
    """Yield the name, the comments and the samples of each family on a page. To parse the samples
    would take a hundred times as long.
    """
    if not page.endswith(b"\n"):  # the next page begins with a line of its own
        page += b"\n"
    view, at = memoryview(page), 0 if page.startswith(HELP) else page.find(b"\n" + HELP) + 1
    while page.startswith(HELP, at):
        end = page.find(b"\n" + HELP, at) + 1 or len(page)
        kind = page.find(TYPE, at, end) + 1
        samples = page.find(b"\n", kind, end) + 1
        if kind and samples:
            begin = at + len(HELP)
            if name := page[begin : page.find(b" ", begin)]:
                yield name, view[at:samples], view[samples:end]
        at = end


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
