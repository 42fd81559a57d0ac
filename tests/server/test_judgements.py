"""The judgements in /health?level=full."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cllm.observe.request_record import RequestRecord
from cllm.server.native.judgements import (
    MAX_MEMORY,
    MAX_SECONDS,
    MIN_SUCCESS_RATE,
    SECONDS,
    RecentRequests,
    judge_memory,
)

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "cllm.rules.yml"


def ended(seconds=1.0, outcome="finished"):
    record = RequestRecord(arrived=0.0, submitted=0.0, outcome=outcome)
    record.ended = seconds
    return record


def states(recent):
    return {one["name"]: one["state"] for one in recent.judge()}


def test_thresholds_are_those_of_the_alerts():
    rules = RULES.read_text()
    for limit in (f"< {MIN_SUCCESS_RATE:g}\n", f"> {MAX_SECONDS:g}\n", f"> {MAX_MEMORY:g}\n"):
        assert limit in rules
    now = [0.0]
    recent = RecentRequests(lambda: now[0])
    assert states(recent) == {"success_rate": "ok", "mean_response_seconds": "ok"}
    for _ in range(19):
        recent.note(ended())
    recent.note(ended(outcome="error"))
    recent.note(ended(seconds=1e6, outcome="abort"))  # its client has left
    assert states(recent) == {"success_rate": "ok", "mean_response_seconds": "ok"}
    recent.note(ended(seconds=200.0, outcome="timeout"))
    assert states(recent) == {"success_rate": "warning", "mean_response_seconds": "warning"}
    assert recent.judge()[0]["reason"] == "2 of the latest 21 requests failed"
    now[0] = SECONDS + 1
    assert states(recent) == {"success_rate": "ok", "mean_response_seconds": "ok"}


def test_full_memory_is_a_warning():
    stats = SimpleNamespace(num_cells_held=90, num_cells=100)
    model: Any = SimpleNamespace(name="m", is_loaded=True, engine=SimpleNamespace(stats=stats))
    [one] = judge_memory([model])
    assert (one["state"], one["value"]) == ("warning", 0.9)
    assert "90 of 100 KV cells" in one["reason"]


def test_health_has_the_judgements(fake_server):
    body = {"prompt": "hello", "max_tokens": 3}
    assert fake_server.client.post("/v1/completions", json=body).status_code == 200
    judgements = fake_server.client.get("/health?level=full").json()["judgements"]
    assert {one["name"] for one in judgements} == {
        "success_rate",
        "mean_response_seconds",
        "memory",
    }
    assert all(one["reason"] for one in judgements)
    assert "judgements" not in fake_server.client.get("/health").json()
