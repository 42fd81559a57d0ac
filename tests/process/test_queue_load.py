"""The load ahead of a newcomer, with any number of accounts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from conftest import repeat

from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.process.queue_load import AccountLoads, QueueLoad, measure_load
from cllm.process.request_counts import RequestCounts


def share_turns(
    requests: list[Request],
    weights: dict[str, float],
    account: str,
    num_turns: float,
    share: float,
) -> QueueLoad:
    """Return what ``AccountLoads.share_turns`` must return, account by account."""
    total = QueueLoad()
    for name in {request.account for request in requests}:
        own = measure_load(*(request for request in requests if request.account == name))
        count = own.num_requests * share
        if name != account:
            count = min(count, num_turns * weights.get(name, 1.0))
        total.add(own, count / own.num_requests)
    return total


@pytest.mark.parametrize("seed", range(repeat(50, 5)))
def test_shares_of_turns_are_those_of_each_account(seed: int) -> None:
    generator = random.Random(seed)
    names = [f"name {number}" for number in range(12)]
    weights = {name: generator.choice([0.5, 2.0, 3.0]) for name in names[:4]}
    loads = AccountLoads(weights)
    requests: list[Request] = []
    for _ in range(200):
        if requests and generator.random() < 0.4:
            loads.add(requests.pop(generator.randrange(len(requests))), -1)
        else:
            params = SamplingParams(n=generator.randint(1, 3))
            prompt = [1] * generator.randint(1, 50)
            requests.append(Request("r", prompt, params, generator.choice(names)))
            loads.add(requests[-1])
        if generator.random() < 0.05:
            weights[generator.choice(names)] = generator.choice([0.5, 1.0, 4.0])
            loads.note_weights()
        account, num_turns = generator.choice(names), generator.choice([0.5, 1.0, 2.5, 20.0])
        share = generator.random()
        got = loads.share_turns(account, num_turns, share)
        expected = share_turns(requests, weights, account, num_turns, share)
        for name in QueueLoad.__slots__:
            assert getattr(got, name) == pytest.approx(getattr(expected, name))
        assert loads.total == measure_load(*requests)
    for request in requests:
        loads.add(request, -1)
    assert not loads.by_account
    assert loads.share_turns("name 1", 1.0, 1.0) == loads.total == QueueLoad()


@pytest.mark.parametrize("seed", range(repeat(50, 5)))
def test_busiest_account_has_the_most_requests(seed: int) -> None:
    generator = random.Random(seed)
    counts, expected = RequestCounts(), Counter[str]()
    for _ in range(300):
        present = [*expected.elements()]
        if present and generator.random() < 0.45:
            account, number = generator.choice(present), -1
        else:
            account, number = generator.choice("abcdefgh"), 1
        counts.add(account, number)
        expected[account] += number
        busiest, most = counts.find_busiest()
        assert most == expected.most_common(1)[0][1]
        assert expected[busiest] == most or (busiest, most) == ("", 0)
    for account in expected.elements():
        counts.add(account, -1)
    assert counts.find_busiest() == ("", 0)
