"""The pool of seq_ids: none is lost or duplicated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.kv_cache.seq_id_pool import SeqIdPool


def test_leased_seq_id_is_not_free():
    """It is free again after it is given back."""
    pool = SeqIdPool(3)
    pool.lease(1)
    assert pool.free == {0, 2}
    assert pool.is_leased(1)
    assert str(pool) == "<SeqIdPool 3: leased [1]>"
    pool.give_back(1)
    assert pool.free == {0, 1, 2}


@pytest.mark.parametrize("seq_id", [0, -1, 2])
def test_leasing_unavailable_seq_id_raises(seq_id):
    """It is leased already or not in the pool. The pool does not change."""
    pool = SeqIdPool(2)
    pool.lease(0)
    with pytest.raises(KeyError):
        pool.lease(seq_id)
    pool.check()
    assert pool.num_leased == 1


def test_giving_back_twice_raises():
    """A number that is not leased cannot be given back."""
    pool = SeqIdPool(2)
    pool.lease(0)
    pool.give_back(0)
    with pytest.raises(KeyError):
        pool.give_back(0)
    pool.check()


def test_check_detects_duplicated_and_lost_seq_ids():
    """The law is not a phrase: breaking it by hand is noticed."""
    doubled, lost = SeqIdPool(2), SeqIdPool(2)
    doubled._leased.add(1)
    lost.free.pop()
    for pool in (doubled, lost):
        with pytest.raises(AssertionError):
            pool.check()


@given(
    size=st.integers(1, 6),
    choices=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40),
)
def test_random_leases_keep_pool_consistent(size, choices):
    """The pool agrees with a plain set of free numbers."""
    pool, free = SeqIdPool(size), set(range(size))
    for wants, number in choices:
        if number in free and wants:
            pool.lease(number)
            free.remove(number)
        elif number < size and number not in free and not wants:
            pool.give_back(number)
            free.add(number)
        pool.check()
        assert pool.num_free == len(free)
        assert pool.num_leased == size - len(free)
        assert {i for i in range(size) if not pool.is_leased(i)} == free
