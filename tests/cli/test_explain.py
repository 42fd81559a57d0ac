"""The output of ``cllm explain``."""

from __future__ import annotations

import pytest

from cllm.cli.explain import MAX_SHOWN, describe_sequence, lines
from cllm.core.request import Priority
from cllm.scheduler.report import explain
from cllm.scheduler.trace import SequenceState


def test_waiting_sequences_are_listed_with_reasons(fake_engine):
    """The head of the queue comes first, then sequences that wait for a prefix, then those behind
    the head.
    """
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=64, context_length=256, length=100)
    prefix = [(7 * i) % 250 for i in range(100)]
    engine.add("leader", prefix, account="user-ann", max_tokens=50)
    engine.step()
    engine.add("follower", [*prefix, 1], max_tokens=50)
    engine.add("other", [5] * 20, max_tokens=50)
    for i in range(MAX_SHOWN + 3):
        engine.add(f"late{i}", [i, 7, 7], max_tokens=50)
    engine.step()
    engine.step()
    said = lines(explain(engine.scheduler, engine.now, 2))
    assert said[0].splitlines()[0].split()[:3] == ["step", "ms", "rows"]
    assert len(said[0].splitlines()) == 1 + 2
    waiting = said[next(i for i, line in enumerate(said) if line.startswith("Waiting: ")) + 1 :]
    assert "all 2 places are in use (scheduler.max_num_seqs)" in waiting[0]
    head = waiting[0].split()[0]
    assert all(
        f"behind {head}, the head of the queue" in line for line in waiting[1:-1] if "late" in line
    )
    assert waiting[-1].startswith("  ... and ")
    leader = next(line for line in said if "leader.0" in line)
    assert "(account user-ann, class normal)" in leader
    assert " output tokens after " in leader


def test_leader_of_shared_prefix_is_named(fake_engine):
    """A sequence waits while another one computes its prefix; the line names that one."""
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=32, context_length=256)
    prefix = [(7 * i) % 250 for i in range(100)]
    engine.add("leader", prefix, max_tokens=1)
    engine.step()
    engine.add("follower", [*prefix, 1], max_tokens=1)
    engine.step()
    said = lines(explain(engine.scheduler, engine.now, 1))
    assert any(
        "follower.0 (class normal) has waited" in line
        and "a prompt of 101 tokens, because leader.0 is computing" in line
        for line in said
    )


def test_idle_server_reports_no_steps(fake_engine):
    assert lines(explain(fake_engine().scheduler, 0.0, 5))[0] == "No step has been computed yet."


def test_steps_that_differ_in_their_time_only_are_one_line(fake_engine):
    engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=64, context_length=256, length=30)
    engine.add("one", [1, 2, 3], max_tokens=30)
    while engine.scheduler.sequences.has_work():
        engine.step()
    said = lines(explain(engine.scheduler, engine.now, 20))
    assert said[0] == "The server is idle. The last steps were:"
    rows = said[1].splitlines()[1:]
    assert len(rows) < 5
    first, last = map(int, max(rows, key=len).split()[0].split("-"))
    assert last - first > 10


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"phase": "queued", "reason": "all 2 places are in use", "expected_wait": 3.04},
            (
                "a.0 (account ann, class normal) has waited 1.5 s with a prompt of 800 tokens, because "
                "all 2 places are in use. It begins in about 3.0 s."
            ),
        ),
        (
            {"phase": "parked", "num_output_tokens": 40, "reason": "all 2 places are in use"},
            (
                "a.0 (account ann, class normal) gave up its cells 1.5 s ago, after 40 output tokens. "
                "It continues later, because all 2 places are in use."
            ),
        ),
        (
            {"phase": "prefill", "num_computed_tokens": 600, "num_cached_tokens": 500},
            (
                "a.0 (account ann, class normal), 4.0 s old, has computed 600 of 800 tokens of its "
                "prompt in 1.5 s, 500 of them from the cache."
            ),
        ),
        (
            {
                "phase": "decode",
                "num_output_tokens": 40,
                "tokens_per_second": 26.04,
                "queued": 2.0,
                "reason": "b.0 is computing 300 tokens of its prompt",
                "num_parked": 1,
            },
            (
                "a.0 (account ann, class normal), 4.0 s old, has 40 output tokens after 1.5 s, 26.0 "
                "tokens/s. It waited 2.0 s before, because b.0 is computing 300 tokens of its prompt. "
                "It was parked 1 time."
            ),
        ),
    ],
)
def test_request_is_described_in_sentences(fields, sentence):
    common = {"name": "a.0", "account": "ann", "priority": "normal", "phase_seconds": 1.5}
    assert (
        describe_sequence(SequenceState(**common, age=4.0, num_prompt_tokens=800, **fields))
        == sentence
    )


def test_phases_follow_a_sequence_until_it_is_parked(fake_engine):
    engine = fake_engine(max_num_seqs=1, max_num_batched_tokens=16, context_length=256, length=100)
    engine.add("low", [1] * 40, account="ann", priority=Priority.BATCH, max_tokens=100)
    engine.step()
    (low,) = explain(engine.scheduler, engine.now, 1).running
    assert (low.phase, low.num_computed_tokens, low.num_cells) == ("prefill", 16, 16)
    for _ in range(6):
        engine.now += 0.5
        engine.step()
    (low,) = explain(engine.scheduler, engine.now, 1).running
    assert (low.phase, low.account, low.num_output_tokens) == ("decode", "ann", 5)
    assert low.tokens_per_second == pytest.approx(2, rel=0.1)
    assert low.phase_seconds == pytest.approx(2, rel=0.1)
    engine.add("high", [2], priority=Priority.INTERACTIVE, max_tokens=100)
    engine.step()
    explained = explain(engine.scheduler, engine.now, 1)
    assert [one.name for one in explained.running] == ["high.0"]
    assert [(one.name, one.phase, one.num_parked) for one in explained.waiting] == [
        ("low.0", "parked", 1)
    ]
    assert explained.waiting[0].num_cells == 0
