"""The order of running sequences, their expiry times, and the reasons why others wait."""

import pytest

from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.core.sequence import Sequence, Status
from cllm.scheduler.expiries import MIN_ENTRIES, Expiries
from cllm.scheduler.policy import make_policy
from cllm.scheduler.reasons import AwaitsLeader, PrefillBudgetUsed, TooFewCells
from cllm.scheduler.running import Running
from cllm.scheduler.waiting import AGED, MAX_STALE, Waiting


def sequence(order: int, priority: Priority = Priority.NORMAL) -> Sequence:
    request = Request(f"r{order}", [1], SamplingParams(), priority=priority)
    seq = Sequence(request, 0, 0, 8)
    seq.order = order
    return seq


def test_sequences_are_ordered_by_class_then_arrival() -> None:
    early, late = sequence(1), sequence(2)
    batch, interactive = sequence(0, Priority.BATCH), sequence(3, Priority.INTERACTIVE)
    running = Running()
    for seq in (late, batch, interactive, early):
        running.add(seq)
    running.check()
    assert [*running] == [interactive, early, late, batch]
    assert running.tail is batch
    assert running.find_last({interactive, late}) is late
    running.remove(batch)
    assert running.tail is late
    with pytest.raises(ValueError):
        running.remove(batch)


def test_nobody_is_promoted_to_aged() -> None:
    running, seq = Running(), sequence(1, Priority.BATCH)
    running.add(seq)
    running.promote(seq, AGED)
    assert seq.effective_priority == Priority.INTERACTIVE


def test_finished_sequences_are_forgotten_before_their_time() -> None:
    expiries = Expiries()
    going = sequence(0)
    expiries.set(going, 1000.0)
    for order in range(1, 1000):
        done = sequence(order)
        expiries.set(done, 3600.0)
        done.status = Status.FINISHED
    assert len(expiries._heap) <= MIN_ENTRIES + 1
    assert [*expiries.take(1000.0)] == [going]


def test_removed_sequences_leave_the_queue() -> None:
    waiting = Waiting(make_policy("fair", {}))
    stays = sequence(0)
    waiting.push(stays)
    for order in range(1, 1000):
        waiting.push(seq := sequence(order))
        waiting.remove(seq)
    assert len(waiting._by_age) <= MAX_STALE + 3
    assert waiting._oldest() is stays


def test_promoted_sequence_moves_forward_and_never_back() -> None:
    first, second = sequence(1), sequence(2, Priority.BATCH)
    running = Running()
    running.add(first)
    running.add(second)
    running.promote(first, Priority.BATCH)
    assert [*running] == [first, second]
    running.promote(second, Priority.INTERACTIVE)
    assert [*running] == [second, first]
    running.check()
    first.effective_priority = -1
    with pytest.raises(AssertionError):
        running.check()


def test_sequence_expires_once_and_only_at_its_last_time() -> None:
    moved, finished, never = sequence(1), sequence(2), sequence(3)
    expiries = Expiries()
    for seq, seconds in ((moved, 1.0), (finished, 2.0), (never, None)):
        expiries.set(seq, seconds)
    expiries.set(moved, 3.0)
    finished.status = Status.FINISHED
    assert [*expiries.take(2.5)] == []
    assert [*expiries.take(3.0)] == [moved]
    assert [*expiries.take(9.0)] == []


def test_reasons_become_sentences() -> None:
    assert str(TooFewCells("a.0", 9, 5, 3)) == (
        "a.0 needs 9 cells and the running sequences 5 more, but only 3 are available"
    )
    assert str(PrefillBudgetUsed(64)) == "the step's prefill budget of 64 tokens is used up"
    assert str(AwaitsLeader(40, "c.1")) == "c.1 is computing 40 tokens of its prompt"
