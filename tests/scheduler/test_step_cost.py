"""The learned cost of a step."""

from __future__ import annotations

import math
import random

import pytest

from cllm.scheduler.step_cost import KNOWN, LEAST, STALE, StepCost


def test_unknown_costs_limit_nothing():
    """Without an observation, prompts are not limited."""
    assert StepCost().compute_prefill_budget(100, 3, 0.1) == 100
    assert StepCost().estimate_decode(3) == 0
    assert StepCost().per_token is None


def test_budget_is_rest_of_target_time():
    """The target minus the decoding rows, divided by the cost of a token, but at least LEAST."""
    cost = StepCost()
    cost.observe(4, 0, 0.050)
    cost.observe(4, 100, 0.150)
    assert cost.per_token == pytest.approx(0.001)
    assert cost.compute_prefill_budget(200, 4, 0.2) == 150
    assert cost.compute_prefill_budget(15, 4, 0.2) == 15
    assert cost.compute_prefill_budget(200, 4, 0.01) == LEAST
    assert (
        cost.compute_prefill_budget(200, 0, 0.2)
        == cost.compute_prefill_budget(200, 4, math.inf)
        == 200
    )


def test_efficient_prefill_takes_as_long_as_ten_steps():
    """Ten times as long as a step of one row. Unlimited until it is known."""
    cost = StepCost()
    assert cost.efficient_prefill_tokens == math.inf
    cost.observe(0, 100, 0.2)
    cost.observe(1, 0, 0.01)
    assert cost.efficient_prefill_tokens == pytest.approx(50)


def test_few_tokens_change_little():
    """They change the estimate less than a whole chunk does."""
    cost = StepCost()
    for tokens in [64, 128, 65, 100] * 10:
        cost.observe(0, tokens, 0.01 * tokens)
    assert cost.estimate_prefill(64) == pytest.approx(0.64)
    cost.observe(0, 8, 0.16)
    assert cost.estimate_prefill(64) == pytest.approx(0.64, rel=0.03)


def test_fewer_tokens_than_the_least_cost_as_much():
    """A pass reads all weights."""
    cost = StepCost()
    cost.observe(0, 4, 0.16)
    assert cost.estimate_prefill(4) == cost.estimate_prefill(LEAST) == pytest.approx(0.16)
    assert cost.estimate_prefill(2 * LEAST) == pytest.approx(0.32)
    assert cost.estimate_prefill(0) == 0


def test_first_prompt_that_took_far_too_long_is_soon_forgotten():
    """It read the weights from the disk. Chunks beside decoding sequences are then small."""
    cost = StepCost()
    cost.observe(0, 100, 30.0)
    for _ in range(60):
        cost.observe(0, LEAST, LEAST * 0.003)
    assert cost.estimate_prefill(64) < 3 * 64 * 0.003 + 1


def test_first_prompt_is_not_free_if_the_rows_beside_it_took_longer_before():
    cost = StepCost()
    cost.observe(8, 0, 0.2)
    cost.observe(8, 100, 0.15)
    assert cost.per_token is None


def test_unseen_number_of_rows_is_estimated_from_nearest():
    """More rows cost more, fewer cost less, and observed costs take precedence."""
    cost = StepCost()
    cost.observe(4, 0, 0.070)
    assert cost.estimate_decode(11) == pytest.approx(0.140)
    assert cost.estimate_decode(1) == pytest.approx(0.040)
    for _ in range(40):
        cost.observe(11, 0, 0.100)
    assert cost.estimate_decode(11) == pytest.approx(0.100, rel=0.01)


def test_number_of_rows_above_all_seen_is_estimated_from_largest():
    cost = StepCost()
    cost.observe(4, 0, 0.070)
    cost.observe(11, 0, 0.100)
    assert cost.estimate_decode(12) == pytest.approx(cost.estimate_decode(11) * 15 / 14)
    assert cost.estimate_decode(5) == pytest.approx(0.070 * 8 / 7)


def observe_prompt(cost, num_tokens, each=512, slower=1.0):
    """A prompt whose 64 tokens each take 0.1 s plus 0.1 s for each 1,000 tokens before them."""
    for before in range(0, num_tokens, each):
        middle = before + each / 2
        seconds = each / 64 * (0.1 + 0.0001 * middle) * slower
        cost.observe(0, each, seconds, num_before=middle)


def test_cost_of_tokens_grows_with_position():
    """After one long prompt, tokens at the beginning and far beyond its end can be estimated."""
    cost = StepCost()
    observe_prompt(cost, 4096)
    assert cost.estimate_prefill(64, 0) == pytest.approx(0.1, rel=0.25)
    assert cost.estimate_prefill(64, 2000) == pytest.approx(0.3, rel=0.05)
    assert cost.estimate_prefill(64, 10_000) == pytest.approx(1.1, rel=0.05)
    assert cost.estimate_prefill(640, 2000) == pytest.approx(3.0, rel=0.05)
    for _ in range(20):  # short prompts move the line, but keep its slope
        cost.observe(0, 64, 0.1, num_before=32)
    assert cost.estimate_prefill(64, 2000) == pytest.approx(0.3, rel=0.25)
    observe_prompt(cost, 4096, slower=2)
    assert cost.estimate_prefill(64, 4000) == pytest.approx(1.0, rel=0.2)


def test_budget_deep_in_a_prompt_has_fewer_tokens():
    """Each further token costs more than the one before."""
    cost = StepCost()
    observe_prompt(cost, 4096)
    cost.observe(1, 0, 0.05)
    first, second = (cost.estimate_prefill(64, 3000 + 64 * i + 32) for i in range(2))
    assert cost.compute_prefill_budget(512, 1, 0.05 + first + second, 3000) == pytest.approx(
        128, abs=1
    )
    assert cost.compute_prefill_budget(512, 1, 0.05 + first, 3000) == pytest.approx(64, abs=1)
    assert cost.compute_prefill_budget(512, 1, 0.05 + first + second) > 256


def test_similar_positions_show_no_slope():
    """Noise among short prompts makes tokens after many others neither costly nor free."""
    rng, cost = random.Random(1), StepCost()
    for _ in range(200):
        cost.observe(0, 64, rng.uniform(0.08, 0.12), num_before=rng.uniform(20, 60))
    assert 0.08 < cost.estimate_prefill(64, 3000) < 0.25


def test_estimates_follow_slower_machine():
    """Within some steps after every step becomes twice as slow."""
    cost = StepCost()
    for seconds in [0.01] * 20 + [0.02] * 20:
        cost.observe(2, 0, seconds)
    assert cost.estimate_decode(2) == pytest.approx(0.02, rel=0.05)


def test_single_slow_step_changes_little():
    """A step that took a hundred times as long, also with a new number of rows."""
    cost = StepCost()
    for _ in range(20):
        cost.observe(2, 0, 0.01)
    cost.observe(2, 0, 1.0)
    assert cost.estimate_decode(2) < 0.0125
    cost.observe(3, 0, 1.0)
    assert cost.estimate_decode(3) < 0.02


def test_steps_of_only_long_sequences_are_learned():
    """Until a step without them shows what attention to them costs."""
    cost = StepCost()
    for _ in range(50):
        cost.observe(2, 0, 0.100, num_long_tokens=8000)
    assert cost.estimate_decode(2, 8000) == pytest.approx(0.100, rel=0.01)
    for _ in range(50):
        cost.observe(2, 0, 0.020)
        cost.observe(2, 0, 0.100, num_long_tokens=8000)
    assert cost.estimate_decode(2) == pytest.approx(0.020, rel=0.01)
    assert cost.estimate_decode(2, 8000) == pytest.approx(0.100, rel=0.01)


def test_what_is_not_observed_any_longer_is_forgotten():
    cost = StepCost()
    for _ in range(KNOWN):
        assert not cost.is_known(8)
        cost.observe(8, 0, 0.5)
    assert cost.is_known(8)
    for _ in range(STALE + 1):
        cost.observe(1, 0, 0.010)
    assert not cost.is_known(8)
    assert cost.estimate_decode(8) == pytest.approx(0.010 * 11 / 4)


def test_row_seconds_follow_the_machine():
    """A measurement at load that was disturbed does not count once less has been observed."""
    cost = StepCost(2.4)
    assert cost.row_seconds == 2.4
    cost.observe(8, 0, 0.1)
    assert cost.row_seconds == 0.1
    for _ in range(30):
        cost.observe(1, 0, 0.03)
    assert cost.row_seconds == pytest.approx(0.03, rel=0.01)
    for _ in range(2 * STALE):
        cost.observe(8, 0, 0.1)
    assert cost.row_seconds == pytest.approx(0.03, rel=0.01)


def test_cost_of_rows_is_at_most_that_of_a_step_with_a_prompt():
    cost = StepCost()
    cost.observe(1, 0, 0.030)
    cost.observe(0, 16, 0.010)
    cost.observe(60, 16, 0.050)
    assert cost.estimate_decode(60) == pytest.approx(0.050)
    assert 0.010 <= cost.estimate_prefill(16) <= 0.020


def test_step_without_time_makes_nothing_free():
    """The clock may not have moved."""
    cost = StepCost()
    cost.observe(1, 0, 0.0)
    cost.observe(0, 16, 0.0)
    assert cost.efficient_prefill_tokens > 0
