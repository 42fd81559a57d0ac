"""The judgements in /health?level=full."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cllm.environment import MemoryUse
from cllm.models.memory import measure_memory_use
from cllm.observe.machine import GpuUse, MachineUse
from cllm.observe.request_record import RequestRecord
from cllm.server.native.judgements import (
    MAX_MEMORY,
    MAX_SECONDS,
    MIN_GPU_USE,
    MIN_SUCCESS_RATE,
    SECONDS,
    RecentRequests,
    judge_machine,
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
    for limit in (
        f"< {MIN_SUCCESS_RATE:g}\n",
        f"> {MAX_SECONDS:g}\n",
        f"> {MAX_MEMORY:g}\n",
        f"< {MIN_GPU_USE:g} and",
    ):
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


def waiting(num_waiting):
    stats = SimpleNamespace(num_waiting=num_waiting)
    return [SimpleNamespace(engine=SimpleNamespace(stats=stats)), SimpleNamespace(engine=None)]


def test_full_machine_and_full_gpus_are_warnings():
    gpus = (
        GpuUse("nvidia0", 0.1, MemoryUse(9_000_000_000, 10_000_000_000)),
        GpuUse("card1", 0.3, MemoryUse(1, 10)),
        GpuUse("card2", None, None),
    )
    machine = MachineUse(MemoryUse(3_000_000_000, 4_000_000_000), gpus)
    ram, full, free, use = judge_machine(machine, waiting(0))
    assert (ram["name"], ram["state"], ram["value"]) == ("machine_memory", "ok", 0.75)
    assert (full["name"], full["state"]) == ("gpu_memory", "warning")
    assert full["reason"] == "9.0 GB of 10.0 GB of nvidia0 are used"
    assert free["state"] == "ok"
    assert (use["name"], use["state"]) == ("gpu_use", "ok")  # nobody waits
    *_, use = judge_machine(machine, waiting(3))
    assert use["state"] == "warning"
    assert use["reason"] == "3 requests wait, and the GPUs compute 20% of the time"


def test_machine_that_tells_nothing_is_not_judged():
    assert judge_machine(MachineUse(), waiting(3)) == []
    gpus = (GpuUse("card0", 0.9, None),)
    [use] = judge_machine(MachineUse(None, gpus), waiting(3))
    assert use["state"] == "ok"


def test_health_has_the_judgements(fake_server):
    body = {"prompt": "hello", "max_tokens": 3}
    assert fake_server.client.post("/v1/completions", json=body).status_code == 200
    judgements = fake_server.client.get("/health?level=full").json()["judgements"]
    names = {one["name"] for one in judgements}
    assert names >= {"success_rate", "mean_response_seconds", "memory"}
    assert ("machine_memory" in names) == (measure_memory_use() is not None)
    assert all(one["reason"] for one in judgements)
    assert "judgements" not in fake_server.client.get("/health").json()
