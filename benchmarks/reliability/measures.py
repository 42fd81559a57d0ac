"""All measurements of docs/reliability.md, by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from benchmarks.reliability.client import Figure
from benchmarks.reliability.crashes import (
    measure_deadline,
    measure_false_alarms,
    measure_flips,
    measure_hang,
    measure_kill,
)
from benchmarks.reliability.hostile import measure_hostile
from benchmarks.reliability.load import (
    measure_aborts,
    measure_cancellation,
    measure_cost,
    measure_ledger,
    measure_overload,
    measure_success,
)

Measure = Callable[[], Awaitable[list[Figure]]]


def list_measures(scale: float) -> dict[str, Measure]:
    """Return all measurements; ``scale`` 1 is the full size."""

    def size(full: int, least: int) -> int:
        return max(least, int(full * scale))

    return {
        "kill": lambda: measure_kill(size(5, 1)),
        "hang": measure_hang,
        "false-alarms": lambda: measure_false_alarms(600 * scale),
        "deadline": lambda: measure_deadline(size(20, 2)),
        "success": lambda: measure_success(size(10_000, 400)),
        "overload": lambda: measure_overload(size(3, 1), size(200, 10), size(4, 2)),
        "ledger": lambda: measure_ledger(size(100_000, 500)),
        "aborts": lambda: measure_aborts(size(10_000, 200)),
        "cancellation": lambda: measure_cancellation(size(200, 10)),
        "flips": lambda: measure_flips(size(1000, 20)),
        "hostile": lambda: measure_hostile(60 * scale),
        "cost": lambda: measure_cost(size(15, 1), size(800, 50)),
    }
