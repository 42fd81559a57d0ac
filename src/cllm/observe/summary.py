"""Lines about the models that compute, every few seconds while there is traffic."""

from __future__ import annotations

import logging

from cllm.core.output import Stats
from cllm.observe.log import REQUESTS

log = logging.getLogger(REQUESTS)


class Summary:
    """Writes a line about each model that has computed something since the last one."""

    def __init__(self, seconds: float | None) -> None:
        """``seconds`` are between two lines; None writes none."""
        self._seconds = seconds
        self._latest: float | None = None  # when the last lines were due
        self._before: dict[str, tuple[Stats, float]] = {}  # by model

    def is_due(self, now: float) -> bool:
        """Return whether ``write`` has to be called for each model now, a time in seconds."""
        if self._seconds is None:
            return False
        if self._latest is None:
            self._latest = now
        if now - self._latest < self._seconds:
            return False
        self._elapsed, self._latest = now - self._latest, now
        return True

    def write(self, model: str, stats: Stats, num_generated: float) -> None:
        """Write the line about a model, whose ``stats`` have totals since the start."""
        before, generated_before = self._before.get(model, (Stats(), 0.0))
        self._before[model] = stats, num_generated
        has_worked = stats.num_steps != before.num_steps
        if not (has_worked or stats.num_waiting) or not log.isEnabledFor(logging.INFO):
            return
        queries = stats.num_cache_queries - before.num_cache_queries
        hits = count_hits(stats) - count_hits(before)
        fields = {
            "model": model,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "prompt_tokens_per_s": self._rate(stats.num_prefill_tokens - before.num_prefill_tokens),
            "output_tokens_per_s": self._rate(num_generated - generated_before),
            "cached_percent": round(100 * hits / queries) if queries else None,
            "cells_used": stats.num_cells_held,
            "cells_idle": stats.num_cells_idle,
            "cells": stats.num_cells,
            "parked": stats.num_parked - before.num_parked,
        }
        shown = {name: value for name, value in fields.items() if value is not None}
        log.info("last %.0f s", self._elapsed, extra={"fields": shown})

    def _rate(self, count: float) -> float:
        return round(count / self._elapsed, 1)


def count_hits(stats: Stats) -> int:
    return stats.num_cell_hits + stats.num_ram_hits + stats.num_disk_hits
