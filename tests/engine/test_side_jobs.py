"""The protocol of side jobs: when the engine calls them, and what their exceptions cost."""

from __future__ import annotations

from itertools import count

import pytest

from cllm.backends.fake.backend import FakeBackend
from cllm.backends.fake.vocabulary import END
from cllm.core.batch import Save
from cllm.core.output import FinishReason, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import EmbeddingRequest, Request
from cllm.engine.build import build_engine
from cllm.engine.commands import Add, Close, Embed
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.engine.side_jobs import SideJob
from cllm.errors import StartupError


class Job(SideJob):
    """Records its calls, returns an output in each, and raises an exception in the ``faulty``
    methods.
    """

    def __init__(self, name: str = "job", *faulty: str) -> None:
        self.name = name
        self.faulty = faulty
        self.calls: list[str] = []

    def _record_call(self, method: str) -> list[TokenOutput]:
        self.calls.append(method)
        if method in self.faulty:
            raise ZeroDivisionError(method)
        return [TokenOutput(f"{self.name} {method}", 0, 7, FinishReason.STOP)]

    def before(self, now: float) -> list[TokenOutput]:
        return self._record_call("before")

    def after(self, now: float) -> list[TokenOutput]:
        return self._record_call("after")

    def idle(self) -> bool:
        self._record_call("idle")
        return False


def start(*jobs: SideJob, **options) -> Engine:
    clock = count(0, 0.001).__next__  # the time of a busy machine would change the steps
    engine = build_engine(FakeBackend(length=3, **options), EngineParams(speculation="off"), clock)
    engine.side_jobs += jobs
    return engine


def add(name: str, prompt: list[int], **params) -> Add:
    return Add(Request(name, prompt, SamplingParams(temperature=0, **params)))


def finish(engine: Engine) -> dict[str, list[int]]:
    """Step until there is no work; return the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(50):
        if not engine.has_work():
            return tokens
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token)
        engine.scheduler.sequences.check()
    raise AssertionError(f"the engine does not finish: {engine.scheduler}")


def test_outputs_of_side_jobs_are_sent_with_the_step():
    """First those of ``before``, then the batch's, then those of ``after``."""
    engine = start(Job("1"), Job("2"))
    engine.handle(add("A", [1]))
    names = [output.request_id for output in engine.step()]
    assert names == ["1 before", "2 before", "A", "1 after", "2 after"]


def test_side_jobs_are_called_without_a_batch():
    job = Job()
    assert [output.request_id for output in start(job).step()] == ["job before", "job after"]
    assert job.calls == ["before", "after"]


@pytest.mark.parametrize("faulty", [("before",), ("after",), ("before", "after")])
def test_side_job_exception_affects_no_sequence_and_no_other_job(faulty):
    broken, other = Job("broken", *faulty), Job("other")
    engine = start(broken, other)
    engine.handle(add("A", [1]))
    engine.handle(add("B", [20]))
    tokens = finish(engine)
    assert tokens["A"] == [2, 3, 4, END]
    assert tokens["B"] == [21, 22, 23, END]
    assert other.calls == broken.calls == ["before", "after"] * 4


@pytest.mark.parametrize("part", ["schedule", "update"])
def test_side_jobs_are_called_after_an_exception_in_the_step(part, monkeypatch):
    job = Job()
    engine = start(job)
    engine.handle(add("A", [1]))
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, part, lambda *args: 1 / 0)
        engine.step()
    assert job.calls == ["before", "after"]
    assert finish(engine)["A"] == [2, 3, 4, END]


def test_ctrl_c_in_a_batch_costs_no_sequence(monkeypatch):
    """The batch is undone; a later exception does not undo it a second time."""
    engine = start(Job("broken", "before"))
    engine.handle(add("A", [1]))

    def interrupt(batch):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.backend, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert finish(engine)["A"] == [2, 3, 4, END]


def test_startup_error_in_side_job_stops_engine(monkeypatch):
    job = Job()
    monkeypatch.setattr(job, "after", lambda now: (_ for _ in ()).throw(StartupError("gone")))
    with pytest.raises(StartupError):
        start(job).step()


def test_busy_idle_side_job_starves_no_other():
    """All side jobs are called."""
    busy, other = Job("busy"), Job("other")
    busy.idle = lambda: True
    assert start(busy, other).idle()
    assert other.calls == ["idle"]


def test_snapshot_evicted_from_ram_is_not_written(monkeypatch):
    """An exception here would be raised in every step."""
    engine = start()
    monkeypatch.setattr(engine.scheduler.sequences, "disk", pytest.fail)
    engine.scheduler.sequences.write_saved([Save(0, 123)])


class Inbox:
    def __init__(self) -> None:
        self.blocks: list[bool] = []

    def drain(self, block: bool) -> list:
        self.blocks.append(block)
        return [Close()] if len(self.blocks) == 4 else []


class Outbox:
    def send(self, outputs, stats) -> None:
        pass


def test_idle_side_jobs_are_called_until_none_has_more_to_do():
    """One that raises an exception has nothing more to do."""

    class Patient(Job):
        def idle(self) -> bool:
            super().idle()
            return self.calls.count("idle") < 3

    broken, patient, inbox = Job("broken", "idle"), Patient(), Inbox()
    start(broken, patient).run(inbox, Outbox())
    assert inbox.blocks == [False, False, True, True]
    assert broken.calls.count("idle") == patient.calls.count("idle") == 4


def test_engine_does_not_block_while_side_job_has_work():
    class Busy(Job):
        def has_work(self) -> bool:
            return True

    job, inbox = Busy(), Inbox()
    start(job).run(inbox, Outbox())
    assert inbox.blocks == [False] * 4
    assert "idle" not in job.calls


def test_steps_call_only_the_side_jobs_that_were_needed():
    """Grammars and embeddings join with the first request that needs them, once."""
    engine = start()
    engine.handle(add("A", [1]))
    assert engine.side_jobs == []
    for i in range(2):
        engine.handle(Embed(EmbeddingRequest(f"e{i}", [[1, 2]])))
    assert engine.side_jobs == [engine.embeddings]
    for name in "BC":
        engine.handle(add(name, [1], grammar='start: "ab"'))
    assert len(engine.side_jobs) == 2


def test_hot_objects_have_fewer_than_30_attributes():
    """CPython 3.11 reads attributes of larger objects more slowly, which costs 3 % of the step's
    time.
    """
    engine = start()
    sequences = engine.scheduler.sequences
    for owner in (engine, engine.scheduler, sequences, sequences.kv_cache):
        assert len(vars(owner)) < 30, owner
