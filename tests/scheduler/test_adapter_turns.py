"""Which adapters a step computes with."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from cllm.scheduler.adapter_turns import SWITCH_SECONDS, SWITCH_SHARE, AdapterTurns


def sequences(*names: str, account: str = "") -> list[Any]:
    return [
        SimpleNamespace(
            adapters=((name, 1.0),) if name else (), request=SimpleNamespace(account=account)
        )
        for name in names
    ]


def turns(weights: dict[str, float] | None = None) -> AdapterTurns:
    made = AdapterTurns(weights or {})
    made.is_used = True
    return made


def run(made: AdapterTurns, seqs: list[Any], num_steps: int, cost: Any) -> list[str]:
    """Return whose turn each step is; ``cost(name, switched)`` is its duration."""
    found: list[str] = []
    for _ in range(num_steps):
        chosen = made.select(seqs, seqs, ())
        assert chosen
        assert {seq.adapters for seq in chosen} == {made.current}
        name = made.current[0][0] if made.current else ""
        switched = not found or found[-1] != name
        made.observe(made.current, cost(name, switched), only_decodes=True)
        found.append(name)
    return found


def test_without_adapters_nothing_is_chosen() -> None:
    made, seqs = AdapterTurns({}), sequences("", "")
    assert made.select(seqs, seqs, ()) is seqs
    assert all(made.includes(seq) for seq in seqs)


def test_one_group_keeps_the_turn() -> None:
    made, seqs = turns(), sequences("a", "a")
    assert {*run(made, seqs, 50, lambda *_: 1.0)} == {"a"}


@pytest.mark.parametrize("num_groups", [2, 3, 16])
def test_groups_get_equal_time_and_little_is_lost_by_changes(num_groups) -> None:
    """Even if the steps of some are much longer."""
    names = [f"a{i}" for i in range(num_groups - 1)] + [""]
    seqs = sequences(*names * 3)
    spent = dict.fromkeys(names, 0.0)
    lost = 0.0
    chance = random.Random(1)
    lengths = {name: chance.uniform(0.005, 0.08) for name in names}

    def cost(name: str, switched: bool) -> float:
        nonlocal lost
        extra = SWITCH_SECONDS if switched else 0.0
        lost += extra
        spent[name] += lengths[name] + extra
        return lengths[name] + extra

    found = run(turns(), seqs, 6000, cost)
    times = [*spent.values()]
    assert sum(times) ** 2 / (len(times) * sum(time * time for time in times)) >= 0.99
    assert lost <= 1.3 * SWITCH_SHARE * sum(times)
    waits = [0] * len(names)
    for name in found:
        waits = [wait + 1 for wait in waits]
        waits[names.index(name)] = 0
        assert max(waits) <= num_groups * 60


def test_paused_and_absent_groups_are_left_out() -> None:
    made, (a, b, c) = turns(), sequences("a", "b", "c")
    for _ in range(20):
        assert made.select([a, b], [a, b, c], [c]) in ([a], [b])
        made.observe(made.current, 10.0, only_decodes=False)
    assert made.select([], [c], ()) == []
    assert made.includes(c)
    assert made.select([], [], ()) == []


def test_group_that_comes_back_has_no_old_debts() -> None:
    made, (a, b) = turns(), sequences("a", "b")
    made.select([a], [a], ())
    made.observe(made.current, 1000.0, only_decodes=True)
    made.select([b], [b], ())
    found = run(made, [a, b], 200, lambda *_: 0.05)
    assert 80 <= found.count("a") <= 120


def test_cost_of_a_change_is_learned() -> None:
    made, seqs = turns(), sequences("a", "b")
    run(made, seqs, 3000, lambda _, switched: 0.02 + (0.05 if switched else 0.0))
    assert made.switch_seconds == pytest.approx(0.05, rel=0.1)
    assert made.turn_seconds == pytest.approx(0.05 / SWITCH_SHARE, rel=0.1)


def test_group_that_was_alone_for_long_is_not_made_to_wait() -> None:
    made, base, other = turns(), sequences("", ""), sequences("a")
    run(made, [*base, *other], 100, lambda *_: 0.05)
    run(made, base, 10_000, lambda *_: 0.05)
    found = run(made, [*base, *other], 400, lambda *_: 0.05)
    assert 180 <= found.count("") <= 220
    assert "" in found[:20]


def test_account_with_many_adapters_gets_no_more_than_others() -> None:
    """And its weight counts."""
    greedy = sequences(*(f"a{i}" for i in range(15)), account="greedy")
    others = [seq for i in range(4) for seq in sequences("", account=f"user{i}")]
    for weight in (1.0, 4.0):
        made = turns({"greedy": weight})
        found = run(made, [*greedy, *others], 8000, lambda *_: 0.05)
        share = sum(name != "" for name in found) / len(found)
        assert share == pytest.approx(weight / (weight + 4), abs=0.05)
