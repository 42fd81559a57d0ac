"""Judgements of a server, with the thresholds of the alerts in ``deploy/prometheus``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

from typing_extensions import TypedDict

from cllm.models.gguf import format_size
from cllm.models.memory import measure_memory_use
from cllm.observe.machine import MachineUse, list_gpus
from cllm.observe.request_record import RequestRecord
from cllm.serving.served_model import ServedModel

SECONDS = 600.0
MAX_REQUESTS = 10_000  # the latest ones are kept
MIN_SUCCESS_RATE = 0.95
MAX_SECONDS = 5.0  # mean response time
MAX_MEMORY = 0.8  # share of the KV cache without what can be evicted, of RAM, of a GPU's memory
MIN_GPU_USE = 0.5  # share of the time, while requests wait


class Judgement(TypedDict):
    """``value`` is None if nothing is known; then the state is ok."""

    name: str
    state: Literal["ok", "warning"]
    value: float | None
    threshold: float
    reason: str


class RecentRequests:
    """The computed requests that have ended within the last ten minutes, but not those whose
    clients have left.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # when each ended, whether it failed, and how long it took
        self._ended: deque[tuple[float, bool, float]] = deque(maxlen=MAX_REQUESTS)

    def note(self, record: RequestRecord) -> None:
        """Take the record of a request that has ended."""
        if record.is_computed and record.outcome != "abort":
            failed = record.outcome in ("error", "timeout")
            self._ended.append((self._clock(), failed, record.seconds))

    def judge(self) -> list[Judgement]:
        """Return the judgements of the success rate and the mean response time."""
        while self._ended and self._clock() - self._ended[0][0] > SECONDS:
            self._ended.popleft()
        count = len(self._ended)
        if not count:
            why = "no request has ended in the last ten minutes"
            return [
                make("success_rate", None, MIN_SUCCESS_RATE, why),
                make("mean_response_seconds", None, MAX_SECONDS, why),
            ]
        num_failed = sum(failed for _, failed, _ in self._ended)
        rate, seconds = 1 - num_failed / count, fmean(one[2] for one in self._ended)
        return [
            make(
                "success_rate",
                rate,
                MIN_SUCCESS_RATE,
                f"{num_failed} of the latest {count} requests failed",
                is_bad=rate < MIN_SUCCESS_RATE,
            ),
            make(
                "mean_response_seconds",
                seconds,
                MAX_SECONDS,
                f"the latest {count} requests took {seconds:.2f} s on average",
                is_bad=seconds > MAX_SECONDS,
            ),
        ]


def judge_memory(models: Sequence[ServedModel]) -> list[Judgement]:
    """Return a judgement of the KV cache of each loaded model."""
    judgements = []
    for model in models:
        if model.engine is None or not model.is_loaded:
            continue
        stats = model.engine.stats
        share = stats.num_cells_held / stats.num_cells if stats.num_cells else 0.0
        reason = (
            f"running sequences of {model.name} hold {stats.num_cells_held} of "
            f"{stats.num_cells} KV cells"
        )
        judgements.append(make("memory", share, MAX_MEMORY, reason, is_bad=share > MAX_MEMORY))
    return judgements


def read_machine() -> MachineUse:
    """Return the present use of the machine. This may take milliseconds."""
    return MachineUse(measure_memory_use(), list_gpus())


def judge_machine(machine: MachineUse, models: Sequence[ServedModel]) -> list[Judgement]:
    """Return judgements of the machine's memory, of each GPU's memory, and of how much the GPUs
    compute while requests of ``models`` wait. What the system does not tell is left out.
    """
    places = {"RAM": machine.memory, **{gpu.name: gpu.memory for gpu in machine.gpus}}
    judgements = [
        make(
            "machine_memory" if name == "RAM" else "gpu_memory",
            use.share,
            MAX_MEMORY,
            f"{format_size(use.num_used)} of {format_size(use.num_bytes)} of {name} are used",
            is_bad=use.share > MAX_MEMORY,
        )
        for name, use in places.items()
        if use is not None
    ]
    shares = [gpu.busy for gpu in machine.gpus if gpu.busy is not None]
    if shares:
        busy = fmean(shares)
        num_waiting = sum(one.engine.stats.num_waiting for one in models if one.engine is not None)
        reason = f"{num_waiting} requests wait, and the GPUs compute {busy:.0%} of the time"
        is_bad = num_waiting > 0 and busy < MIN_GPU_USE
        judgements.append(make("gpu_use", busy, MIN_GPU_USE, reason, is_bad=is_bad))
    return judgements


def make(
    name: str, value: float | None, threshold: float, reason: str, *, is_bad: bool = False
) -> Judgement:
    return {
        "name": name,
        "state": "warning" if is_bad else "ok",
        "value": value,
        "threshold": threshold,
        "reason": reason,
    }
