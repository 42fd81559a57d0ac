"""Policies: classes, fair shares, ageing, and users' own policies."""

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
    split_prefill_budget,
)
from cllm.scheduler.waiting import AGED_SHARE, PATIENCE, Waiting

numbers = itertools.count()


def sequence(
    account: str = "",
    priority: Priority = Priority.NORMAL,
    arrived: float = 0.0,
    size: int = 10,
    **limits,
):
    seq = Sequence(
        Request(str(next(numbers)), [1] * size, SamplingParams(), account, priority, **limits),
        0,
        0,
        100,
    )
    seq.order, seq.arrived, seq.num_uncached_tokens = next(numbers), arrived, size
    return seq


def order(waiting: Waiting, now: float = 0.0) -> list[Sequence]:
    """Take all sequences in the order of the policy, charging their prompts."""
    served = []
    while (seq := waiting.head(now)) is not None:
        waiting.take(seq)
        waiting.policy.served(seq, seq.num_prompt_tokens, 0)
        served.append(seq)
    return served


def test_higher_classes_go_first():
    """Interactive, normal, batch. Within a class, the earliest arrival goes first."""
    waiting = Waiting(Fair({}))
    seqs = [
        sequence(priority=p)
        for p in (Priority.BATCH, Priority.NORMAL, Priority.INTERACTIVE, Priority.NORMAL)
    ]
    for seq in seqs:
        waiting.push(seq)
    assert order(waiting) == [seqs[2], seqs[1], seqs[3], seqs[0]]


def test_fcfs_ignores_classes_and_accounts():
    """One queue, whatever the class."""
    waiting = Waiting(make_policy("fcfs", {}))
    seqs = [sequence(account, priority) for account in "ab" for priority in Priority]
    for seq in seqs:
        waiting.push(seq)
    assert order(waiting) == seqs


def test_accounts_take_turns():
    """Twenty requests of one account do not delay two of another."""
    waiting = Waiting(Fair({}))
    for _ in range(20):
        waiting.push(sequence("heavy"))
    for _ in range(2):
        waiting.push(sequence("light"))
    assert [seq.request.account for seq in order(waiting)][:5].count("light") == 2


def test_fair_shares_count_tokens():
    """An account with prompts three times as long is served a third as often."""
    waiting = Waiting(Fair({}))
    for _ in range(30):
        waiting.push(sequence("long", size=30))
        waiting.push(sequence("short", size=10))
    first = [seq.request.account for seq in order(waiting)[:40]]
    assert first.count("short") in (29, 30)


def test_weight_scales_share():
    """An account with twice the weight is served twice as often."""
    waiting = Waiting(Fair({"rich": 2.0}))
    for _ in range(30):
        waiting.push(sequence("rich"))
        waiting.push(sequence("poor"))
    first = [seq.request.account for seq in order(waiting)[:30]]
    assert first.count("rich") in (19, 20, 21)


def test_output_tokens_are_charged():
    """Each costs OUTPUT_WEIGHT prompt tokens."""
    policy = Fair({})
    seq = sequence("a")
    policy.arrived(policy.group(seq))
    policy.served(seq, 10, 0)
    policy.served(seq, 0, 3)
    assert policy.counters[policy.group(seq)] == 10 + 3 * OUTPUT_WEIGHT


def test_idle_accounts_save_no_credit():
    """An account that returns after a long pause gets its turns, but not those that it did not use."""
    waiting = Waiting(Fair({}))
    for _ in range(20):
        waiting.push(sequence("busy"))
    order(waiting)
    for _ in range(20):
        waiting.push(sequence("idle"))
        waiting.push(sequence("busy"))
    first = [seq.request.account for seq in order(waiting)[:10]]
    assert 4 <= first.count("busy") <= 6


def test_account_that_returns_starts_at_the_floor_or_its_own_counter():
    policy = Fair({})
    light, heavy = sequence("light"), sequence("heavy")
    policy.served(light, 10, 0)
    for _ in range(10):
        policy.served(heavy, 100, 0)
    assert policy.floors[light.request.priority] == 900
    for seq, counter in ((light, 900), (heavy, 1000)):
        policy.arrived(policy.group(seq))
        assert policy.rank(policy.group(seq))[1] == counter


@pytest.mark.parametrize(
    ("sizes", "budget", "efficient", "shares"),
    [
        ([100, 10], 40, 1000, [(1, 10), (0, 30)]),  # a short prompt joins the step
        ([100, 50], 40, 1000, [(0, 40), (1, 0)]),  # half as long is not short
        ([100, 15, 10], 40, 1000, [(1, 15), (0, 25), (2, 0)]),  # the first keeps half
        ([10, 100], 40, 1000, [(0, 10), (1, 30)]),
        ([10, 20, 20], 60, 15, [(0, 10), (1, 20), (2, 0)]),  # enough tokens for an efficient step
        ([10, 20], 5, 1000, [(0, 5), (1, 0)]),
        ([], 40, 1000, []),
    ],
)
def test_prefill_budget_is_split(sizes, budget, efficient, shares):
    seqs = [sequence(size=size) for size in sizes]
    found = split_prefill_budget(seqs, budget, efficient)
    assert [(seqs.index(seq), share) for seq, share in found] == shares


@pytest.mark.parametrize("budget", [64, 128])
def test_short_prompts_cannot_delay_the_first_for_ever(budget):
    """Although parts of undivided prompts are avoided."""
    first, short = sequence(size=120), sequence(size=20)
    shares = dict(split_prefill_budget([first, short], budget, 1000, 128))
    assert shares[short] == 20
    assert shares[first] >= budget // 2


def test_earlier_deadline_goes_first_within_account():
    """Requests without a deadline go last."""
    waiting = Waiting(Fair({}))
    seqs = [sequence(), sequence(deadline=9.0), sequence(deadline=3.0)]
    for seq in seqs:
        waiting.push(seq)
    assert order(waiting) == seqs[::-1]


def test_oldest_request_is_served_regularly():
    """After PATIENCE, one in AGED_SHARE admissions goes to the oldest request, also in the lowest
    class.
    """
    waiting = Waiting(Fair({}))
    old = sequence(priority=Priority.BATCH)
    waiting.push(old)
    for _ in range(50):
        waiting.push(sequence(priority=Priority.INTERACTIVE, arrived=PATIENCE))
    assert order(waiting, PATIENCE).index(old) == 50, "it has not waited for longer than PATIENCE"
    old = sequence(priority=Priority.BATCH)
    waiting.push(old)
    for _ in range(50):
        waiting.push(sequence(priority=Priority.INTERACTIVE, arrived=PATIENCE))
    assert order(waiting, PATIENCE + 1).index(old) < AGED_SHARE


def test_returning_sequence_keeps_its_position():
    """Its arrival decides."""
    waiting = Waiting(Fair({}))
    seqs = [sequence() for _ in range(3)]
    for seq in seqs:
        waiting.push(seq)
    waiting.remove(seqs[0])
    waiting.push(seqs[0])
    assert order(waiting) == seqs


def test_number_of_counters_is_limited():
    """A new account for each request does not fill the memory."""
    fair = Fair({})
    waiting = Waiting(fair)
    for i in range(2 * MAX_COUNTERS):
        waiting.push(sequence(str(i)))
        order(waiting)
    assert len(fair.counters) <= MAX_COUNTERS + 1


def test_forgotten_account_is_charged_from_floor(monkeypatch):
    """A running account whose counter was forgotten continues from the floor, as returning accounts
    do, not from 0.
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
def test_rank_of_waiting_account_never_falls(events):
    """Accounts are served, forgotten and return, and sequences are served out of order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cllm.scheduler.policy.MAX_COUNTERS", 6)
        policy, ranks = Fair({"3": 5.0}), {}
        for account, priority, size, waits in events:
            seq = sequence(str(account), priority, size=size)
            group = policy.group(seq)
            if waits and group not in ranks:
                policy.arrived(group)
                ranks[group] = policy.rank(group)
            else:
                policy.served(seq, size, 1)
            for waiting, rank in ranks.items():
                assert policy.rank(waiting) >= rank
                ranks[waiting] = policy.rank(waiting)


def test_own_policy_is_imported_with_weights():
    """package.module:Class is imported and given the weights."""
    policy = make_policy(f"{__name__}:Own", {"a": 2.0})
    assert isinstance(policy, Own)
    assert policy.weights == {"a": 2.0}


class Own(FirstComeFirstServed):
    def __init__(self, weights) -> None:
        self.weights = weights


class OldName(FirstComeFirstServed):
    """A policy written for earlier versions."""

    def urgency(self, seq) -> int:
        return 7

    def group(self, seq) -> str:
        return seq.request.key


class BothNames(OldName):
    """A policy for earlier and present versions."""

    def effective_priority(self, seq) -> int:
        return 5


@pytest.mark.parametrize(
    ("policy", "priority", "num_warnings"), [(Own, 1, 0), (OldName, 7, 1), (BothNames, 5, 0)]
)
def test_own_policy_may_use_former_names(policy, priority, num_warnings, caplog):
    """``urgency`` is ``effective_priority``, with a warning; ``Request.key`` is ``account``."""
    made = make_policy(f"{__name__}:{policy.__name__}", {})
    assert made.effective_priority(sequence()) == priority
    assert policy is Own or made.group(sequence(account="alice")) == "alice"
    warnings = [r.message for r in caplog.records if "urgency is deprecated" in r.message]
    assert len(warnings) == num_warnings


@pytest.mark.parametrize("method", ["group", "arrived", "rank"])
def test_failing_policy_queues_nothing(method, monkeypatch):
    """Otherwise the engine would have work forever."""
    waiting = Waiting(make_policy("fair", {}))

    def fail(*_):
        raise ValueError(method)

    monkeypatch.setattr(waiting.policy, method, fail)
    with pytest.raises(ValueError, match=method):
        waiting.push(sequence())
    assert (len(waiting), waiting.num_tokens) == (0, 0)


def test_policy_of_docs_sorts_by_length(tmp_path, monkeypatch):
    """A module in the current folder is found, although Python would not search there."""
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
def test_unknown_policy_raises_startup_error(name):
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
def test_queue_returns_each_waiting_sequence_once(events):
    """Sequences arrive, leave and return. The length of the queue stays right."""
    waiting, inside, served = Waiting(Fair({})), set(), []
    for account, priority, take in events:
        if take and inside:
            seq = waiting.head(0.0)
            assert seq in inside
            waiting.take(seq)
            waiting.policy.served(seq, 10, 1)
            inside.discard(seq)
            served.append(seq)
        else:
            seq = served.pop() if take and served else sequence(account, priority)
            waiting.push(seq)
            inside.add(seq)
        assert len(waiting) == len(inside)
        assert set(waiting) == inside
        assert waiting.num_tokens == sum(seq.num_tokens for seq in inside)
    assert set(order(waiting)) == inside


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), min_size=30, max_size=60))
def test_counters_of_waiting_accounts_stay_close(sizes):
    """While both wait, the counters differ by at most the cost of one admission (theorem 4.1 of the
    paper).
    """
    policy = Fair({})
    waiting = Waiting(policy)
    for account, size in sizes:
        waiting.push(sequence(account, size=size))
    left = {account: sum(k == account for k, _ in sizes) for account in "ab"}
    while all(left.values()):
        seq = waiting.head(0.0)
        waiting.take(seq)
        policy.served(seq, seq.num_prompt_tokens, 0)
        left[seq.request.account] -= 1
        a, b = (policy.counters[Priority.NORMAL, account] for account in "ab")
        assert abs(a - b) <= 50
