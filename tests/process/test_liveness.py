"""Which engine processes count as hung."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cllm.process.liveness import Hang, Liveness
from cllm.process.step_record import CurrentStep

BETWEEN_STEPS = CurrentStep(2, 0.0, [])


class Engine:
    """An engine process at which somebody looks once a second. It reads everything at once, and is
    pinged after each look.
    """

    def __init__(self, entry: CurrentStep = BETWEEN_STEPS) -> None:
        self.now = 1000.0
        self.entry = entry
        self.has_work = False
        self.num_sent = self.num_read = 0
        self.owes_answers = True
        self.is_stopped = False
        self._liveness = Liveness(self.now, entry)

    def look(self, after: float = 1.0) -> Hang | None:
        self.now += after
        num_read = self.num_read
        hang = self._liveness.look(
            self.now, self.entry, self.num_sent, num_read, has_work=self.has_work
        )
        if num_read >= self.num_sent and self.owes_answers:
            self.send()
        return hang

    def send(self) -> None:
        self.num_sent += 10
        if not self.is_stopped:
            self.num_read = self.num_sent

    def find_hang(self, seconds: int, before: Callable[[], object] = int) -> tuple[Hang, float]:
        """Look for ``seconds``; return the hang and how long it took to notice it."""
        begun = self.now
        for _ in range(seconds):
            before()
            if (hang := self.look()) is not None:
                return hang, self.now - begun
        raise LookupError("it does not hang")


@pytest.mark.parametrize("has_work", [False, True])
def test_stopped_process_is_noticed_within_30_seconds(has_work: bool) -> None:
    """Between steps, or with nothing to compute: texts to tokenize and commands are unread too."""
    engine = Engine()
    engine.owes_answers = has_work
    for _ in range(100):
        engine.look()
    engine.is_stopped, engine.has_work = True, has_work
    engine.send()
    hang, seconds = engine.find_hang(100)
    assert hang.is_stopped
    assert seconds <= 30


@pytest.mark.parametrize("expected_seconds", [0.0, 0.1, 3.0, 50.0])
def test_process_stopped_in_a_step_is_noticed_within_30_seconds(expected_seconds: float) -> None:
    """However long the step may take."""
    engine = Engine(CurrentStep(2, expected_seconds, ["a"]))
    engine.has_work = True
    engine.look()
    engine.is_stopped = True
    hang, seconds = engine.find_hang(100)
    assert hang.is_stopped
    assert seconds <= 30


@pytest.mark.parametrize(
    ("expected_seconds", "longest"), [(0.0, 600), (0.1, 28), (2.8, 28), (5.0, 50)]
)
def test_step_hangs_after_ten_times_its_expected_duration(
    expected_seconds: float, longest: int
) -> None:
    """After 28 seconds at least. A request may be the cause."""
    engine = Engine(CurrentStep(2, expected_seconds, ["a"]))
    engine.has_work = True
    hang, seconds = engine.find_hang(700)
    assert not hang.is_stopped
    assert longest < seconds <= longest + 1


def test_process_that_reads_may_tokenize_or_load_for_long() -> None:
    engine = Engine()
    with pytest.raises(LookupError):
        engine.find_hang(10_000)


def test_stopped_process_that_was_sent_nothing_does_not_hang() -> None:
    engine = Engine()
    engine.owes_answers, engine.is_stopped = False, True
    with pytest.raises(LookupError):
        engine.find_hang(10_000)


def test_process_that_is_always_a_little_behind_does_not_hang() -> None:
    engine = Engine()

    def send() -> None:
        engine.num_read = engine.num_sent
        engine.num_sent += 10

    with pytest.raises(LookupError):
        engine.find_hang(1000, send)


@pytest.mark.parametrize("gap", [3.0, 29.0, 1e6])
def test_late_looks_prove_nothing(gap: float) -> None:
    """The API process, its group or the machine was suspended. Later hangs are noticed."""
    engine = Engine(CurrentStep(2, 0.1, ["a"]))
    engine.has_work = True
    for _ in range(27):
        assert engine.look() is None
    engine.is_stopped = True  # until the engine continues too
    assert engine.look(gap) is None
    engine.is_stopped = False
    engine.num_read = engine.num_sent
    engine.entry = CurrentStep(4, 0.1, ["a"])
    for _ in range(27):
        assert engine.look() is None
    engine.is_stopped = True
    assert engine.look(gap) is None
    hang, seconds = engine.find_hang(100)
    assert hang.is_stopped
    assert seconds <= 30
