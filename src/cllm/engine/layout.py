"""Changes the layout of the cells while the engine runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cllm.backends.base import Backend
from cllm.core.model_info import ModelInfo
from cllm.core.output import TokenOutput
from cllm.engine.side_jobs import SideJob, run_operations
from cllm.kv_cache.layouts import LAYOUTS, Layout, LayoutChooser, Sharing
from cllm.kv_cache.model_state import Recurrent, Trimmable
from cllm.scheduler.scheduler import Scheduler

log = logging.getLogger("cllm.engine")

CHOOSE_EVERY = 8  # steps


def make_layout(info: ModelInfo) -> Layout:
    state = Trimmable() if info.can_trim else Recurrent()
    return LAYOUTS[info.layout](state, info.num_spare_ids)


class LayoutChange(SideJob):
    """Changes the layout of the cells if that saves time. After a failure, it never tries again."""

    def __init__(
        self,
        chooser: LayoutChooser,
        backend: Backend,
        scheduler: Scheduler,
        clock: Callable[[], float],
    ) -> None:
        self._chooser = chooser
        self._backend = backend
        self._scheduler = scheduler
        self._clock = clock
        self._num_steps = 0  # when the layout was last considered
        self._has_failed = False

    def after(self, now: float) -> list[TokenOutput]:
        num_steps = self._scheduler.statistics.num_steps - self._num_steps
        if num_steps >= CHOOSE_EVERY or (num_steps and self._scheduler.deferred):
            self._choose()
        return []

    def idle(self) -> bool:
        self._choose()
        return False

    def _choose(self) -> None:
        if self._has_failed:
            return
        try:
            self._change_if_faster()
        except Exception:
            self._has_failed = True
            raise

    def _change_if_faster(self) -> None:
        """Change the layout of the cells if that saves time.

        Parks all running sequences; they resume in the new layout.

        Deferred sequences count too, because they will soon run and share their prefix. The best
        time to change is before they run.
        """
        scheduler, unified = self._scheduler, self._backend.info.layout == "unified"
        sharing = scheduler.kv_cache.sharing()
        num_steps, self._num_steps = self._num_steps, scheduler.statistics.num_steps
        self._chooser.observe(sharing, self._num_steps - num_steps, unified=unified)
        expected = sharing, 0.0
        if scheduler.deferred:
            expected = self._include_followers(sharing), scheduler.length_estimates.output
        decoding = any(seq.num_lacking_tokens == 1 for seq in scheduler.running)
        tiers = scheduler.kv_cache.snapshots.tiers
        # cells that do not fit into RAM would have to be recomputed
        if decoding and tiers.size_of(expected[0].num_tokens) > tiers.ram_bytes:
            return
        if not self._chooser.should_change(*expected, unified=unified, decoding=decoding):
            return
        self._chooser.seconds_lost = 0.0
        started = self._clock()
        if not run_operations(self._backend, scheduler, scheduler.empty_cells()):
            return
        self._backend.change_layout("partitioned" if unified else "unified")
        info = self._backend.info
        scheduler.change_layout(info.num_cells, make_layout(info))
        log.info("changed the KV layout to %s in %.2f s", info.layout, self._clock() - started)

    def _include_followers(self, sharing: Sharing) -> Sharing:
        """Return the expected sharing after the deferred followers have joined their leaders."""
        num_seqs, num_tokens, num_distinct, num_idle = sharing
        for leader, awaited in self._scheduler.deferred.leaders():
            missing = max(awaited) - self._scheduler.kv_cache.count_cells(leader.seq_id)
            num_seqs += len(awaited)
            num_tokens += missing + sum(awaited)
            num_distinct += missing
        return Sharing(num_seqs, num_tokens, num_distinct, num_idle)
