"""Snapshots stay within their budgets. The least recently used are evicted first, but never one
that is in use.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.kv_cache.tiers import Snapshot, StorageTier, Tiers


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def save(tiers: Tiers, count: int) -> Snapshot:
    """Add a snapshot to RAM, in which there is room for it."""
    assert tiers.make_room(tiers.compute_size(count)) == []
    return tiers.add(tokens(count))


def list_keys(snapshots: list[Snapshot] | None) -> list[int] | None:
    return None if snapshots is None else [snapshot.key for snapshot in snapshots]


def test_snapshot_size_has_fixed_and_per_token_parts():
    """Recurrent state has the first part, plain attention the second."""
    tiers = Tiers(1000, 0, bytes_per_token=3, bytes_per_snapshot=10)
    assert tiers.compute_size(20) == 70
    save(tiers, 20)
    save(tiers, 5)
    assert tiers.num_ram_bytes == 95
    tiers.check()


def test_least_recently_used_snapshots_leave_ram():
    """As few as possible leave."""
    tiers = Tiers(100, 0, 1)
    snapshots = [save(tiers, 30) for _ in range(3)]
    tiers.touch(snapshots[0])
    assert tiers.make_room(10) == []
    assert list_keys(tiers.make_room(41)) == [1, 2]
    assert list(tiers.ram) == [0]
    assert tiers.num_ram_bytes == 30
    tiers.check()


def test_make_room_returns_none_if_impossible():
    """The request exceeds all RAM, or would evict a snapshot that is needed or being read. Nothing
    changes.
    """
    tiers = Tiers(100, 100, 1)
    spared = save(tiers, 30)
    reading = tiers.add(tokens(30), StorageTier.DISK)
    tiers.read(reading)
    save(tiers, 30)
    assert tiers.make_room(101) is None
    assert tiers.make_room(41, spared) is None
    assert list(tiers.ram) == [0, 1, 2]
    assert list_keys(tiers.make_room(40, spared)) == [2]
    tiers.check()


def test_snapshot_in_file_survives_eviction_from_ram():
    """It is found on disk afterwards. A snapshot without a file is lost."""
    tiers = Tiers(60, 100, 1)
    in_file, gone = save(tiers, 30), save(tiers, 30)
    assert tiers.record_written(in_file) == []
    assert list_keys(tiers.make_room(60)) == [0, 1]
    assert (in_file.tier, len(tiers)) == (StorageTier.DISK, 1)
    assert tiers.find(in_file.key) is in_file
    assert tiers.find(gone.key) is None
    tiers.check()


def test_snapshot_being_read_cannot_leave_ram():
    """It takes room in RAM while it is being read."""
    tiers = Tiers(60, 100, 1)
    snapshot = tiers.add(tokens(40), StorageTier.DISK)
    assert (tiers.num_ram_bytes, tiers.num_disk_bytes) == (0, 40)
    tiers.read(snapshot)
    assert (tiers.num_ram_bytes, tiers.num_disk_bytes) == (40, 40)
    assert tiers.make_room(30) is None
    snapshot.tier = StorageTier.RAM
    assert tiers.make_room(30) == [snapshot]
    tiers.check()


def test_files_stay_within_their_budget():
    """The least recently used files are deleted. Their copies in RAM remain."""
    tiers = Tiers(200, 100, 1)
    snapshots = [save(tiers, 40) for _ in range(3)]
    assert tiers.record_written(snapshots[0]) == tiers.record_written(snapshots[1]) == []
    tiers.touch(snapshots[0])
    assert tiers.record_written(snapshots[2]) == [snapshots[1]]
    assert (list(tiers.files), list(tiers.ram)) == ([0, 2], [1, 2, 0])
    assert not snapshots[1].in_file
    tiers.check()


def test_file_larger_than_budget_does_not_count():
    """It evicts no other file."""
    tiers = Tiers(200, 50, 1)
    small, large = save(tiers, 40), save(tiers, 51)
    assert tiers.record_written(small) == []
    assert tiers.record_written(large) == []
    assert not large.in_file
    assert tiers.num_disk_bytes == 40
    assert large.tier is StorageTier.RAM
    tiers.check()


def test_forget_removes_snapshot_from_all_tiers():
    """Its bytes are freed."""
    tiers = Tiers(100, 100, 1)
    snapshot = save(tiers, 40)
    tiers.record_written(snapshot)
    tiers.forget(snapshot)
    assert (len(tiers), tiers.num_ram_bytes, tiers.num_disk_bytes) == (0, 0, 0)
    tiers.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda tiers, snapshot: setattr(tiers, "num_ram_bytes", 7),
        lambda tiers, snapshot: setattr(tiers, "num_disk_bytes", 7),
        lambda tiers, snapshot: setattr(tiers, "ram_bytes", 7),
        lambda tiers, snapshot: setattr(snapshot, "in_file", False),
        lambda tiers, snapshot: setattr(snapshot, "tier", StorageTier.DISK),
    ],
    ids=["RAM", "disk", "too much in RAM", "no file", "not on disk alone"],
)
def test_check_detects_broken_invariants(damage):
    """Each test case breaks one invariant."""
    tiers = Tiers(100, 100, 1)
    snapshot = save(tiers, 40)
    tiers.record_written(snapshot)
    tiers.check()
    damage(tiers, snapshot)
    with pytest.raises(AssertionError):
        tiers.check()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    used=st.lists(st.integers(0, 7)),
    need=st.integers(0, 60),
)
def test_make_room_evicts_as_few_as_necessary(sizes, used, need):
    """In order of their last use."""
    tiers = Tiers(max(60, sum(sizes)), 0, 1)
    snapshots = [save(tiers, size) for size in sizes]
    order = list(range(len(sizes)))
    for key in used:
        if key < len(sizes):
            tiers.touch(snapshots[key])
            order.remove(key)
            order.append(key)
    leaving = list_keys(tiers.make_room(need))
    assert leaving == order[: len(leaving)]
    assert tiers.num_ram_bytes + need <= tiers.ram_bytes
    if leaving:
        assert tiers.num_ram_bytes + sizes[leaving[-1]] + need > tiers.ram_bytes
    tiers.check()
