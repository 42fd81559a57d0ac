"""Checkpoints: which are kept, and how sequences go back to them."""

from __future__ import annotations

import numpy as np
import pytest

from cllm.core.batch import Drop, Load, Save
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.kv_cache.cache import KVCache
from cllm.kv_cache.checkpoints import Checkpoints
from cllm.kv_cache.layouts import Partitioned
from cllm.kv_cache.matching import Finder
from cllm.kv_cache.model_state import Recurrent
from cllm.kv_cache.radix_tree import RadixTree
from cllm.kv_cache.snapshots import MIN_SAVED_TOKENS, Snapshots

SHORT, LONG = MIN_SAVED_TOKENS, 10 * MIN_SAVED_TOKENS


def tokens(kind, count):
    return np.full(count, kind, np.int32)


@pytest.fixture
def checkpoints():
    """Room for three."""
    made = Checkpoints(max_bytes=39, bytes_each=10)
    made.enter(RadixTree())
    yield made
    made.check()


def add(checkpoints, key, kind, count, salt=""):
    return checkpoints.add(key, tokens(kind, count), salt, 0)


def test_short_prefixes_and_models_without_such_states_have_none(checkpoints):
    assert not checkpoints.can_hold(SHORT - 1)
    assert checkpoints.can_hold(SHORT)
    assert not Checkpoints(0, 10).can_hold(SHORT)
    assert not Checkpoints(100, 0).can_hold(SHORT)


def test_same_tokens_are_saved_once(checkpoints):
    assert add(checkpoints, 0, 1, SHORT) == [Save(0, 0, is_checkpoint=True)]
    assert add(checkpoints, 1, 1, SHORT) == []
    assert add(checkpoints, 2, 1, SHORT, "salt") == [Save(0, 2, is_checkpoint=True)]
    assert add(checkpoints, 3, 1, SHORT + 1) == [Save(0, 3, is_checkpoint=True)]
    assert checkpoints.num_bytes == 30


def test_those_that_save_the_most_tokens_are_kept(checkpoints):
    add(checkpoints, 0, 0, LONG)
    add(checkpoints, 1, 1, SHORT)
    add(checkpoints, 2, 2, LONG)
    assert add(checkpoints, 3, 3, LONG)[0] == Drop(1)


def test_those_that_are_used_the_most_are_kept(checkpoints):
    for key in range(3):
        add(checkpoints, key, key, LONG)
    for kind in (0, 2):
        checkpoints.note_use(checkpoints.find(tokens(kind, LONG), ""))
    assert add(checkpoints, 3, 3, LONG)[0] == Drop(1)


def test_old_ones_are_replaced_in_the_end(checkpoints):
    """However often they were used."""
    add(checkpoints, 0, 0, LONG)
    for _ in range(5):
        checkpoints.note_use(checkpoints.find(tokens(0, LONG), ""))
    dropped = [add(checkpoints, key, key, LONG)[0] for key in range(1, 30)]
    assert Drop(0) in dropped


def test_only_states_after_exactly_these_tokens_are_found(checkpoints):
    add(checkpoints, 0, 1, LONG)
    assert checkpoints.find(tokens(1, SHORT), "") is None
    assert checkpoints.find(tokens(1, LONG), "salt") is None
    found = checkpoints.find(tokens(1, LONG), "")
    assert found is not None
    assert found.num_computed == LONG
    assert checkpoints.has_later(tokens(1, LONG + 5), SHORT, "")
    assert not checkpoints.has_later(tokens(1, LONG + 5), LONG, "")
    assert not checkpoints.has_later(tokens(1, LONG - 5), SHORT, "")


def test_operations_of_failed_steps_are_undone(checkpoints):
    add(checkpoints, 0, 0, LONG)
    add(checkpoints, 1, 1, LONG)
    failed = [Save(0, 0, is_checkpoint=True), Save(0, 1), Load(5, 0, 3, is_checkpoint=True)]
    assert checkpoints.invalidate(failed) == [Drop(0)]
    assert len(checkpoints) == 1


# --- sequences -------------------------------------------------------------------------------------

SYSTEM = [7] * 100


@pytest.fixture
def engine(fake_engine):
    return fake_engine(
        max_num_seqs=3,
        context_length=600,
        length=600,
        max_taken_back=0,
        checkpoint_bytes=10,
        engine_ram_cache_bytes=5000,
    )


def run(engine, name, prompt, boundaries=(), num_tokens=5):
    """Compute a request alone; return how many of its tokens were reused."""
    request = engine.add(name, prompt, max_tokens=num_tokens, boundaries=boundaries)
    engine.finish()
    expected = [(prompt[-1] + 1 + i) % 256 for i in range(num_tokens)]
    assert engine.tokens(name) == expected
    return next(
        b.rows[0].start
        for b in engine.backend.batches
        if b.rows and b.rows[0].seq.request is request
    )


def test_next_turn_continues_before_the_answer(engine):
    """In the same seq_id, without a copy."""
    first = [*SYSTEM, *range(50)]
    assert run(engine, "a", [*first, 200, 201], (100, 150)) == 0
    second = [*first, 200, 99, *range(60)]  # without the reasoning of the answer
    num_batches = len(engine.backend.batches)
    assert run(engine, "b", [*second, 200, 201], (100, len(second))) == 150
    operations = [one for b in engine.backend.batches[num_batches:] for one in b.operations]
    assert [type(one) for one in operations] == [Load, Save]
    third = [*second, 200, 98, *range(30)]
    assert run(engine, "c", [*third, 200, 201], (100, len(third))) == len(second)


def test_other_conversations_continue_after_the_instructions(engine):
    """A copy of them; the first conversation keeps its own."""
    first = [*SYSTEM, *range(50)]
    run(engine, "a", [*first, 200], (100, 150))
    assert run(engine, "b", [*SYSTEM, *range(60, 90), 200], (100, 130)) == 100
    assert run(engine, "a2", [*first, 200, 99, *range(9), 200], (100, 161)) == 150
    assert run(engine, "b2", [*SYSTEM, *range(60, 90), 200, 99, 200], (100, 132)) == 130


def test_evicted_prefixes_are_bases_in_ram(engine):
    """Four conversations share three seq_ids."""
    firsts = [[50 + i] * 120 for i in range(4)]
    for i, first in enumerate(firsts):
        assert run(engine, f"a{i}", [*first, 200], (120,)) == 0
    for i, first in enumerate(firsts):
        assert run(engine, f"b{i}", [*first, 200, 99, 200], (122,)) == 120


def test_checkpoints_without_keys_and_values_are_useless(fake_engine):
    """Nothing keeps evicted prefixes."""
    engine = fake_engine(max_num_seqs=1, context_length=600, max_taken_back=0, checkpoint_bytes=10)
    run(engine, "a", [*[1] * 120, 200], (120,))
    run(engine, "b", [*[2] * 120, 200], (120,))
    assert run(engine, "c", [*[1] * 120, 200, 99, 200], (122,)) == 0


def test_sequence_that_runs_is_a_base(engine):
    """Its state moves on, but the checkpoint is where the other one continues."""
    engine.add("a", [*SYSTEM, *range(50), 200], max_tokens=200, boundaries=(100, 150))
    for _ in range(10):
        engine.step()
    engine.add("b", [*SYSTEM, *range(50), 201], max_tokens=5, boundaries=(100, 150))
    engine.finish()
    assert engine.tokens("a") == [(201 + i) % 256 for i in range(200)]
    assert engine.tokens("b") == [(202 + i) % 256 for i in range(5)]
    starts = [row.start for b in engine.backend.batches for row in b.rows if row.seq.name == "b.0"]
    assert starts[0] == 150


def test_long_prompts_are_saved_at_regular_distances(fake_engine, monkeypatch):
    monkeypatch.setattr("cllm.core.sequence.BOUNDARY_DISTANCE", 100)
    engine = fake_engine(max_num_seqs=2, max_taken_back=0, checkpoint_bytes=10)
    run(engine, "a", [9] * 450)
    assert run(engine, "b", [*[9] * 350, *range(20)]) == 300


def test_checkpoints_are_a_tenth_of_the_cells(engine):
    checkpoints = engine.kv_cache.checkpoints
    for i in range(40):
        run(engine, f"r{i}", [*[10 + i] * 100, 200], (100,))
    assert checkpoints.num_bytes == 180  # of 1800 cells with one byte each


def test_checkpoints_of_other_conversations_cost_little_time(monkeypatch):
    """Keys and values are looked for only if a prompt contains all tokens of a checkpoint."""
    examined = []
    find_base = Finder._find_base

    def count_find_base(self, checkpoint, matches):
        examined.append(checkpoint.num_computed)
        return find_base(self, checkpoint, matches)

    monkeypatch.setattr(Finder, "_find_base", count_find_base)
    snapshots = Snapshots(ram_bytes=1 << 20, bytes_per_token=1)
    cache = KVCache(1000, 1000, 1, Partitioned(Recurrent()), snapshots, Checkpoints(1000, 1))
    for kind in range(20):
        path = np.append(tokens(99, LONG), tokens(kind, SHORT))
        snapshots.add(path, "", cache.layout.state)
        cache.checkpoints.add(snapshots.new_key(), path[:-1], "", 0)
    cache.checkpoints.add(snapshots.new_key(), tokens(99, SHORT), "", 0)
    seq = Sequence(Request("A", [99] * LONG + [50], SamplingParams()), 0, 0, 1000)
    assert cache.find(seq).num_tokens == SHORT
    assert examined == [SHORT]


# --- eviction --------------------------------------------------------------------------------------


POOL = {
    "max_num_seqs": 6,
    "num_cells": 600,
    "context_length": 600,
    "length": 600,
    "max_taken_back": 0,
    "checkpoint_bytes": 5,
}


@pytest.fixture
def pool(fake_engine):
    """An engine whose sequences share 600 cells, with nothing else to keep prefixes in."""
    return fake_engine(**POOL)


def list_idle_lengths(engine):
    return [len(path) for path, _ in engine.kv_cache.list_idle().values()]


@pytest.mark.parametrize(
    ("size", "length"),
    [(350, 205), (430, 150), (480, 100), (520, 0)],
    ids=["nothing", "the answer", "the question", "all"],
)
def test_as_much_of_a_prefix_is_evicted_as_is_needed(pool, size, length):
    """It then ends at a checkpoint, or is lost as a whole."""
    run(pool, "a", [*SYSTEM, *range(50), *range(50), 200], (100, 150))
    assert list_idle_lengths(pool) == [205]
    run(pool, "b", [9] * size, num_tokens=1)
    assert list_idle_lengths(pool) == [length] * (length > 0) + [size]
    question = [*SYSTEM, *range(50), 201]
    assert run(pool, "c", question, (100, 150)) == min(length, 150)


def test_prefix_that_is_cut_twice_is_saved_once(fake_engine):
    """The longer one in RAM and the checkpoint are enough for the shorter one."""
    engine = fake_engine(**POOL, engine_ram_cache_bytes=5000)
    run(engine, "a", [*SYSTEM, *range(50), *range(50), 200], (100, 150))
    run(engine, "b", [9] * 430, num_tokens=1)
    assert list_idle_lengths(engine) == [150, 430]
    run(engine, "c", [8] * 60, num_tokens=1)
    assert list_idle_lengths(engine) == [100, 430, 60]
    assert [len(saved.tokens) for saved in engine.kv_cache.snapshots.ram.values()] == [205]
    assert run(engine, "d", [*SYSTEM, *range(50), 201], (100, 150)) == 150


def test_instructions_of_many_survive_the_eviction_of_conversations(pool):
    for i in range(4):
        assert run(pool, f"a{i}", [*SYSTEM, *[i] * 60, 200], (100, 160)) == (100 if i else 0)
    assert pool.kv_cache.cells.num_used == 100 + 4 * 65
    run(pool, "long", [9] * 490, num_tokens=1)
    assert list_idle_lengths(pool) == [100, 490]
    assert run(pool, "b", [*SYSTEM, *[8] * 60, 200], (100, 160)) == 100
