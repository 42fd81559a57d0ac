"""Logprobs are those of the model, before any sampling step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.batch import Batch, Row
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.sampling.pipeline import Sampler


def sequence(prompt: tuple[int, ...] = (1,), index: int = 0, **params) -> Sequence:
    return Sequence(Request("A", list(prompt), SamplingParams(**params)), index, 0, 10**6)


def expected(logits: np.ndarray) -> list[float]:
    values = [float(value) for value in logits]
    norm = math.log(sum(math.exp(value - max(values)) for value in values)) + max(values)
    return [value - norm for value in values]


@given(st.integers(0, 20), st.integers(0, 2**32), st.sampled_from([20, 300, 2000]))
def test_logprobs_ignore_penalties_bias_and_temperature(num_top, seed, size):
    """This holds for the chosen token and for the most probable ones."""
    logits = np.random.default_rng(seed).normal(0, 4, (2, size)).astype(np.float32)
    plain = sequence(temperature=0)
    asking = sequence(
        (1, 5), logprobs=num_top, repetition_penalty=1.7, logit_bias={3: 9.0}, temperature=2.0
    )
    sampler = Sampler()
    tokens = sampler.sample(Batch([Row(plain, 0, 1, 1), Row(asking, 1, 1, 1)], []), logits.copy())
    assert list(sampler.logprobs) == [1]
    told, right = sampler.logprobs[1], expected(logits[1])
    assert told.logprob == pytest.approx(right[tokens[1]], abs=1e-4)
    best = sorted(range(size), key=lambda token: -right[token])[:num_top]
    assert [token for token, _ in told.top] == best
    assert [value for _, value in told.top] == pytest.approx(
        [right[token] for token in best], abs=1e-4
    )


def test_prompt_logprobs_precede_the_sampled_row():
    """The next call does not report them again."""
    logits = np.random.default_rng(0).normal(0, 4, (3, 50)).astype(np.float32)
    seq, sampler = sequence((7, 8, 9), temperature=0, prompt_logprobs=1), Sampler()
    tokens = sampler.sample(Batch([Row(seq, 0, 3, 3, (), 2)], []), logits.copy())
    assert tokens == [8, 9, int(logits[2].argmax())]
    assert [sampler.logprobs[i].logprob for i in (0, 1)] == pytest.approx(
        [expected(logits[0])[8], expected(logits[1])[9]], abs=1e-4
    )
    assert sampler.logprobs[1].top[0][0] == logits[1].argmax()
    assert list(sampler.logprobs) == [0, 1]
    sampler.sample(Batch([Row(sequence(), 0, 1, 1)], []), logits[:1].copy())
    assert not sampler.logprobs


def test_logit_of_minus_infinity_has_that_logprob():
    """The other logprobs are not affected."""
    logits = np.array([[0.0, -np.inf, 0.0]], np.float32)
    seq, sampler = sequence(temperature=0, logprobs=3), Sampler()
    sampler.sample(Batch([Row(seq, 0, 1, 1)], []), logits)
    assert sampler.logprobs[0].logprob == pytest.approx(math.log(0.5))
    assert sampler.logprobs[0].top[2] == (1, -math.inf)
