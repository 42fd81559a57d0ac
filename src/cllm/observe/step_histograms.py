"""Histograms of the steps of an engine: their content, and the time of each stage."""

from __future__ import annotations

from cllm.core.output import STAGES, Stats
from cllm.observe.exposition import Buckets

STAGE_BOUNDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
ROW_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
PREFILL_BOUNDS = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class StepHistograms:
    """Histograms over the steps of one engine: decoding rows, prompt tokens, both together, and
    the seconds of each stage, by its name in Stats.
    """

    def __init__(self) -> None:
        self.rows = Buckets(ROW_BOUNDS)
        self.prefill = Buckets(PREFILL_BOUNDS)
        self.tokens = Buckets(TOKEN_BOUNDS)
        self.stages = {stage: Buckets(STAGE_BOUNDS) for stage in STAGES}

    def observe(self, before: Stats, after: Stats) -> None:
        """Count the step between two messages of an engine, if there was one."""
        if after.num_steps != before.num_steps + 1:
            return
        rows = after.num_rows - before.num_rows
        prefill = after.num_prefill_tokens - before.num_prefill_tokens
        self.rows.observe(rows)
        self.prefill.observe(prefill)
        self.tokens.observe(rows + prefill)
        for stage, buckets in self.stages.items():
            if seconds := getattr(after, stage) - getattr(before, stage):
                buckets.observe(seconds)
