"""The result cache: its keys and what it evicts."""

import msgspec
import pytest

from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.process.results import OVERHEAD, ResultCache, digest


def ask(prompt=(1, 2), name="r", account="", **params):
    return Request(name, [*prompt], SamplingParams(**params), account)


def outputs(count, name="r"):
    return [
        TokenOutput(name, i % 2, 40 + i, "length" if i >= count - 2 else "", i != 3, 7)
        for i in range(count)
    ]


def test_random_request_has_no_digest():
    """Only greedy sampling or a seed gives the same answer twice."""
    assert digest(ask()) is None
    assert None not in (digest(ask(temperature=0)), digest(ask(top_k=1)), digest(ask(seed=0)))


def test_digest_ignores_parameters_without_effect():
    """Greedy sampling chooses the same token whatever the other parameters are."""
    best = [
        ask(temperature=0),
        ask(top_k=1),
        ask(temperature=0, seed=3),
        ask(temperature=0, top_p=0.5, min_p=0.1),
    ]
    assert len(set(map(digest, best))) == 1
    assert digest(ask(temperature=0, presence_penalty=1.0)) != digest(ask(temperature=0))


def test_digest_covers_prompt_and_all_parameters():
    """It covers nothing else."""
    same = Request("other", [1, 2], SamplingParams(seed=1), "user-x", Priority.BATCH, 5.0)
    assert digest(same) == digest(ask(seed=1))
    different = [
        ask(seed=1),
        ask((1, 3), seed=1),
        ask((12,), seed=1),
        ask(seed=2),
        ask(seed=1, n=2),
    ]
    different += [
        ask(seed=1, stop=("a",)),
        ask(seed=1, stop=("b",)),
        ask(seed=1, logit_bias={1: 2.0}),
    ]
    different.append(msgspec.structs.replace(ask(seed=1), reports_prefill=True))
    different.append(msgspec.structs.replace(ask(seed=1), reading="one call"))
    assert len(set(map(digest, different))) == len(different)
    assert digest(ask(seed=1, logit_bias={1: 2.0, 3: 4.0})) == digest(
        ask(seed=1, logit_bias={3: 4.0, 1: 2.0})
    )


def test_result_is_returned_under_another_request_id():
    """Every token of every choice, but with no cached tokens."""
    cache = ResultCache(4, 10_000)
    cache.store(b"x", outputs(6))
    expected = [
        TokenOutput("s", one.index, one.token, one.finish, one.is_text) for one in outputs(6)
    ]
    assert cache.recall(b"x", "s") == expected
    with pytest.raises(KeyError):
        cache.recall(b"y", "s")


def test_least_recently_used_result_is_evicted_first():
    """When there are too many results."""
    cache = ResultCache(2, 10_000)
    for key in (b"a", b"b"):
        cache.store(key, outputs(3))
    cache.recall(b"a", "r")
    cache.store(b"c", outputs(3))
    assert [key for key in (b"a", b"b", b"c") if key in cache] == [b"a", b"c"]


def test_memory_is_limited_and_counted():
    """A result that is larger than the limit leaves nothing behind. A result that is stored twice
    counts once.
    """
    cache = ResultCache(1000, 6000)
    for i in range(100):
        cache.store(b"%d" % (i % 30), outputs(i))
        assert cache.num_bytes <= 6000
        assert cache.num_bytes == sum(OVERHEAD + len(result) for result in cache._results.values())
    assert len(cache) > 2
    cache.store(b"huge", outputs(5000))
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_cache_of_size_zero_stores_nothing():
    """This is the default."""
    cache = ResultCache()
    cache.store(b"a", outputs(3))
    assert (cache.is_on, len(cache), cache.num_bytes) == (False, 0, 0)
