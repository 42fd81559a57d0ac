"""When the KV layout changes, and when a change has to wait."""

from __future__ import annotations

import pytest

from cllm.kv_cache.layouts import MEMORY_BANDWIDTH, LayoutChooser, Sharing

UNRELATED = Sharing(num_seqs=8, num_tokens=3200, num_distinct=3200, num_idle=0)
SHARED = Sharing(num_seqs=8, num_tokens=8200, num_distinct=1200, num_idle=0)
NO_SEQUENCES = Sharing(0, 0, 0, 0)
BYTES = 100_000


def make_chooser(max_stall: float | None = None) -> LayoutChooser:
    """Return a make_chooser for which a change takes a second, plus the time to move the tokens."""
    return LayoutChooser(1.0, BYTES, max_stall)


def count_steps_until_change(
    make_chooser: LayoutChooser, sharing: Sharing, *, unified: bool
) -> int | None:
    for count in range(5000):
        make_chooser.observe(sharing, 1, unified=unified)
        if make_chooser.should_change(sharing, 0, unified=unified, decoding=unified):
            return count
    return None


def test_layout_changes_when_loss_reaches_cost_of_change():
    lost_per_step = 7 * 3200 / 3 * BYTES / MEMORY_BANDWIDTH
    assert count_steps_until_change(make_chooser(), UNRELATED, unified=True) == pytest.approx(
        1.3 / lost_per_step, rel=0.1
    )
    assert count_steps_until_change(make_chooser(), UNRELATED, unified=False) is None


def test_shared_prefix_changes_layout_to_unified():
    """It does not change while a sequence decodes, because that would return with cells of its own."""
    shared = make_chooser()
    shared.observe(SHARED, 1000, unified=False)
    assert not shared.should_change(SHARED, 0, unified=False, decoding=True)
    assert count_steps_until_change(make_chooser(), SHARED, unified=False) is not None
    assert count_steps_until_change(make_chooser(), SHARED, unified=True) is None


def test_expected_load_counts_in_advance():
    """If it is large enough and the present layout does not suit it."""
    fresh = make_chooser()
    assert fresh.should_change(SHARED, 64, unified=False, decoding=False)
    assert not fresh.should_change(SHARED, 4, unified=False, decoding=False)
    assert not fresh.should_change(SHARED, 64, unified=True, decoding=False)
    assert fresh.seconds_lost == 0


def test_long_change_waits_until_no_sequence_decodes():
    """It is then made, however long it takes."""
    patient = make_chooser(max_stall=0.1)
    assert count_steps_until_change(patient, UNRELATED, unified=True) is None
    assert patient.should_change(NO_SEQUENCES, 0, unified=True, decoding=False)
    assert (
        count_steps_until_change(make_chooser(max_stall=10.0), UNRELATED, unified=True) is not None
    )


def test_old_losses_fade():
    """Hours of one load do not outweigh minutes of another."""
    patient = make_chooser(max_stall=0.1)
    patient.observe(UNRELATED, 100_000, unified=True)
    patient.observe(SHARED, 2000, unified=True)
    assert not patient.should_change(NO_SEQUENCES, 0, unified=True, decoding=False)
