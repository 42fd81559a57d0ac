"""Snapshots stay within their budgets. The least recently used are evicted first, but never one
that is in use.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.core.batch import Drop
from cllm.kv_cache.model_state import Recurrent
from cllm.kv_cache.snapshots import Snapshot, Snapshots, StorageTier


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def save(snapshots: Snapshots, count: int) -> Snapshot:
    """Add a snapshot to RAM, in which there is room for it."""
    added = snapshots.add(tokens(count), "", Recurrent())
    assert added is not None
    key, operations = added
    assert operations == []
    return snapshots.ram[key]


def drops(*keys: int) -> list[Drop]:
    return [Drop(key) for key in keys]


def check(snapshots: Snapshots) -> None:
    snapshots.check()
    assert len(snapshots._tree) == len(snapshots)


def test_snapshot_size_has_fixed_and_per_token_parts():
    """Recurrent state has the first part, plain attention the second."""
    snapshots = Snapshots(1000, 0, bytes_per_token=3, bytes_per_snapshot=10)
    assert snapshots.compute_size(20) == 70
    save(snapshots, 20)
    save(snapshots, 5)
    assert snapshots.num_ram_bytes == 95
    check(snapshots)


def test_least_recently_used_snapshots_leave_ram():
    """As few as possible leave."""
    snapshots = Snapshots(100, 0, 1)
    saved = [save(snapshots, 30) for _ in range(3)]
    snapshots.touch(saved[0])
    assert snapshots.make_room(10) == []
    assert snapshots.make_room(41) == drops(1, 2)
    assert list(snapshots.ram) == [0]
    assert snapshots.num_ram_bytes == 30
    check(snapshots)


def test_make_room_returns_none_if_impossible():
    """The request exceeds all RAM, or would evict a snapshot that is needed or being read. Nothing
    changes.
    """
    snapshots = Snapshots(100, 100, 1)
    needed = save(snapshots, 30)
    reading = snapshots.add_from_file(tokens(30))
    snapshots.read(reading)
    save(snapshots, 30)
    assert snapshots.make_room(101) is None
    assert snapshots.make_room(41, needed) is None
    assert list(snapshots.ram) == [0, 1, 2]
    assert snapshots.make_room(40, needed) == drops(2)
    check(snapshots)


def test_snapshot_in_file_survives_eviction_from_ram():
    """It is found on disk afterwards. A snapshot without a file is lost."""
    snapshots = Snapshots(60, 100, 1)
    in_file, gone = save(snapshots, 30), save(snapshots, 30)
    snapshots.record_written(in_file.key)
    assert snapshots.make_room(60) == drops(0, 1)
    assert (in_file.tier, len(snapshots)) == (StorageTier.DISK, 1)
    assert snapshots.find(in_file.key) is in_file
    assert snapshots.find(gone.key) is None
    check(snapshots)


def test_snapshot_being_read_cannot_leave_ram():
    """It takes room in RAM while it is being read."""
    snapshots = Snapshots(60, 100, 1)
    snapshot = snapshots.add_from_file(tokens(40))
    assert (snapshots.num_ram_bytes, snapshots.num_disk_bytes) == (0, 40)
    snapshots.read(snapshot)
    assert (snapshots.num_ram_bytes, snapshots.num_disk_bytes) == (40, 40)
    assert snapshots.make_room(30) is None
    snapshots.finish_read(snapshot.key, succeeded=True)
    assert snapshots.make_room(30) == [Drop(snapshot.key)]
    check(snapshots)


def test_files_stay_within_their_budget():
    """The least recently used files are deleted. Their copies in RAM remain."""
    snapshots = Snapshots(200, 100, 1)
    saved = [save(snapshots, 40) for _ in range(3)]
    for snapshot in saved[:2]:
        snapshots.record_written(snapshot.key)
    snapshots.touch(saved[0])
    snapshots.record_written(saved[2].key)
    assert (list(snapshots.files), list(snapshots.ram)) == ([0, 2], [1, 2, 0])
    assert not saved[1].in_file
    check(snapshots)


def test_file_larger_than_budget_does_not_count():
    """It evicts no other file."""
    snapshots = Snapshots(200, 50, 1)
    small, large = save(snapshots, 40), save(snapshots, 51)
    snapshots.record_written(small.key)
    snapshots.record_written(large.key)
    assert list(snapshots.files) == [small.key]
    assert not large.in_file
    assert snapshots.num_disk_bytes == 40
    assert large.tier is StorageTier.RAM
    check(snapshots)


def test_dropped_snapshot_leaves_ram_and_files():
    """Its bytes are freed."""
    snapshots = Snapshots(100, 100, 1)
    snapshot = save(snapshots, 40)
    snapshots.record_written(snapshot.key)
    assert snapshots.drop(snapshot.key) == [Drop(snapshot.key)]
    assert (len(snapshots), snapshots.num_ram_bytes, snapshots.num_disk_bytes) == (0, 0, 0)
    check(snapshots)


@pytest.mark.parametrize(
    "damage",
    [
        lambda snapshots, snapshot: setattr(snapshots, "num_ram_bytes", 7),
        lambda snapshots, snapshot: setattr(snapshots, "num_disk_bytes", 7),
        lambda snapshots, snapshot: setattr(snapshots, "ram_bytes", 7),
        lambda snapshots, snapshot: setattr(snapshot, "in_file", False),
        lambda snapshots, snapshot: setattr(snapshot, "tier", StorageTier.DISK),
    ],
    ids=["RAM", "disk", "too much in RAM", "no file", "not on disk alone"],
)
def test_check_detects_broken_invariants(damage):
    """Each test case breaks one invariant."""
    snapshots = Snapshots(100, 100, 1)
    snapshot = save(snapshots, 40)
    snapshots.record_written(snapshot.key)
    check(snapshots)
    damage(snapshots, snapshot)
    with pytest.raises(AssertionError):
        snapshots.check()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    used=st.lists(st.integers(0, 7)),
    need=st.integers(0, 60),
)
def test_make_room_evicts_as_few_as_necessary(sizes, used, need):
    """In order of their last use."""
    snapshots = Snapshots(max(60, sum(sizes)), 0, 1)
    saved = [save(snapshots, size) for size in sizes]
    order = list(range(len(sizes)))
    for key in used:
        if key < len(sizes):
            snapshots.touch(saved[key])
            order.remove(key)
            order.append(key)
    leaving = [operation.snapshot for operation in snapshots.make_room(need)]
    assert leaving == order[: len(leaving)]
    assert snapshots.num_ram_bytes + need <= snapshots.ram_bytes
    if leaving:
        assert snapshots.num_ram_bytes + sizes[leaving[-1]] + need > snapshots.ram_bytes
    check(snapshots)
