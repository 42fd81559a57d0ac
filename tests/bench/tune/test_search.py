"""The search for settings, on simulated machines whose clock advances by a second with each
measurement.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.backends.llama_cpp.options import Options
from cllm.bench.tune.measure import CandidateError, Speeds, SpeedWork
from cllm.bench.tune.search import (
    BATCH_THREADS,
    KV_TYPE,
    LAYOUT,
    MIN_ROUNDS,
    THREADS,
    UBATCH,
    Choice,
    Knob,
    SpeedFigure,
    Traffic,
    Tuned,
    Works,
    apply_choice,
    final_figures,
    knobs,
    search,
    starting_choice,
    works,
)
from cllm.engine.params import EngineParams
from cllm.errors import StartupError

PARAMS = EngineParams(options=Options().model_dump())
ONE, MANY = SpeedWork(1, 16, 8), SpeedWork(8, 64, 8)
FIGURES = [SpeedFigure("prompt", MANY), SpeedFigure("decode", MANY)]
FINAL = [*FIGURES, SpeedFigure("decode", ONE)]
START: Choice = {THREADS: 4, UBATCH: 512}
KNOBS = [Knob(THREADS, [1, 2], FIGURES), Knob(UBATCH, [128, 256], FIGURES[:1])]


class Machine:
    """A simulated machine. ``speed`` is the factor of a choice; 1 means 100 tokens/s. It records
    what was measured.
    """

    def __init__(self, speed: Callable[[Choice], float]) -> None:
        self.speed = speed
        self.now = 0.0
        self.choices: list[Choice] = []

    def measure(self, choice: Choice, work: SpeedWork) -> Speeds:
        self.now += 1
        self.choices.append(choice)
        speed = 100 * self.speed(choice)
        return Speeds(speed, speed)

    def tune(
        self,
        tries: list[Knob] = KNOBS,
        seconds: float = 1000,
        refuse: Callable[[str, Choice], str] | None = None,
    ) -> Tuned:
        allow = refuse or (lambda key, choice: "")
        return search(tries, FINAL, START, self.measure, allow, seconds, clock=lambda: self.now)


def test_search_finds_best_value_of_each_setting() -> None:
    machine = Machine(
        lambda choice: (
            {1: 0.7, 2: 1.5, 4: 1.0}[choice[THREADS]] * (2 if choice[UBATCH] == 128 else 1)
        )
    )
    tuned = machine.tune()
    assert tuned.chosen == tuned.recommended == {THREADS: 2, UBATCH: 128}
    assert tuned.after.gain == pytest.approx(2.0)
    assert [(tried.value, tried.chosen) for tried in tuned.tried] == [
        (4, False),
        (1, False),
        (2, True),
        (512, False),
        (128, True),
        (256, False),
    ]
    assert list(tuned.after.speeds) == ["prompt", "decode 8", "decode 1"]


@given(
    st.dictionaries(st.sampled_from([1, 2, 4]), st.integers(10, 100), min_size=3),
    st.dictionaries(st.sampled_from([128, 256, 512]), st.integers(10, 100), min_size=3),
)
def test_search_finds_optimum_without_noise(
    threads: dict[int, int], passes: dict[int, int]
) -> None:
    """If settings are independent, the result is the optimum, up to the smallest gain that counts."""

    def speed(choice: Choice) -> float:
        return threads[choice[THREADS]] * passes[choice[UBATCH]]

    chosen = START | Machine(speed).tune().recommended
    assert speed(chosen) * 1.02**2 >= max(threads.values()) * max(passes.values()) * 0.999
    assert speed(chosen) >= speed(START)


def test_candidates_are_measured_alternately() -> None:
    """Each round measures all candidates, and every second round in reverse order."""
    machine = Machine(lambda choice: 1.0)
    machine.tune([Knob(THREADS, [1, 2], FIGURES[:1])], seconds=1)
    assert [choice[THREADS] for choice in machine.choices] == [4, 1, 2, 2, 1, 4, 4, 1, 2]


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_not_a_gain(seed: int) -> None:
    """No setting has an effect on this machine, whose speed varies by a tenth."""
    noise = random.Random(seed)
    tuned = Machine(lambda choice: noise.uniform(0.9, 1.1)).tune()
    assert tuned.recommended == {} or tuned.after.gain > tuned.after.noise


def test_gradual_slowdown_affects_all_candidates_equally() -> None:
    """The machine becomes slower and slower; the order of the settings does not matter."""
    machine = Machine(lambda choice: (1.2 if choice[THREADS] == 2 else 1) * 0.97**machine.now)
    assert machine.tune().recommended == {THREADS: 2}


def test_gain_must_repeat_in_final_measurement() -> None:
    """A gain that does not repeat is reported but not recommended."""
    machine = Machine(lambda choice: 1.5 if choice[THREADS] == 2 and machine.now <= 9 else 1.0)
    tuned = machine.tune(KNOBS[:1], seconds=10)
    assert tuned.chosen == {THREADS: 2}
    assert not tuned.confirmed
    assert tuned.recommended == {}


def test_small_gains_are_ignored() -> None:
    """Each setting has a smallest gain that counts."""
    machine = Machine(lambda choice: 1.05 if choice[THREADS] == 1 else 1.0)
    assert machine.tune([Knob(THREADS, [1], FIGURES)]).recommended == {THREADS: 1}
    assert machine.tune([Knob(THREADS, [1], FIGURES, least=0.1)]).recommended == {}


def test_crashed_candidate_is_dropped() -> None:
    """The reason is stored and the other candidates are measured. The current settings must work."""

    def speed(choice: Choice) -> float:
        if choice[THREADS] == 1:
            raise CandidateError("it died of SIGSEGV")
        return 1.5 if choice[THREADS] == 2 else 1.0

    machine = Machine(speed)
    tuned = machine.tune(KNOBS[:1])
    assert tuned.recommended == {THREADS: 2}
    assert [tried.outcome.failure for tried in tuned.tried] == ["", "it died of SIGSEGV", ""]
    assert sum(choice[THREADS] == 1 for choice in machine.choices) == 1
    with pytest.raises(StartupError, match="the present settings cannot be measured: never"):
        Machine(lambda choice: (_ for _ in ()).throw(CandidateError("never"))).tune()


def test_slow_candidate_is_dropped_early() -> None:
    machine = Machine(lambda choice: {1: 0.5, 2: 0.9, 4: 1.0}[choice[THREADS]])
    machine.tune([Knob(THREADS, [1, 2], FIGURES[:1])])
    counts = [sum(choice[THREADS] == threads for choice in machine.choices) for threads in (1, 2)]
    assert counts == [2, 3]


def test_refused_candidate_is_not_chosen() -> None:
    """The next best candidate is chosen."""
    machine = Machine(lambda choice: {1: 1.5, 2: 1.2, 4: 1.0}[choice[THREADS]])
    tuned = machine.tune(
        KNOBS[:1], refuse=lambda key, choice: "too hot" if choice[THREADS] == 1 else ""
    )
    assert tuned.recommended == {THREADS: 2}
    assert [tried.note for tried in tuned.tried] == ["", "too hot", ""]


def test_settings_without_time_are_skipped() -> None:
    """A setting whose measurement has begun gets all rounds; the others are named as skipped."""
    machine = Machine(lambda choice: 1.0)
    tuned = machine.tune(seconds=3)
    assert tuned.skipped == [UBATCH]
    assert len(machine.choices) == 3 * MIN_ROUNDS


def test_settings_without_candidates_are_skipped() -> None:
    tuned = Machine(lambda choice: 1.0).tune([Knob(UBATCH, [], FIGURES)])
    assert (tuned.tried, tuned.skipped) == ([], [UBATCH])


def test_thread_counts_are_written_together() -> None:
    """A thread count of null would follow the other one, so both are written."""
    start: Choice = {BATCH_THREADS: 4, THREADS: 4, UBATCH: 512}
    machine = Machine(lambda choice: 1.5 if choice[THREADS] == 2 else 1.0)
    tuned = search(
        [Knob(THREADS, [2], FIGURES)],
        FINAL,
        start,
        machine.measure,
        lambda *_: "",
        100,
        clock=lambda: machine.now,
    )
    assert tuned.recommended == {BATCH_THREADS: 4, THREADS: 2}


# --- what is tried ------------------------------------------------------------------------------


def test_chosen_settings_reach_engine_parameters() -> None:
    """A null thread count means one thread per core; a null batch size means the size of one
    sequence.
    """
    start = starting_choice(PARAMS, 6)
    assert start == {BATCH_THREADS: 6, THREADS: 6, UBATCH: 512, LAYOUT: "auto", KV_TYPE: "f16"}
    params = EngineParams(max_num_batched_tokens=100, options=Options(n_threads=2).model_dump())
    assert starting_choice(params, 6) == {
        **start,
        BATCH_THREADS: 2,
        THREADS: 2,
        UBATCH: 100,
    }
    assert starting_choice(apply_choice(PARAMS, start | {THREADS: 3}), 1) == start | {THREADS: 3}


@pytest.mark.parametrize("cores", [1, 2, 6, 64])
def test_candidates_depend_on_cores(cores: int) -> None:
    """No candidate appears twice, equals the current setting, or has no effect on the workload."""
    start = starting_choice(PARAMS, cores)
    tries = knobs(start, Works(ONE, MANY, MANY, MANY), cores, 512)
    assert [knob.key for knob in tries] == [BATCH_THREADS, THREADS, UBATCH, LAYOUT, KV_TYPE]
    for knob in tries:
        assert start[knob.key] not in knob.values
        assert len(set(knob.values)) == len(knob.values)
    assert all(1 <= cast(int, threads) < cores for threads in tries[0].values)
    assert tries[2].values == [256, 128]
    for prompt_tokens, passes in ((64, []), (100, [128]), (128, [128])):
        short = Works(ONE, MANY, SpeedWork(2, prompt_tokens, 8), MANY)
        assert knobs(start, short, cores, 512)[2].values == passes


@pytest.mark.parametrize("tokens_per_s", [5.0, 300.0, 20_000.0])
@pytest.mark.parametrize("seconds", [60.0, 600.0])
def test_workload_sizes_fit_available_time(tokens_per_s: float, seconds: float) -> None:
    """A measurement takes about a sixtieth of the time, unless the machine is too slow for the
    smallest useful workload.
    """
    found = works(lambda work: Speeds(tokens_per_s, tokens_per_s), 32, seconds)
    assert [work.num_seqs for work in found] == [1, 8, 8, 32]
    assert [figure.label for figure in final_figures(found)] == [
        "prompt",
        "decode 1",
        "decode 8",
        "decode 32",
    ]
    num_tokens = 8 * (found.many.prompt_tokens + found.many.steps)
    assert num_tokens / tokens_per_s <= max(seconds / 60, 8 * 20 / tokens_per_s)
    assert math.log2(found.many.prompt_tokens) % 1 == 0
    few = works(lambda work: Speeds(tokens_per_s, tokens_per_s), 1, seconds)
    assert {work.num_seqs for work in few} == {1}


def test_workloads_replace_general_figures() -> None:
    """Every setting is measured with them, and so is the final comparison."""
    traffic = [Traffic("chat", 0.1), Traffic("agents", 0.1)]
    start = starting_choice(PARAMS, 4)
    tries = knobs(start, Works(ONE, MANY, MANY, MANY), 4, 512, traffic)
    final = final_figures(Works(ONE, MANY, MANY, MANY), traffic)
    assert [figure.label for figure in final] == ["chat", "agents"]
    assert all(knob.figures == final for knob in tries)
    assert tries[2].values == [256, 128]
