"""Cells are counted, never lost; what is idle or saved is found again; what the ledger says is what
the cells hold.
"""

from __future__ import annotations

import numpy as np
import pytest

from cllm.core.batch import Copy, Drop, Load, Operation, Save, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.kv_cache.layouts import Layout, Sharing
from cllm.kv_cache.ledger import (
    MIN_EVICTED_TOKENS,
    MIN_SAVED_TOKENS,
    MIN_SHARED_TOKENS,
    Ledger,
    Match,
)
from cllm.kv_cache.tiers import Place, Tiers

UNIFIED = Layout(shares=True, dense=False)
SPARE = Layout(shares=True, dense=False, num_spare_ids=2)
CHECKPOINT = Layout(trims=False)

LONG = list(range(100, 140))  # long enough to be worth keeping
LONGER = list(range(100, 200))  # and to be worth saving


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(Request("A", tokens, SamplingParams()), 0, 0, 1024)


def lease(ledger: Ledger, tokens: list[int]) -> tuple[Sequence, int, list[Operation]]:
    """Lease a seq_id for ``tokens`` with what there is of them: (sequence, number of tokens found,
    operations).
    """
    seq = sequence(tokens)
    leased = ledger.lease(seq, ledger.match(tokens))
    assert leased is not None
    seq.seq_id, seq.num_computed_tokens, operations = leased
    ledger.check()
    return seq, seq.num_computed_tokens, operations


def compute(ledger: Ledger, seq: Sequence, count: int | None = None) -> list[Operation]:
    """Compute ``count`` more tokens of ``seq``, all if None; what had to be done for room."""
    count = seq.num_lacking_tokens if count is None else count
    operations = ledger.make_room(count)
    assert operations is not None
    ledger.hold(seq.seq_id, count)
    seq.num_computed_tokens += count
    ledger.check()
    return operations


def begun(ledger: Ledger, tokens: list[int], count: int | None = None) -> Sequence:
    """A running sequence that has computed ``count`` of its tokens, all if None."""
    seq, _, _ = lease(ledger, tokens)
    compute(ledger, seq, count)
    return seq


def end(ledger: Ledger, seq: Sequence, *, soon: bool = False) -> None:
    ledger.release(seq.seq_id, seq.tokens[: seq.num_computed_tokens], soon=soon)
    ledger.check()


def used(ledger: Ledger, tokens: list[int]) -> int:
    """Lease a seq_id, compute ``tokens`` and give it back."""
    seq = begun(ledger, tokens)
    end(ledger, seq)
    return seq.seq_id


def found(ledger: Ledger, tokens: list[int]) -> int:
    return ledger.match(tokens).num_tokens


# --- counting and finding -----------------------------------------------------------------------


def test_cells_move_from_free_to_held_to_idle():
    """The print of the ledger shows where the cells are, and the three numbers add up."""
    ledger = Ledger(num_cells=64, cells_per_seq=64, max_num_seqs=2)
    assert str(ledger) == "<Ledger 64: held 0 idle 0 free 64>"
    seq, num_found, operations = lease(ledger, [1, 2, 3])
    assert (seq.seq_id, num_found, operations) == (0, 0, [])
    compute(ledger, seq)
    assert str(ledger) == "<Ledger 64: held 3 idle 0 free 61>"
    assert ledger.num_cells_of(0) == 3
    end(ledger, seq)
    assert str(ledger) == "<Ledger 64: held 0 idle 3 free 61>"


def test_a_pool_that_holds_no_sequence():
    """Fewer cells than one sequence may fill are refused: it could wait for ever."""
    with pytest.raises(ValueError, match="9 cells cannot hold a sequence of 10"):
        Ledger(num_cells=9, cells_per_seq=10, max_num_seqs=1)


def test_one_sequence_too_many():
    """There are max_num_seqs seq_ids; spare ones are not leased."""
    ledger = Ledger(128, 64, 2, SPARE)
    assert [lease(ledger, [1])[0].seq_id for _ in range(2)] == [0, 1]
    with pytest.raises(IndexError):
        ledger.lease(sequence([1]), Match())


def test_the_longest_idle_prefix_is_found():
    """Of those that begin like the prompt, the one that shares most of it."""
    ledger = Ledger(num_cells=384, cells_per_seq=128, max_num_seqs=3)
    seqs = [begun(ledger, [i]) for i in range(3)]
    for seq, tokens in zip(seqs, [LONG[:20], [*LONG[:30], 7, 7], [8] * 20], strict=True):
        seq.tokens = tokens
        compute(ledger, seq)
        end(ledger, seq)
    match = ledger.match(LONG)
    assert (match.num_tokens, match.source.seq_id, match.is_on_its_way) == (30, 1, False)


def test_an_exact_continuation_takes_the_seq_id_over():
    """If all the idle tokens are a prefix of the prompt, nothing has to be done."""
    for layout in (Layout(), UNIFIED, SPARE, CHECKPOINT):
        ledger = Ledger(128, 64, 2, layout)
        assert used(ledger, LONG) == 0
        seq, num_found, operations = lease(ledger, [*LONG, 1, 2])
        assert (seq.seq_id, num_found, operations) == (0, len(LONG), [])


def test_a_few_tokens_are_not_worth_a_copy():
    """Where cells are not shared, the end of an idle prefix is given up rather than all the rest
    copied, or saved.
    """
    answered, question = [*LONGER, 1, 2, 3], [*LONGER, 7, 8]
    ledger = Ledger(256, 128, 2, tiers=Tiers(1000, 0, 1))
    used(ledger, answered)
    assert lease(ledger, question)[2] == [Trim(0, len(LONGER))]
    ledger = Ledger(256, 128, 2, tiers=Tiers(1000, 0, 1))
    used(ledger, [*answered, 4])
    assert lease(ledger, question)[2] == [Copy(0, 1, len(LONGER))], (
        "a thirty-second part costs as much as the copy"
    )


def test_the_last_token_of_a_prompt_is_computed_again():
    """A prompt that lies in the cache as a whole leaves one token to compute, since its logits are
    needed.
    """
    ledger = Ledger(64, 64, 1)
    used(ledger, LONG)
    seq, num_found, operations = lease(ledger, LONG)
    assert (seq.seq_id, num_found, operations) == (0, len(LONG) - 1, [Trim(0, len(LONG) - 1)])


@pytest.mark.parametrize(
    ("num_shared", "reused"), [(MIN_SHARED_TOKENS - 1, 0), (MIN_SHARED_TOKENS, MIN_SHARED_TOKENS)]
)
def test_a_short_prefix_is_not_worth_it(num_shared, reused):
    """Below MIN_SHARED_TOKENS nothing is found."""
    ledger = Ledger(64, 64, 2, UNIFIED)
    used(ledger, LONG[:20])
    assert found(ledger, [*LONG[:num_shared], 1, 2, 3]) == reused


def test_an_idle_prefix_outlives_strangers():
    """Strangers get the empty seq_ids first and then the one that was unused longest."""
    ledger = Ledger(num_cells=192, cells_per_seq=64, max_num_seqs=3)
    assert [used(ledger, [i] * 20) for i in range(5)] == [0, 1, 2, 0, 1]
    assert [found(ledger, [i] * 30) for i in range(5)] == [0, 0, 20, 20, 20]


def test_leased_numbers_stay_side_by_side():
    """Where holes between active seq_ids cost passes, a hole is filled first, then an end is
    extended.
    """
    ledger = Ledger(num_cells=400, cells_per_seq=50, max_num_seqs=8)
    seqs = [begun(ledger, [i] * 20) for i in range(4)]
    for seq in seqs:
        end(ledger, seq)
    seqs = [lease(ledger, [9])[0] for _ in range(4)]
    assert [seq.seq_id for seq in seqs] == [4, 5, 6, 7]
    end(ledger, seqs[1])
    assert lease(ledger, [9])[0].seq_id == 5
    assert lease(ledger, [9])[0].seq_id == 3


# --- sharing ------------------------------------------------------------------------------------


def test_a_running_prefix_is_shared():
    """In the unified layout a copy takes no cells, and they count once until the last who has them
    goes.
    """
    ledger = Ledger(128, 100, 3, UNIFIED)
    first = begun(ledger, LONG)
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


def test_only_what_is_computed_is_copied():
    """Of a sequence that computes its prompt, the tokens that are there already."""
    ledger = Ledger(128, 100, 2, UNIFIED)
    begun(ledger, LONG, 30)
    assert ledger.match(LONG)[:2] == (30, ledger._leased[0])
    assert lease(ledger, LONG)[1:] == (30, [Copy(0, 1, 30)])


def test_a_copy_in_a_partitioned_cache_takes_cells():
    """Each has its own."""
    ledger = Ledger(200, 100, 2)
    begun(ledger, LONG)
    _, num_found, operations = lease(ledger, [*LONG, 1])
    assert (num_found, operations) == (40, [Copy(0, 1, 40)])
    assert str(ledger) == "<Ledger 200: held 80 idle 0 free 120>"
    assert ledger.num_shared(ledger.match([*LONG, 1])) == 0


def test_what_is_longer_than_wanted_stays_where_there_is_room():
    """A part of an idle prefix is copied to an empty seq_id, so that the whole can be found
    later.
    """
    ledger = Ledger(200, 100, 2)
    used(ledger, LONG)
    _, num_found, operations = lease(ledger, [*LONG[:30], 1])
    assert (num_found, operations) == (30, [Copy(0, 1, 30)])
    assert found(ledger, [*LONG, 1]) == 40


def test_what_is_longer_than_wanted_moves_to_a_spare_seq_id():
    """When its own is needed; it costs no cells there."""
    ledger = Ledger(128, 100, 1, SPARE)
    used(ledger, LONG)
    _, num_found, operations = lease(ledger, [*LONG[:30], 1])
    assert (num_found, operations) == (30, [Copy(0, 1, 40), Trim(0, 0), Copy(1, 0, 30)])
    assert str(ledger) == "<Ledger 128: held 30 idle 10 free 88>"
    assert found(ledger, [*LONG, 1]) == 40


def test_idle_prefixes_move_to_spare_seq_ids():
    """More of them stay than can run; when the spare ones are full too, the longest unused one
    goes.
    """
    ledger = Ledger(256, 100, 1, SPARE)
    for i in range(3):
        used(ledger, [i] * 20)
    assert [found(ledger, [i] * 30) for i in range(3)] == [20, 20, 20]
    _, _, operations = lease(ledger, [9])
    assert operations == [Trim(1, 0), Copy(0, 1, 20), Trim(0, 0)]
    assert [found(ledger, [i] * 30) for i in range(3)] == [0, 20, 20]


def test_moving_makes_nobody_younger():
    """What was moved to a spare seq_id is evicted when it would have been evicted without."""
    ledger = Ledger(130, 100, 2, SPARE)
    for i in range(2):
        used(ledger, [i] * 40)
    assert lease(ledger, [7])[2] == [Copy(0, 2, 40), Trim(0, 0)]
    assert ledger.make_room(60) == [Trim(2, 0)]


# --- promises -----------------------------------------------------------------------------------


def test_what_a_running_sequence_will_compute_is_promised():
    """It is better to wait for it than to compute it twice; there is a leader until it has got that
    far.
    """
    ledger = Ledger(256, 100, 2, UNIFIED)
    leader = begun(ledger, LONG, 10)
    match = ledger.match([*LONG[:35], 1])
    assert match == Match(0, None, 35, leader)
    assert match.is_on_its_way
    compute(ledger, leader, 25)
    assert ledger.match([*LONG[:35], 1]) == Match(35, ledger._leased[0], 0, None)


def test_little_more_is_not_worth_waiting_for():
    """Fewer than MIN_SHARED_TOKENS beyond what is there already are computed, not awaited."""
    ledger = Ledger(256, 100, 2, UNIFIED)
    leader = begun(ledger, LONG, 39 - MIN_SHARED_TOKENS)
    assert ledger.match(LONG).leader is leader
    compute(ledger, leader, 1)
    assert ledger.match(LONG).leader is None


def test_a_promise_of_state_is_kept():
    """What cannot be trimmed is promised only if it can be saved when it is there, and is found
    then.
    """
    ledger = Ledger(400, 200, 2, CHECKPOINT, Tiers(MIN_SAVED_TOKENS, 0, 1))
    leader = begun(ledger, LONGER, 10)
    prompt = [*LONGER[:MIN_SAVED_TOKENS], 1]
    assert ledger.match(prompt) == Match(0, None, MIN_SAVED_TOKENS, leader)
    compute(ledger, leader, MIN_SAVED_TOKENS - 10)
    assert ledger.checkpoint(leader) == [Save(0, 0)]
    assert found(ledger, prompt) == MIN_SAVED_TOKENS


@pytest.mark.parametrize(
    ("num_shared", "num_computed", "ram_bytes"),
    [(MIN_SAVED_TOKENS - 1, 10, 1000), (90, 10, 89), (90, 90, 1000), (90, 91, 1000)],
    ids=["too short to be saved", "too large for RAM", "not saved when it was there", "gone"],
)
def test_nobody_waits_for_state_in_vain(num_shared, num_computed, ram_bytes):
    """What is not going to be saved is not promised."""
    ledger = Ledger(400, 200, 2, CHECKPOINT, Tiers(ram_bytes, 0, 1))
    begun(ledger, LONGER, num_computed)
    assert ledger.match([*LONGER[:num_shared], 1]) == Match()


# --- room ---------------------------------------------------------------------------------------


def test_room_is_made_from_the_longest_unused():
    """Idle tokens are given up in the order in which they became idle, from their ends, not one by
    one.
    """
    ledger = Ledger(num_cells=180, cells_per_seq=60, max_num_seqs=3)
    seqs = [begun(ledger, [i] * 60) for i in range(3)]
    for i in (1, 0, 2):
        end(ledger, seqs[i])
    assert ledger.make_room(0) == []
    assert ledger.make_room(1) == [Trim(1, 60 - MIN_EVICTED_TOKENS)]
    assert ledger.make_room(MIN_EVICTED_TOKENS) == []
    assert ledger.make_room(80) == [Trim(1, 0), Trim(0, 60 - MIN_EVICTED_TOKENS)]
    assert str(ledger) == "<Ledger 180: held 0 idle 88 free 92>"
    ledger.check()


def test_state_is_given_up_as_a_whole():
    """It cannot be trimmed."""
    ledger = Ledger(num_cells=120, cells_per_seq=60, max_num_seqs=2, layout=CHECKPOINT)
    used(ledger, [1] * 60)
    used(ledger, [2] * 60)
    assert ledger.make_room(1) == [Trim(0, 0)]


def test_what_was_released_for_room_goes_first():
    """Parked to make room, it is evicted before what was idle already."""
    ledger = Ledger(100, 50, 3, UNIFIED)
    used(ledger, [1] * 40)
    end(ledger, begun(ledger, [2] * 40), soon=True)
    assert ledger.make_room(60) == [Trim(1, 0)]


def test_what_was_copied_from_stays_longer():
    """An idle prefix that was of use is evicted after one that was not."""
    ledger = Ledger(100, 60, 3, UNIFIED)
    used(ledger, LONG)
    used(ledger, [1] * 40)
    assert lease(ledger, [*LONG[:20], 2])[2] == [Copy(0, 2, 20)]
    assert ledger.make_room(60) == [Trim(1, 0)]


def test_evicting_a_fork_spares_what_it_shares():
    """The cells that another has too are not freed by it, so all of it goes, and then the next."""
    ledger = Ledger(100, 80, 2, UNIFIED)
    first = begun(ledger, [1] * 40)
    second = begun(ledger, [*[1] * 40, 2, 2])
    end(ledger, second)
    end(ledger, first)
    assert str(ledger) == "<Ledger 100: held 0 idle 42 free 58>"
    assert ledger.make_room(61) == [Trim(1, 0), Trim(0, 0)]


def test_running_sequences_are_not_robbed():
    """If they hold too much, also of what idle ones share with them, the answer is None and nothing
    has changed.
    """
    ledger = Ledger(100, 80, 3, UNIFIED)
    used(ledger, LONG)
    begun(ledger, [*LONG[:30], *[1] * 20])
    before = str(ledger)
    assert before == "<Ledger 100: held 50 idle 10 free 40>"
    assert ledger.make_room(51) is None
    assert str(ledger) == before
    assert ledger.make_room(50) == [Trim(0, 0)]


def test_guesses_are_taken_back():
    """The cells of wrong ones are free again."""
    ledger = Ledger(100, 80, 1, UNIFIED)
    seq = begun(ledger, LONG)
    ledger.hold(0, 5)
    assert ledger.rewind(0, 42) == [Trim(0, 42)]
    assert str(ledger) == "<Ledger 100: held 42 idle 0 free 58>"
    seq.tokens += [1, 2]
    seq.num_computed_tokens = 42
    end(ledger, seq)
    assert found(ledger, [*LONG, 1, 2, 3]) == 42


def test_a_sequence_that_leaves_nothing_behind():
    """Released without tokens, a seq_id has no idle entry."""
    ledger = Ledger(50, 50, 1)
    seq = begun(ledger, LONG)
    ledger.release(seq.seq_id, [])
    assert str(ledger) == "<Ledger 50: held 0 idle 0 free 50>"
    ledger.check()


def test_what_is_unknown_is_forgotten():
    """Cells that a failed step touched are emptied, and neither found nor saved; a spare seq_id can
    be used again.
    """
    ledger = Ledger(300, 100, 1, SPARE, Tiers(1000, 0, 1))
    used(ledger, LONGER)
    used(ledger, [1] * 80)
    assert [found(ledger, tokens) for tokens in (LONGER, [1] * 80)] == [99, 79]
    assert ledger.invalidate_seq_ids({0, 1}) == [Trim(0, 0), Trim(1, 0)]
    ledger.check()
    assert str(ledger) == "<Ledger 300: held 0 idle 0 free 300>"
    assert [found(ledger, tokens) for tokens in (LONGER, [1] * 80)] == [0, 0]
    assert len(ledger.tiers) == 0


# --- copies outside of the cells ----------------------------------------------------------------


def ledger_with_ram(
    ram_bytes: int = 1000, disk_bytes: int = 1000, layout: Layout = UNIFIED
) -> Ledger:
    """120 cells for two sequences of up to 120 tokens; a token takes a byte."""
    return Ledger(120, 120, 2, layout, Tiers(ram_bytes, disk_bytes, 1))


def test_what_is_evicted_is_saved_and_found_again():
    """A prefix that left the cells comes back from RAM, as much of it as is wanted."""
    ledger = ledger_with_ram()
    used(ledger, LONGER)
    assert ledger.make_room(120) == [Save(0, 0), Trim(0, 0)]
    match = ledger.match([*LONGER[:80], 1])
    assert (match.num_tokens, match.source.key, match.is_on_its_way) == (80, 0, False)
    seq, num_found, operations = lease(ledger, [*LONGER[:80], 1])
    assert (num_found, operations) == (80, [Load(0, seq.seq_id, 80)])
    assert str(ledger) == "<Ledger 120: held 80 idle 0 free 40>"


def test_a_load_makes_room_for_the_whole_snapshot():
    """The backend can only load it as a whole, and then trim it."""
    ledger = ledger_with_ram()
    used(ledger, LONGER)
    ledger.make_room(120)
    used(ledger, [1] * 30)
    _, num_found, operations = lease(ledger, [*LONGER[:70], 1])
    assert (num_found, operations) == (70, [Trim(0, 0), Load(0, 1, 70)])
    assert str(ledger) == "<Ledger 120: held 70 idle 0 free 50>"


def test_a_load_that_does_not_fit():
    """Beside running sequences that hold too much; nothing has changed then."""
    ledger = ledger_with_ram()
    used(ledger, LONGER)
    ledger.make_room(120)
    running = begun(ledger, [1] * 30)
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
def test_what_is_not_worth_saving(tokens, ram_bytes):
    """It is given up without a copy."""
    ledger = ledger_with_ram(ram_bytes)
    used(ledger, tokens)
    assert ledger.make_room(120) == [Trim(0, 0)]
    assert len(ledger.tiers) == 0


def test_what_lies_elsewhere_is_not_saved():
    """Another prefix that contains it is enough, in cells or in RAM."""
    ledger = ledger_with_ram()
    used(ledger, LONGER[:80])
    assert begun(ledger, [*LONGER[:80], 1, 2]).seq_id == 0
    assert lease(ledger, [*LONGER[:80], 3])[2] == [Copy(0, 1, 80)]
    ledger.release(0, [*LONGER[:80], 1, 2])
    ledger.release(1, LONGER[:80], soon=True)
    assert ledger.make_room(40) == [Trim(1, 0), Save(0, 0), Trim(0, 82 - MIN_EVICTED_TOKENS)]
    assert ledger.make_room(120) == [Trim(0, 0)], "what is left of it is part of the snapshot"
    ledger.check()


def test_a_longer_snapshot_replaces_a_shorter_one():
    """The turns of a chat are one snapshot, not many."""
    ledger = ledger_with_ram()
    used(ledger, LONGER[:70])
    ledger.make_room(120)
    seq = begun(ledger, LONGER)
    end(ledger, seq)
    assert ledger.make_room(120) == [Drop(0), Save(seq.seq_id, 1), Trim(seq.seq_id, 0)]
    assert list(ledger.tiers.ram) == [1]
    ledger.check()


def test_a_file_of_a_shorter_snapshot_stays_in_the_books():
    """Else nobody would ever delete it, and the folder would outgrow its budget."""
    ledger = ledger_with_ram()
    used(ledger, LONGER[:70])
    ledger.make_room(120)
    assert ledger.written(0) == []
    seq = begun(ledger, LONGER)
    end(ledger, seq)
    assert ledger.make_room(120) == [Drop(0), Save(seq.seq_id, 1), Trim(seq.seq_id, 0)]
    assert (list(ledger.tiers.ram), list(ledger.tiers.files)) == ([1], [0])
    ledger.check()


def test_snapshots_of_state_do_not_replace_one_another():
    """Each is the state at one position and no other."""
    ledger = ledger_with_ram(layout=CHECKPOINT)
    seq = begun(ledger, LONGER, 70)
    assert ledger.checkpoint(seq) == [Save(0, 0)]
    assert ledger.checkpoint(seq) == [], "it is there"
    compute(ledger, seq, 20)
    assert ledger.checkpoint(seq) == [Save(0, 1)]
    assert [found(ledger, [*LONGER[:n], 1]) for n in (69, 70, 80, 90, 95)] == [0, 70, 70, 90, 90]


def test_the_longest_unused_leave_ram():
    """What no file holds is lost then; what was loaded stays longer."""
    ledger = Ledger(100, 100, 1, UNIFIED, Tiers(200, 0, 1))
    for i in range(2):
        used(ledger, [i] * 90)
    used(ledger, [0] * 90)
    used(ledger, [2] * 90)
    ledger.make_room(100)
    assert [found(ledger, [i] * 100) for i in range(3)] == [90, 0, 90]
    ledger.check()


def test_what_is_being_loaded_is_not_driven_out():
    """The seq_id or the room that a load needs may cost another prefix its cells, whose copy does
    not take its RAM.
    """
    ledger = Ledger(100, 100, 1, UNIFIED, Tiers(100, 0, 1))
    used(ledger, LONGER[:90])
    assert lease(ledger, [1] * 90)[2] == [Save(0, 0), Trim(0, 0)]
    ledger.hold(0, 90)
    ledger.release(0, [1] * 90)
    _, num_found, operations = lease(ledger, [*LONGER[:90], 1])
    assert (num_found, operations) == (90, [Trim(0, 0), Load(0, 0, 90)])


def test_what_is_being_loaded_is_not_replaced():
    """Not even by a longer snapshot of what has to leave the cells for it."""
    ledger = Ledger(600, 600, 1, Layout(), Tiers(1000, 0, 1))
    tokens = list(range(500))
    used(ledger, tokens[:400])
    ledger.make_room(600)
    used(ledger, tokens)
    operations = lease(ledger, [*tokens[:400], 7])[2]
    assert operations == [Save(0, 1), Trim(0, 0), Load(0, 0, 400)]
    assert list(ledger.tiers.ram) == [1, 0]


def test_from_disk_by_way_of_ram():
    """A prefix that is only in a file has to be read first; while it is, everybody who wants it
    waits.
    """
    ledger = ledger_with_ram()
    snapshot = ledger.found_on_disk(np.array(LONGER, np.int32))
    match = ledger.match([*LONGER, 1])
    assert (match.num_tokens, match.source, match.is_on_its_way) == (100, snapshot, True)
    assert ledger.read(snapshot) == []
    assert ledger.match([*LONGER, 1]).is_on_its_way
    snapshot.place = Place.RAM
    assert lease(ledger, [*LONGER, 1])[1:] == (100, [Load(snapshot.key, 0, 100)])


def test_a_little_more_is_not_worth_a_slower_way():
    """Cells are preferred to RAM and RAM to disk, unless the slower place holds clearly more."""
    ledger = ledger_with_ram()
    ledger.found_on_disk(np.array(LONGER, np.int32))
    assert used(ledger, [*LONGER[:97], 7, 7]) == 0
    match = ledger.match([*LONGER, 1])
    assert (match.num_tokens, match.source.chain.length) == (97, 99)
    ledger.make_room(120)
    match = ledger.match([*LONGER, 1])
    assert (match.num_tokens, match.source.place) == (97, Place.RAM)
    ledger.drop(match.source.key)
    used(ledger, [*LONGER[:80], 7, 7])
    match = ledger.match([*LONGER, 1])
    assert (match.num_tokens, match.source.place) == (100, Place.DISK)


def test_reading_makes_room_in_ram():
    """Others leave for it, or it cannot be read."""
    ledger = ledger_with_ram(ram_bytes=150)
    used(ledger, [1] * 100)
    ledger.make_room(120)
    small = ledger.found_on_disk(np.array(LONGER, np.int32))
    large = ledger.found_on_disk(np.arange(151, dtype=np.int32))
    assert ledger.read(large) is None
    assert ledger.read(small) == [Drop(0)]
    assert found(ledger, [1] * 100) == 0
    ledger.check()
    assert ledger.drop(small.key) == ledger.drop(large.key) == ledger.drop(77) == []
    ledger.check()
    assert len(ledger.tiers) == 0


def test_a_file_from_an_engine_with_a_longer_context():
    """No seq_id has the cells to load it, so it is no match, not even for its first tokens."""
    ledger = ledger_with_ram()
    ledger.found_on_disk(np.arange(120, dtype=np.int32))
    assert found(ledger, list(range(100))) == 99
    ledger.found_on_disk(np.arange(500, 621, dtype=np.int32))
    assert found(ledger, list(range(500, 600))) == 0


def test_the_life_of_a_file():
    """Written, it outlives RAM; when the files are too many, the oldest goes, and is not found any
    more.
    """
    ledger = Ledger(100, 100, 1, UNIFIED, Tiers(100, 150, 1))
    for i in range(3):
        used(ledger, [i] * 90)
        ledger.make_room(100)
        assert ledger.written(i) == ([i - 1] if i else [])
    assert [found(ledger, [i] * 100) for i in range(3)] == [0, 0, 90]
    ledger.check()


def test_a_file_that_came_too_late():
    """What left RAM while it was being written is not in the books, so its file has to go."""
    ledger = Ledger(100, 100, 1, UNIFIED, Tiers(100, 150, 1))
    for i in range(2):
        used(ledger, [i] * 90)
        ledger.make_room(100)
    assert ledger.written(0) == [0]
    assert ledger.written(1) == []
    ledger.check()


@pytest.mark.parametrize(
    ("ram_bytes", "disk_bytes"), [(1000, 1000), (1000, 100), (100, 1000), (100, 100)]
)
def test_saving_what_is_idle_ends(ram_bytes, disk_bytes):
    """While nothing else is to be done, what is idle is saved, the last used first; once, however
    small the budgets.
    """
    ledger = Ledger(300, 100, 3, UNIFIED, Tiers(ram_bytes, disk_bytes, 1))
    for i in range(3):
        used(ledger, [i] * 90)
    saves = []
    while operations := ledger.save_one_idle():
        saves += [operation for operation in operations if isinstance(operation, Save)]
        ledger.written(saves[-1].snapshot)
        ledger.check()
    assert saves == [Save(2, 0), Save(1, 1), Save(0, 2)]
    assert [found(ledger, [i] * 100) for i in range(3)] == [90, 90, 90]


# --- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(), UNIFIED])
def test_what_is_shared(layout):
    """Who runs, what they hold, and how much of it is different, of their answers too; in either
    layout the same.
    """
    ledger = Ledger(400, 100, 4, layout)
    used(ledger, [7] * 20)
    first = begun(ledger, LONG)
    first.tokens += [1, 2, 3]
    compute(ledger, first)
    begun(ledger, [*LONG[:30], 5, 6])
    assert ledger.sharing() == Sharing(
        num_seqs=2, num_tokens=43 + 32, num_distinct=43 + 2, num_idle=20
    )


@pytest.mark.parametrize("layout", [Layout(), UNIFIED])
def test_what_is_not_computed_is_not_shared(layout):
    """Two that are still computing a prompt hold what they have computed."""
    ledger = Ledger(400, 200, 2, layout)
    begun(ledger, LONGER, 40)
    begun(ledger, [*LONGER[:60], 1, 2, 3], 1)
    assert ledger.sharing() == Sharing(2, 40 + 41, 41, 0)


def test_another_layout_has_the_same_snapshots():
    """In RAM and on disk; cells are not taken along, so nobody may hold any."""
    ledger = ledger_with_ram()
    used(ledger, LONGER)
    ledger.found_on_disk(np.full(80, 7, np.int32))
    with pytest.raises(AssertionError, match="idle cells would be forgotten"):
        ledger.with_layout(240, Layout())
    assert ledger.make_room(120) == [Save(0, 1), Trim(0, 0)]
    other = ledger.with_layout(240, Layout())
    other.check()
    assert str(other) == "<Ledger 240: held 0 idle 0 free 240>"
    assert lease(other, [*LONGER, 1])[1:] == (100, [Load(1, 0, 100)])
    assert other.match([7] * 90).source.place is Place.DISK
    with pytest.raises(AssertionError, match="a running sequence would lose its cells"):
        other.with_layout(120, UNIFIED)


# --- crimes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "crime",
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
        lambda ledger: setattr(ledger.tiers, "num_ram_bytes", 7),
    ],
    ids=[
        "held",
        "used",
        "more than there are",
        "a sequence too long",
        "no lease",
        "leased and idle",
        "idle and lost",
        "under a wrong number",
        "other tokens than cells",
        "leased by nobody",
        "a spare one lost",
        "not in the tree",
        "RAM",
    ],
)
def test_check_finds_every_crime(crime):
    """Each law is broken by hand once, and noticed."""
    ledger = Ledger(200, 100, 2, SPARE, Tiers(1000, 0, 1))
    running = begun(ledger, LONG)
    lease(ledger, [1])
    end(ledger, running)
    assert (ledger._idle.keys(), ledger._leased.keys()) == ({0}, {1})
    crime(ledger)
    with pytest.raises(AssertionError):
        ledger.check()
