"""Numbers are leased, never lost, never doubled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.kv_cache.seq_id_pool import SeqIdPool


def test_the_lowest_free_number_comes_first():
    """Numbers given back are leased again before higher ones, so that the active ones stay dense."""
    pool = SeqIdPool(4)
    assert [pool.lease() for _ in range(4)] == [0, 1, 2, 3]
    pool.give_back(2)
    pool.give_back(0)
    assert [pool.lease(), pool.lease()] == [0, 2]


def test_a_wanted_number():
    """A free number can be asked for; the others keep their order."""
    pool = SeqIdPool(3)
    assert pool.lease(1) == 1
    assert [pool.lease(), pool.lease()] == [0, 2]


def test_an_empty_pool_and_a_taken_number():
    """What is leased cannot be leased again, and an empty pool says so; nothing changes by asking."""
    pool = SeqIdPool(1)
    assert pool.lease() == 0
    with pytest.raises(IndexError):
        pool.lease()
    with pytest.raises(ValueError):
        pool.lease(0)
    pool.check()
    assert str(pool) == "<SeqIdPool 1: leased [0]>"


def test_giving_back_twice():
    """A number that is not leased cannot be given back."""
    pool = SeqIdPool(2)
    pool.give_back(pool.lease())
    with pytest.raises(KeyError):
        pool.give_back(0)
    pool.check()


def test_check_finds_a_doubled_and_a_lost_number():
    """The law is not a phrase: breaking it by hand is noticed."""
    doubled, lost = SeqIdPool(2), SeqIdPool(2)
    doubled._free.append(1)
    lost._free.pop()
    for pool in (doubled, lost):
        with pytest.raises(AssertionError):
            pool.check()


@given(size=st.integers(1, 6), choices=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_any_order_of_leases_and_returns(size, choices):
    """Whatever is leased and given back, the pool agrees with a plain set of free numbers."""
    pool, free = SeqIdPool(size), set(range(size))
    for wants, number in choices:
        if number >= size:
            if free:
                assert pool.lease() == min(free)
                free.remove(min(free))
        elif number in free and wants:
            assert pool.lease(number) == number
            free.remove(number)
        elif number not in free and not wants:
            pool.give_back(number)
            free.add(number)
        pool.check()
        assert pool.num_free == len(free)
        assert pool.num_leased == size - len(free)
        assert {i for i in range(size) if not pool.is_leased(i)} == free
