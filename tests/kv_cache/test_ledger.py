"""The ledger: cells are counted and never lost, idle and saved prefixes are found again, and
its operations match its records.
"""

from __future__ import annotations

import numpy as np
import pytest

from cllm.core.batch import Copy, Drop, Load, Operation, Save, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.kv_cache.base import Match
from cllm.kv_cache.layouts import Layout, Partitioned, Unified
from cllm.kv_cache.ledger import MIN_EVICTED_TOKENS, MIN_SHARED_TOKENS, Ledger
from cllm.kv_cache.model_state import Recurrent
from cllm.kv_cache.snapshots import MIN_SAVED_TOKENS
from cllm.kv_cache.tiers import StorageTier, Tiers

UNIFIED = Unified()
SPARE = Unified(num_spare_ids=2)
CHECKPOINT = Partitioned(Recurrent())

LONG = list(range(100, 140))  # long enough to be kept
LONGER = list(range(100, 200))  # long enough to be saved


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request("A", tokens, SamplingParams()), 0, 0, 1024)


def lease(ledger: Ledger, tokens: list[int]) -> tuple[Sequence, int, list[Operation]]:
    """Lease a seq_id for ``tokens`` with their best match; return (sequence, number of tokens
    found, operations).
    """
    seq = sequence(tokens)
    leased = ledger.lease(seq, ledger.match(tokens))
    assert leased is not None
    seq.seq_id, seq.num_computed_tokens, operations = leased
    ledger.check()
    return seq, seq.num_computed_tokens, operations


def compute(ledger: Ledger, seq: Sequence, count: int | None = None) -> list[Operation]:
    """Compute ``count`` more tokens of ``seq``, all if None; return the operations that made room."""
    count = seq.num_lacking_tokens if count is None else count
    operations = ledger.make_room(count)
    assert operations is not None
    ledger.hold(seq.seq_id, count)
    seq.num_computed_tokens += count
    ledger.check()
    return operations


def start(ledger: Ledger, tokens: list[int], count: int | None = None) -> Sequence:
    """Return a running sequence that has computed ``count`` of its tokens, all if None."""
    seq, _, _ = lease(ledger, tokens)
    compute(ledger, seq, count)
    return seq


def end(ledger: Ledger, seq: Sequence, *, soon: bool = False) -> None:
    ledger.release(seq.seq_id, seq.tokens[: seq.num_computed_tokens], soon=soon)
    ledger.check()


def run_and_release(ledger: Ledger, tokens: list[int]) -> int:
    """Lease a seq_id, compute ``tokens`` and release it."""
    seq = start(ledger, tokens)
    end(ledger, seq)
    return seq.seq_id


def count_found(ledger: Ledger, tokens: list[int]) -> int:
    return ledger.match(tokens).num_tokens


# --- counting and finding -----------------------------------------------------------------------


def test_cells_move_from_free_to_held_to_idle():
    """The text form of the ledger shows them, and the three numbers add up."""
    ledger = Ledger(num_cells=64, cells_per_seq=64, max_num_seqs=2)
    assert str(ledger) == "<Ledger 64: held 0 idle 0 free 64>"
    seq, num_found, operations = lease(ledger, [1, 2, 3])
    assert (seq.seq_id, num_found, operations) == (0, 0, [])
    compute(ledger, seq)
    assert str(ledger) == "<Ledger 64: held 3 idle 0 free 61>"
    assert ledger.count_cells(0) == 3
    end(ledger, seq)
    assert str(ledger) == "<Ledger 64: held 0 idle 3 free 61>"


def test_pool_smaller_than_sequence_is_rejected():
    """A sequence could wait forever."""
    with pytest.raises(ValueError, match="must be at least cells_per_seq"):
        Ledger(num_cells=9, cells_per_seq=10, max_num_seqs=1)


def test_lease_raises_if_all_seq_ids_are_leased():
    """Spare seq_ids are not leased."""
    ledger = Ledger(128, 64, 2, SPARE)
    assert [lease(ledger, [1])[0].seq_id for _ in range(2)] == [0, 1]
    with pytest.raises(IndexError):
        ledger.lease(sequence([1]), Match())


def test_longest_idle_prefix_is_found():
    """Among prefixes that begin like the prompt, the one that shares most tokens is chosen."""
    ledger = Ledger(num_cells=384, cells_per_seq=128, max_num_seqs=3)
    seqs = [start(ledger, [i]) for i in range(3)]
    for seq, tokens in zip(seqs, [LONG[:20], [*LONG[:30], 7, 7], [8] * 20], strict=True):
        seq.tokens = tokens
        compute(ledger, seq)
        end(ledger, seq)
    match = ledger.match(LONG)
    assert (match.num_tokens, match.source.seq_id, match.must_wait) == (30, 1, False)


def test_continuation_reuses_cells_in_place():
    """If all idle tokens are a prefix of the prompt, no operation is necessary."""
    for layout in (Partitioned(), UNIFIED, SPARE, CHECKPOINT):
        ledger = Ledger(128, 64, 2, layout)
        assert run_and_release(ledger, LONG) == 0
        seq, num_found, operations = lease(ledger, [*LONG, 1, 2])
        assert (seq.seq_id, num_found, operations) == (0, len(LONG), [])


def test_few_surplus_tokens_are_dropped_instead_of_copying():
    """If cells cannot be shared, dropping the end of an idle prefix is cheaper than copying the
    rest of it.
    """
    answered, question = [*LONGER, 1, 2, 3], [*LONGER, 7, 8]
    ledger = Ledger(256, 128, 2, tiers=Tiers(1000, 0, 1))
    run_and_release(ledger, answered)
    assert lease(ledger, question)[2] == [Trim(0, len(LONGER))]
    ledger = Ledger(256, 128, 2, tiers=Tiers(1000, 0, 1))
    run_and_release(ledger, [*answered, 4])
    assert lease(ledger, question)[2] == [Copy(0, 1, len(LONGER))], (
        "recomputing a 32nd of the tokens costs as much as the copy"
    )


def test_last_prompt_token_is_recomputed():
    """Its logits are needed, even if the whole prompt is cached."""
    ledger = Ledger(64, 64, 1)
    run_and_release(ledger, LONG)
    seq, num_found, operations = lease(ledger, LONG)
    assert (seq.seq_id, num_found, operations) == (0, len(LONG) - 1, [Trim(0, len(LONG) - 1)])


@pytest.mark.parametrize(
    ("num_shared", "reused"), [(MIN_SHARED_TOKENS - 1, 0), (MIN_SHARED_TOKENS, MIN_SHARED_TOKENS)]
)
def test_prefix_below_min_shared_tokens_is_not_found(num_shared, reused):
    """Below MIN_SHARED_TOKENS nothing is found."""
    ledger = Ledger(64, 64, 2, UNIFIED)
    run_and_release(ledger, LONG[:20])
    assert count_found(ledger, [*LONG[:num_shared], 1, 2, 3]) == reused


def test_idle_prefix_outlives_unrelated_sequences():
    """They get empty seq_ids first, and then the least recently used one."""
    ledger = Ledger(num_cells=192, cells_per_seq=64, max_num_seqs=3)
    assert [run_and_release(ledger, [i] * 20) for i in range(5)] == [0, 1, 2, 0, 1]
    assert [count_found(ledger, [i] * 30) for i in range(5)] == [0, 0, 20, 20, 20]


def test_leased_seq_ids_stay_adjacent():
    """If gaps between leased seq_ids cost passes, a gap is filled first, then an end is extended."""
    ledger = Ledger(num_cells=400, cells_per_seq=50, max_num_seqs=8)
    seqs = [start(ledger, [i] * 20) for i in range(4)]
    for seq in seqs:
        end(ledger, seq)
    seqs = [lease(ledger, [9])[0] for _ in range(4)]
    assert [seq.seq_id for seq in seqs] == [4, 5, 6, 7]
    end(ledger, seqs[1])
    assert lease(ledger, [9])[0].seq_id == 5
    assert lease(ledger, [9])[0].seq_id == 3


# --- sharing ------------------------------------------------------------------------------------


def test_prefix_of_running_sequence_is_shared():
    """In the unified layout a copy takes no cells, and shared cells count once until their last
    owner releases them.
    """
    ledger = Ledger(128, 100, 3, UNIFIED)
    first = start(ledger, LONG)
    match = ledger.match([*LONG, 1, 2])
    assert ledger.num_shared(match) == 40
    second, num_found, operations = lease(ledger, [*LONG, 1, 2])
    assert (num_found, operations) == (40, [Copy(0, 1, 40)])
    compute(ledger, second)
    assert str(ledger) == "<Ledger 128: held 42 idle 0 free 86>"
    end(ledger, first)
    assert str(ledger) == "<Ledger 128: held 42 idle 0 free 86>"
    end(ledger, second)
    assert str(ledger) == "<Ledger 128: held 0 idle 42 free 86>"


def test_only_computed_tokens_are_copied():
    """The source is a sequence whose prompt is still being computed."""
    ledger = Ledger(128, 100, 2, UNIFIED)
    start(ledger, LONG, 30)
    assert ledger.match(LONG)[:2] == (30, ledger._leased[0])
    assert lease(ledger, LONG)[1:] == (30, [Copy(0, 1, 30)])


def test_copy_takes_cells_in_partitioned_layout():
    """Each has its own."""
    ledger = Ledger(200, 100, 2)
    start(ledger, LONG)
    _, num_found, operations = lease(ledger, [*LONG, 1])
    assert (num_found, operations) == (40, [Copy(0, 1, 40)])
    assert str(ledger) == "<Ledger 200: held 80 idle 0 free 120>"
    assert ledger.num_shared(ledger.match([*LONG, 1])) == 0


def test_longer_idle_prefix_stays_if_there_is_room():
    """A part of it is copied to an empty seq_id, so that the whole prefix can be found again."""
    ledger = Ledger(200, 100, 2)
    run_and_release(ledger, LONG)
    _, num_found, operations = lease(ledger, [*LONG[:30], 1])
    assert (num_found, operations) == (30, [Copy(0, 1, 30)])
    assert count_found(ledger, [*LONG, 1]) == 40


def test_longer_idle_prefix_moves_to_spare_seq_id():
    """When its seq_id is needed. It costs no cells there."""
    ledger = Ledger(128, 100, 1, SPARE)
    run_and_release(ledger, LONG)
    _, num_found, operations = lease(ledger, [*LONG[:30], 1])
    assert (num_found, operations) == (30, [Copy(0, 1, 40), Trim(0, 0), Copy(1, 0, 30)])
    assert str(ledger) == "<Ledger 128: held 30 idle 10 free 88>"
    assert count_found(ledger, [*LONG, 1]) == 40


def test_idle_prefixes_move_to_spare_seq_ids():
    """More of them stay than sequences can run. When the spare seq_ids are full too, the least
    recently used prefix is dropped.
    """
    ledger = Ledger(256, 100, 1, SPARE)
    for i in range(3):
        run_and_release(ledger, [i] * 20)
    assert [count_found(ledger, [i] * 30) for i in range(3)] == [20, 20, 20]
    _, _, operations = lease(ledger, [9])
    assert operations == [Trim(1, 0), Copy(0, 1, 20), Trim(0, 0)]
    assert [count_found(ledger, [i] * 30) for i in range(3)] == [0, 20, 20]


def test_moving_keeps_order_of_eviction():
    """A prefix that moved to a spare seq_id is evicted when it would have been evicted otherwise."""
    ledger = Ledger(130, 100, 2, SPARE)
    for i in range(2):
        run_and_release(ledger, [i] * 40)
    assert lease(ledger, [7])[2] == [Copy(0, 2, 40), Trim(0, 0)]
    assert ledger.make_room(60) == [Trim(2, 0)]


# --- prefixes in flight -------------------------------------------------------------------------


def test_prefix_in_flight_has_a_leader():
    """Waiting is better than computing it twice. There is a leader until it has computed that far."""
    ledger = Ledger(256, 100, 2, UNIFIED)
    leader = start(ledger, LONG, 10)
    match = ledger.match([*LONG[:35], 1])
    assert match == Match(0, None, 35, leader)
    assert match.must_wait
    compute(ledger, leader, 25)
    assert ledger.match([*LONG[:35], 1]) == Match(35, ledger._leased[0], 0, None)


def test_short_prefix_in_flight_is_not_awaited():
    """Fewer than MIN_SHARED_TOKENS more than the cached ones are computed instead."""
    ledger = Ledger(256, 100, 2, UNIFIED)
    leader = start(ledger, LONG, 39 - MIN_SHARED_TOKENS)
    assert ledger.match(LONG).leader is leader
    compute(ledger, leader, 1)
    assert ledger.match(LONG).leader is None


def test_recurrent_state_in_flight_is_found_later():
    """It is awaited only if it can be saved when it is computed. It is then found."""
    ledger = Ledger(400, 200, 2, CHECKPOINT, Tiers(MIN_SAVED_TOKENS, 0, 1))
    leader = start(ledger, LONGER, 10)
    prompt = [*LONGER[:MIN_SAVED_TOKENS], 1]
    assert ledger.match(prompt) == Match(0, None, MIN_SAVED_TOKENS, leader)
    compute(ledger, leader, MIN_SAVED_TOKENS - 10)
    assert ledger.checkpoint(leader) == [Save(0, 0)]
    assert count_found(ledger, prompt) == MIN_SAVED_TOKENS


@pytest.mark.parametrize(
    ("num_shared", "num_computed", "ram_bytes"),
    [(MIN_SAVED_TOKENS - 1, 10, 1000), (90, 10, 89), (90, 90, 1000), (90, 91, 1000)],
    ids=["too short to be saved", "too large for RAM", "not saved when it was there", "gone"],
)
def test_state_that_will_not_be_saved_is_not_awaited(num_shared, num_computed, ram_bytes):
    """``match`` promises only states that will be saved."""
    ledger = Ledger(400, 200, 2, CHECKPOINT, Tiers(ram_bytes, 0, 1))
    start(ledger, LONGER, num_computed)
    assert ledger.match([*LONGER[:num_shared], 1]) == Match()


# --- room ---------------------------------------------------------------------------------------


def test_idle_prefixes_are_evicted_least_recently_used_first():
    """Several tokens at a time are evicted from their ends."""
    ledger = Ledger(num_cells=180, cells_per_seq=60, max_num_seqs=3)
    seqs = [start(ledger, [i] * 60) for i in range(3)]
    for i in (1, 0, 2):
        end(ledger, seqs[i])
    assert ledger.make_room(0) == []
    assert ledger.make_room(1) == [Trim(1, 60 - MIN_EVICTED_TOKENS)]
    assert ledger.make_room(MIN_EVICTED_TOKENS) == []
    assert ledger.make_room(80) == [Trim(1, 0), Trim(0, 60 - MIN_EVICTED_TOKENS)]
    assert str(ledger) == "<Ledger 180: held 0 idle 88 free 92>"
    ledger.check()


def test_recurrent_state_is_evicted_as_a_whole():
    """It cannot be trimmed."""
    ledger = Ledger(num_cells=120, cells_per_seq=60, max_num_seqs=2, layout=CHECKPOINT)
    run_and_release(ledger, [1] * 60)
    run_and_release(ledger, [2] * 60)
    assert ledger.make_room(1) == [Trim(0, 0)]


def test_parked_prefix_is_evicted_first():
    """It is evicted before prefixes that were idle already."""
    ledger = Ledger(100, 50, 3, UNIFIED)
    run_and_release(ledger, [1] * 40)
    end(ledger, start(ledger, [2] * 40), soon=True)
    assert ledger.make_room(60) == [Trim(1, 0)]


def test_copied_prefix_is_evicted_later():
    """An idle prefix that was reused is evicted after one that was not."""
    ledger = Ledger(100, 60, 3, UNIFIED)
    run_and_release(ledger, LONG)
    run_and_release(ledger, [1] * 40)
    assert lease(ledger, [*LONG[:20], 2])[2] == [Copy(0, 2, 20)]
    assert ledger.make_room(60) == [Trim(1, 0)]


def test_evicting_fork_keeps_shared_cells():
    """Shared cells are not freed, so the whole fork is evicted, and then the next prefix."""
    ledger = Ledger(100, 80, 2, UNIFIED)
    first = start(ledger, [1] * 40)
    second = start(ledger, [*[1] * 40, 2, 2])
    end(ledger, second)
    end(ledger, first)
    assert str(ledger) == "<Ledger 100: held 0 idle 42 free 58>"
    assert ledger.make_room(61) == [Trim(1, 0), Trim(0, 0)]


def test_make_room_returns_none_if_running_sequences_hold_too_much():
    """Including cells that idle prefixes share with them. Nothing changes."""
    ledger = Ledger(100, 80, 3, UNIFIED)
    run_and_release(ledger, LONG)
    start(ledger, [*LONG[:30], *[1] * 20])
    before = str(ledger)
    assert before == "<Ledger 100: held 50 idle 10 free 40>"
    assert ledger.make_room(51) is None
    assert str(ledger) == before
    assert ledger.make_room(50) == [Trim(0, 0)]


def test_rewind_frees_cells_of_rejected_tokens():
    """The cells of wrong ones are free again."""
    ledger = Ledger(100, 80, 1, UNIFIED)
    seq = start(ledger, LONG)
    ledger.hold(0, 5)
    assert ledger.rewind(0, 42) == [Trim(0, 42)]
    assert str(ledger) == "<Ledger 100: held 42 idle 0 free 58>"
    seq.tokens += [1, 2]
    seq.num_computed_tokens = 42
    end(ledger, seq)
    assert count_found(ledger, [*LONG, 1, 2, 3]) == 42


def test_release_without_tokens_leaves_no_idle_prefix():
    """Released without tokens, a seq_id has no idle entry."""
    ledger = Ledger(50, 50, 1)
    seq = start(ledger, LONG)
    ledger.release(seq.seq_id, [])
    assert str(ledger) == "<Ledger 50: held 0 idle 0 free 50>"
    ledger.check()


def test_invalidated_seq_ids_are_emptied():
    """Cells that a failed step affected are neither found nor saved. Spare seq_ids can be among
    them.
    """
    ledger = Ledger(300, 100, 1, SPARE, Tiers(1000, 0, 1))
    run_and_release(ledger, LONGER)
    run_and_release(ledger, [1] * 80)
    assert [count_found(ledger, tokens) for tokens in (LONGER, [1] * 80)] == [99, 79]
    assert ledger.invalidate_seq_ids({0, 1}) == [Trim(0, 0), Trim(1, 0)]
    ledger.check()
    assert str(ledger) == "<Ledger 300: held 0 idle 0 free 300>"
    assert [count_found(ledger, tokens) for tokens in (LONGER, [1] * 80)] == [0, 0]
    assert len(ledger.snapshots.tiers) == 0


# --- snapshots ----------------------------------------------------------------------------------


def make_ledger_with_ram(
    ram_bytes: int = 1000, disk_bytes: int = 1000, layout: Layout = UNIFIED
) -> Ledger:
    """Return a ledger of 120 cells for two sequences of up to 120 tokens, where a token takes one
    byte.
    """
    return Ledger(120, 120, 2, layout, Tiers(ram_bytes, disk_bytes, 1))


def test_evicted_prefix_is_loaded_from_ram():
    """Only the needed part is loaded."""
    ledger = make_ledger_with_ram()
    run_and_release(ledger, LONGER)
    assert ledger.make_room(120) == [Save(0, 0), Trim(0, 0)]
    match = ledger.match([*LONGER[:80], 1])
    assert (match.num_tokens, match.source.key, match.must_wait) == (80, 0, False)
    seq, num_found, operations = lease(ledger, [*LONGER[:80], 1])
    assert (num_found, operations) == (80, [Load(0, seq.seq_id, 80)])
    assert str(ledger) == "<Ledger 120: held 80 idle 0 free 40>"


def test_load_makes_room_for_whole_snapshot():
    """The backend can only load it as a whole and then trim it."""
    ledger = make_ledger_with_ram()
    run_and_release(ledger, LONGER)
    ledger.make_room(120)
    run_and_release(ledger, [1] * 30)
    _, num_found, operations = lease(ledger, [*LONGER[:70], 1])
    assert (num_found, operations) == (70, [Trim(0, 0), Load(0, 1, 70)])
    assert str(ledger) == "<Ledger 120: held 70 idle 0 free 50>"


def test_lease_returns_none_if_load_does_not_fit():
    """If running sequences hold too many cells. Nothing changes."""
    ledger = make_ledger_with_ram()
    run_and_release(ledger, LONGER)
    ledger.make_room(120)
    running = start(ledger, [1] * 30)
    before = str(ledger)
    assert ledger.lease(sequence([*LONGER[:70], 1]), ledger.match([*LONGER[:70], 1])) is None
    assert str(ledger) == before
    ledger.check()
    end(ledger, running)
    assert lease(ledger, [*LONGER[:70], 1])[1] == 70


@pytest.mark.parametrize(
    ("tokens", "ram_bytes"),
    [(LONGER[: MIN_SAVED_TOKENS - 1], 1000), (LONGER, 99), (LONGER, 0)],
    ids=["too few", "too large for RAM", "no RAM"],
)
def test_prefix_that_is_not_worth_saving_is_dropped(tokens, ram_bytes):
    """It is given up without a copy."""
    ledger = make_ledger_with_ram(ram_bytes)
    run_and_release(ledger, tokens)
    assert ledger.make_room(120) == [Trim(0, 0)]
    assert len(ledger.snapshots.tiers) == 0


def test_prefix_stored_elsewhere_is_not_saved():
    """It is part of another prefix in the cells or in RAM."""
    ledger = make_ledger_with_ram()
    run_and_release(ledger, LONGER[:80])
    assert start(ledger, [*LONGER[:80], 1, 2]).seq_id == 0
    assert lease(ledger, [*LONGER[:80], 3])[2] == [Copy(0, 1, 80)]
    ledger.release(0, [*LONGER[:80], 1, 2])
    ledger.release(1, LONGER[:80], soon=True)
    assert ledger.make_room(40) == [Trim(1, 0), Save(0, 0), Trim(0, 82 - MIN_EVICTED_TOKENS)]
    assert ledger.make_room(120) == [Trim(0, 0)], "what is left of it is part of the snapshot"
    ledger.check()


def test_longer_snapshot_replaces_shorter_one():
    """The turns of a chat are one snapshot."""
    ledger = make_ledger_with_ram()
    run_and_release(ledger, LONGER[:70])
    ledger.make_room(120)
    seq = start(ledger, LONGER)
    end(ledger, seq)
    assert ledger.make_room(120) == [Drop(0), Save(seq.seq_id, 1), Trim(seq.seq_id, 0)]
    assert list(ledger.snapshots.tiers.ram) == [1]
    ledger.check()


def test_snapshot_with_other_end_is_not_replaced():
    """Two conversations that begin alike both stay in RAM."""
    ledger = make_ledger_with_ram(1000)
    run_and_release(ledger, LONGER[:70])
    ledger.make_room(120)
    seq = start(ledger, [*LONGER[:60], *range(500, 530)])
    end(ledger, seq)
    operations = ledger.make_room(120)
    assert Save(seq.seq_id, 1) in operations
    assert Drop(0) not in operations
    assert list(ledger.snapshots.tiers.ram) == [0, 1]
    ledger.check()


def test_file_of_replaced_snapshot_is_still_tracked():
    """Otherwise it would never be deleted, and the folder would exceed its budget."""
    ledger = make_ledger_with_ram()
    run_and_release(ledger, LONGER[:70])
    ledger.make_room(120)
    ledger.snapshots.record_written(0)
    seq = start(ledger, LONGER)
    end(ledger, seq)
    assert ledger.make_room(120) == [Drop(0), Save(seq.seq_id, 1), Trim(seq.seq_id, 0)]
    assert (list(ledger.snapshots.tiers.ram), list(ledger.snapshots.tiers.files)) == ([1], [0])
    ledger.check()


def test_snapshots_of_recurrent_state_do_not_replace_each_other():
    """Each is the state at one position only."""
    ledger = make_ledger_with_ram(layout=CHECKPOINT)
    seq = start(ledger, LONGER, 70)
    assert ledger.checkpoint(seq) == [Save(0, 0)]
    assert ledger.checkpoint(seq) == [], "it is there"
    compute(ledger, seq, 20)
    assert ledger.checkpoint(seq) == [Save(0, 1)]
    assert [count_found(ledger, [*LONGER[:n], 1]) for n in (69, 70, 80, 90, 95)] == [
        0,
        70,
        70,
        90,
        90,
    ]


def test_least_recently_used_snapshots_leave_ram_first():
    """A snapshot without a file is then lost. A loaded one stays longer."""
    ledger = Ledger(100, 100, 1, UNIFIED, Tiers(200, 0, 1))
    for i in range(2):
        run_and_release(ledger, [i] * 90)
    run_and_release(ledger, [0] * 90)
    run_and_release(ledger, [2] * 90)
    ledger.make_room(100)
    assert [count_found(ledger, [i] * 100) for i in range(3)] == [90, 0, 90]
    ledger.check()


def test_snapshot_being_loaded_is_not_evicted():
    """The seq_id or the room that a load needs may evict another prefix, whose copy must not
    replace the loaded one.
    """
    ledger = Ledger(100, 100, 1, UNIFIED, Tiers(100, 0, 1))
    run_and_release(ledger, LONGER[:90])
    assert lease(ledger, [1] * 90)[2] == [Save(0, 0), Trim(0, 0)]
    ledger.hold(0, 90)
    ledger.release(0, [1] * 90)
    _, num_found, operations = lease(ledger, [*LONGER[:90], 1])
    assert (num_found, operations) == (90, [Trim(0, 0), Load(0, 0, 90)])


def test_snapshot_being_loaded_is_not_replaced():
    """A longer snapshot of a prefix that leaves the cells for it does not replace it either."""
    ledger = Ledger(600, 600, 1, Partitioned(), Tiers(1000, 0, 1))
    tokens = list(range(500))
    run_and_release(ledger, tokens[:400])
    ledger.make_room(600)
    run_and_release(ledger, tokens)
    operations = lease(ledger, [*tokens[:400], 7])[2]
    assert operations == [Save(0, 1), Trim(0, 0), Load(0, 0, 400)]
    assert list(ledger.snapshots.tiers.ram) == [1, 0]


def test_snapshot_in_file_is_read_before_use():
    """All sequences that need it wait until it has been read."""
    ledger = make_ledger_with_ram()
    snapshot = ledger.snapshots.add_from_file(np.array(LONGER, np.int32))
    match = ledger.match([*LONGER, 1])
    assert (match.num_tokens, match.source, match.must_wait) == (100, snapshot, True)
    assert ledger.snapshots.read(snapshot) == []
    assert ledger.match([*LONGER, 1]).must_wait
    snapshot.tier = StorageTier.RAM
    assert lease(ledger, [*LONGER, 1])[1:] == (100, [Load(snapshot.key, 0, 100)])


def test_faster_tier_is_preferred():
    """Cells are preferred to RAM and RAM to disk, unless the slower tier has clearly more tokens."""
    ledger = make_ledger_with_ram()
    ledger.snapshots.add_from_file(np.array(LONGER, np.int32))
    assert run_and_release(ledger, [*LONGER[:97], 7, 7]) == 0
    match = ledger.match([*LONGER, 1])
    assert (match.num_tokens, match.source.chain.length) == (97, 99)
    ledger.make_room(120)
    match = ledger.match([*LONGER, 1])
    assert (match.num_tokens, match.source.tier) == (97, StorageTier.RAM)
    ledger.snapshots.drop(match.source.key)
    run_and_release(ledger, [*LONGER[:80], 7, 7])
    match = ledger.match([*LONGER, 1])
    assert (match.num_tokens, match.source.tier) == (100, StorageTier.DISK)


def test_reading_makes_room_in_ram():
    """Other snapshots are evicted for it, or it cannot be read."""
    ledger = make_ledger_with_ram(ram_bytes=150)
    run_and_release(ledger, [1] * 100)
    ledger.make_room(120)
    small = ledger.snapshots.add_from_file(np.array(LONGER, np.int32))
    large = ledger.snapshots.add_from_file(np.arange(151, dtype=np.int32))
    assert ledger.snapshots.read(large) is None
    assert ledger.snapshots.read(small) == [Drop(0)]
    assert count_found(ledger, [1] * 100) == 0
    ledger.check()
    assert (
        ledger.snapshots.drop(small.key)
        == ledger.snapshots.drop(large.key)
        == ledger.snapshots.drop(77)
        == []
    )
    ledger.check()
    assert len(ledger.snapshots.tiers) == 0


def test_snapshot_longer_than_context_is_no_match():
    """No seq_id has enough cells to load it, so not even its first tokens can be reused."""
    ledger = make_ledger_with_ram()
    ledger.snapshots.add_from_file(np.arange(120, dtype=np.int32))
    assert count_found(ledger, list(range(100))) == 99
    ledger.snapshots.add_from_file(np.arange(500, 621, dtype=np.int32))
    assert count_found(ledger, list(range(500, 600))) == 0


def test_file_outlives_ram_until_evicted():
    """When there are too many files, the oldest is deleted and no longer found."""
    ledger = Ledger(100, 100, 1, UNIFIED, Tiers(100, 150, 1))
    for i in range(3):
        run_and_release(ledger, [i] * 90)
        ledger.make_room(100)
        ledger.snapshots.record_written(i)
        assert list(ledger.snapshots.tiers.files) == [i]
    assert [count_found(ledger, [i] * 100) for i in range(3)] == [0, 0, 90]
    ledger.check()


def test_file_of_evicted_snapshot_is_deleted():
    """A snapshot that left RAM while it was being written is unknown, so its file must be deleted."""
    ledger = Ledger(100, 100, 1, UNIFIED, Tiers(100, 150, 1))
    for i in range(2):
        run_and_release(ledger, [i] * 90)
        ledger.make_room(100)
    for i in range(2):
        ledger.snapshots.record_written(i)
    assert list(ledger.snapshots.tiers.files) == [1]
    ledger.check()


@pytest.mark.parametrize(
    ("ram_bytes", "disk_bytes"), [(1000, 1000), (1000, 100), (100, 1000), (100, 100)]
)
def test_idle_prefixes_are_saved_once(ram_bytes, disk_bytes):
    """Most recently used first, whatever the budgets are."""
    ledger = Ledger(300, 100, 3, UNIFIED, Tiers(ram_bytes, disk_bytes, 1))
    for i in range(3):
        run_and_release(ledger, [i] * 90)
    saves = []
    while operations := ledger.save_one_idle():
        saves += [operation for operation in operations if isinstance(operation, Save)]
        ledger.snapshots.record_written(saves[-1].snapshot)
        ledger.check()
    assert saves == [Save(2, 0), Save(1, 1), Save(0, 2)]
    assert [count_found(ledger, [i] * 100) for i in range(3)] == [90, 90, 90]


# --- invariants ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda ledger: setattr(ledger.cells, "num_held", 7),
        lambda ledger: setattr(ledger.cells, "num_used", 7),
        lambda ledger: setattr(ledger.cells, "size", 39),
        lambda ledger: ledger.hold(1, 101),
        lambda ledger: ledger.seq_ids.give_back(1),
        lambda ledger: ledger._idle.update({1: ledger._idle[0]}),
        lambda ledger: ledger._idle.pop(0),
        lambda ledger: setattr(ledger._idle[0], "seq_id", 3),
        lambda ledger: setattr(ledger._idle[0], "path", ledger._idle[0].path[:-1]),
        lambda ledger: setattr(ledger._leased[1], "seq", None),
        lambda ledger: ledger._spare.pop(),
        lambda ledger: ledger._tree.remove(ledger._idle[0]),
        lambda ledger: setattr(ledger.snapshots.tiers, "num_ram_bytes", 7),
    ],
    ids=[
        "held",
        "run_and_release",
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
    ledger = Ledger(200, 100, 2, SPARE, Tiers(1000, 0, 1))
    running = start(ledger, LONG)
    lease(ledger, [1])
    end(ledger, running)
    assert (ledger._idle.keys(), ledger._leased.keys()) == ({0}, {1})
    damage(ledger)
    with pytest.raises(AssertionError):
        ledger.check()
