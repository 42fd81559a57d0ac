"""The uniform numbers that decide each draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.sampling.random import derive_seed, uniform

words = st.integers(0, 2**64 - 1)


def numbers(seeds, positions) -> np.ndarray:
    return np.array(
        [uniform(*each) for each in zip(map(int, seeds), map(int, positions), strict=True)]
    )


@given(st.lists(st.tuples(words, words), min_size=1, max_size=20))
def test_number_is_in_the_unit_interval(pairs):
    """It is the same for one position and for an array of them."""
    together = numbers(*zip(*pairs, strict=True))
    assert ((together >= 0) & (together < 1)).all()
    assert together.tolist() == [numbers([seed], [position])[0] for seed, position in pairs]


def test_numbers_are_stable_across_releases():
    """A seed must give the same text in the next release, so these numbers are fixed."""
    assert numbers([0, 0, 1, 2**64 - 1], [0, 1, 0, 5]).tolist() == [
        0.28176129772258496,
        0.6524484863740322,
        0.8628561488610587,
        0.5118143779284616,
    ]


def test_numbers_of_different_positions_and_seeds_differ():
    """50,000 positions of a seed, 50,000 seeds of a position and a request's 128 sequences never
    share a number.

    The numbers have 53 bits; a fair source would give two equal ones among 50,000 with probability
    1.4e-7. The draw is the same in each run, so the test does not fail by chance.
    """
    many = np.arange(50_000)
    for draws in (
        numbers(np.full(50_000, 42), many),
        numbers(many, np.full(50_000, 7)),
        numbers([derive_seed(42, index) for index in range(128)], [9] * 128),
    ):
        assert len(set(draws.tolist())) == len(draws)


@pytest.mark.slow
def test_numbers_are_uniform():
    """100,000 numbers over 100 bins, over positions and over seeds.

    Chi-square with 99 degrees of freedom exceeds 200 with probability 1e-8.
    """
    many = np.arange(100_000)
    for draws in (numbers(np.full(100_000, 3), many), numbers(many, np.full(100_000, 3))):
        counts = np.histogram(draws, bins=100, range=(0, 1))[0]
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 200


@pytest.mark.slow
def test_neighbouring_numbers_are_uncorrelated():
    """Consecutive positions, and the same position of consecutive seeds.

    The correlation of 100,000 independent pairs is normal with deviation 0.0032. 0.02 is more than
    six deviations, with probability 2e-10.
    """
    many = np.arange(100_001)
    for draws in (numbers(np.full(100_001, 3), many), numbers(many, np.full(100_001, 3))):
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.02


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127))
def test_sequences_of_a_request_have_different_seeds(seed, index):
    """A derived seed has 64 bits, and the first sequence keeps the request's own seed."""
    derived = derive_seed(seed, index)
    assert 0 <= derived < 2**64
    assert (derived == seed % 2**64) == (index == 0)
