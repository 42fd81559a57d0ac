"""Bounds of the sampling parameters, and the errors for values outside them."""

from __future__ import annotations

import math

import pytest

from cllm.core.params import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    PARAMETERS,
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
def test_values_at_the_bounds_are_accepted(field, limit, step):
    """The lowest and the highest value of each field are accepted."""
    assert getattr(SamplingParams(**{field: limit}), field) == limit


@pytest.mark.parametrize(("field", "limit", "step"), BELOW)
def test_value_below_the_minimum_is_rejected(field, limit, step):
    """The error names the field and the minimum, and has OpenAI's code."""
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**{field: limit - step})
    assert refused.value.param == field
    assert refused.value.status == 400
    assert refused.value.code == f"{'integer' if step == 1 else 'decimal'}_below_min_value"
    assert f"'{field}'" in str(refused.value)
    assert str(limit) in str(refused.value)


@pytest.mark.parametrize(("field", "limit", "step"), ABOVE)
def test_value_above_the_maximum_is_rejected(field, limit, step):
    """The error names the field and the maximum, and has OpenAI's code."""
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**{field: limit + step})
    assert refused.value.param == field
    assert refused.value.code == f"{'integer' if step == 1 else 'decimal'}_above_max_value"
    assert str(limit) in str(refused.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", [field for field, _, _, step in BOUNDS if step != 1])
def test_nan_and_infinity_are_rejected(field, value):
    with pytest.raises(BadRequest) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize("field", [name for name, p in PARAMETERS.items() if p.type is int])
def test_integer_parameters_reject_other_types(field):
    """A float or a bool would fail later, in a step of the engine."""
    for value in (5.0, True, "5", [5]):
        with pytest.raises(BadRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field


@pytest.mark.parametrize(
    "params", [{"logit_bias": [1]}, {"logit_bias": {"a": 1}}, {"stop_token_ids": 5}]
)
def test_token_ids_must_be_integers(params):
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**params)
    assert caught.value.param in params


@pytest.mark.parametrize(
    "bias",
    [{1: math.nan}, {1: 100.5}, {1: -101}, {-1: 0}, dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0)],
)
def test_logit_bias_outside_its_limits_is_rejected(bias):
    """A bias out of range, a negative token id, and too many entries."""
    with pytest.raises(BadRequest) as refused:
        SamplingParams(logit_bias=bias)
    assert refused.value.param == "logit_bias"


def test_largest_logit_bias_is_accepted():
    """The maximum number of entries, with biases at both ends of the range."""
    params = SamplingParams(
        logit_bias={token: -100 if token % 2 else 100 for token in range(MAX_LOGIT_BIAS)}
    )
    assert len(params.logit_bias) == MAX_LOGIT_BIAS


@pytest.mark.parametrize(
    "stop", [("",), ("a", ""), ("x" * (MAX_STOP_LENGTH + 1),), ("x",) * (MAX_STOP_STRINGS + 1)]
)
def test_stop_strings_outside_their_limits_are_rejected(stop):
    """An empty one, one that is too long, and too many of them."""
    with pytest.raises(BadRequest) as refused:
        SamplingParams(stop=stop)
    assert refused.value.param == "stop"


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
@pytest.mark.parametrize("token", [260, 2**31 - 1])
def test_token_ids_outside_the_vocabulary_are_rejected(field, token):
    """check_vocabulary accepts the last id of the vocabulary and rejects the next one."""
    params = SamplingParams(**{field: {token: 1.0} if field == "logit_bias" else (token,)})
    params.check_vocabulary(token + 1)
    with pytest.raises(BadRequest) as refused:
        params.check_vocabulary(token)
    assert refused.value.param == field
    assert str(token - 1) in str(refused.value)


def test_negative_stop_token_is_rejected():
    with pytest.raises(BadRequest):
        SamplingParams(stop_token_ids=(-1,)).check_vocabulary(260)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [({}, False), ({"temperature": 0}, True), ({"top_k": 1}, True), ({"top_k": 2}, False)],
)
def test_greedy(params, greedy):
    assert SamplingParams(**params).is_greedy is greedy


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_counts_as_penalty(field):
    """Sequences without a penalty do not count tokens."""
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{field: 0.5}).has_penalties


@pytest.mark.parametrize("value", ["no", 1, None])
def test_switches_reject_other_types(value):
    with pytest.raises(BadRequest, match="'ignore_eos': it must be true or false"):
        SamplingParams(ignore_eos=value)


def test_numbers_reject_true_and_false():
    with pytest.raises(BadRequest, match="'temperature': it must be a number"):
        SamplingParams(temperature=True)


def test_seed_of_minus_1_means_none():
    """As in llama-server, vLLM and Ollama."""
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2
