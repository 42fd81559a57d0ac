"""Cells are counted, never lost; what is idle is found again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cllm.core.batch import Trim
from cllm.kv_cache.ledger import MIN_SHARED_TOKENS, Ledger, common_prefix

LONG = list(range(100, 140))  # a prompt long enough to be worth keeping


def used(ledger: Ledger, tokens: list[int]) -> int:
    """Lease a seq_id, fill it with ``tokens`` and give it back."""
    seq_id, num_shared, _ = ledger.lease(tokens)
    assert ledger.make_room(len(tokens) - num_shared) is not None
    ledger.hold(seq_id, len(tokens) - num_shared)
    ledger.release(seq_id, tokens)
    ledger.check()
    return seq_id


def test_cells_move_from_free_to_held_to_idle():
    """The print of the ledger shows where the cells are, and the three numbers add up."""
    ledger = Ledger(num_cells=64, cells_per_seq=64, max_num_seqs=2)
    assert str(ledger) == "<Ledger 64: held 0 idle 0 free 64>"
    seq_id, num_shared, operations = ledger.lease([1, 2, 3])
    assert (seq_id, num_shared, operations) == (0, 0, [])
    ledger.hold(seq_id, 3)
    assert str(ledger) == "<Ledger 64: held 3 idle 0 free 61>"
    ledger.release(seq_id, [1, 2, 3])
    assert str(ledger) == "<Ledger 64: held 0 idle 3 free 61>"


def test_the_longest_idle_prefix_is_taken_over():
    """The seq_id that holds most of the prompt is leased, and what differs behind the prefix is trimmed."""
    ledger = Ledger(num_cells=256, cells_per_seq=128, max_num_seqs=3)
    seq_ids = [ledger.lease([1])[0] for _ in range(3)]
    for seq_id, tokens in zip(seq_ids, [LONG[:20], [*LONG[:30], 7, 7], [8] * 20], strict=True):
        ledger.hold(seq_id, len(tokens))
        ledger.release(seq_id, tokens)
    assert ledger.lease(LONG) == (1, 30, [Trim(1, 30)])
    assert str(ledger) == "<Ledger 256: held 30 idle 40 free 186>"
    ledger.check()


def test_an_exact_continuation_needs_no_operation():
    """If all the idle tokens are a prefix of the prompt, nothing has to be trimmed."""
    ledger = Ledger(num_cells=64, cells_per_seq=64, max_num_seqs=2)
    used(ledger, LONG)
    assert ledger.lease([*LONG, 1, 2]) == (0, len(LONG), [])


def test_the_last_token_of_a_prompt_is_computed_again():
    """A prompt that lies in the cache as a whole leaves one token to compute, since its logits are needed."""
    ledger = Ledger(num_cells=64, cells_per_seq=64, max_num_seqs=2)
    used(ledger, LONG)
    assert ledger.lease(LONG) == (0, len(LONG) - 1, [Trim(0, len(LONG) - 1)])


@pytest.mark.parametrize(("num_shared", "reused"), [(MIN_SHARED_TOKENS - 1, 0), (MIN_SHARED_TOKENS, MIN_SHARED_TOKENS)])
def test_a_short_prefix_is_not_worth_it(num_shared, reused):
    """Below MIN_SHARED_TOKENS an empty seq_id is leased, and the idle tokens stay."""
    ledger = Ledger(num_cells=64, cells_per_seq=64, max_num_seqs=2)
    used(ledger, LONG[:20])
    prompt = [*LONG[:num_shared], 1, 2, 3]
    assert ledger.lease(prompt) == ((0, reused, [Trim(0, reused)]) if reused else (1, 0, []))
    assert ledger.num_idle == (0 if reused else 20)


def test_an_idle_prefix_outlives_strangers():
    """While nobody runs, strangers get the empty seq_ids first and then the one that was unused longest."""
    ledger = Ledger(num_cells=256, cells_per_seq=64, max_num_seqs=3)
    assert [used(ledger, [i] * 20) for i in range(5)] == [0, 1, 2, 0, 1]
    assert ledger.lease([2] * 30)[:2] == (2, 20)


def test_leased_numbers_stay_side_by_side():
    """Holes between active seq_ids cost llama.cpp passes, so a hole is filled first, then an end is extended."""
    ledger = Ledger(num_cells=400, cells_per_seq=50, max_num_seqs=8)
    for _ in range(4):
        used(ledger, [ledger.num_idle] * 20)
    seq_ids = [ledger.lease([9])[0] for _ in range(4)]
    assert seq_ids == [4, 5, 6, 7]
    ledger.release(5, [])
    assert ledger.lease([9])[0] == 5
    assert ledger.lease([9])[0] == 3


def test_room_is_made_from_the_longest_unused():
    """Idle tokens are given up in the order in which they became idle, from their ends, and no more than needed."""
    ledger = Ledger(num_cells=60, cells_per_seq=60, max_num_seqs=4)
    for seq_id in [ledger.lease([1])[0] for _ in range(3)]:
        ledger.hold(seq_id, 20)
    for seq_id in (1, 0, 2):
        ledger.release(seq_id, [seq_id] * 20)
    assert ledger.make_room(0) == []
    assert ledger.make_room(21) == [Trim(1, 0), Trim(0, 19)]
    assert str(ledger) == "<Ledger 60: held 0 idle 39 free 21>"
    assert ledger.make_room(30) == [Trim(0, 0)]
    assert str(ledger) == "<Ledger 60: held 0 idle 20 free 40>"


def test_running_sequences_are_not_robbed():
    """If the others hold too much, the answer is None and nothing has changed."""
    ledger = Ledger(num_cells=50, cells_per_seq=50, max_num_seqs=2)
    used(ledger, LONG)
    seq_id, _, _ = ledger.lease([1])
    ledger.hold(seq_id, 30)
    before = str(ledger)
    assert ledger.make_room(21) is None
    assert str(ledger) == before
    assert ledger.make_room(20) is not None


def test_a_sequence_that_leaves_nothing_behind():
    """Released without tokens, a seq_id has no idle entry."""
    ledger = Ledger(num_cells=50, cells_per_seq=50, max_num_seqs=2)
    seq_id, _, _ = ledger.lease([1])
    ledger.hold(seq_id, 30)
    ledger.release(seq_id, [])
    assert str(ledger) == "<Ledger 50: held 0 idle 0 free 50>"
    ledger.check()


@pytest.mark.parametrize(
    "crime",
    [
        lambda ledger: setattr(ledger, "num_held", 7),
        lambda ledger: setattr(ledger, "num_idle", 7),
        lambda ledger: ledger.hold(0, 41),
        lambda ledger: ledger.seq_ids.give_back(0),
        lambda ledger: ledger._idle.update({0: np.zeros(0, np.int32)}),
    ],
    ids=["held", "idle", "too many cells", "no lease", "leased and idle"],
)
def test_check_finds_every_crime(crime):
    """Each law is broken by hand once, and noticed."""
    ledger = Ledger(num_cells=80, cells_per_seq=40, max_num_seqs=2)
    ledger.lease([1])
    ledger.check()
    crime(ledger)
    with pytest.raises(AssertionError):
        ledger.check()


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_common_prefix(a, b):
    """The vectorised comparison counts like a loop."""
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected


# Prompts that often share a beginning: one of two families, any length, sometimes with an end of their own.
prompts = st.builds(
    lambda family, length, own: [family] * length + own,
    st.integers(1, 2),
    st.integers(1, 30),
    st.lists(st.integers(3, 5), max_size=4),
)


class LedgerMachine(RuleBasedStateMachine):
    """Leases, fills and releases at random, beside a model that keeps every token of every cell in a list.

    The model carries out the operations it is given, as a backend would; so a forgotten trim shows as tokens that the
    ledger does not know of.
    """

    num_cells = 160
    cells_per_seq = 40
    max_num_seqs = 4

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.num_cells, self.cells_per_seq, self.max_num_seqs)
        self.cells: dict[int, list[int]] = {i: [] for i in range(self.max_num_seqs)}
        self.wanted: dict[int, list[int]] = {}  # seq_id -> tokens of the one who leased it

    def carry_out(self, operations: list[Trim]) -> None:
        for seq_id, keep in operations:
            assert keep <= len(self.cells[seq_id]), "a trim that keeps more than there is"
            del self.cells[seq_id][keep:]

    @precondition(lambda self: len(self.wanted) < self.max_num_seqs)
    @rule(prompt=prompts)
    def lease(self, prompt: list[int]) -> None:
        idle = [tokens for seq_id, tokens in self.cells.items() if seq_id not in self.wanted]
        longest = max(common(tokens, prompt[:-1]) for tokens in idle)
        seq_id, num_shared, operations = self.ledger.lease(prompt)
        assert all(operation.seq_id == seq_id for operation in operations)
        self.carry_out(operations)
        assert seq_id not in self.wanted
        assert num_shared == (longest if longest >= MIN_SHARED_TOKENS else 0)
        assert self.cells[seq_id] == prompt[:num_shared]
        self.wanted[seq_id] = prompt

    @precondition(lambda self: len(self.wanted) == self.max_num_seqs)
    @rule(prompt=prompts)
    def lease_one_too_many(self, prompt: list[int]) -> None:
        with pytest.raises(IndexError):
            self.ledger.lease(prompt)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), num_tokens=st.integers(1, 20))
    def fill(self, data: st.DataObject, num_tokens: int) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.wanted)))
        start = len(self.cells[seq_id])
        num_tokens = min(num_tokens, self.cells_per_seq - start)
        tokens = self.wanted[seq_id][start : start + num_tokens]
        tokens += [9] * (num_tokens - len(tokens))
        held = sum(len(self.cells[i]) for i in self.wanted)
        operations = self.ledger.make_room(num_tokens)
        assert (operations is None) == (held + num_tokens > self.num_cells)
        if operations is not None:
            assert not {operation.seq_id for operation in operations} & self.wanted.keys(), "robbed a running one"
            self.carry_out(operations)
            self.ledger.hold(seq_id, num_tokens)
            self.cells[seq_id] += tokens

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.wanted)))
        del self.wanted[seq_id]
        self.ledger.release(seq_id, self.cells[seq_id])

    @invariant()
    def laws_hold(self) -> None:
        self.ledger.check()

    @invariant()
    def agrees_with_the_model(self) -> None:
        held = sum(len(self.cells[i]) for i in self.wanted)
        idle = sum(map(len, self.cells.values())) - held
        free = self.num_cells - held - idle
        assert str(self.ledger) == f"<Ledger {self.num_cells}: held {held} idle {idle} free {free}>"


class SmallPoolMachine(LedgerMachine):
    """The unified layout: fewer cells than all sequences together could fill."""

    num_cells = 70


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TestPartitionedLedger = LedgerMachine.TestCase
TestSmallPoolLedger = SmallPoolMachine.TestCase
