"""The engine records its steps and the spans of its sequences while somebody asks for it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cllm.backends.fake.backend import Costs
from cllm.core.timeline import Timeline
from cllm.engine import timeline as module
from cllm.engine.commands import Close, RecordTimeline, TakeTimeline, TimelineTaken


class Box:
    """The inbox and the outbox of an engine. The commands of ``turns`` come one after the other."""

    def __init__(self, *turns: object) -> None:
        self.turns = list(turns)
        self.messages: list = []

    def drain(self, block: bool) -> list:
        command = self.turns.pop(0) if self.turns else Close(0.0)
        return [] if command is None else [command]

    def send(self, outputs, stats) -> None:
        """Forget the outputs."""

    def send_message(self, message) -> None:
        self.messages.append(message)


def record(fake, num_steps: int) -> Timeline:
    """Return the timeline of the next steps."""
    box = Box(RecordTimeline(), *[None] * (num_steps - 1), TakeTimeline())
    fake.engine.run(box, box)
    [reply] = box.messages
    assert isinstance(reply, TimelineTaken)
    return reply.timeline


def phases(timeline: Timeline, sequence: str) -> list[tuple[str, int]]:
    spans = [span for span in timeline.spans if span.sequence == sequence]
    return [(span.phase, span.num_tokens) for span in sorted(spans, key=lambda one: one.begin)]


@pytest.fixture
def engine(fake_engine):
    return fake_engine(
        max_num_seqs=2, max_num_batched_tokens=32, context_length=256, costs=Costs(0.01), length=99
    )


def test_prompt_chunks_and_decoding_have_spans(engine):
    engine.add("A", [1] * 80, account="ann", max_tokens=5)
    timeline = record(engine, 20)
    assert phases(timeline, "A.0") == [
        *(("queued", 0), ("prefill", 32), ("prefill", 32), ("prefill", 16)),
        ("decode", 4),  # the last chunk gave the first token
    ]
    assert {span.account for span in timeline.spans} == {"ann"}
    assert [step.number for step in timeline.steps] == list(range(1, 8))
    assert sum(step.num_prefill_tokens for step in timeline.steps) == 80
    for step in timeline.steps:
        moments = [step.begun, step.scheduling, step.forwarding, step.sampling, step.updating]
        assert [*moments, step.updated, step.ended] == sorted([*moments, step.updated, step.ended])
        assert step.sampling > step.forwarding  # the backend has computed
    spans = sorted(timeline.spans, key=lambda span: span.begin)
    assert all(one.end <= other.begin for one, other in pairwise(spans))


def test_waiting_sequences_have_their_reason(engine):
    for name in "ABC":
        engine.add(name, [1, 2, ord(name)], max_tokens=200)
    engine.step()
    timeline = record(engine, 3)
    assert phases(timeline, "A.0") == [("decode", 3)]  # it was running
    [span] = [span for span in timeline.spans if span.sequence == "C.0"]
    assert (span.phase, span.begin) == ("queued", 0.0)
    assert "all 2 places are in use" in span.reason


def test_parked_sequence_has_a_parked_span(fake_engine):
    sizes = {"context_length": 60, "num_cells": 61, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    engine = fake_engine(**sizes, length=30, costs=Costs(0.01))
    engine.scheduler.sequences.length_estimates.output = 1
    engine.add("A", [1] * 18, max_tokens=20)
    engine.add("B", [2] * 18, max_tokens=20)
    found = [phase for phase, _ in phases(record(engine, 100), "B.0")]
    assert found[:4] == ["queued", "prefill", "decode", "parked"]
    assert found[-1] == "decode"


def test_only_the_last_steps_are_kept(engine, monkeypatch):
    monkeypatch.setattr(module, "MAX_STEPS", 3)
    engine.add("A", [1], max_tokens=10)
    timeline = record(engine, 20)
    assert [step.number for step in timeline.steps] == [8, 9, 10]
    assert timeline.num_dropped == 7


def test_nothing_is_recorded_when_nobody_asks(engine):
    engine.add("A", [1], max_tokens=10)
    box = Box(*[None] * 5, TakeTimeline())
    engine.engine.run(box, box)
    assert box.messages == [TimelineTaken(Timeline())]
    record(engine, 1)
    assert engine.engine._timeline is None
