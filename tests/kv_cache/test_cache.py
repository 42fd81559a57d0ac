"""The KV cache: cells are counted and never lost, idle and saved prefixes are found again, and
its operations match its records.
"""

from __future__ import annotations

import numpy as np
import pytest

from cllm.core.batch import Copy, Drop, Load, Operation, Save, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.kv_cache.cache import MIN_EVICTED_TOKENS, KVCache
from cllm.kv_cache.layouts import Layout, Partitioned, Unified
from cllm.kv_cache.matching import MIN_SHARED_TOKENS, Match
from cllm.kv_cache.model_state import Recurrent
from cllm.kv_cache.snapshots import MIN_SAVED_TOKENS, Snapshots, StorageTier

UNIFIED = Unified()
SPARE = Unified(num_spare_ids=2)
CHECKPOINT = Partitioned(Recurrent())

LONG = list(range(100, 140))  # long enough to be kept
LONGER = list(range(100, 200))  # long enough to be saved


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request("A", tokens, SamplingParams()), 0, 0, 1024)


def match_tokens(cache: KVCache, tokens: list[int]) -> Match:
    return cache.find(sequence(tokens))


def lease(cache: KVCache, tokens: list[int]) -> tuple[Sequence, int, list[Operation]]:
    """Lease a seq_id for ``tokens`` with their best match; return (sequence, number of tokens
    found, operations).
    """
    seq = sequence(tokens)
    leased = cache.lease(seq, cache.find(seq))
    assert leased is not None
    seq.seq_id, seq.num_computed_tokens, operations = leased
    cache.check()
    return seq, seq.num_computed_tokens, operations


def compute(cache: KVCache, seq: Sequence, count: int | None = None) -> list[Operation]:
    """Compute ``count`` more tokens of ``seq``, all if None; return the operations that made room."""
    count = seq.num_lacking_tokens if count is None else count
    operations = cache.make_room(count)
    assert operations is not None
    cache.hold(seq.seq_id, count)
    seq.num_computed_tokens += count
    cache.check()
    return operations


def start(cache: KVCache, tokens: list[int], count: int | None = None) -> Sequence:
    """Return a running sequence that has computed ``count`` of its tokens, all if None."""
    seq, _, _ = lease(cache, tokens)
    compute(cache, seq, count)
    return seq


def end(cache: KVCache, seq: Sequence, *, soon: bool = False) -> None:
    cache.release(seq.seq_id, seq.tokens[: seq.num_computed_tokens], soon=soon)
    cache.check()


def run_and_release(cache: KVCache, tokens: list[int]) -> int:
    """Lease a seq_id, compute ``tokens`` and release it."""
    seq = start(cache, tokens)
    end(cache, seq)
    return seq.seq_id


def count_found(cache: KVCache, tokens: list[int]) -> int:
    return match_tokens(cache, tokens).num_tokens


# --- counting and finding -----------------------------------------------------------------------


def test_cells_move_from_free_to_held_to_idle():
    """The text form of the cache shows them, and the three numbers add up."""
    cache = KVCache(num_cells=64, cells_per_seq=64, max_num_seqs=2)
    assert str(cache) == "<KVCache 64: held 0 idle 0 free 64>"
    seq, num_found, operations = lease(cache, [1, 2, 3])
    assert (seq.seq_id, num_found, operations) == (0, 0, [])
    compute(cache, seq)
    assert str(cache) == "<KVCache 64: held 3 idle 0 free 61>"
    assert cache.count_cells(0) == 3
    end(cache, seq)
    assert str(cache) == "<KVCache 64: held 0 idle 3 free 61>"


def test_pool_smaller_than_sequence_is_rejected():
    """A sequence could wait forever."""
    with pytest.raises(ValueError, match="must be at least cells_per_seq"):
        KVCache(num_cells=9, cells_per_seq=10, max_num_seqs=1)


def test_lease_raises_if_all_seq_ids_are_leased():
    """Spare seq_ids are not leased."""
    cache = KVCache(128, 64, 2, SPARE)
    assert [lease(cache, [1])[0].seq_id for _ in range(2)] == [0, 1]
    with pytest.raises(IndexError):
        cache.lease(sequence([1]), Match())


def test_longest_idle_prefix_is_found():
    """Among prefixes that begin like the prompt, the one that shares most tokens is chosen."""
    cache = KVCache(num_cells=384, cells_per_seq=128, max_num_seqs=3)
    seqs = [start(cache, [i]) for i in range(3)]
    for seq, tokens in zip(seqs, [LONG[:20], [*LONG[:30], 7, 7], [8] * 20], strict=True):
        seq.tokens = tokens
        compute(cache, seq)
        end(cache, seq)
    match = match_tokens(cache, LONG)
    assert (match.num_tokens, match.source.seq_id, match.must_wait) == (30, 1, False)


def test_continuation_reuses_cells_in_place():
    """If all idle tokens are a prefix of the prompt, no operation is necessary."""
    for layout in (Partitioned(), UNIFIED, SPARE, CHECKPOINT):
        cache = KVCache(128, 64, 2, layout)
        assert run_and_release(cache, LONG) == 0
        seq, num_found, operations = lease(cache, [*LONG, 1, 2])
        assert (seq.seq_id, num_found, operations) == (0, len(LONG), [])


def test_few_surplus_tokens_are_dropped_instead_of_copying():
    """If cells cannot be shared, dropping the end of an idle prefix is cheaper than copying the
    rest of it.
    """
    answered, question = [*LONGER, 1, 2, 3], [*LONGER, 7, 8]
    cache = KVCache(256, 128, 2, snapshots=Snapshots(1000, 0, 1))
    run_and_release(cache, answered)
    assert lease(cache, question)[2] == [Trim(0, len(LONGER))]
    cache = KVCache(256, 128, 2, snapshots=Snapshots(1000, 0, 1))
    run_and_release(cache, [*answered, 4])
    assert lease(cache, question)[2] == [Copy(0, 1, len(LONGER))], (
        "recomputing a 32nd of the tokens costs as much as the copy"
    )


def test_last_prompt_token_is_recomputed():
    """Its logits are needed, even if the whole prompt is cached."""
    cache = KVCache(64, 64, 1)
    run_and_release(cache, LONG)
    seq, num_found, operations = lease(cache, LONG)
    assert (seq.seq_id, num_found, operations) == (0, len(LONG) - 1, [Trim(0, len(LONG) - 1)])


@pytest.mark.parametrize(
    ("num_shared", "reused"), [(MIN_SHARED_TOKENS - 1, 0), (MIN_SHARED_TOKENS, MIN_SHARED_TOKENS)]
)
def test_prefix_below_min_shared_tokens_is_not_found(num_shared, reused):
    """Below MIN_SHARED_TOKENS nothing is found."""
    cache = KVCache(64, 64, 2, UNIFIED)
    run_and_release(cache, LONG[:20])
    assert count_found(cache, [*LONG[:num_shared], 1, 2, 3]) == reused


def test_idle_prefix_outlives_unrelated_sequences():
    """They get empty seq_ids first, and then the least recently used one."""
    cache = KVCache(num_cells=192, cells_per_seq=64, max_num_seqs=3)
    assert [run_and_release(cache, [i] * 20) for i in range(5)] == [0, 1, 2, 0, 1]
    assert [count_found(cache, [i] * 30) for i in range(5)] == [0, 0, 20, 20, 20]


def test_leased_seq_ids_stay_adjacent():
    """If gaps between leased seq_ids cost passes, a gap is filled first, then an end is extended."""
    cache = KVCache(num_cells=400, cells_per_seq=50, max_num_seqs=8)
    seqs = [start(cache, [i] * 20) for i in range(4)]
    for seq in seqs:
        end(cache, seq)
    seqs = [lease(cache, [9])[0] for _ in range(4)]
    assert [seq.seq_id for seq in seqs] == [4, 5, 6, 7]
    end(cache, seqs[1])
    assert lease(cache, [9])[0].seq_id == 5
    assert lease(cache, [9])[0].seq_id == 3


# --- sharing ------------------------------------------------------------------------------------


def test_prefix_of_running_sequence_is_shared():
    """In the unified layout a copy takes no cells, and shared cells count once until their last
    owner releases them.
    """
    cache = KVCache(128, 100, 3, UNIFIED)
    first = start(cache, LONG)
    match = match_tokens(cache, [*LONG, 1, 2])
    assert cache.count_shared_cells(match) == 40
    second, num_found, operations = lease(cache, [*LONG, 1, 2])
    assert (num_found, operations) == (40, [Copy(0, 1, 40)])
    compute(cache, second)
    assert str(cache) == "<KVCache 128: held 42 idle 0 free 86>"
    end(cache, first)
    assert str(cache) == "<KVCache 128: held 42 idle 0 free 86>"
    end(cache, second)
    assert str(cache) == "<KVCache 128: held 0 idle 42 free 86>"


def test_only_computed_tokens_are_copied():
    """The source is a sequence whose prompt is still being computed."""
    cache = KVCache(128, 100, 2, UNIFIED)
    start(cache, LONG, 30)
    assert match_tokens(cache, LONG)[:2] == (30, cache._leased[0])
    assert lease(cache, LONG)[1:] == (30, [Copy(0, 1, 30)])


def test_copy_takes_cells_in_partitioned_layout():
    """Each has its own."""
    cache = KVCache(200, 100, 2)
    start(cache, LONG)
    _, num_found, operations = lease(cache, [*LONG, 1])
    assert (num_found, operations) == (40, [Copy(0, 1, 40)])
    assert str(cache) == "<KVCache 200: held 80 idle 0 free 120>"
    assert cache.count_shared_cells(match_tokens(cache, [*LONG, 1])) == 0


def test_longer_idle_prefix_stays_if_there_is_room():
    """A part of it is copied to an empty seq_id, so that the whole prefix can be found again."""
    cache = KVCache(200, 100, 2)
    run_and_release(cache, LONG)
    _, num_found, operations = lease(cache, [*LONG[:30], 1])
    assert (num_found, operations) == (30, [Copy(0, 1, 30)])
    assert count_found(cache, [*LONG, 1]) == 40


def test_longer_idle_prefix_moves_to_spare_seq_id():
    """When its seq_id is needed. It costs no cells there."""
    cache = KVCache(128, 100, 1, SPARE)
    run_and_release(cache, LONG)
    _, num_found, operations = lease(cache, [*LONG[:30], 1])
    assert (num_found, operations) == (30, [Copy(0, 1, 40), Trim(0, 0), Copy(1, 0, 30)])
    assert str(cache) == "<KVCache 128: held 30 idle 10 free 88>"
    assert count_found(cache, [*LONG, 1]) == 40


def test_idle_prefixes_move_to_spare_seq_ids():
    """More of them stay than sequences can run. When the spare seq_ids are full too, the least
    recently used prefix is dropped.
    """
    cache = KVCache(256, 100, 1, SPARE)
    for i in range(3):
        run_and_release(cache, [i] * 20)
    assert [count_found(cache, [i] * 30) for i in range(3)] == [20, 20, 20]
    _, _, operations = lease(cache, [9])
    assert operations == [Trim(1, 0), Copy(0, 1, 20), Trim(0, 0)]
    assert [count_found(cache, [i] * 30) for i in range(3)] == [0, 20, 20]


def test_moving_keeps_order_of_eviction():
    """A prefix that moved to a spare seq_id is evicted when it would have been evicted otherwise."""
    cache = KVCache(130, 100, 2, SPARE)
    for i in range(2):
        run_and_release(cache, [i] * 40)
    assert lease(cache, [7])[2] == [Copy(0, 2, 40), Trim(0, 0)]
    assert cache.make_room(60) == [Trim(2, 0)]


# --- prefixes in flight -------------------------------------------------------------------------


def test_prefix_in_flight_has_a_leader():
    """Waiting is better than computing it twice. There is a leader until it has computed that far."""
    cache = KVCache(256, 100, 2, UNIFIED)
    leader = start(cache, LONG, 10)
    match = match_tokens(cache, [*LONG[:35], 1])
    assert match == Match(0, None, 35, leader)
    assert match.must_wait
    compute(cache, leader, 25)
    assert match_tokens(cache, [*LONG[:35], 1]) == Match(35, cache._leased[0], 0, None)


def test_short_prefix_in_flight_is_not_awaited():
    """Fewer than MIN_SHARED_TOKENS more than the cached ones are computed instead."""
    cache = KVCache(256, 100, 2, UNIFIED)
    leader = start(cache, LONG, 39 - MIN_SHARED_TOKENS)
    assert match_tokens(cache, LONG).leader is leader
    compute(cache, leader, 1)
    assert match_tokens(cache, LONG).leader is None


def test_recurrent_state_in_flight_is_found_later():
    """It is awaited only if it can be saved when it is computed. It is then found."""
    cache = KVCache(400, 200, 2, CHECKPOINT, Snapshots(MIN_SAVED_TOKENS, 0, 1))
    leader = start(cache, LONGER, 10)
    prompt = [*LONGER[:MIN_SAVED_TOKENS], 1]
    assert match_tokens(cache, prompt) == Match(0, None, MIN_SAVED_TOKENS, leader)
    compute(cache, leader, MIN_SAVED_TOKENS - 10)
    assert cache.checkpoint(leader) == [Save(0, 0)]
    assert count_found(cache, prompt) == MIN_SAVED_TOKENS


@pytest.mark.parametrize(
    ("num_shared", "num_computed", "ram_bytes"),
    [(MIN_SAVED_TOKENS - 1, 10, 1000), (90, 10, 89), (90, 90, 1000), (90, 91, 1000)],
    ids=["too short to be saved", "too large for RAM", "not saved when it was there", "gone"],
)
def test_state_that_will_not_be_saved_is_not_awaited(num_shared, num_computed, ram_bytes):
    """``match`` promises only states that will be saved."""
    cache = KVCache(400, 200, 2, CHECKPOINT, Snapshots(ram_bytes, 0, 1))
    start(cache, LONGER, num_computed)
    assert match_tokens(cache, [*LONGER[:num_shared], 1]) == Match()


# --- room ---------------------------------------------------------------------------------------


def test_idle_prefixes_are_evicted_least_recently_used_first():
    """Several tokens at a time are evicted from their ends."""
    cache = KVCache(num_cells=180, cells_per_seq=60, max_num_seqs=3)
    seqs = [start(cache, [i] * 60) for i in range(3)]
    for i in (1, 0, 2):
        end(cache, seqs[i])
    assert cache.make_room(0) == []
    assert cache.make_room(1) == [Trim(1, 60 - MIN_EVICTED_TOKENS)]
    assert cache.make_room(MIN_EVICTED_TOKENS) == []
    assert cache.make_room(80) == [Trim(1, 0), Trim(0, 60 - MIN_EVICTED_TOKENS)]
    assert str(cache) == "<KVCache 180: held 0 idle 88 free 92>"
    cache.check()


def test_recurrent_state_is_evicted_as_a_whole():
    """It cannot be trimmed."""
    cache = KVCache(num_cells=120, cells_per_seq=60, max_num_seqs=2, layout=CHECKPOINT)
    run_and_release(cache, [1] * 60)
    run_and_release(cache, [2] * 60)
    assert cache.make_room(1) == [Trim(0, 0)]


def test_parked_prefix_is_evicted_first():
    """It is evicted before prefixes that were idle already."""
    cache = KVCache(100, 50, 3, UNIFIED)
    run_and_release(cache, [1] * 40)
    end(cache, start(cache, [2] * 40), soon=True)
    assert cache.make_room(60) == [Trim(1, 0)]


def test_copied_prefix_is_evicted_later():
    """An idle prefix that was reused is evicted after one that was not."""
    cache = KVCache(100, 60, 3, UNIFIED)
    run_and_release(cache, LONG)
    run_and_release(cache, [1] * 40)
    assert lease(cache, [*LONG[:20], 2])[2] == [Copy(0, 2, 20)]
    assert cache.make_room(60) == [Trim(1, 0)]


def test_evicting_fork_keeps_shared_cells():
    """Shared cells are not freed, so the whole fork is evicted, and then the next prefix."""
    cache = KVCache(100, 80, 2, UNIFIED)
    first = start(cache, [1] * 40)
    second = start(cache, [*[1] * 40, 2, 2])
    end(cache, second)
    end(cache, first)
    assert str(cache) == "<KVCache 100: held 0 idle 42 free 58>"
    assert cache.make_room(61) == [Trim(1, 0), Trim(0, 0)]


def test_make_room_returns_none_if_running_sequences_hold_too_much():
    """Including cells that idle prefixes share with them. Nothing changes."""
    cache = KVCache(100, 80, 3, UNIFIED)
    run_and_release(cache, LONG)
    start(cache, [*LONG[:30], *[1] * 20])
    before = str(cache)
    assert before == "<KVCache 100: held 50 idle 10 free 40>"
    assert cache.make_room(51) is None
    assert str(cache) == before
    assert cache.make_room(50) == [Trim(0, 0)]


def test_rewind_frees_cells_of_rejected_tokens():
    """The cells of wrong ones are free again."""
    cache = KVCache(100, 80, 1, UNIFIED)
    seq = start(cache, LONG)
    cache.hold(0, 5)
    assert cache.rewind(0, 42) == [Trim(0, 42)]
    assert str(cache) == "<KVCache 100: held 42 idle 0 free 58>"
    seq.tokens += [1, 2]
    seq.num_computed_tokens = 42
    end(cache, seq)
    assert count_found(cache, [*LONG, 1, 2, 3]) == 42


def test_release_without_tokens_leaves_no_idle_prefix():
    """Released without tokens, a seq_id has no idle entry."""
    cache = KVCache(50, 50, 1)
    seq = start(cache, LONG)
    cache.release(seq.seq_id, [])
    assert str(cache) == "<KVCache 50: held 0 idle 0 free 50>"
    cache.check()


def test_invalidated_seq_ids_are_emptied():
    """Cells that a failed step affected are neither found nor saved. Spare seq_ids can be among
    them.
    """
    cache = KVCache(300, 100, 1, SPARE, Snapshots(1000, 0, 1))
    run_and_release(cache, LONGER)
    run_and_release(cache, [1] * 80)
    assert [count_found(cache, tokens) for tokens in (LONGER, [1] * 80)] == [99, 79]
    assert cache.invalidate_seq_ids({0, 1}) == [Trim(0, 0), Trim(1, 0)]
    cache.check()
    assert str(cache) == "<KVCache 300: held 0 idle 0 free 300>"
    assert [count_found(cache, tokens) for tokens in (LONGER, [1] * 80)] == [0, 0]
    assert len(cache.snapshots) == 0


# --- snapshots ----------------------------------------------------------------------------------


def make_cache_with_ram(
    ram_bytes: int = 1000, disk_bytes: int = 1000, layout: Layout = UNIFIED
) -> KVCache:
    """Return a cache of 120 cells for two sequences of up to 120 tokens, where a token takes one
    byte.
    """
    return KVCache(120, 120, 2, layout, Snapshots(ram_bytes, disk_bytes, 1))


def test_evicted_prefix_is_loaded_from_ram():
    """Only the needed part is loaded."""
    cache = make_cache_with_ram()
    run_and_release(cache, LONGER)
    assert cache.make_room(120) == [Save(0, 0), Trim(0, 0)]
    match = match_tokens(cache, [*LONGER[:80], 1])
    assert (match.num_tokens, match.source.key, match.must_wait) == (80, 0, False)
    seq, num_found, operations = lease(cache, [*LONGER[:80], 1])
    assert (num_found, operations) == (80, [Load(0, seq.seq_id, 80)])
    assert str(cache) == "<KVCache 120: held 80 idle 0 free 40>"


def test_load_makes_room_for_whole_snapshot():
    """The backend can only load it as a whole and then trim it."""
    cache = make_cache_with_ram()
    run_and_release(cache, LONGER)
    cache.make_room(120)
    run_and_release(cache, [1] * 30)
    _, num_found, operations = lease(cache, [*LONGER[:70], 1])
    assert (num_found, operations) == (70, [Trim(0, 0), Load(0, 1, 70)])
    assert str(cache) == "<KVCache 120: held 70 idle 0 free 50>"


def test_lease_returns_none_if_load_does_not_fit():
    """If running sequences hold too many cells. Nothing changes."""
    cache = make_cache_with_ram()
    run_and_release(cache, LONGER)
    cache.make_room(120)
    running = start(cache, [1] * 30)
    before = str(cache)
    assert cache.lease(sequence([*LONGER[:70], 1]), match_tokens(cache, [*LONGER[:70], 1])) is None
    assert str(cache) == before
    cache.check()
    end(cache, running)
    assert lease(cache, [*LONGER[:70], 1])[1] == 70


@pytest.mark.parametrize(
    ("tokens", "ram_bytes"),
    [(LONGER[: MIN_SAVED_TOKENS - 1], 1000), (LONGER, 99), (LONGER, 0)],
    ids=["too few", "too large for RAM", "no RAM"],
)
def test_prefix_that_is_not_worth_saving_is_dropped(tokens, ram_bytes):
    """It is given up without a copy."""
    cache = make_cache_with_ram(ram_bytes)
    run_and_release(cache, tokens)
    assert cache.make_room(120) == [Trim(0, 0)]
    assert len(cache.snapshots) == 0


def test_prefix_stored_elsewhere_is_not_saved():
    """It is part of another prefix in the cells or in RAM."""
    cache = make_cache_with_ram()
    run_and_release(cache, LONGER[:80])
    assert start(cache, [*LONGER[:80], 1, 2]).seq_id == 0
    assert lease(cache, [*LONGER[:80], 3])[2] == [Copy(0, 1, 80)]
    cache.release(0, [*LONGER[:80], 1, 2])
    cache.release(1, LONGER[:80], soon=True)
    assert cache.make_room(40) == [Trim(1, 0), Save(0, 0), Trim(0, 82 - MIN_EVICTED_TOKENS)]
    assert cache.make_room(120) == [Trim(0, 0)], "what is left of it is part of the snapshot"
    cache.check()


def test_longer_snapshot_replaces_shorter_one():
    """The turns of a chat are one snapshot."""
    cache = make_cache_with_ram()
    run_and_release(cache, LONGER[:70])
    cache.make_room(120)
    seq = start(cache, LONGER)
    end(cache, seq)
    assert cache.make_room(120) == [Drop(0), Save(seq.seq_id, 1), Trim(seq.seq_id, 0)]
    assert list(cache.snapshots.ram) == [1]
    cache.check()


def test_snapshot_with_other_end_is_not_replaced():
    """Two conversations that begin alike both stay in RAM."""
    cache = make_cache_with_ram(1000)
    run_and_release(cache, LONGER[:70])
    cache.make_room(120)
    seq = start(cache, [*LONGER[:60], *range(500, 530)])
    end(cache, seq)
    operations = cache.make_room(120)
    assert Save(seq.seq_id, 1) in operations
    assert Drop(0) not in operations
    assert list(cache.snapshots.ram) == [0, 1]
    cache.check()


def test_file_of_replaced_snapshot_is_still_tracked():
    """Otherwise it would never be deleted, and the folder would exceed its budget."""
    cache = make_cache_with_ram()
    run_and_release(cache, LONGER[:70])
    cache.make_room(120)
    cache.snapshots.record_written(0)
    seq = start(cache, LONGER)
    end(cache, seq)
    assert cache.make_room(120) == [Drop(0), Save(seq.seq_id, 1), Trim(seq.seq_id, 0)]
    assert (list(cache.snapshots.ram), list(cache.snapshots.files)) == ([1], [0])
    cache.check()


def test_snapshots_of_recurrent_state_do_not_replace_each_other():
    """Each is the state at one position only."""
    cache = make_cache_with_ram(layout=CHECKPOINT)
    seq = start(cache, LONGER, 70)
    assert cache.checkpoint(seq) == [Save(0, 0)]
    assert cache.checkpoint(seq) == [], "it is there"
    compute(cache, seq, 20)
    assert cache.checkpoint(seq) == [Save(0, 1)]
    assert [count_found(cache, [*LONGER[:n], 1]) for n in (69, 70, 80, 90, 95)] == [
        0,
        70,
        70,
        90,
        90,
    ]


def test_least_recently_used_snapshots_leave_ram_first():
    """A snapshot without a file is then lost. A loaded one stays longer."""
    cache = KVCache(100, 100, 1, UNIFIED, Snapshots(200, 0, 1))
    for i in range(2):
        run_and_release(cache, [i] * 90)
    run_and_release(cache, [0] * 90)
    run_and_release(cache, [2] * 90)
    cache.make_room(100)
    assert [count_found(cache, [i] * 100) for i in range(3)] == [90, 0, 90]
    cache.check()


def test_snapshot_being_loaded_is_not_evicted():
    """The seq_id or the room that a load needs may evict another prefix, whose copy must not
    replace the loaded one.
    """
    cache = KVCache(100, 100, 1, UNIFIED, Snapshots(100, 0, 1))
    run_and_release(cache, LONGER[:90])
    assert lease(cache, [1] * 90)[2] == [Save(0, 0), Trim(0, 0)]
    cache.hold(0, 90)
    cache.release(0, [1] * 90)
    _, num_found, operations = lease(cache, [*LONGER[:90], 1])
    assert (num_found, operations) == (90, [Trim(0, 0), Load(0, 0, 90)])


def test_snapshot_being_loaded_is_not_replaced():
    """A longer snapshot of a prefix that leaves the cells for it does not replace it either."""
    cache = KVCache(600, 600, 1, Partitioned(), Snapshots(1000, 0, 1))
    tokens = list(range(500))
    run_and_release(cache, tokens[:400])
    cache.make_room(600)
    run_and_release(cache, tokens)
    operations = lease(cache, [*tokens[:400], 7])[2]
    assert operations == [Save(0, 1), Trim(0, 0), Load(0, 0, 400)]
    assert list(cache.snapshots.ram) == [1, 0]


def test_snapshot_in_file_is_read_before_use():
    """All sequences that need it wait until it has been read."""
    cache = make_cache_with_ram()
    snapshot = cache.snapshots.add_from_file(np.array(LONGER, np.int32))
    match = match_tokens(cache, [*LONGER, 1])
    assert (match.num_tokens, match.source, match.must_wait) == (100, snapshot, True)
    assert cache.snapshots.read(snapshot) == []
    assert match_tokens(cache, [*LONGER, 1]).must_wait
    snapshot.tier = StorageTier.RAM
    assert lease(cache, [*LONGER, 1])[1:] == (100, [Load(snapshot.key, 0, 100)])


def test_faster_tier_is_preferred():
    """Cells are preferred to RAM and RAM to disk, unless the slower tier has clearly more tokens."""
    cache = make_cache_with_ram()
    cache.snapshots.add_from_file(np.array(LONGER, np.int32))
    assert run_and_release(cache, [*LONGER[:97], 7, 7]) == 0
    match = match_tokens(cache, [*LONGER, 1])
    assert (match.num_tokens, match.source.chain.length) == (97, 99)
    cache.make_room(120)
    match = match_tokens(cache, [*LONGER, 1])
    assert (match.num_tokens, match.source.tier) == (97, StorageTier.RAM)
    cache.snapshots.drop(match.source.key)
    run_and_release(cache, [*LONGER[:80], 7, 7])
    match = match_tokens(cache, [*LONGER, 1])
    assert (match.num_tokens, match.source.tier) == (100, StorageTier.DISK)


def test_reading_makes_room_in_ram():
    """Other snapshots are evicted for it, or it cannot be read."""
    cache = make_cache_with_ram(ram_bytes=150)
    run_and_release(cache, [1] * 100)
    cache.make_room(120)
    small = cache.snapshots.add_from_file(np.array(LONGER, np.int32))
    large = cache.snapshots.add_from_file(np.arange(151, dtype=np.int32))
    assert cache.snapshots.read(large) is None
    assert cache.snapshots.find(large.key) is None, "it can never be read"
    assert cache.snapshots.read(small) == [Drop(0)]
    assert count_found(cache, [1] * 100) == 0
    cache.check()
    assert cache.snapshots.drop(small.key) == cache.snapshots.drop(77) == []
    cache.check()
    assert len(cache.snapshots) == 0


def test_snapshot_longer_than_context_is_no_match():
    """No seq_id has enough cells to load it, so not even its first tokens can be reused."""
    cache = make_cache_with_ram()
    cache.snapshots.add_from_file(np.arange(120, dtype=np.int32))
    assert count_found(cache, list(range(100))) == 99
    cache.snapshots.add_from_file(np.arange(500, 621, dtype=np.int32))
    assert count_found(cache, list(range(500, 600))) == 0


def test_file_outlives_ram_until_evicted():
    """When there are too many files, the oldest is deleted and no longer found."""
    cache = KVCache(100, 100, 1, UNIFIED, Snapshots(100, 150, 1))
    for i in range(3):
        run_and_release(cache, [i] * 90)
        cache.make_room(100)
        cache.snapshots.record_written(i)
        assert list(cache.snapshots.files) == [i]
    assert [count_found(cache, [i] * 100) for i in range(3)] == [0, 0, 90]
    cache.check()


def test_file_of_evicted_snapshot_is_deleted():
    """A snapshot that left RAM while it was being written is unknown, so its file must be deleted."""
    cache = KVCache(100, 100, 1, UNIFIED, Snapshots(100, 150, 1))
    for i in range(2):
        run_and_release(cache, [i] * 90)
        cache.make_room(100)
    for i in range(2):
        cache.snapshots.record_written(i)
    assert list(cache.snapshots.files) == [1]
    cache.check()


@pytest.mark.parametrize(
    ("ram_bytes", "disk_bytes"), [(1000, 1000), (1000, 100), (100, 1000), (100, 100)]
)
def test_idle_prefixes_are_saved_once(ram_bytes, disk_bytes):
    """Most recently used first, whatever the budgets are."""
    cache = KVCache(300, 100, 3, UNIFIED, Snapshots(ram_bytes, disk_bytes, 1))
    for i in range(3):
        run_and_release(cache, [i] * 90)
    saves = []
    while operations := cache.save_one_idle():
        saves += [operation for operation in operations if isinstance(operation, Save)]
        cache.snapshots.record_written(saves[-1].snapshot)
        cache.check()
    assert saves == [Save(2, 0), Save(1, 1), Save(0, 2)]
    assert [count_found(cache, [i] * 100) for i in range(3)] == [90, 90, 90]


# --- invariants ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: setattr(cache.cells, "num_held", 7),
        lambda cache: setattr(cache.cells, "num_used", 7),
        lambda cache: setattr(cache.cells, "size", 39),
        lambda cache: cache.hold(1, 101),
        lambda cache: cache.seq_ids.give_back(1),
        lambda cache: cache._idle.update({1: cache._idle[0]}),
        lambda cache: cache._idle.pop(0),
        lambda cache: setattr(cache._idle[0], "seq_id", 3),
        lambda cache: setattr(cache._idle[0], "path", cache._idle[0].path[:-1]),
        lambda cache: setattr(cache._leased[1], "seq", None),
        lambda cache: cache._spare.pop(),
        lambda cache: cache._tree.remove(cache._idle[0]),
        lambda cache: setattr(cache.snapshots, "num_ram_bytes", 7),
    ],
    ids=[
        "held",
        "used",
        "more than exist",
        "a sequence too long",
        "no lease",
        "leased and idle",
        "idle and lost",
        "under a wrong number",
        "other tokens than cells",
        "no owner of the lease",
        "a spare seq_id lost",
        "not in the tree",
        "RAM",
    ],
)
def test_check_detects_broken_invariants(damage):
    """Each test case breaks one invariant."""
    cache = KVCache(200, 100, 2, SPARE, Snapshots(1000, 0, 1))
    running = start(cache, LONG)
    lease(cache, [1])
    end(cache, running)
    assert (cache._idle.keys(), cache._leased.keys()) == ({0}, {1})
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check()
