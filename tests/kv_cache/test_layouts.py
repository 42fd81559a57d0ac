"""When a change of the KV layout pays, and when it has to wait."""

from __future__ import annotations

import pytest

from cllm.kv_cache.layouts import COPY_BANDWIDTH, MEMORY_BANDWIDTH, LayoutChooser, Sharing

UNRELATED = Sharing(num_seqs=8, num_tokens=3200, num_distinct=3200, num_idle=0)
SHARED = Sharing(num_seqs=8, num_tokens=8200, num_distinct=1200, num_idle=0)
NOBODY = Sharing(0, 0, 0, 0)
BYTES = 100_000


def chooser(max_stall: float | None = None) -> LayoutChooser:
    """A change costs about a second."""
    return LayoutChooser(int(COPY_BANDWIDTH / BYTES), BYTES, max_stall)


def steps_until_change(chooser: LayoutChooser, sharing: Sharing, *, unified: bool) -> int | None:
    return next((n for n in range(5000) if chooser.wants_change(sharing, 1, unified=unified)), None)


def test_unrelated_sequences_leave_the_pool_when_that_has_cost_as_much_as_the_change():
    lost_a_step = 7 * 3200 / 3 * BYTES / MEMORY_BANDWIDTH
    assert steps_until_change(chooser(), UNRELATED, unified=True) == pytest.approx(1.3 / lost_a_step, rel=0.1)
    assert steps_until_change(chooser(), UNRELATED, unified=False) is None


def test_a_shared_prefix_brings_them_back():
    assert steps_until_change(chooser(), SHARED, unified=False) is not None
    assert steps_until_change(chooser(), SHARED, unified=True) is None


def test_a_change_that_takes_too_long_waits_until_nobody_runs():
    """And is made then, however long that took."""
    patient = chooser(max_stall=0.1)
    assert steps_until_change(patient, UNRELATED, unified=True) is None
    assert patient.wants_change(NOBODY, 0, unified=True)
    quick = chooser(max_stall=10.0)
    assert steps_until_change(quick, UNRELATED, unified=True) is not None


def test_what_is_long_past_is_forgotten():
    """Hours of one load do not outweigh minutes of another."""
    patient = chooser(max_stall=0.1)
    for _ in range(5000):
        patient.wants_change(UNRELATED, 1, unified=True)
    for _ in range(2000):
        patient.wants_change(SHARED, 1, unified=True)
    assert not patient.wants_change(NOBODY, 0, unified=True)
