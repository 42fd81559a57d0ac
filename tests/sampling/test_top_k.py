"""The k largest values, compared with a full sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.sampling.top_k import NUM_BLOCKS, top_k


def check(row: np.ndarray, k: int) -> None:
    ids, values = top_k(row, k)
    assert ids.tolist() == np.argsort(-row, kind="stable")[:k].tolist(), (
        "the same ids as a full sort, in falling order"
    )
    assert row[ids].tolist() == values.tolist(), "each id with its own value"


@given(
    st.integers(0, 2**32),
    st.integers(1, 700),
    st.integers(1, 750),
    st.sampled_from([0, 2, 9, 10**6]),
)
def test_top_k_matches_a_full_sort(seed, size, k, num_values):
    """Any size and any k, also larger than the row; with many ties, few, or none (num_values 0)."""
    generator = np.random.default_rng(seed)
    row = (
        generator.standard_normal(size)
        if num_values == 0
        else generator.integers(0, num_values, size)
    )
    check(row.astype(np.float32), k)


@pytest.mark.parametrize("k", [1, 2, 40, 256, 1185, 1190, 151_936, 200_000])
def test_vocabulary_of_151936_logits(k):
    """Below and above the k from which the whole row is partitioned."""
    row = np.random.default_rng(k).standard_normal(151_936).astype(np.float32)
    check(row, k)
    check(np.round(row, 2), k)


@pytest.mark.parametrize(
    "size", [NUM_BLOCKS * 40 - 1, NUM_BLOCKS * 40, NUM_BLOCKS * 40 + 1, NUM_BLOCKS * 41 - 1]
)
def test_largest_value_is_found_at_any_position(size):
    """Positions after the last whole block count too."""
    for at in (0, 39, 40, size // 2, size - 2, size - 1):
        row = np.zeros(size, np.float32)
        row[at] = 1
        check(row, 1)
        assert top_k(row, 1)[0].tolist() == [at]


def test_largest_values_in_one_column_of_the_blocks():
    """All other values are minus infinity."""
    width = 100
    row = np.full(NUM_BLOCKS * width, -np.inf, np.float32)
    row[3::width] = np.arange(NUM_BLOCKS)
    check(row, 20)
    assert top_k(row, 2)[0].tolist() == [31 * width + 3, 30 * width + 3]
