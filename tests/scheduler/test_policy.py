"""Who is served next: classes, fair shares, ageing."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.core.sequence import Sequence
from cllm.errors import StartupError
from cllm.scheduler.policy import (
    MAX_COUNTERS,
    OUTPUT_WEIGHT,
    Fair,
    FirstComeFirstServed,
    make_policy,
)
from cllm.scheduler.waiting import AGED_SHARE, PATIENCE, Waiting

numbers = itertools.count()


def sequence(
    key: str = "",
    priority: Priority = Priority.NORMAL,
    arrived: float = 0.0,
    size: int = 10,
    **limits,
):
    seq = Sequence(
        Request(str(next(numbers)), [1] * size, SamplingParams(), key, priority, **limits),
        0,
        0,
        100,
    )
    seq.order, seq.arrived, seq.num_uncached_tokens = next(numbers), arrived, size
    return seq


def order(waiting: Waiting, now: float = 0.0) -> list[Sequence]:
    """Serve everybody, charging prompts."""
    served = []
    while (seq := waiting.head(now)) is not None:
        waiting.take(seq)
        waiting.policy.served(seq, seq.num_prompt_tokens, 0)
        served.append(seq)
    return served


def test_classes_go_before_arrival():
    """Interactive, normal, batch; within a class who came first."""
    waiting = Waiting(Fair({}))
    seqs = [
        sequence(priority=p)
        for p in (Priority.BATCH, Priority.NORMAL, Priority.INTERACTIVE, Priority.NORMAL)
    ]
    for seq in seqs:
        waiting.push(seq)
    assert order(waiting) == [seqs[2], seqs[1], seqs[3], seqs[0]]


def test_first_come_first_served():
    """One queue, whatever the class."""
    waiting = Waiting(make_policy("fcfs", {}))
    seqs = [sequence(key, priority) for key in "ab" for priority in Priority]
    for seq in seqs:
        waiting.push(seq)
    assert order(waiting) == seqs


def test_keys_take_turns():
    """Twenty of one key do not keep two of another waiting."""
    waiting = Waiting(Fair({}))
    for _ in range(20):
        waiting.push(sequence("heavy"))
    for _ in range(2):
        waiting.push(sequence("light"))
    assert [seq.request.key for seq in order(waiting)][:5].count("light") == 2


def test_tokens_count_not_requests():
    """Who sends prompts three times as long is served a third as often."""
    waiting = Waiting(Fair({}))
    for _ in range(30):
        waiting.push(sequence("long", size=30))
        waiting.push(sequence("short", size=10))
    first = [seq.request.key for seq in order(waiting)[:40]]
    assert first.count("short") in (29, 30)


def test_a_weight_is_a_share():
    """With twice the weight a key is served twice as often."""
    waiting = Waiting(Fair({"rich": 2.0}))
    for _ in range(30):
        waiting.push(sequence("rich"))
        waiting.push(sequence("poor"))
    first = [seq.request.key for seq in order(waiting)[:30]]
    assert first.count("rich") in (19, 20, 21)


def test_output_counts():
    """Sampled tokens are charged too, with their weight."""
    policy = Fair({})
    seq = sequence("a")
    policy.arrived(policy.group(seq))
    policy.served(seq, 10, 0)
    policy.served(seq, 0, 3)
    assert policy.counters[policy.group(seq)] == 10 + 3 * OUTPUT_WEIGHT


def test_nobody_saves_up():
    """A key that comes back after a long pause gets its turn, but not all that it did not use."""
    waiting = Waiting(Fair({}))
    for _ in range(20):
        waiting.push(sequence("busy"))
    order(waiting)
    for _ in range(20):
        waiting.push(sequence("idle"))
        waiting.push(sequence("busy"))
    first = [seq.request.key for seq in order(waiting)[:10]]
    assert 4 <= first.count("busy") <= 6


def test_deadlines_sort_within_a_key():
    """Who must have finished first goes first; who has no deadline goes last."""
    waiting = Waiting(Fair({}))
    seqs = [sequence(), sequence(deadline=9.0), sequence(deadline=3.0)]
    for seq in seqs:
        waiting.push(seq)
    assert order(waiting) == seqs[::-1]


def test_nobody_starves():
    """One in AGED_SHARE admissions goes to who has waited longest, also in the lowest class."""
    waiting = Waiting(Fair({}))
    old = sequence(priority=Priority.BATCH)
    waiting.push(old)
    for _ in range(50):
        waiting.push(sequence(priority=Priority.INTERACTIVE, arrived=PATIENCE))
    assert order(waiting, PATIENCE).index(old) == 50, "it is not old yet"
    old = sequence(priority=Priority.BATCH)
    waiting.push(old)
    for _ in range(50):
        waiting.push(sequence(priority=Priority.INTERACTIVE, arrived=PATIENCE))
    assert order(waiting, PATIENCE + 1).index(old) < AGED_SHARE


def test_who_comes_back_has_the_place_it_had():
    """Pushed again, a sequence stands where its arrival puts it."""
    waiting = Waiting(Fair({}))
    seqs = [sequence() for _ in range(3)]
    for seq in seqs:
        waiting.push(seq)
    waiting.remove(seqs[0])
    waiting.push(seqs[0])
    assert order(waiting) == seqs


def test_counters_are_bounded():
    """A new key for every request does not fill the memory, and changes nobody's turn."""
    waiting = Waiting(Fair({}))
    for i in range(2 * MAX_COUNTERS):
        waiting.push(sequence(str(i)))
        order(waiting)
    assert len(waiting.policy.counters) <= MAX_COUNTERS + 1


def test_forgotten_key_is_charged_from_the_floor(monkeypatch):
    """A running key whose counter was forgotten goes on where those who come back begin, not at
    0.
    """
    monkeypatch.setattr("cllm.scheduler.policy.MAX_COUNTERS", 10)
    policy = Fair({})
    runs = sequence("runs")
    for seq in (runs, *(sequence(str(i), size=100 + i) for i in range(20))):
        policy.arrived(policy.group(seq))
        policy.served(seq, seq.num_prompt_tokens, 0)
    assert policy.group(runs) not in policy.counters
    floor = policy.floors[Priority.NORMAL]
    assert floor > 0
    policy.served(runs, 0, 5)
    assert policy.rank(policy.group(runs)) == (Priority.NORMAL, floor + 5 * OUTPUT_WEIGHT)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30), st.sampled_from(list(Priority)), st.integers(0, 50), st.booleans()
        ),
        max_size=150,
    )
)
def test_rank_of_a_waiting_key_never_falls(events):
    """Whatever is served, forgotten and comes back meanwhile; also when those served are not the
    first in order.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cllm.scheduler.policy.MAX_COUNTERS", 6)
        policy, ranks = Fair({"3": 5.0}), {}
        for key, priority, size, waits in events:
            seq = sequence(str(key), priority, size=size)
            group = policy.group(seq)
            if waits and group not in ranks:
                policy.arrived(group)
                ranks[group] = policy.rank(group)
            else:
                policy.served(seq, size, 1)
            for waiting, rank in ranks.items():
                assert policy.rank(waiting) >= rank
                ranks[waiting] = policy.rank(waiting)


def test_a_policy_of_ones_own():
    """package.module:Class is imported and given the weights."""
    policy = make_policy(f"{__name__}:Own", {"a": 2.0})
    assert isinstance(policy, Own)
    assert policy.weights == {"a": 2.0}


class Own(FirstComeFirstServed):
    def __init__(self, weights) -> None:
        self.weights = weights


def test_the_policy_of_the_docs(tmp_path, monkeypatch):
    """A module in the current folder is found, also where Python would not look there."""
    page = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text()
    (example,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        if "ShortestFirst" in block
    )
    (tmp_path / "mine.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = list(sys.path)
    waiting = Waiting(make_policy("mine:ShortestFirst", {}))
    assert sys.path == before
    for size in (500, 20, 100, 18):
        waiting.push(sequence(size=size))
    assert [seq.num_prompt_tokens for seq in order(waiting)] == [20, 18, 100, 500]


@pytest.mark.parametrize("name", ["unfair", "no.such.module:Class", f"{__name__}:Nobody", ":"])
def test_a_policy_that_is_not_there(name):
    """One line that names the setting and the value."""
    with pytest.raises(
        StartupError, match=r"scheduler\.policy must be fair, priority, fcfs or package"
    ):
        make_policy(name, {})


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(list(Priority)), st.booleans()),
        max_size=40,
    )
)
def test_nobody_is_lost_or_served_twice(events):
    """Whatever comes, goes and comes back: the queue gives out exactly those who wait, and its
    length is right.
    """
    waiting, inside, served = Waiting(Fair({})), set(), []
    for key, priority, take in events:
        if take and inside:
            seq = waiting.head(0.0)
            assert seq in inside
            waiting.take(seq)
            waiting.policy.served(seq, 10, 1)
            inside.discard(seq)
            served.append(seq)
        else:
            seq = served.pop() if take and served else sequence(key, priority)
            waiting.push(seq)
            inside.add(seq)
        assert len(waiting) == len(inside)
        assert set(waiting) == inside
        assert waiting.num_tokens == sum(seq.num_tokens for seq in inside)
    assert set(order(waiting)) == inside


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), min_size=30, max_size=60))
def test_counters_of_backlogged_keys_stay_close(sizes):
    """While both wait, virtual counters differ by what one admission costs, at most (theorem 4.1 of
    the paper).
    """
    policy = Fair({})
    waiting = Waiting(policy)
    for key, size in sizes:
        waiting.push(sequence(key, size=size))
    left = {key: sum(k == key for k, _ in sizes) for key in "ab"}
    while all(left.values()):
        seq = waiting.head(0.0)
        waiting.take(seq)
        policy.served(seq, seq.num_prompt_tokens, 0)
        left[seq.request.key] -= 1
        a, b = (policy.counters[Priority.NORMAL, key] for key in "ab")
        assert abs(a - b) <= 50
