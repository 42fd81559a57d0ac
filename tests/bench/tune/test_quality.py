"""Divergence and agreement of distributions, compared with a plain implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cllm.bench.tune.quality import compare

LOGITS = arrays(np.float32, (3, 7), elements=st.floats(-30, 30, width=32))


def plain_kl(first: list[float], second: list[float]) -> float:
    def probabilities(logits: list[float]) -> list[float]:
        weights = [math.exp(value) for value in logits]
        return [weight / math.fsum(weights) for weight in weights]

    p, q = probabilities(first), probabilities(second)
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@given(LOGITS, LOGITS)
def test_quality_matches_direct_sum(first: np.ndarray, second: np.ndarray) -> None:
    divergence, same = compare(first, second)
    expected = [plain_kl(a, b) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    assert divergence == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert same.tolist() == [
        np.argmax(a) == np.argmax(b) for a, b in zip(first, second, strict=True)
    ]
    assert (divergence > -1e-12).all()


@given(LOGITS)
def test_equal_logits_have_zero_divergence(logits: np.ndarray) -> None:
    divergence, same = compare(logits, logits)
    assert (divergence == 0).all()
    assert same.all()


def test_large_and_infinite_logits_are_finite() -> None:
    """The results neither overflow nor become undefined."""
    first = np.array([[1000.0, 999.0, -np.inf]], np.float32)
    divergence, _ = compare(first, np.array([[1.0, 0.0, -5.0]], np.float32))
    assert divergence == pytest.approx([math.log1p(math.exp(-5.0) / (math.e + 1))])
