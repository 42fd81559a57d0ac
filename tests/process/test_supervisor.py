"""One engine process after the other: what the client of a supervisor hears, and when the next one
starts.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest
from conftest import PATIENCE
from fake_engines import READY, read_frames

from cllm.core.output import Stats
from cllm.engine.commands import Close
from cllm.errors import KilledWhileLoading, StartupError
from cllm.process import supervisor as module
from cllm.process.launch import EngineSpec, Place
from cllm.process.liveness import Hang
from cllm.process.messages import Failed, Loading, Ready, Start, Stepped
from cllm.process.step_record import StepRecord
from cllm.process.supervisor import Death, Supervisor

ONLY = EngineSpec()
_decode_start = msgspec.msgpack.Decoder(Start).decode


class FakeProcess:
    """An engine process that answers Start with the next of ``answers``, or ends."""

    pid = 7

    def __init__(self, engines, take, launched, place):
        self.ended = asyncio.Event()
        self.num_sent = 0
        self.was_ended_from_outside = False
        self.engines, self.take = engines, take
        self.launched, self.place = launched, place
        self.start: Start | None = None
        self.closed: list = []

    def write(self, data):
        if self.start is None:
            self.start = _decode_start(data[4:])
            self.record = StepRecord(Path(self.start.step_record))
            answers = self.engines.answers.pop(0) if self.engines.answers else [READY]
            for answer in answers:
                self.take(answer)
            if not answers:
                self.end(from_outside=self.engines.kills_loading)
        else:
            self.closed += read_frames(data)
            self.end()

    def end(self, *, from_outside=False):
        self.was_ended_from_outside = from_outside
        self.ended.set()

    async def stop(self):
        self.ended.set()

    def describe_end(self):
        return "SIGABRT"


class Engines:
    """The client of a supervisor, and the processes that this has started. ``answers`` are those of
    the next processes when they load; others are ready at once.
    """

    def __init__(self):
        self.processes: list[FakeProcess] = []
        self.answers: list[list] = []
        self.kills_loading = False
        self.events: asyncio.Queue = asyncio.Queue()
        self.taken: list = []
        self.shares: list[float] = []
        self.works = self.owes = False

    async def spawn(self, take, launched, place):
        self.processes.append(FakeProcess(self, take, launched, place))
        return self.processes[-1]

    def take(self, event):
        match event:
            case Loading(share):
                self.shares.append(share)
            case Ready() | Death() | Failed():
                self.events.put_nowait(event)
            case _:
                self.taken.append(event)

    def has_work(self):
        return self.works

    def owes_answers(self):
        return self.owes


@pytest.fixture(autouse=True)
def without_waits(monkeypatch):
    monkeypatch.setattr(module, "FIRST_BACKOFF", 0.0)


def run(test, monkeypatch, params=READY.params, spec=ONLY, **more):
    """Run ``test(supervisor, engines)`` and close the supervisor."""

    async def main():
        engines = Engines()
        monkeypatch.setattr(module, "spawn", engines.spawn)
        supervisor = Supervisor(params, engines, spec, **more)
        try:
            await asyncio.wait_for(test(supervisor, engines), PATIENCE)
        finally:
            await supervisor.close()
        assert all(process.ended.is_set() for process in engines.processes)

    asyncio.run(main())


def test_loaded_engine_is_ready_and_its_messages_reach_the_client(monkeypatch):
    async def test(supervisor, engines):
        engines.answers = [[Loading(0.5), READY, Stepped([], Stats())]]
        assert not supervisor.ready
        await supervisor.start(max_bytes=1000)
        assert supervisor.ready
        assert supervisor.pid == 7
        assert engines.events.get_nowait() == READY
        assert engines.shares == [0.5]
        assert engines.taken == [Stepped([], Stats())]
        assert (supervisor.info, supervisor.vocabulary) == (READY.info, READY.vocabulary)
        assert engines.processes[0].start.params.max_bytes == 1000
        with pytest.raises(RuntimeError, match="has been started"):
            await supervisor.start()

    run(test, monkeypatch)


def test_first_engine_may_have_been_launched_before(monkeypatch):
    """The next ones compute at the same place."""
    launched, place = object(), Place((1,))

    async def test(supervisor, engines):
        await supervisor.start()
        await engines.events.get()
        engines.processes[0].end()
        await engines.events.get()
        await engines.events.get()
        assert [(one.launched, one.place) for one in engines.processes] == [
            (launched, place),
            (None, place),
        ]

    run(test, monkeypatch, spec=EngineSpec(0, "the engine", place, launched))


def test_death_is_reported_with_the_requests_in_the_step_and_the_next_engine_starts(monkeypatch):
    async def test(supervisor, engines):
        await supervisor.start()
        assert await engines.events.get() == READY
        engines.processes[0].record.begin(["a", "b"], 0.1)
        engines.processes[0].end()
        death = await engines.events.get()
        assert (death.cause, death.in_step, death.is_own_fault) == ("SIGABRT", ["a", "b"], True)
        assert death.retry_after > 0
        assert await engines.events.get() == READY
        assert supervisor.ready
        assert supervisor.num_restarts == 1

    run(test, monkeypatch)


def test_engine_that_was_ended_from_outside_is_not_at_fault(monkeypatch):
    async def test(supervisor, engines):
        await supervisor.start()
        await engines.events.get()
        engines.processes[0].end(from_outside=True)
        assert not (await engines.events.get()).is_own_fault

    run(test, monkeypatch)


def test_engine_without_memory_is_at_fault_even_if_the_system_ended_it(monkeypatch):
    kills = 0
    monkeypatch.setattr(module, "count_oom_kills", lambda: kills)

    async def test(supervisor, engines):
        nonlocal kills
        await supervisor.start()
        await engines.events.get()
        kills += 1
        engines.processes[0].end(from_outside=True)
        death = await engines.events.get()
        assert death.is_own_fault
        assert "out of memory" in death.cause

    run(test, monkeypatch)


def test_failed_restarts_are_reported_and_repeated_until_one_succeeds(monkeypatch):
    async def test(supervisor, engines):
        await supervisor.start()
        await engines.events.get()
        engines.answers = [[Failed("no memory")], [], [READY]]
        engines.processes[0].end()
        await engines.events.get()
        assert not supervisor.ready
        for count in (1, 2):
            assert isinstance(await engines.events.get(), Failed)
            assert supervisor.num_failed == count
        assert await engines.events.get() == READY
        assert supervisor.num_failed == 0

    run(test, monkeypatch)


def test_each_failed_restart_doubles_the_wait(monkeypatch):
    waits, sleep = [], asyncio.sleep
    monkeypatch.setattr(module, "FIRST_BACKOFF", 0.5)
    monkeypatch.setattr(module, "LONGEST_BACKOFF", 3.0)

    async def note(seconds):
        waits.append(seconds)
        await sleep(0)

    async def test(supervisor, engines):
        await supervisor.start()
        await engines.events.get()
        engines.answers = [[Failed("no memory")]] * 4
        monkeypatch.setattr(module.asyncio, "sleep", note)
        engines.processes[0].end()
        while await engines.events.get() != READY:
            pass
        monkeypatch.setattr(module.asyncio, "sleep", sleep)
        assert waits == [0.0, 0.5, 1.0, 2.0, 3.0]

    run(test, monkeypatch)


def test_restart_keeps_the_context(monkeypatch):
    """Accepted requests must fit into the next engine, whatever memory is free then."""

    async def test(supervisor, engines):
        await supervisor.start()
        await engines.events.get()
        engines.answers = [[Loading(0.5), READY]]
        engines.processes[0].end()
        await engines.events.get()
        await engines.events.get()
        assert engines.shares == [0.5]
        assert engines.processes[0].start.params.context_length is None
        params = engines.processes[1].start.params
        assert params.context_length == READY.info.context_length

    run(test, monkeypatch)


@pytest.mark.parametrize(
    ("answers", "is_killed", "error", "words"),
    [
        ([Failed("no such file")], False, StartupError, "no such file"),
        ([], False, StartupError, "may be damaged"),
        ([], True, KilledWhileLoading, "was ended while loading"),
    ],
)
def test_first_engine_that_cannot_load_is_an_error(monkeypatch, answers, is_killed, error, words):
    async def test(supervisor, engines):
        engines.answers, engines.kills_loading = [answers], is_killed
        with pytest.raises(error, match=words):
            await supervisor.start()
        assert engines.processes[0].ended.is_set()
        assert not supervisor.ready
        assert engines.events.empty()

    run(test, monkeypatch)


def test_unloaded_engine_is_not_replaced_until_it_is_started(monkeypatch):
    async def test(supervisor, engines):
        await supervisor.start()
        await engines.events.get()
        await supervisor.unload()
        assert engines.processes[0].closed == [Close(0.0)]
        assert supervisor.unloaded
        assert not supervisor.ready
        assert engines.events.empty(), "nothing has died"
        await supervisor.start()
        assert await engines.events.get() == READY
        assert not supervisor.unloaded
        assert supervisor.num_restarts == 0

    run(test, monkeypatch)


def test_engine_with_a_disk_cache_gets_time_to_save(monkeypatch):
    async def test(supervisor, engines):
        await supervisor.start()
        await supervisor.unload()
        assert engines.processes[0].closed == [Close(module.UNLOAD_SECONDS)]

    run(test, monkeypatch, msgspec.structs.replace(READY.params, disk_cache="/tmp/x"))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_engine_that_hangs_is_killed(monkeypatch, is_stopped):
    """It is at fault, unless the whole process has stopped."""
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.01)

    async def test(supervisor, engines):
        await supervisor.start()
        await engines.events.get()
        with monkeypatch.context() as patch:
            hang = Hang("does nothing", is_stopped)
            patch.setattr(module.Liveness, "look", lambda *_: hang)
            death = await engines.events.get()
        assert death.cause == "it hung"
        assert death.is_own_fault is not is_stopped
        assert await engines.events.get() == READY

    run(test, monkeypatch)


def test_time_until_ready_is_the_wait_plus_the_last_load(monkeypatch):
    now = 100.0

    async def test(supervisor, engines):
        nonlocal now
        assert supervisor.seconds_until_ready() == module.USUAL_LOAD_SECONDS
        now += 2
        assert supervisor.seconds_until_ready() == module.USUAL_LOAD_SECONDS - 2
        now += 100
        assert supervisor.seconds_until_ready() == 1.0, "at least"
        await supervisor.start()
        assert supervisor.seconds_until_ready() == 0.0
        await supervisor.unload()
        supervisor._load_seconds = 9.0
        now += 5
        assert supervisor.seconds_until_ready() == 9.0, "nothing is being loaded"

    run(test, monkeypatch, clock=lambda: now)


def test_engine_responds_while_its_steps_are_as_fast_as_expected(monkeypatch):
    now = 100.0

    async def test(supervisor, engines):
        nonlocal now
        assert not supervisor.is_responding()
        await supervisor.start()
        record = engines.processes[0].record
        record.begin(["a"], 0.2)
        with monkeypatch.context() as patch:
            patch.setattr(module.time, "monotonic", lambda: now)
            assert supervisor.is_responding()
            for _ in range(2):
                now += 0.29
                assert supervisor.is_responding(), "within three times the expected duration"
            now += 0.1
            assert not supervisor.is_responding()
            record.end()
            record.begin(["a"], 0.0)
            assert supervisor.is_responding()
            for _ in range(3):
                now += 0.29
                assert supervisor.is_responding(), "nobody knows how long the step takes"

    run(test, monkeypatch)
