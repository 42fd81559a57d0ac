"""What may be asked, and how a refusal reads."""

from __future__ import annotations

import math

import pytest

from cllm.core.params import (
    INTEGERS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    SamplingParams,
)
from cllm.errors import BadRequest

BOUNDS = [
    ("n", 1, MAX_N, 1),
    ("max_tokens", 0, None, 1),
    ("min_tokens", 0, None, 1),
    ("logprobs", 0, 20, 1),
    ("prompt_logprobs", 0, 20, 1),
    ("typical_p", 0, 1, 0.01),
    ("top_n_sigma", -1, 100, 0.01),
    ("xtc_probability", 0, 1, 0.01),
    ("xtc_threshold", 0, 1, 0.01),
    ("mirostat_tau", 0, 100, 0.01),
    ("mirostat_eta", 0, 1, 0.01),
    ("dry_multiplier", 0, 100, 0.01),
    ("dry_base", 0, 100, 0.01),
    ("dry_allowed_length", 1, None, 1),
    ("dry_penalty_last_n", -1, None, 1),
    ("temperature", 0, 100, 0.01),
    ("top_k", 0, None, 1),
    ("top_p", 0, 1, 0.01),
    ("min_p", 0, 1, 0.01),
    ("repetition_penalty", 0.01, 100, 0.001),
    ("presence_penalty", -2, 2, 0.01),
    ("frequency_penalty", -2, 2, 0.01),
    ("seed", -(2**63), 2**63 - 1, 1),
]
BELOW = [(field, low, step) for field, low, _, step in BOUNDS]
ABOVE = [(field, high, step) for field, _, high, step in BOUNDS if high is not None]


@pytest.mark.parametrize(("field", "limit", "step"), [*BELOW, *ABOVE])
def test_the_limits_themselves_are_allowed(field, limit, step):
    """The lowest and the highest value of each field are accepted."""
    assert getattr(SamplingParams(**{field: limit}), field) == limit


@pytest.mark.parametrize(("field", "limit", "step"), BELOW)
def test_below_the_lowest_value(field, limit, step):
    """A value below the lowest is refused with its field, the limit and OpenAI's code."""
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**{field: limit - step})
    assert refused.value.param == field
    assert refused.value.status == 400
    assert refused.value.code == f"{'integer' if step == 1 else 'decimal'}_below_min_value"
    assert f"'{field}'" in str(refused.value)
    assert str(limit) in str(refused.value)


@pytest.mark.parametrize(("field", "limit", "step"), ABOVE)
def test_above_the_highest_value(field, limit, step):
    """A value above the highest is refused with its field, the limit and OpenAI's code."""
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**{field: limit + step})
    assert refused.value.param == field
    assert refused.value.code == f"{'integer' if step == 1 else 'decimal'}_above_max_value"
    assert str(limit) in str(refused.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [field for field, _, _, step in BOUNDS if step != 1])
def test_numbers_that_are_none(field, value):
    """NaN and the infinities are out of every range."""
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize("field", INTEGERS)
def test_numbers_that_count_are_integers(field):
    """A float or a bool would fail in the engine, in a step that is not its own."""
    for value in (5.0, True, "5", [5]):
        with pytest.raises(BadRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field


@pytest.mark.parametrize(
    "params", [{"logit_bias": [1]}, {"logit_bias": {"a": 1}}, {"stop_token_ids": 5}]
)
def test_token_ids_are_integers(params):
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**params)
    assert caught.value.param in params


@pytest.mark.parametrize(
    "bias",
    [{1: math.nan}, {1: 100.5}, {1: -101}, {-1: 0}, dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0)],
)
def test_logit_bias_has_limits(bias):
    """A bias out of range, a negative token id and too many entries are refused."""
    with pytest.raises(BadRequest) as refused:
        SamplingParams(logit_bias=bias)
    assert refused.value.param == "logit_bias"


def test_the_largest_logit_bias_is_allowed():
    """As many entries as the limit says, at both ends of the range of a bias."""
    params = SamplingParams(
        logit_bias={token: -100 if token % 2 else 100 for token in range(MAX_LOGIT_BIAS)}
    )
    assert len(params.logit_bias) == MAX_LOGIT_BIAS


@pytest.mark.parametrize(
    "stop", [("",), ("a", ""), ("x" * (MAX_STOP_LENGTH + 1),), ("x",) * (MAX_STOP_STRINGS + 1)]
)
def test_stop_strings_have_limits(stop):
    """An empty stop string, one too long and too many of them are refused."""
    with pytest.raises(BadRequest) as refused:
        SamplingParams(stop=stop)
    assert refused.value.param == "stop"


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token", [260, 2**31 - 1])
def test_token_ids_outside_of_the_vocabulary(field, token):
    """A token id is compared with the vocabulary as soon as that is known."""
    params = SamplingParams(**{field: {token: 1.0} if field == "logit_bias" else (token,)})
    params.check_vocabulary(token + 1)
    with pytest.raises(BadRequest) as refused:
        params.check_vocabulary(token)
    assert refused.value.param == field
    assert str(token - 1) in str(refused.value)


def test_a_negative_stop_token_is_refused():
    """There is no token below 0."""
    with pytest.raises(BadRequest):
        SamplingParams(stop_token_ids=(-1,)).check_vocabulary(260)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [({}, False), ({"temperature": 0}, True), ({"top_k": 1}, True), ({"top_k": 2}, False)],
)
def test_greedy(params, greedy):
    """Temperature 0 and top_k 1 take the most probable token."""
    assert SamplingParams(**params).greedy is greedy


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalized(field):
    """Only those who ask for a penalty pay for it."""
    assert not SamplingParams().penalized
    assert SamplingParams(**{field: 0.5}).penalized
