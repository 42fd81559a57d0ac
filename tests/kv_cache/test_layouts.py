"""When a change of the KV layout pays, and when it has to wait."""

from __future__ import annotations

import pytest

from cllm.kv_cache.layouts import MEMORY_BANDWIDTH, LayoutChooser, Sharing

UNRELATED = Sharing(num_seqs=8, num_tokens=3200, num_distinct=3200, num_idle=0)
SHARED = Sharing(num_seqs=8, num_tokens=8200, num_distinct=1200, num_idle=0)
NOBODY = Sharing(0, 0, 0, 0)
BYTES = 100_000


def chooser(max_stall: float | None = None) -> LayoutChooser:
    """A change takes a second, and what it takes to move the tokens."""
    return LayoutChooser(1.0, BYTES, max_stall)


def steps_until_change(chooser: LayoutChooser, sharing: Sharing, *, unified: bool) -> int | None:
    for count in range(5000):
        chooser.observe(sharing, 1, unified=unified)
        if chooser.wants_change(sharing, 0, unified=unified, decoding=unified):
            return count
    return None


def test_unrelated_sequences_leave_the_pool_when_that_has_cost_as_much_as_the_change():
    lost_a_step = 7 * 3200 / 3 * BYTES / MEMORY_BANDWIDTH
    assert steps_until_change(chooser(), UNRELATED, unified=True) == pytest.approx(
        1.3 / lost_a_step, rel=0.1
    )
    assert steps_until_change(chooser(), UNRELATED, unified=False) is None


def test_a_shared_prefix_brings_them_back():
    """But not while somebody decodes: each would come back with cells of his own."""
    shared = chooser()
    shared.observe(SHARED, 1000, unified=False)
    assert not shared.wants_change(SHARED, 0, unified=False, decoding=True)
    assert steps_until_change(chooser(), SHARED, unified=False) is not None
    assert steps_until_change(chooser(), SHARED, unified=True) is None


def test_a_load_that_is_coming_counts_before_it_is_there():
    """If there is enough of it, and it is not the load that the layout is right for."""
    fresh = chooser()
    assert fresh.wants_change(SHARED, 64, unified=False, decoding=False)
    assert not fresh.wants_change(SHARED, 4, unified=False, decoding=False)
    assert not fresh.wants_change(SHARED, 64, unified=True, decoding=False)
    assert fresh.seconds_lost == 0


def test_a_change_that_takes_too_long_waits_until_nobody_decodes():
    """And is made then, however long that took."""
    patient = chooser(max_stall=0.1)
    assert steps_until_change(patient, UNRELATED, unified=True) is None
    assert patient.wants_change(NOBODY, 0, unified=True, decoding=False)
    assert steps_until_change(chooser(max_stall=10.0), UNRELATED, unified=True) is not None


def test_what_is_long_past_is_forgotten():
    """Hours of one load do not outweigh minutes of another."""
    patient = chooser(max_stall=0.1)
    patient.observe(UNRELATED, 100_000, unified=True)
    patient.observe(SHARED, 2000, unified=True)
    assert not patient.wants_change(NOBODY, 0, unified=True, decoding=False)
