"""The uniform numbers behind every draw."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cllm.sampling.random import derive_seed, uniform

words = st.integers(0, 2**64 - 1)


def numbers(seeds, positions) -> np.ndarray:
    return np.array(
        [uniform(*each) for each in zip(map(int, seeds), map(int, positions), strict=True)]
    )


@given(st.lists(st.tuples(words, words), min_size=1, max_size=20))
def test_in_the_unit_interval_and_by_itself(pairs):
    """Any seed and position give a number in [0, 1), and the same one alone and in company."""
    together = numbers(*zip(*pairs, strict=True))
    assert ((together >= 0) & (together < 1)).all()
    assert together.tolist() == [numbers([seed], [position])[0] for seed, position in pairs]


def test_the_numbers_do_not_change():
    """A seed means the same text in the next release: these numbers are written down."""
    assert numbers([0, 0, 1, 2**64 - 1], [0, 1, 0, 5]).tolist() == [
        0.28176129772258496,
        0.6524484863740322,
        0.8628561488610587,
        0.5118143779284616,
    ]


def test_distinct_over_positions_and_seeds():
    """50,000 positions of a seed, 50,000 seeds of a position and a request's 128 sequences never
    share a number.

    The numbers have 53 bits; a fair source would show two equal ones among 50,000 with probability
    1.4e-7. It is the same draw in each run, so this does not fail by chance.
    """
    many = np.arange(50_000)
    for draws in (
        numbers(np.full(50_000, 42), many),
        numbers(many, np.full(50_000, 7)),
        numbers([derive_seed(42, index) for index in range(128)], [9] * 128),
    ):
        assert len(set(draws.tolist())) == len(draws)


def test_spread_evenly():
    """In each of 100 bins lie as many of 100,000 numbers as chance allows, over positions and over
    seeds.

    Chi-square with 99 degrees of freedom exceeds 200 with probability 1e-8.
    """
    many = np.arange(100_000)
    for draws in (numbers(np.full(100_000, 3), many), numbers(many, np.full(100_000, 3))):
        counts = np.histogram(draws, bins=100, range=(0, 1))[0]
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 200


def test_neighbours_are_independent():
    """Consecutive positions, and the same position of consecutive seeds, are not correlated.

    The correlation of 100,000 independent pairs is normal with deviation 0.0032; 0.02 is more than
    six of them, a chance of 2e-10.
    """
    many = np.arange(100_001)
    for draws in (numbers(np.full(100_001, 3), many), numbers(many, np.full(100_001, 3))):
        assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.02


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127))
def test_derived_seeds(seed, index):
    """A derived seed has 64 bits; the first sequence keeps the request's own, and the others
    differ.
    """
    derived = derive_seed(seed, index)
    assert 0 <= derived < 2**64
    assert (derived == seed % 2**64) == (index == 0)
