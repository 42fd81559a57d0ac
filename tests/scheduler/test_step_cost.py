"""What a step costs is learned, from whatever steps there are."""

from __future__ import annotations

import pytest

from cllm.scheduler.step_cost import MIN_CHUNK, StepCost


def test_nothing_is_known_at_first():
    """Without an observation there is no limit to prompts."""
    assert StepCost().num_prefill_tokens(3, 0.1) is None
    assert StepCost().decode(3) == 0


def test_the_budget_is_what_the_target_leaves():
    """Target minus decoding rows, over the cost of a token."""
    cost = StepCost()
    cost.observe(4, 0, 0.050)
    cost.observe(4, 100, 0.150)
    assert cost.num_prefill_tokens(4, 0.2) == 150
    assert cost.num_prefill_tokens(4, 0.01) == MIN_CHUNK


def test_a_pass_and_its_tokens_are_told_apart():
    """From chunks of several sizes; and a chunk is never so small that its pass costs more than its tokens."""
    cost = StepCost()
    cost.observe(4, 0, 0.050)
    for tokens in [10, 40, 80, 20] * 10:
        cost.observe(4, tokens, 0.050 + 0.060 + 0.001 * tokens)
    assert cost.per_token == pytest.approx(0.001, rel=0.1)
    assert cost.per_chunk == pytest.approx(0.060, rel=0.1)
    assert cost.num_prefill_tokens(4, 0.21) == pytest.approx(100, rel=0.1)
    assert cost.num_prefill_tokens(4, 0.11) == pytest.approx(60, rel=0.1)


def test_rows_never_seen_are_estimated_from_the_nearest():
    """More rows cost more, fewer cost less, and what has been seen is believed."""
    cost = StepCost()
    cost.observe(4, 0, 0.070)
    assert cost.decode(11) == pytest.approx(0.140)
    assert cost.decode(1) == pytest.approx(0.040)
    for _ in range(40):
        cost.observe(11, 0, 0.100)
    assert cost.decode(11) == pytest.approx(0.100, rel=0.01)


def test_it_follows_the_machine():
    """When everything becomes twice as slow the estimates do, within some steps."""
    cost = StepCost()
    for seconds in [0.01] * 20 + [0.02] * 20:
        cost.observe(2, 0, seconds)
    assert cost.decode(2) == pytest.approx(0.02, rel=0.05)


def test_a_hiccup_is_not_believed():
    """One step that took a hundred times as long changes little, also where the number of rows is new."""
    cost = StepCost()
    for _ in range(20):
        cost.observe(2, 0, 0.01)
    cost.observe(2, 0, 1.0)
    assert cost.decode(2) < 0.0125
    cost.observe(3, 0, 1.0)
    assert cost.decode(3) < 0.02
