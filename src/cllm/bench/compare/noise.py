"""How much CPU time other processes took while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cllm.observe.cpu_time import read_tree_cpu_seconds

# fields of /proc/stat in which a CPU works: user, nice, system, irq, softirq, stolen by the host
BUSY = (0, 1, 2, 5, 6, 7)


class Watch:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._begun = self._now()

    def others(self) -> float:
        """Return the share of all CPUs that processes other than this one and its descendants have
        used; 0 if there is no /proc.
        """
        seconds, busy, own = (
            now - then for now, then in zip(self._now(), self._begun, strict=True)
        )
        capacity = seconds * (os.cpu_count() or 1)
        return max(0.0, (busy - own) / capacity) if capacity else 0.0

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), read_busy_seconds(), read_tree_cpu_seconds(os.getpid())


def read_busy_seconds() -> float:
    """Return the CPU time of all processes of the machine; 0 if there is no /proc."""
    try:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    return sum(int(fields[i]) for i in BUSY) / os.sysconf("SC_CLK_TCK")
