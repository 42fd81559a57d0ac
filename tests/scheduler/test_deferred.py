"""Sequences that wait for a prefix that another sequence computes, or that is being read."""

from __future__ import annotations

import itertools

import pytest

from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.kv_cache.snapshots import Snapshot, StorageTier
from cllm.scheduler.deferred import Deferred

numbers = itertools.count()


def sequence(num_computed_tokens: int = 0) -> Sequence:
    seq = Sequence(Request(str(next(numbers)), [1] * 50, SamplingParams()), 0, 0, 100)
    seq.num_computed_tokens = num_computed_tokens
    return seq


def test_followers_resume_when_their_prefix_is_computed() -> None:
    deferred, leader, others = Deferred(), sequence(), [sequence() for _ in range(3)]
    for num_tokens, seq in zip([10, 30, 20], others, strict=True):
        deferred.follow(leader, num_tokens, seq)
    assert [*deferred] == others
    assert deferred.count_awaited(leader) == [10, 30, 20]
    leader.num_computed_tokens = 9
    assert deferred.take_ready_followers(leader) == []
    leader.num_computed_tokens = 20
    assert deferred.take_ready_followers(leader) == [others[0], others[2]]
    assert deferred.count_awaited(leader) == [30]
    assert [*deferred] == [others[1]]
    assert deferred.take_ready_followers(leader) == []
    assert deferred.take_followers(leader) == [others[1]]
    assert len(deferred) == 0
    assert deferred.take_followers(leader) == []


def test_followers_of_other_leaders_keep_waiting() -> None:
    deferred, first, second = Deferred(), sequence(40), sequence(40)
    mine, other = sequence(), sequence()
    deferred.follow(first, 5, mine)
    deferred.follow(second, 5, other)
    assert deferred.take_ready_followers(sequence(50)) == []
    assert deferred.take_followers(first) == [mine]
    assert [*deferred] == [other]
    assert deferred.list_followers(second) == [other]


def test_readers_resume_when_their_snapshot_has_been_read() -> None:
    deferred, seqs = Deferred(), [sequence() for _ in range(3)]
    for key, seq in zip([1, 2, 1], seqs, strict=True):
        deferred.await_read(Snapshot(key, [1] * 7, 100, StorageTier.DISK), seq)
    assert deferred.take_readers(1) == [seqs[0], seqs[2]]
    assert deferred.take_readers(1) == []
    assert [*deferred] == [seqs[1]]


def test_reader_of_next_snapshot_ignores_the_last_one() -> None:
    deferred, seq = Deferred(), sequence()
    for key in (1, 2):
        deferred.await_read(Snapshot(key, [1] * 7, 100, StorageTier.DISK), seq)
        if key == 1:
            assert deferred.take_readers(1) == [seq]
    assert deferred.take_readers(1) == []
    assert deferred.take_readers(2) == [seq]


def test_discarded_sequence_is_never_returned() -> None:
    deferred, leader, follower, reader = Deferred(), sequence(50), sequence(), sequence()
    deferred.follow(leader, 10, follower)
    deferred.await_read(Snapshot(1, [1] * 7, 100, StorageTier.DISK), reader)
    assert deferred.discard(follower)
    assert deferred.discard(reader)
    assert not deferred.discard(follower)
    assert deferred.list_followers(leader) == []
    assert deferred.take_ready_followers(leader) == []
    assert deferred.take_readers(1) == []


def test_reasons_name_the_tokens_and_the_leader() -> None:
    deferred, leader, follower, reader = Deferred(), sequence(), sequence(), sequence()
    deferred.follow(leader, 12, follower)
    deferred.await_read(Snapshot(1, [1] * 7, 100, StorageTier.DISK), reader)
    assert "12 tokens" in str(deferred.reasons[follower])
    assert leader.name in str(deferred.reasons[follower])
    assert "7 tokens" in str(deferred.reasons[reader])
    assert "disk" in str(deferred.reasons[reader])


def test_check_detects_leader_that_is_not_running() -> None:
    deferred, leader = Deferred(), sequence()
    deferred.follow(leader, 12, sequence())
    deferred.check([leader])
    with pytest.raises(AssertionError, match="leader"):
        deferred.check([])


def test_check_detects_sequence_that_waits_for_nothing() -> None:
    deferred, leader, follower = Deferred(), sequence(), sequence()
    deferred.follow(leader, 12, follower)
    reason = deferred.reasons[follower]
    deferred.take_followers(leader)
    deferred.check([])
    deferred.reasons[follower] = reason
    with pytest.raises(AssertionError, match="nothing"):
        deferred.check([])
