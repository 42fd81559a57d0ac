"""Copies stay within their budgets; what was not used for longest leaves first, and never what is
needed.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.kv_cache.tiers import Place, Snapshot, Tiers


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def saved(tiers: Tiers, count: int) -> Snapshot:
    """A snapshot in RAM for which there is room."""
    assert tiers.make_room(tiers.size_of(count)) == []
    return tiers.add(tokens(count))


def keys(snapshots: list[Snapshot] | None) -> list[int] | None:
    return None if snapshots is None else [snapshot.key for snapshot in snapshots]


def test_the_size_of_a_snapshot():
    """A fixed part, and a part for each token; recurrent state has the first, plain attention the
    second.
    """
    tiers = Tiers(1000, 0, bytes_per_token=3, bytes_per_snapshot=10)
    assert tiers.size_of(20) == 70
    saved(tiers, 20)
    saved(tiers, 5)
    assert tiers.num_ram_bytes == 95
    tiers.check()


def test_room_in_ram_is_made_from_the_longest_unused():
    """No more leave than have to; using one puts it behind the others."""
    tiers = Tiers(100, 0, 1)
    snapshots = [saved(tiers, 30) for _ in range(3)]
    tiers.touch(snapshots[0])
    assert tiers.make_room(10) == []
    assert keys(tiers.make_room(41)) == [1, 2]
    assert list(tiers.ram) == [0]
    assert tiers.num_ram_bytes == 30
    tiers.check()


def test_room_that_cannot_be_made():
    """Larger than RAM, or only at the cost of one that is needed or on its way: None, and nothing
    has changed.
    """
    tiers = Tiers(100, 100, 1)
    spared = saved(tiers, 30)
    reading = tiers.add(tokens(30), Place.DISK)
    tiers.read(reading)
    saved(tiers, 30)
    assert tiers.make_room(101) is None
    assert tiers.make_room(41, spared) is None
    assert list(tiers.ram) == [0, 1, 2]
    assert keys(tiers.make_room(40, spared)) == [2]
    tiers.check()


def test_what_a_file_holds_survives_ram():
    """It is found on disk afterwards; what no file holds is gone."""
    tiers = Tiers(60, 100, 1)
    in_file, gone = saved(tiers, 30), saved(tiers, 30)
    assert tiers.written(in_file) == []
    assert keys(tiers.make_room(60)) == [0, 1]
    assert (in_file.place, len(tiers)) == (Place.DISK, 1)
    assert tiers.find(in_file.key) is in_file
    assert tiers.find(gone.key) is None
    tiers.check()


def test_back_from_disk():
    """While it is read it takes room in RAM and cannot leave it."""
    tiers = Tiers(60, 100, 1)
    snapshot = tiers.add(tokens(40), Place.DISK)
    assert (tiers.num_ram_bytes, tiers.num_disk_bytes) == (0, 40)
    tiers.read(snapshot)
    assert (tiers.num_ram_bytes, tiers.num_disk_bytes) == (40, 40)
    assert tiers.make_room(30) is None
    snapshot.place = Place.RAM
    assert tiers.make_room(30) == [snapshot]
    tiers.check()


def test_files_stay_within_their_budget():
    """The longest unused go; they stay where they are in RAM."""
    tiers = Tiers(200, 100, 1)
    snapshots = [saved(tiers, 40) for _ in range(3)]
    assert tiers.written(snapshots[0]) == tiers.written(snapshots[1]) == []
    tiers.touch(snapshots[0])
    assert tiers.written(snapshots[2]) == [snapshots[1]]
    assert (list(tiers.files), list(tiers.ram)) == ([0, 2], [1, 2, 0])
    assert not snapshots[1].in_file
    tiers.check()


def test_a_file_larger_than_the_budget_goes_at_once():
    """And costs the others nothing."""
    tiers = Tiers(200, 50, 1)
    small, large = saved(tiers, 40), saved(tiers, 51)
    assert tiers.written(small) == []
    assert tiers.written(large) == [large]
    assert tiers.num_disk_bytes == 40
    assert large.place is Place.RAM
    tiers.check()


def test_what_is_forgotten_is_nowhere():
    """Neither in RAM nor in a file, and its bytes are free."""
    tiers = Tiers(100, 100, 1)
    snapshot = saved(tiers, 40)
    tiers.written(snapshot)
    tiers.forget(snapshot)
    assert (len(tiers), tiers.num_ram_bytes, tiers.num_disk_bytes) == (0, 0, 0)
    tiers.check()


@pytest.mark.parametrize(
    "crime",
    [
        lambda tiers, snapshot: setattr(tiers, "num_ram_bytes", 7),
        lambda tiers, snapshot: setattr(tiers, "num_disk_bytes", 7),
        lambda tiers, snapshot: setattr(tiers, "ram_bytes", 7),
        lambda tiers, snapshot: setattr(snapshot, "in_file", False),
        lambda tiers, snapshot: setattr(snapshot, "place", Place.DISK),
    ],
    ids=["RAM", "disk", "too much in RAM", "no file", "not on disk alone"],
)
def test_check_finds_every_crime(crime):
    """Each law is broken by hand once, and noticed."""
    tiers = Tiers(100, 100, 1)
    snapshot = saved(tiers, 40)
    tiers.written(snapshot)
    tiers.check()
    crime(tiers, snapshot)
    with pytest.raises(AssertionError):
        tiers.check()


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    used=st.lists(st.integers(0, 7)),
    need=st.integers(0, 60),
)
def test_as_few_leave_as_make_the_room(sizes, used, need):
    """Those who leave are the longest unused, and without the last of them the room would not
    do.
    """
    tiers = Tiers(max(60, sum(sizes)), 0, 1)
    snapshots = [saved(tiers, size) for size in sizes]
    order = list(range(len(sizes)))
    for key in used:
        if key < len(sizes):
            tiers.touch(snapshots[key])
            order.remove(key)
            order.append(key)
    leaving = keys(tiers.make_room(need))
    assert leaving == order[: len(leaving)]
    assert tiers.num_ram_bytes + need <= tiers.ram_bytes
    if leaving:
        assert tiers.num_ram_bytes + sizes[leaving[-1]] + need > tiers.ram_bytes
    tiers.check()
