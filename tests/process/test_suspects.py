"""Which request has killed the engine."""

from __future__ import annotations

import random

import pytest

from cllm.process.suspects import Suspects


def run_engines(suspects, names, poisons, *, width, dies_with):
    """Compute requests in steps of ``width`` until all have a token or are known to be fatal;
    return the number of deaths and the fatal requests. A step with one of ``poisons`` kills the engine.
    """
    num_deaths, fatal, left = 0, [], [*names]
    while left:
        ready = [name for name in left if not suspects.must_wait(name)]
        assert ready, "somebody may continue"
        step = ready[:width]
        if poisons.intersection(step) and dies_with(step):
            num_deaths += 1
            request = suspects.record_death(step)
            if request is not None:
                fatal.append(request)
                left.remove(request)
            continue
        for name in step:
            suspects.record_token(name)
            suspects.forget(name)
            left.remove(name)
    return num_deaths, fatal


@pytest.mark.parametrize("width", [1, 2, 5, 32])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 32, 100])
@pytest.mark.parametrize("num_poisons", [1, 3])
def test_poisons_are_found_in_few_deaths(num_requests, width, num_poisons):
    """Two of each alone, and two of many requests. If a step cannot have all requests, each poison
    may be in a search of its own.
    """
    names = [f"r{i}" for i in range(num_requests)]
    for seed in range(5):
        poisons = {*random.Random(seed).sample(names, min(num_poisons, num_requests))}
        num_deaths, fatal = run_engines(
            Suspects(), names, poisons, width=width, dies_with=lambda _: True
        )
        assert {*fatal} == poisons
        assert num_deaths <= 2 * len(poisons) + 2 * (len(poisons) if width < num_requests else 1)


def test_one_death_of_several_requests_blames_nobody():
    deaths = iter([True])
    num_deaths, fatal = run_engines(
        Suspects(), "abcd", {"b"}, width=4, dies_with=lambda _: next(deaths, False)
    )
    assert (num_deaths, fatal) == (1, [])


def test_request_that_was_computed_since_is_no_suspect():
    """Unless there are no others."""
    suspects = Suspects()
    for request in (None, None, "new"):
        assert suspects.record_death(["old", "new"]) == request
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


def test_each_suspect_waits_for_the_one_before():
    """A request that ends, or leaves, lets the next one continue as well. New ones wait for all."""
    suspects = Suspects()
    suspects.record_death([*"abcd"])
    assert not any(map(suspects.must_wait, "abcd"))
    suspects.record_token("a")
    suspects.record_death([*"abcde"])
    assert [name for name in "abcdef" if suspects.must_wait(name)] == [*"bcdef"]
    assert suspects.record_token("a")
    assert not suspects.must_wait("e"), "a suspect for the first time"
    assert not suspects.forget("c")
    assert suspects.record_token("e")
    assert [name for name in "abdef" if suspects.must_wait(name)] == [*"df"]
    assert suspects.forget("b")
    assert suspects.must_wait("f")
    assert suspects.record_token("d")
    assert not suspects.is_searching
    assert not suspects.must_wait("f")


def test_many_new_poisons_blame_no_innocent_request():
    """Whatever else is computed beside it."""
    generator = random.Random(5)
    for _ in range(50):
        names = [f"r{i}" for i in range(40)]
        poisons = {*generator.sample(names, 12)}
        _, fatal = run_engines(
            Suspects(), names, poisons, width=generator.randint(1, 8), dies_with=lambda _: True
        )
        assert {*fatal} == poisons


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
