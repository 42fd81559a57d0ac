"""Which request has killed the engine."""

from __future__ import annotations

import random

import pytest

from cllm.process.suspects import Suspects


def run_engines(suspects, names, poison, *, width, dies_with):
    """Compute requests in steps of ``width`` until all have a token or are culprits; return the
    number of deaths and the culprits. A step with ``poison`` kills the engine.
    """
    num_deaths, culprits, left = 0, [], [*names]
    while left:
        ready = [name for name in left if not suspects.must_wait(name)]
        assert ready, "somebody may continue"
        step = ready[:width]
        if poison in step and dies_with(step):
            num_deaths += 1
            culprit = suspects.record_death(step)
            if culprit is not None:
                culprits.append(culprit)
                left.remove(culprit)
            continue
        for name in step:
            suspects.record_token(name)
            suspects.forget(name)
            left.remove(name)
    return num_deaths, culprits


@pytest.mark.parametrize("width", [1, 2, 5, 32])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 32, 100])
def test_poison_is_found_in_few_deaths(num_requests, width):
    names = [f"r{i}" for i in range(num_requests)]
    for poison in random.Random(1).sample(names, min(5, num_requests)):
        num_deaths, culprits = run_engines(
            Suspects(), names, poison, width=width, dies_with=lambda _: True
        )
        assert culprits == [poison]
        assert num_deaths <= 7


def test_one_death_of_several_requests_blames_nobody():
    deaths = iter([True])
    num_deaths, culprits = run_engines(
        Suspects(), "abcd", "b", width=4, dies_with=lambda _: next(deaths, False)
    )
    assert (num_deaths, culprits) == (1, [])


def test_request_that_was_computed_since_is_no_suspect():
    """Unless there are no others."""
    suspects = Suspects()
    for culprit in (None, None, "new"):
        assert suspects.record_death(["old", "new"]) == culprit
        suspects.record_token("old")


def test_innocent_suspect_is_not_blamed_for_a_new_request():
    """It waits until the other one has got a token."""
    suspects = Suspects()
    assert suspects.record_death(["innocent"]) is None
    assert suspects.record_death(["innocent", "poison"]) is None
    assert suspects.must_wait("innocent")
    assert suspects.record_death(["poison"]) is None
    assert suspects.record_death(["poison"]) == "poison"
    assert not suspects.must_wait("innocent")


def test_group_waits_for_the_one_before():
    """A request that ends, or leaves, lets it continue as well."""
    suspects = Suspects()
    for _ in range(2):
        suspects.record_death([*"abcdefgh"])
    assert [name for name in "abcdefgh" if suspects.must_wait(name)] == [*"cdefgh"]
    assert suspects.record_token("a") == []
    assert suspects.forget("d") == []
    assert suspects.record_token("b") == ["c"]
    assert suspects.forget("c") == ["e", "f"]
    assert [name for name in "abcdefgh" if suspects.must_wait(name)] == [*"gh"]


def test_uncertain_death_is_not_counted_alone():
    """Something else, such as a text being tokenized, may have been the cause."""
    suspects = Suspects()
    assert [suspects.record_death(["a"], is_certain=False) for _ in range(5)] == [None] * 5
    assert suspects.record_death(["a"]) is None
    assert suspects.record_death(["a"]) == "a"


def test_request_that_always_ends_engines_is_found_in_the_end():
    """A guard of the memory may end the engine from outside. A token proves innocence."""
    suspects = Suspects()
    for _ in range(20):
        assert suspects.record_end(["a"]) is None
        suspects.record_token("a")
    ends = [suspects.record_end(["a"]) for _ in range(12)]
    assert ends == [None] * 11 + ["a"]


def test_engine_that_was_ended_blames_nobody():
    suspects = Suspects()
    suspects.record_death(["a"])
    suspects.record_token("a")
    suspects.record_end(["a"])
    assert not suspects.must_wait("a")
    assert suspects.record_death(["a", "b"]) is None
