"""What each step computes, and for which requests, seen in the batches of the fake backend."""

from __future__ import annotations

import pytest
from conftest import repeat
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.backends.fake.backend import Costs
from cllm.core.batch import Copy, Load, Save
from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.core.sequence import Sequence, Status
from cllm.engine.commands import Add
from cllm.kv_cache.cache import KVCache
from cllm.kv_cache.matching import MIN_SHARED_TOKENS
from cllm.scheduler.params import SchedulerParams
from cllm.scheduler.policy import make_policy
from cllm.scheduler.report import collect_stats
from cllm.scheduler.running import TURN_SECONDS
from cllm.scheduler.scheduler import Scheduler
from cllm.scheduler.step_cost import LEAST
from cllm.scheduler.waiting import AGED_SHARE, PATIENCE

LONG = list(range(100, 140))


def make_scheduler(max_num_batched_tokens: int) -> Scheduler:
    """Return a scheduler for two sequences of up to 8 tokens."""
    params = SchedulerParams(max_num_batched_tokens=max_num_batched_tokens)
    return Scheduler(KVCache(16, 8, 2), params, [], make_policy("fair", {}))


def test_waiting_sequence_takes_finished_ones_seq_id(fake_engine):
    """In the next step. No sequence waits for a batch to end."""
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=16)
    for name, max_tokens in (("A", 2), ("B", 4), ("C", 2)):
        engine.add(name, [1, 2, 3], max_tokens=max_tokens)
    assert engine.finish() == [
        "A.0 0+3 sample | B.0 0+3 sample",
        "A.0 3+1 sample | B.0 3+1 sample",
        "C.0 2+1 sample | B.0 4+1 sample",
        "C.0 3+1 sample | B.0 5+1 sample",
    ]


def test_seq_id_is_free_after_step_of_last_token(fake_engine):
    """The sequence releases its seq_id and cells in the step that samples its last token."""
    engine = fake_engine(max_num_seqs=1, max_num_batched_tokens=16)
    engine.add("A", [1, 2, 3], max_tokens=1)
    engine.add("B", [4, 5, 6], max_tokens=1)
    assert engine.step() == "A.0 0+3 sample"
    assert engine.kv_cache.seq_ids.num_free == 1
    assert engine.kv_cache.cells.num_held == 0
    assert engine.step() == "B.0 0+3 sample"
    assert engine.step() == ""


def test_long_prompt_is_computed_in_chunks(fake_engine):
    """A prompt longer than a step takes several. Only the last chunk is sampled."""
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=16)
    engine.add("A", LONG, max_tokens=1)
    assert engine.finish() == ["A.0 0+16", "A.0 16+16", "A.0 32+8 sample"]
    assert engine.tokens("A") == [140]


def test_step_is_filled_with_prompts_in_order_of_arrival(fake_engine):
    """A step is filled to the last token, in order of arrival."""
    engine = fake_engine(max_num_seqs=3, max_num_batched_tokens=16)
    for name in "ABC":
        engine.add(name, [1] * 10, max_tokens=1)
    assert engine.finish() == ["A.0 0+10 sample | B.0 0+6", "B.0 6+4 sample | C.0 0+10 sample"]


def test_decoding_sequences_get_rows_before_prompts(fake_engine):
    """A decoding sequence has a row in every step. Prompts get the rest."""
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=8)
    engine.add("A", [1, 2], max_tokens=3)
    engine.step()
    engine.add("B", LONG, max_tokens=1)
    assert engine.step() == "A.0 2+1 sample | B.0 0+7"
    assert engine.step() == "A.0 3+1 sample | B.0 7+7"
    assert engine.step() == "B.0 14+8", "without decoding sequences, B has the whole step"


def test_prompts_respect_latency_target(fake_engine):
    """While sequences decode, a prompt gets the tokens that fit into the target by the learned
    costs.
    """
    costs = Costs(step=0.010, row=0.010, token=0.001)
    engine = fake_engine(max_num_batched_tokens=200, costs=costs, engine_target_itl=0.1)
    engine.add("A", [1] * 100, ignore_eos=True, max_tokens=100)
    for _ in range(40):
        engine.step()
    engine.add("B", [2] * 400, max_tokens=1)
    started, chunks = engine.now, []
    while "B.0" not in engine.ends():
        chunks.append(engine.step())
        assert engine.now - started <= 0.102, chunks
        started = engine.now
    assert len(chunks) <= 10, "the target time is used"
    engine.abort("A")
    engine.add("C", [3] * 400, max_tokens=1)
    assert engine.finish() == ["C.0 0+200", "C.0 200+200 sample"], (
        "full chunks, because no sequence decodes"
    )


def test_step_computes_no_more_prompts_than_efficient(fake_engine):
    """Two of these prompts make an efficient step. With more, all would get their first token when
    the last one does.
    """
    engine = fake_engine(
        max_num_batched_tokens=400, costs=Costs(step=0.009, row=0.001, token=0.001)
    )
    engine.add("A", [1] * 96, ignore_eos=True, max_tokens=100)
    engine.finish()
    for name in "BCDE":
        engine.add(name, [ord(name)] * 60, max_tokens=2)
    assert engine.step() == "B.0 0+60 sample | C.0 0+60 sample"
    assert engine.step() == "B.0 60+1 sample | C.0 60+1 sample | D.0 0+60 sample | E.0 0+60 sample"


def test_prompts_progress_if_target_cannot_be_met(fake_engine):
    """If the decoding rows alone take longer than the target, prompts still get LEAST tokens."""
    engine = fake_engine(
        max_num_batched_tokens=200, costs=Costs(step=1, row=1, token=1), engine_target_itl=0.5
    )
    engine.add("A", [1] * 30, ignore_eos=True, max_tokens=100)
    for _ in range(3):
        engine.step()
    engine.add("B", [2] * 50, max_tokens=1)
    assert engine.step() == f"A.0 32+1 sample | B.0 0+{LEAST}"


def test_step_as_large_as_seq_ids_decodes_all_sequences(fake_engine):
    """Every running sequence gets its token."""
    engine = fake_engine(max_num_seqs=3, max_num_batched_tokens=3, length=5)
    requests = [engine.add(name, [1, 2, 3, 4]) for name in "ABCD"]
    engine.finish()
    assert [engine.tokens(request.request_id) for request in requests] == [[5, 6, 7, 8, 9, 256]] * 4


def test_rows_are_sorted_by_seq_id(fake_engine):
    """Whichever sequence arrived first."""
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=16)
    engine.add("A", [1, 2], max_tokens=1)
    engine.add("B", [1, 2], max_tokens=4)
    engine.step()
    engine.add("C", [1, 2], max_tokens=4)
    assert engine.step() == "C.0 1+1 sample | B.0 2+1 sample"
    assert engine.backend.seq_ids[-1] == [0, 1]


def test_max_tokens_ends_sequence_with_length(fake_engine):
    """The sequence has max_tokens tokens, and the reason is length."""
    engine = fake_engine(length=9)
    engine.add("A", [1], max_tokens=3)
    engine.finish()
    assert engine.tokens("A") == [2, 3, 4]
    assert engine.ends() == {"A.0": "length"}


def test_context_length_limits_prompt_and_output(fake_engine):
    """The limit holds if more tokens were requested."""
    engine = fake_engine(context_length=16, length=99)
    for name, size in (("A", 10), ("B", 15)):
        engine.add(name, LONG[:size], max_tokens=50)
    engine.finish()
    assert [len(engine.tokens("A")), len(engine.tokens("B"))] == [6, 1]
    assert engine.ends() == {"A.0": "length", "B.0": "length"}


def test_prompt_that_can_never_fit_ends_with_error(fake_engine):
    """Nothing is leased for it. The sender should have checked it."""
    engine = fake_engine(context_length=16)
    request = Request("A", LONG[:16], SamplingParams(n=2))
    assert [output.finish for output in engine.engine.handle(Add(request))] == ["error", "error"]
    assert not engine.scheduler.sequences.has_work()


def test_end_token_ends_sequence(fake_engine):
    """It is counted, but it is not text."""
    engine = fake_engine(length=2)
    engine.add("A", [1])
    engine.finish()
    assert [(o.token, str(o.finish), o.is_text) for o in engine.outputs] == [
        (2, "", True),
        (3, "", True),
        (256, "stop", False),
    ]


def test_ignore_eos_continues_after_end_token(fake_engine):
    """Up to max_tokens."""
    engine = fake_engine(length=2)
    engine.add("A", [1], ignore_eos=True, max_tokens=5)
    engine.finish()
    assert engine.tokens("A") == [2, 3, 256, 1, 2]
    assert engine.ends() == {"A.0": "length"}


def test_stop_token_ends_sequence(fake_engine):
    """It is not text either."""
    engine = fake_engine(length=9)
    engine.add("A", [1], stop_token_ids=(4,))
    engine.finish()
    assert engine.tokens("A") == [2, 3, 4]
    assert engine.ends() == {"A.0": "stop"}
    assert not engine.outputs[-1].is_text


def test_sequences_are_parked_from_tail(fake_engine):
    """When the pool is short, the last arrivals are parked, one by one. All end with the right
    text.
    """
    engine = fake_engine(
        context_length=40, num_cells=60, max_num_seqs=4, max_num_batched_tokens=32, length=25
    )
    engine.scheduler.sequences.length_estimates.output = 4
    requests = [engine.add(name, LONG[:4], max_tokens=24) for name in "ABCD"]
    running = ["ABCD"]
    while engine.scheduler.sequences.has_work():
        engine.step()
        batch = engine.backend.batches[-1]
        names = "".join(sorted(row.seq.request.request_id for row in batch.rows))
        if names != running[-1]:
            running.append(names)
    assert running == ["ABCD", "ABC", "AB", "CD", "D"]
    assert engine.scheduler.statistics.num_parked == 2
    assert [engine.tokens(r.request_id) for r in requests] == [
        engine.right_tokens(r) for r in requests
    ]
    assert list(engine.ends()) == ["A.0", "B.0", "C.0", "D.0"]


def test_sequence_parked_in_step_gets_no_row(fake_engine):
    """An interactive prompt takes the cells of a batch prompt that was to be served in the same
    step.
    """
    engine = fake_engine(
        context_length=64, max_num_seqs=8, max_num_batched_tokens=9, num_cells=277, length=60
    )
    engine.scheduler.sequences.length_estimates.output = 8.0
    for i in range(6):
        engine.add(f"D{i}", [10 * i] * 2, max_tokens=55, ignore_eos=True)
    for _ in range(4):
        engine.step()
    requests = [engine.add("B", [100] * 50, priority=Priority.BATCH, max_tokens=3)]
    for _ in range(15):
        engine.step()
    requests.append(engine.add("A", [200] * 38, priority=Priority.INTERACTIVE, max_tokens=3))
    engine.finish()
    assert engine.scheduler.statistics.num_parked > 0
    assert set(engine.ends().values()) == {"length"}
    assert [engine.tokens(r.request_id) for r in requests] == [
        engine.right_tokens(r) for r in requests
    ]


def test_parked_sequence_waits_at_head_of_queue(fake_engine):
    """It waits in front of sequences that have never run."""
    engine = fake_engine(
        context_length=60, num_cells=61, max_num_seqs=2, max_num_batched_tokens=64, length=30
    )
    engine.scheduler.sequences.length_estimates.output = 1
    engine.add("A", LONG[:18], max_tokens=20)
    engine.add("B", LONG[18:36], max_tokens=20)
    engine.add("C", [1, 2], max_tokens=1)
    while not engine.scheduler.statistics.num_parked:
        engine.step()
    assert engine.scheduler.sequences.waiting.head(0).request.request_id == "B"
    assert engine.scheduler.sequences.waiting.head(0).status is Status.PARKED
    engine.finish()
    assert engine.tokens("B") == list(range(136, 156))


def test_admission_leaves_cells_for_running_sequences(fake_engine):
    """A prompt waits if it would fit only by parking decoding sequences."""
    engine = fake_engine(
        context_length=32, num_cells=32, max_num_seqs=2, max_num_batched_tokens=32, length=4
    )
    engine.add("A", LONG[:20])
    engine.add("B", LONG[20:36], max_tokens=1)
    steps = engine.finish()
    assert engine.scheduler.statistics.num_parked == 0
    assert steps[5] == "B.0 0+16 sample", "B is admitted after A has ended"


def test_abort_removes_waiting_sequence(fake_engine):
    """The others keep their positions."""
    engine = fake_engine(max_num_seqs=1)
    for name in "ABC":
        engine.add(name, [1], max_tokens=2)
    engine.step()
    assert [(o.request_id, o.token, str(o.finish)) for o in engine.abort("B")] == [
        ("B", -1, "abort")
    ]
    engine.finish()
    assert engine.ends() == {"B.0": "abort", "A.0": "length", "C.0": "length"}


def test_abort_during_prefill_keeps_computed_prefix(fake_engine):
    """Its seq_id and cells are free immediately, and the computed chunks serve as a prefix."""
    engine = fake_engine(max_num_seqs=1, max_num_batched_tokens=18)
    engine.add("A", LONG, max_tokens=2)
    engine.step()
    engine.abort("A")
    assert str(engine.kv_cache) == "<KVCache 1024: held 0 idle 18 free 1006>"
    engine.add("B", LONG, max_tokens=1)
    assert engine.step() == "B.0 18+18"


def test_abort_ends_decoding_sequence(fake_engine):
    """The next step is computed without it, and no token of it follows."""
    engine = fake_engine(max_num_seqs=2)
    engine.add("A", [1])
    engine.add("B", [1], max_tokens=3)
    engine.step()
    engine.step()
    engine.abort("A")
    assert engine.step() == "B.0 2+1 sample"
    assert engine.tokens("A") == [2, 3]
    assert engine.outputs[-2].finish == "abort"


def test_abort_with_index_ends_only_that_sequence(fake_engine):
    """With an index only that sequence ends."""
    engine = fake_engine(max_num_seqs=2, length=3)
    engine.add("A", [1], n=3)
    engine.step()
    engine.abort("A", 1)
    engine.abort("A", 2)
    engine.finish()
    assert engine.ends() == {"A.1": "abort", "A.2": "abort", "A.0": "stop"}
    assert engine.tokens("A", 0) == [2, 3, 4, 256]


def test_abort_of_unknown_request_does_nothing(fake_engine):
    """The request never existed or has ended."""
    engine = fake_engine(length=1)
    engine.add("A", [1])
    engine.finish()
    assert engine.abort("A") == []
    assert engine.abort("B") == []


def test_idle_prefix_is_reused(fake_engine):
    """The second turn of a chat computes only its new tokens, and reports how many were cached."""
    engine = fake_engine(length=3)
    first = engine.add("A", LONG)
    engine.finish()
    engine.add("B", [*first.prompt, *engine.tokens("A")[:3], 7, 7], max_tokens=1)
    assert engine.finish() == ["B.0 43+2 sample"]
    assert engine.tokens("B") == [8]
    assert engine.outputs[-1].num_cached_tokens == 43


def test_prefix_below_min_shared_tokens_is_recomputed(fake_engine):
    """Fewer than MIN_SHARED_TOKENS common tokens are not looked for."""
    engine = fake_engine(length=1)
    engine.add("A", LONG[: MIN_SHARED_TOKENS - 1])
    engine.finish()
    engine.add("B", [*LONG[: MIN_SHARED_TOKENS - 1], 7], max_tokens=1)
    assert engine.finish() == [f"B.0 0+{MIN_SHARED_TOKENS} sample"]
    assert engine.outputs[-1].num_cached_tokens == 0


def test_prefix_of_running_sequence_is_shared(fake_engine):
    """It is copied instead of computed again, and counts as cached."""
    engine = fake_engine(max_num_batched_tokens=64)
    engine.add("A", LONG, max_tokens=3)
    engine.step()
    engine.add("B", LONG, max_tokens=3)
    assert engine.step() == "A.0 40+1 sample | B.0 39+1 sample"
    assert engine.backend.batches[-1].operations == [Copy(0, 1, 39)]
    assert engine.outputs[-1].num_cached_tokens == 39


def test_common_prefix_of_new_requests_is_computed_once(fake_engine):
    """The first request computes it, and the others wait and continue from there."""
    engine = fake_engine(context_length=200, max_num_seqs=4, max_num_batched_tokens=24)
    for name, own in zip("ABC", ([1, 2], [3], [4, 5, 6]), strict=True):
        engine.add(name, [*LONG, *own], max_tokens=1)
    engine.add("D", [7] * 10, max_tokens=1)
    assert engine.finish() == [
        "A.0 0+14 | D.0 0+10 sample",
        "A.0 14+24",
        "A.0 38+4 sample",
        "B.0 40+1 sample | C.0 40+3 sample",
    ]
    assert [engine.tokens(name) for name in "ABCD"] == [[3], [4], [7], [8]]


def test_short_prompt_does_not_wait_for_long_one(fake_engine):
    """Up to half of a step goes to prompts that are much shorter than what the first one lacks."""
    engine = fake_engine(
        context_length=200, max_num_seqs=4, max_num_batched_tokens=20, costs=Costs(step=2)
    )
    engine.add("long", [1] * 100, max_tokens=1)
    engine.step()
    engine.add("short", [2] * 9, max_tokens=1)
    assert engine.step() == "long.0 20+11 | short.0 0+9 sample"
    for i in range(9):
        engine.add(str(i), [3 + i] * 10, max_tokens=1)
    engine.step()
    assert engine.step().startswith("long.0 41+10"), "the long prompt keeps half of the step"


def test_fcfs_parks_no_sequence(fake_engine):
    """Without classes in the policy, no sequence yields to another class."""
    engine = fake_engine(max_num_seqs=1, engine_policy="fcfs")
    engine.add("A", [1], priority=Priority.BATCH, max_tokens=5)
    engine.step()
    engine.add("B", [2], priority=Priority.INTERACTIVE, max_tokens=5)
    engine.finish()
    assert engine.scheduler.statistics.num_parked == 0


def test_lower_class_yields_its_cells(fake_engine):
    """It also yields to a sequence that waits for cells and not for a seq_id."""
    engine = fake_engine(context_length=100, num_cells=100, max_num_seqs=4, length=90)
    engine.add("A", [1] * 40, priority=Priority.BATCH, max_tokens=50)
    engine.step()
    engine.add("B", [2] * 40, priority=Priority.INTERACTIVE, max_tokens=5)
    assert engine.step() == "B.0 0+40 sample"
    assert str(engine.scheduler.step.blocked).startswith("A.0"), "B was admitted"
    engine.finish()
    assert len(engine.tokens("A")) == 50


def test_next_follower_computes_prefix_of_aborted_leader(fake_engine):
    """An abort of the one who computes the prefix lets the next one compute what is missing."""
    engine = fake_engine(max_num_seqs=4, max_num_batched_tokens=16)
    for name in "ABC":
        engine.add(name, [*LONG, ord(name)], max_tokens=1)
    engine.step()
    engine.abort("A")
    assert engine.step() == "B.0 16+16"
    engine.finish()
    assert [engine.tokens(name) for name in "BC"] == [[67], [68]]


def test_sequences_do_not_wait_for_short_prefixes(fake_engine):
    """Fewer than MIN_SHARED_TOKENS common tokens are computed by each sequence."""
    engine = fake_engine(max_num_seqs=4, max_num_batched_tokens=64)
    for name in "AB":
        engine.add(name, [*LONG[: MIN_SHARED_TOKENS - 1], ord(name)], max_tokens=1)
    assert engine.finish() == ["A.0 0+16 sample | B.0 0+16 sample"]


def test_sequences_of_one_request_share_prompt(fake_engine):
    """The prompt is computed once."""
    engine = fake_engine(max_num_seqs=4, max_num_batched_tokens=64)
    engine.add("A", LONG, max_tokens=2, n=3)
    assert engine.finish() == [
        "A.0 0+40 sample",
        "A.0 40+1 sample | A.1 39+1 sample | A.2 39+1 sample",
        "A.1 40+1 sample | A.2 40+1 sample",
    ]


def test_recurrent_state_is_shared_through_checkpoints(fake_engine):
    """The leader stops where its followers branch off, and its state is saved there."""
    engine = fake_engine(
        context_length=200,
        max_num_seqs=4,
        max_num_batched_tokens=200,
        max_taken_back=0,
        engine_ram_cache_bytes=1000,
    )
    prefix = list(range(20, 100))
    for name, own in zip("ABC", ([1, 2], [3], [4, 5, 6]), strict=True):
        engine.add(name, [*prefix, *own], max_tokens=1)
    assert engine.finish() == [
        "A.0 0+80",
        "A.0 80+1 | B.0 80+1 sample | C.0 80+2",
        "A.0 81+1 sample | C.0 82+1 sample",
    ]
    assert [engine.tokens(name) for name in "ABC"] == [[3], [4], [7]]
    engine.add("D", [*prefix, 1, 9], max_tokens=1)
    assert engine.finish() == ["D.0 81+1 sample"], "the state at the end of a prompt is saved, too"


def test_parked_sequence_resumes_from_ram(fake_engine):
    """Its cells are saved when they are needed, and loaded when it resumes, so nothing is computed
    twice.
    """
    options = {
        "context_length": 200,
        "num_cells": 200,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 200,
    }
    engine = fake_engine(**options, length=150, engine_ram_cache_bytes=10_000)
    engine.scheduler.sequences.length_estimates.output = 4
    requests = [engine.add("A", LONG, max_tokens=100), engine.add("B", [7] * 80, max_tokens=100)]
    engine.finish()
    assert engine.scheduler.statistics.num_parked == 1
    assert any(isinstance(op, Save) for batch in engine.backend.batches for op in batch.operations)
    assert any(isinstance(op, Load) for batch in engine.backend.batches for op in batch.operations)
    assert sum(batch.num_tokens for batch in engine.backend.batches) == 40 + 80 + 2 * 99
    assert [engine.tokens(r.request_id) for r in requests] == [
        engine.right_tokens(r) for r in requests
    ]


def test_own_tokens_after_parking_do_not_count_as_cached(fake_engine):
    """num_cached_tokens is reported to the client. It excludes what the sequence itself had
    computed before it was parked.
    """
    engine = fake_engine(
        context_length=69, num_cells=69, max_num_seqs=2, max_num_batched_tokens=64, length=40
    )
    engine.scheduler.sequences.length_estimates.output = 4
    engine.add("A", LONG[:20], max_tokens=16)
    engine.add("B", LONG[20:], max_tokens=18)
    engine.finish()
    assert engine.scheduler.statistics.num_parked == 1
    assert {o.num_cached_tokens for o in engine.outputs} == {0}


def test_stats_count_sequences_and_cells(fake_engine):
    """The gauges count what is there."""
    engine = fake_engine(context_length=64, max_num_seqs=2, length=1)
    for name in "ABC":
        engine.add(name, [1, 2, 3])
    engine.step()
    stats = collect_stats(engine.scheduler)
    assert (stats.num_running, stats.num_waiting, stats.num_seq_ids_in_use, stats.num_seq_ids) == (
        2,
        1,
        2,
        2,
    )
    assert (stats.num_cells, stats.num_cells_held, stats.num_cells_idle) == (128, 6, 0)
    engine.finish()
    stats = collect_stats(engine.scheduler)
    assert (stats.num_running, stats.num_waiting, stats.num_seq_ids_in_use, stats.num_steps) == (
        0,
        0,
        0,
        4,
    )
    assert (stats.num_cells_held, stats.num_cells_idle) == (0, 8)


def test_schedule_returns_none_without_sequences():
    """Without sequences there is no batch."""
    assert make_scheduler(8).schedule(0.0) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda scheduler: scheduler.sequences.running.remove(scheduler.sequences.running.tail),
        lambda scheduler: setattr(
            next(iter(scheduler.sequences.running)), "status", Status.WAITING
        ),
        lambda scheduler: setattr(
            next(iter(scheduler.sequences.running)), "num_computed_tokens", 9
        ),
        lambda scheduler: setattr(next(iter(scheduler.sequences.running)), "seq_id", 1),
        lambda scheduler: setattr(scheduler.sequences.waiting.head(0), "seq_id", 0),
        lambda scheduler: setattr(scheduler.sequences.waiting.head(0), "status", Status.RUNNING),
        lambda scheduler: scheduler.sequences.waiting.remove(scheduler.sequences.waiting.head(0)),
        lambda scheduler: scheduler.sequences.deferred.follow(
            next(iter(scheduler.sequences.running)), 3, scheduler.sequences.waiting.head(0)
        ),
        lambda scheduler: scheduler.sequences.deferred.reasons.update(
            {scheduler.sequences.waiting.head(0): "nothing"}
        ),
        lambda scheduler: scheduler.sequences.kv_cache.hold(0, 1),
    ],
    ids=[
        "lost",
        "status",
        "computed",
        "not leased",
        "waiting with a lease",
        "waiting but running",
        "not in the queue",
        "in two queues",
        "deferred for nothing",
        "one cell too many",
    ],
)
def test_check_detects_broken_invariants(damage):
    """Each test case breaks one invariant."""
    scheduler = make_scheduler(4)
    for name in "ABC":
        scheduler.add(
            Sequence(Request(name, [ord(name)] * 5, SamplingParams(max_tokens=2)), 0, 0, 8), 0.0
        )
    scheduler.update(scheduler.schedule(0.0), [], 1.0)
    scheduler.sequences.check()
    damage(scheduler)
    with pytest.raises(AssertionError):
        scheduler.sequences.check()


arrivals = st.tuples(
    st.just("add"),
    st.builds(
        lambda family, length, own: [family] * length + own,
        st.sampled_from([1, 50]),
        st.integers(1, 30),
        st.lists(st.integers(0, 255), max_size=3),
    ),
    st.fixed_dictionaries({}, optional={"max_tokens": st.integers(1, 20), "n": st.integers(1, 3)}),
)
aborts = st.tuples(st.just("abort"), st.integers(0, 9), st.one_of(st.none(), st.integers(0, 2)))
steps = st.tuples(st.just("step"), st.integers(1, 8), st.none())
limits = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(4, 24),
        "num_cells": st.one_of(st.none(), st.integers(40, 80)),
        "length": st.integers(0, 12),
    }
)


@settings(max_examples=repeat(80, 20))
@given(limits, st.lists(st.one_of(arrivals, arrivals, aborts, steps, steps), max_size=14))
def test_random_arrivals_and_aborts_leave_nothing(fake_engine, limits, events):
    """All seq_ids and cells are released, no step is too large, and every text is right."""
    engine = fake_engine(context_length=40, **limits)
    requests, aborted = [], set()
    for event, what, options in events:
        if event == "add":
            requests.append(engine.add(str(len(requests)), what, **options))
        elif event == "abort":
            aborted |= {(o.request_id, o.index) for o in engine.abort(str(what), options)}
        else:
            for _ in range(what):
                engine.step()
    engine.finish()

    assert engine.kv_cache.seq_ids.num_leased == 0
    assert engine.kv_cache.cells.num_held == 0
    assert all(0 < b.num_tokens <= limits["max_num_batched_tokens"] for b in engine.backend.batches)
    ends = engine.ends()
    for request in requests:
        expected = engine.right_tokens(request)
        for index in range(request.params.n):
            name, tokens = request.request_id, engine.tokens(request.request_id, index)
            if (name, index) in aborted:
                assert tokens == expected[: len(tokens)]
                assert ends[f"{name}.{index}"] == "abort"
            else:
                assert tokens == expected
                assert ends[f"{name}.{index}"] == ("stop" if expected[-1] == 256 else "length")
    num_ends = sum(bool(output.finish) for output in engine.outputs)
    assert num_ends == len(ends) == sum(request.params.n for request in requests), (
        "each sequence ends exactly once"
    )


@given(limits, st.lists(st.integers(1, 30), min_size=2, max_size=6))
def test_decoding_sequence_gets_token_in_each_step(fake_engine, limits, lengths):
    """It gets one until it ends or is parked, whatever requests arrive."""
    engine = fake_engine(context_length=40, **limits)
    for i, length in enumerate(lengths):
        engine.add(str(i), [1] * length, max_tokens=5)
    decoding = set()
    while engine.scheduler.sequences.has_work():
        engine.step()
        batch = engine.backend.batches[-1]
        rows = {row.seq: row for row in batch.rows}
        waiting = set(engine.scheduler.sequences.waiting)
        assert decoding - waiting <= rows.keys()
        prompts = sum(row.num_tokens for row in batch.rows if row.seq not in decoding)
        assert prompts <= limits["max_num_batched_tokens"] - len(decoding & rows.keys())
        decoding = {
            seq for seq in engine.scheduler.sequences.running if seq.num_lacking_tokens == 1
        }


def test_queue_timeout_ends_when_first_sequence_starts(fake_engine):
    """The second sequence waits for the prompt that the first one computes, for longer than
    queue_timeout.
    """
    engine = fake_engine(
        max_num_batched_tokens=20, costs=Costs(step=1.0, row=0.0, token=0.0), max_num_seqs=1
    )
    engine.add("A", [5] * 200, n=2, queue_timeout=3.0, max_tokens=3, ignore_eos=True)
    engine.step()
    engine.add("B", [6] * 20, queue_timeout=3.0, max_tokens=3)
    engine.finish()
    assert engine.ends() == {"A.0": "length", "A.1": "length", "B.0": "timeout"}


@pytest.mark.parametrize("limit", ["deadline", "queue_timeout"])
def test_limit_of_zero_seconds_expires_at_once(fake_engine, limit):
    engine = fake_engine()
    engine.now = 1.0
    engine.add("A", [1], **{limit: 0.0})
    engine.finish()
    assert engine.ends() == {"A.0": "timeout"}


def test_estimated_wait_ignores_cached_tokens(fake_engine):
    """Forty requests share a long cached prompt."""
    costs = Costs(step=0.01, row=0.001, token=0.001)
    engine = fake_engine(
        context_length=2048, max_num_seqs=4, max_num_batched_tokens=512, costs=costs
    )
    shared = [(7 * i) % 250 for i in range(1500)]
    for i in range(3):
        engine.add(f"early{i}", [*shared, i], max_tokens=4)
        engine.finish()
    for i in range(40):
        engine.add(f"late{i}", [*shared, 100 + i], max_tokens=4)
    engine.step()
    started, stats = engine.now, collect_stats(engine.scheduler)
    assert 0 < stats.num_waiting_tokens <= 40
    engine.finish()
    assert stats.waiting_seconds < 10 < 36 * 1.5, "cached tokens cost nothing"
    assert engine.now - started < 1
    assert collect_stats(engine.scheduler).prompt_token_seconds < 0.1 * costs.token, (
        "the next request is also expected to be cached"
    )


def test_seconds_of_prompt_token_are_those_of_one_among_many(fake_engine):
    engine = fake_engine(costs=Costs(step=0.001, row=0.0, token=0.01), context_length=256)
    for i in range(3):
        engine.add(f"{i}", [i] * 100, max_tokens=1)
        engine.finish()
    assert collect_stats(engine.scheduler).prompt_token_seconds == pytest.approx(0.01, rel=0.05)


def test_aged_sequence_is_not_parked_again(fake_engine):
    """A batch request among endless interactive ones runs to its end once it has aged."""
    engine = fake_engine(
        max_num_seqs=2, max_num_batched_tokens=40, costs=Costs(step=1.0, row=0.0, token=0.0)
    )
    engine.add("slow", [9] * 30, priority=Priority.BATCH, max_tokens=5, ignore_eos=True)
    for i in range(300):
        while len(engine.scheduler.sequences.waiting) < 3:
            engine.add(
                f"i{engine.scheduler.sequences._next_order}",
                [i % 200] * 10,
                priority=Priority.INTERACTIVE,
                max_tokens=3,
            )
        engine.step()
        if "slow.0" in engine.ends():
            break
    assert engine.ends().get("slow.0") == "length"
    assert engine.tokens("slow") == [10, 11, 12, 13, 14]


def test_leader_inherits_class_of_followers(fake_engine):
    """An interactive request whose prefix a batch request computes does not wait for other
    interactive prompts.
    """
    engine = fake_engine(max_num_seqs=4, max_num_batched_tokens=20, context_length=256)
    prefix = [(7 * i) % 250 for i in range(100)]
    engine.add("batch", [*prefix, 1], priority=Priority.BATCH, max_tokens=1)
    engine.step()
    engine.add("urgent", [*prefix, 2], priority=Priority.INTERACTIVE, max_tokens=1)
    for i in range(3):
        engine.add(f"other{i}", [i] * 100, priority=Priority.INTERACTIVE, max_tokens=1)
    engine.finish()
    order = [output.request_id for output in engine.outputs if output.finish]
    assert order.index("urgent") <= 2, order


def test_prompt_is_computed_if_snapshot_does_not_fit(fake_engine):
    """The pool has room for the prompt, but not for the long prefix from which it would be loaded."""
    engine = fake_engine(
        context_length=200,
        num_cells=260,
        max_num_seqs=2,
        max_num_batched_tokens=200,
        engine_ram_cache_bytes=10_000,
    )
    long = [(7 * i) % 250 for i in range(180)]
    engine.add("first", long, max_tokens=2)
    engine.finish()
    engine.add("second", [5] * 190, max_tokens=2)  # takes the cells, so the first prefix is saved
    engine.finish()
    engine.add("running", [6] * 100, max_tokens=60, ignore_eos=True)
    engine.step()
    engine.add("short", [*long[:60], 1], max_tokens=2)
    for _ in range(6):
        engine.step()
    assert "short.0" in engine.ends()
    engine.finish()
    assert len(engine.tokens("running")) == 60


@pytest.mark.parametrize("account", ["", "other"])
@pytest.mark.parametrize("priority", [Priority.NORMAL, Priority.BATCH])
def test_unread_sequence_yields_its_place_to_any_other(fake_engine, account, priority):
    """Also to those of its own account and of a lower class. It continues with the same text."""
    engine = fake_engine(max_num_seqs=1, length=30)
    engine.add("A", [1], priority=Priority.INTERACTIVE, max_tokens=20)
    engine.step()
    engine.scheduler.sequences.set_yielding("A", yields=True)
    engine.add("B", [50], account, priority, max_tokens=5)
    engine.add("C", [70], account, priority, max_tokens=5)
    engine.finish()
    ends = [o.request_id for o in engine.outputs if o.finish]
    assert ends == ["B", "C", "A"]
    assert engine.tokens("A") == [*range(2, 22)]
    assert engine.scheduler.statistics.num_parked == 1
    assert engine.scheduler.sequences._yielding == set()


def test_sequence_that_is_read_again_has_its_old_place(fake_engine):
    engine = fake_engine(max_num_seqs=1, length=30)
    engine.add("A", [1], max_tokens=20)
    engine.step()
    engine.scheduler.sequences.set_yielding("A", yields=True)
    engine.add("B", [50], max_tokens=9)
    engine.add("C", [70], max_tokens=9)
    engine.step()
    engine.step()
    engine.scheduler.sequences.set_yielding("A", yields=False)
    engine.finish()
    assert [o.request_id for o in engine.outputs if o.finish] == ["B", "A", "C"]


def test_unread_sequence_that_waits_does_not_hold_up_others(fake_engine):
    """A lower class is still parked for a higher one behind it."""
    engine = fake_engine(max_num_seqs=1, length=60)
    engine.add("batch", [1], priority=Priority.BATCH, max_tokens=40)
    engine.step()
    engine.add("unread", [50], priority=Priority.INTERACTIVE, max_tokens=3)
    engine.scheduler.sequences.set_yielding("unread", yields=True)
    engine.add("normal", [70], max_tokens=3)
    engine.finish()
    assert [o.request_id for o in engine.outputs if o.finish] == ["normal", "batch", "unread"]


def test_unread_request_that_arrives_later_yields(fake_engine):
    """Its grammar was being compiled when the client stopped reading."""
    engine = fake_engine(max_num_seqs=1, length=30)
    engine.scheduler.sequences.set_yielding("A", yields=True)
    engine.add("A", [1], max_tokens=20)
    engine.step()
    engine.add("B", [50], max_tokens=5)
    engine.finish()
    assert [o.request_id for o in engine.outputs if o.finish] == ["B", "A"]


def test_unread_leader_keeps_the_class_of_its_followers(fake_engine):
    """They wait for the prefix that it computes."""
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=18, length=60)
    engine.add("A", LONG, max_tokens=20)
    engine.step()
    engine.add("B", LONG, max_tokens=2)
    engine.step()
    engine.scheduler.sequences.set_yielding("A", yields=True)
    (leader,) = [seq for seq in engine.scheduler.sequences.running if seq.request.request_id == "A"]
    assert leader.effective_priority == Priority.NORMAL
    engine.finish()


def test_account_without_a_place_gets_one_of_the_account_with_the_most(fake_engine):
    """After a second, and only one: its next request waits for a free place. No text changes."""
    engine = fake_engine(max_num_seqs=4, length=200)
    for i in range(4):
        engine.add(f"A{i}", [10 * i], "many", max_tokens=100)
    engine.step()
    engine.add("B", [50], "few", max_tokens=5)
    engine.add("C", [70], "few", max_tokens=5)
    engine.now += TURN_SECONDS / 2
    engine.step()
    assert engine.scheduler.statistics.num_parked == 0
    engine.now += TURN_SECONDS
    engine.finish()
    order = [o.request_id for o in engine.outputs if o.finish]
    assert order[:2] == ["B", "C"]
    assert engine.scheduler.statistics.num_parked == 1
    for i in range(4):
        assert engine.tokens(f"A{i}") == [10 * i + 1 + j for j in range(100)]


@pytest.mark.parametrize(
    ("policy", "accounts"), [("fcfs", "aaab"), ("priority", "aaab"), ("fair", "abcd")]
)
def test_no_account_loses_its_only_place(fake_engine, policy, accounts):
    """And without turns, none loses any."""
    engine = fake_engine(max_num_seqs=4, length=200, engine_policy=policy)
    for i, account in enumerate(accounts):
        engine.add(f"A{i}", [10 * i], account, max_tokens=50)
    engine.step()
    engine.add("B", [50], "other", max_tokens=5)
    engine.now += 2 * TURN_SECONDS
    engine.finish()
    assert engine.scheduler.statistics.num_parked == 0


def test_account_whose_turn_it_is_gets_cells_only_if_parking_frees_enough(fake_engine):
    """Free seq_ids, but no cells: the account with the most gives up as many as are needed, or
    none if they would not be enough.
    """
    for size, num_parked in ((100, 2), (230, 0)):
        engine = fake_engine(
            max_num_seqs=8,
            num_cells=512,
            context_length=256,
            length=250,
            max_num_batched_tokens=512,
        )
        engine.scheduler.sequences.length_estimates.estimate_length = lambda seq: (
            seq.num_tokens + 10
        )
        engine.add("L", [200] * 240, "long", max_tokens=16)
        for i in range(4):
            engine.add(f"A{i}", [10 * i] * 50, "many", max_tokens=60)
        engine.step()
        engine.add("B", [50] * size, "few", max_tokens=2)
        engine.now += 2 * TURN_SECONDS
        for _ in range(3):
            engine.step()
        assert engine.scheduler.statistics.num_parked == num_parked
        engine.finish()
        assert set(engine.ends().values()) == {"length"}


def test_account_gets_no_turn_before_one_that_was_served_less(fake_engine):
    """Its turn comes once the other one has been served as much. A sequence that was parked sooner
    would return at once.
    """
    engine = fake_engine(max_num_seqs=4, length=250)
    engine.add("before", list(range(100)), "few", max_tokens=10)
    engine.finish()
    for i in range(4):
        engine.add(f"A{i}", [10 * i], "many", max_tokens=100)
    engine.step()
    engine.add("B", [50], "few", max_tokens=5)
    engine.now += 2 * TURN_SECONDS
    engine.step()
    assert engine.scheduler.statistics.num_parked == 0
    engine.finish()
    assert engine.scheduler.statistics.num_parked == 1
    order = [o.request_id for o in engine.outputs if o.finish]
    assert order[:2] == ["before", "B"]


def run_for(engine, num_steps, seconds=0.0):
    """Make steps, ``seconds`` apart."""
    for _ in range(num_steps):
        engine.now += seconds
        engine.step()


def fill_places(fake_engine):
    """Return an engine whose four places are taken by streams that are older than PATIENCE."""
    engine = fake_engine(max_num_seqs=4, length=10_000, context_length=8000)
    for i in range(4):
        engine.add(f"A{i}", [10 * i], "many", max_tokens=5000)
    engine.step()
    engine.now += 2 * PATIENCE
    return engine


def test_old_streams_give_up_places_again_and_again(fake_engine):
    """They have run for longer than PATIENCE, which is no wait: when they are parked they do not
    go before the others.
    """
    engine = fill_places(fake_engine)
    for i in range(20):
        engine.add(f"B{i}", [50 + i], f"few {i % 3}", max_tokens=5)
        begun = engine.now
        while not engine.tokens(f"B{i}"):
            run_for(engine, 1, 0.1)
        assert engine.now - begun <= TURN_SECONDS + 0.2
        run_for(engine, 10)
    assert engine.scheduler.statistics.num_parked == 20
    assert {seq.effective_priority for seq in engine.scheduler.sequences.running} == {
        Priority.NORMAL
    }


def test_turn_is_kept(fake_engine):
    """Its account does not lose the place to the parked stream, which waits now."""
    engine = fill_places(fake_engine)
    engine.scheduler.sequences.waiting._num_taken = (
        AGED_SHARE - 2
    )  # one more, and the oldest goes first
    engine.add("B", [50], "few", max_tokens=200)
    while not engine.ends().get("B.0"):
        run_for(engine, 1, 0.1)
    assert engine.scheduler.statistics.num_parked == 1


@pytest.mark.slow
def test_shared_cells_are_not_counted_as_freed(fake_engine):
    """Parking streams with a common prompt frees little, so they are not parked for a long one."""
    engine = fake_engine(
        max_num_seqs=16,
        num_cells=2048,
        context_length=1024,
        length=2000,
        max_num_batched_tokens=1024,
    )
    for i in range(8):
        engine.add(f"A{i}", [*[7] * 500, i], "many", max_tokens=400)
    run_for(engine, 4)
    engine.add("L", [200] * 500, "long", max_tokens=400)
    run_for(engine, 30)
    engine.add("B", [250] * 900, "few", max_tokens=60)
    engine.now += 2 * TURN_SECONDS
    run_for(engine, 10)
    assert engine.scheduler.statistics.num_parked == 0
    engine.finish()


@pytest.mark.slow
def test_cells_of_several_accounts_are_freed_for_one(fake_engine):
    """Each keeps a stream."""
    engine = fake_engine(
        max_num_seqs=16,
        num_cells=1600,
        context_length=1000,
        length=900,
        max_num_batched_tokens=1600,
    )
    engine.scheduler.sequences.length_estimates.estimate_length = lambda seq: seq.num_tokens + 10
    for i in range(3):
        engine.add(f"X{i}", [10 * i + 1] * 100, "x", max_tokens=600)
        engine.add(f"Y{i}", [10 * i + 100] * 15, "y", max_tokens=600)
    engine.add("L", [200] * 390, "long", max_tokens=400)
    run_for(engine, 40)
    engine.add("B", [250] * (200 + engine.kv_cache.num_available), "few", max_tokens=2)
    engine.now += 2 * TURN_SECONDS
    run_for(engine, 6)
    assert engine.ends().get("B.0") == "length"
    assert {"x", "y", "long"} <= {seq.request.account for seq in engine.scheduler.sequences.running}
    engine.finish()


def test_request_that_waits_for_a_prefix_takes_no_place(fake_engine):
    engine = fake_engine(
        max_num_seqs=4, length=1000, context_length=2000, max_num_batched_tokens=16
    )
    engine.add("L", [200] * 600, "long", max_tokens=40)
    for i in range(3):
        engine.add(f"A{i}", [10 * i], "many", max_tokens=400)
    run_for(engine, 3)
    engine.add("B", [200] * 600, "few", max_tokens=3)
    engine.now += 2 * TURN_SECONDS
    engine.step()
    assert engine.scheduler.statistics.num_parked == 0
    engine.finish()


@pytest.mark.parametrize("is_aborted", [False, True])
def test_leader_has_the_class_of_its_followers_only_while_they_wait(fake_engine, is_aborted):
    engine = fake_engine(max_num_batched_tokens=16, max_num_seqs=2, num_cells=2000, length=1000)
    prefix = [7] * 100
    engine.add("leader", [*prefix, 1], priority=Priority.BATCH, ignore_eos=True)
    engine.step()
    engine.step()
    engine.add("urgent", [*prefix, 2], priority=Priority.INTERACTIVE, max_tokens=3)
    engine.step()
    (leader,) = engine.scheduler.sequences.running
    assert leader.effective_priority == Priority.INTERACTIVE
    if is_aborted:
        engine.abort("urgent")
        engine.step()
    while not is_aborted and "urgent.0" not in engine.ends():
        engine.step()
    assert leader.effective_priority == Priority.BATCH


@pytest.mark.parametrize(("size", "num_parked"), [(500, 0), (300, 1)])
def test_lower_class_is_parked_only_if_that_makes_enough_room(fake_engine, size, num_parked):
    """The cells of a prefix that those above share are counted once."""
    engine = fake_engine(
        context_length=1000,
        max_num_seqs=8,
        num_cells=1000,
        max_num_batched_tokens=256,
        length=10_000,
    )
    above = {"max_tokens": 50, "ignore_eos": True, "priority": Priority.INTERACTIVE}
    for number in range(3):
        engine.add(f"above{number}", [1] * 500 + [number], **above)
        engine.step()
    while engine.scheduler.sequences.deferred or engine.scheduler.sequences.waiting:
        engine.step()
    batch = {"max_tokens": 200, "ignore_eos": True, "priority": Priority.BATCH}
    engine.add("batch", [10] * 50, **batch)
    engine.step()
    engine.step()
    assert len(engine.scheduler.sequences.running) == 4
    engine.add("head", [2] * size, max_tokens=10, priority=Priority.INTERACTIVE)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.statistics.num_parked == num_parked
