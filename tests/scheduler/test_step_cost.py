"""What a step costs is learned, from whatever steps there are."""

from __future__ import annotations

import math

import pytest

from cllm.scheduler.step_cost import StepCost


def test_nothing_is_known_at_first():
    """Without an observation there is no limit to prompts."""
    assert StepCost(16).num_tiles(3, 0.1) is None
    assert StepCost(16).decode(3) == 0
    assert StepCost(16).per_token is None


def test_the_budget_is_what_the_target_leaves():
    """Target minus decoding rows, over the cost of a tile; one at least."""
    cost = StepCost(10)
    cost.observe(4, 0, 0.050)
    cost.observe(4, 100, 0.150)
    assert cost.per_token == pytest.approx(0.001)
    assert cost.num_tiles(4, 0.2) == 15
    assert cost.num_tiles(4, 0.01) == 1


def test_enough_is_where_reading_the_weights_hardly_counts():
    """Twenty times as long as a step of one row; whatever fits while nothing is known."""
    cost = StepCost(10)
    assert cost.efficient_prefill_tokens == math.inf
    cost.observe(0, 100, 0.2)
    cost.observe(1, 0, 0.01)
    assert cost.efficient_prefill_tokens == pytest.approx(100)


def test_a_part_of_a_tile_counts_as_one():
    """And changes less of what is known than a whole one."""
    cost = StepCost(64)
    for tokens in [64, 128, 65, 100] * 10:
        cost.observe(0, tokens, 0.5 * -(-tokens // 64))
    assert cost.per_tile == pytest.approx(0.5)
    cost.observe(0, 8, 0.1)
    assert cost.per_tile == pytest.approx(0.5, rel=0.03)


def test_rows_never_seen_are_estimated_from_the_nearest():
    """More rows cost more, fewer cost less, and what has been seen is believed."""
    cost = StepCost(16)
    cost.observe(4, 0, 0.070)
    assert cost.decode(11) == pytest.approx(0.140)
    assert cost.decode(1) == pytest.approx(0.040)
    for _ in range(40):
        cost.observe(11, 0, 0.100)
    assert cost.decode(11) == pytest.approx(0.100, rel=0.01)


def test_it_follows_the_machine():
    """When everything becomes twice as slow the estimates do, within some steps."""
    cost = StepCost(16)
    for seconds in [0.01] * 20 + [0.02] * 20:
        cost.observe(2, 0, seconds)
    assert cost.decode(2) == pytest.approx(0.02, rel=0.05)


def test_a_hiccup_is_not_believed():
    """One step that took a hundred times as long changes little, also where the number of rows is
    new.
    """
    cost = StepCost(16)
    for _ in range(20):
        cost.observe(2, 0, 0.01)
    cost.observe(2, 0, 1.0)
    assert cost.decode(2) < 0.0125
    cost.observe(3, 0, 1.0)
    assert cost.decode(3) < 0.02
