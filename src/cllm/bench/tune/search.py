"""Finds the settings that make a model fastest on this machine, one setting after the other, the
most important first.

All candidates for a setting, and its present value, are measured in turn, round after round, so
that a slow minute of the machine affects all of them. What counts is the ratio to the present value
in the same round: a candidate is chosen if the median of these ratios is better by more than their
noise. At the end, the original settings and all choices are measured against each other once more.
Choices that are not faster in this measurement are not recommended.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar

import msgspec

from cllm.bench.tune.measure import CandidateError, Speeds, SpeedWork
from cllm.engine.params import EngineParams
from cllm.errors import StartupError

T = TypeVar("T")
Choice = dict[str, Any]
"""Dotted key of a setting -> its value."""
Clock = Callable[[], float]

THREADS, BATCH_THREADS = "backend.llama_cpp.n_threads", "backend.llama_cpp.n_threads_batch"
UBATCH, LAYOUT, KV_TYPE = "backend.llama_cpp.n_ubatch", "kv.layout", "kv.type"
OPTION_PREFIX = "backend.llama_cpp."

MIN_ROUNDS, MAX_ROUNDS = 3, 7
ENOUGH = 5  # rounds from which the median distance is meaningful
# least gain worth a line in a config file; least gain worth giving up `auto`
LEAST_GAIN, CLEAR_GAIN = 0.02, 0.1
KV_KL_LIMIT = 0.01  # nats; a change that the user did not request must not alter the answers more
# rounds -> ratio; a candidate below it in all of these rounds is dropped
HOPELESS = {1: 0.0, 2: 0.7, 3: 0.95}
# approximate number of measurements, of one candidate each, that must fit into the time
MEASUREMENTS = 60


class Trial(msgspec.Struct, frozen=True):
    """The result of one candidate. ``speeds`` has the tokens/s of each round, by figure. ``gain``
    and ``noise`` are shares of the speed of the candidate that it was compared with. ``failure``
    says why it could not be measured; "" if it could.
    """

    speeds: dict[str, list[float]]
    gain: float = 0.0
    noise: float = 0.0
    failure: str = ""

    def beats(self, least: float) -> bool:
        return not self.failure and self.gain > max(least, self.noise)


class Tried(msgspec.Struct, frozen=True):
    """A measured value of a setting. ``note`` says why it was not chosen although it was faster."""

    key: str
    value: object
    outcome: Trial
    chosen: bool
    note: str = ""


class Tuned(msgspec.Struct, frozen=True):
    """The result.

    ``before`` and ``after`` are the original settings and all choices, measured in turn; None if
    nothing was chosen. ``confirmed`` says that the choices are also faster in this last
    measurement. ``skipped`` has the settings with nothing to try or no time left.
    """

    tried: list[Tried]
    skipped: list[str]
    chosen: Choice
    before: Trial | None = None
    after: Trial | None = None

    @property
    def confirmed(self) -> bool:
        return self.after is not None and self.after.beats(0.0)

    @property
    def recommended(self) -> Choice:
        return self.chosen if self.confirmed else {}


class Traffic(NamedTuple):
    """A workload of users to tune for, with prompts of ``scale`` times their usual lengths."""

    workload: str
    scale: float


class SpeedFigure(NamedTuple):
    """A measured number: ``part`` of the speeds of a work (prompt or decode), or of a workload
    (rate).
    """

    part: str
    work: SpeedWork | Traffic

    @property
    def label(self) -> str:
        if isinstance(self.work, Traffic):
            return self.work.workload
        return "prompt" if self.part == "prompt" else f"decode {self.work.num_seqs}"


class Works(NamedTuple):
    """The works to measure: one sequence; several; several with longer prompts; the most that can
    run, up to 32.
    """

    one: SpeedWork
    many: SpeedWork
    long: SpeedWork
    all: SpeedWork


class Knob(NamedTuple):
    """A setting, the values to try in addition to the present one, the figures to measure, and the
    least gain.
    """

    key: str
    values: list[object]
    figures: list[SpeedFigure]
    least: float = LEAST_GAIN


def race(
    runners: Mapping[str, T],
    measure: Callable[[T], dict[str, float]],
    going_on: Callable[[int], bool],
) -> dict[str, Trial]:
    """Measure all runners in turn, round after round. The others are compared with the first one.

    ``measure`` returns tokens/s by figure. A CandidateError removes the runner. ``going_on`` is
    called with the number of rounds after each of them. A runner's value in a round is the
    geometric mean of its figures' ratios to those of the first runner. Raises StartupError if the
    first runner fails.
    """
    first, *others = runners
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    failures: dict[str, str] = {}

    def ratios(name: str) -> list[float]:
        pairs = zip(measured[name], measured[first], strict=False)
        return [
            statistics.geometric_mean(own[figure] / its[figure] for figure in own)
            for own, its in pairs
        ]

    for num_rounds in count(1):
        order = [first, *others]
        for name in order if num_rounds % 2 else reversed(order):
            try:
                measured[name].append(measure(runners[name]))
            except CandidateError as error:
                if name == first:
                    raise StartupError(f"{name} cannot be measured: {error}") from None
                failures[name] = str(error)
        limit = HOPELESS[min(num_rounds, max(HOPELESS))]
        others = [name for name in others if name not in failures and max(ratios(name)) >= limit]
        if not others or not going_on(num_rounds):
            break
    return {
        name: make_outcome(measured[name], ratios(name), failures.get(name, "")) for name in runners
    }


def make_outcome(rounds: list[dict[str, float]], ratios: list[float], failure: str) -> Trial:
    """Return gain and noise. The noise is twice the median distance of the rounds from their
    median; with few rounds, it is the largest distance.
    """
    speeds = {figure: [one[figure] for one in rounds] for figure in (rounds[0] if rounds else ())}
    if failure or not ratios:
        return Trial(speeds, failure=failure or "not measured")
    middle = statistics.median(ratios)
    distances = [abs(ratio - middle) for ratio in ratios]
    noise = 2 * statistics.median(distances) if len(ratios) >= ENOUGH else max(distances)
    return Trial(speeds, middle - 1, noise)


def measure_figures(figures: list[SpeedFigure], measure: Callable[[Any], Any]) -> dict[str, float]:
    """Return label -> tokens/s of each figure. Each work is measured once."""
    speeds = {work: measure(work) for work in dict.fromkeys(figure.work for figure in figures)}
    return {figure.label: getattr(speeds[figure.work], figure.part) for figure in figures}


def search(
    knobs: list[Knob],
    final: list[SpeedFigure],
    start: Choice,
    measure: Callable[[Choice, SpeedWork | Traffic], Any],
    refuse: Callable[[str, Choice], str],
    seconds: float,
    clock: Clock = time.monotonic,
) -> Tuned:
    """Coordinate descent: settle one setting after the other, beginning with ``start``.

    ``refuse`` returns why a faster choice must not be taken, or "" if it may. Each setting gets
    time in proportion to the measurements it needs, but at least MIN_ROUNDS once it has begun.
    Raises StartupError if ``start`` fails.
    """
    end = clock() + seconds
    sizes = [
        (1 + len(knob.values)) * len({figure.work for figure in knob.figures}) for knob in knobs
    ]
    sizes.append(2 * len({figure.work for figure in final}))
    choice, tried, skipped = dict(start), list[Tried](), list[str]()

    def race_choices(
        runners: dict[str, Choice], figures: list[SpeedFigure], until: float
    ) -> dict[str, Trial]:
        def going_on(num_rounds: int) -> bool:
            return num_rounds < MIN_ROUNDS or (num_rounds < MAX_ROUNDS and clock() < until)

        return race(
            runners, lambda it: measure_figures(figures, lambda work: measure(it, work)), going_on
        )

    for i, knob in enumerate(knobs):
        if not knob.values or clock() >= end:
            skipped.append(knob.key)
            continue
        candidates = {"the present settings": choice}
        candidates |= {str(value): choice | {knob.key: value} for value in knob.values}
        until = clock() + (end - clock()) * sizes[i] / sum(sizes[i:])
        outcomes = race_choices(candidates, knob.figures, until)
        best, notes = pick(candidates, outcomes, knob, refuse)
        for name, outcome in outcomes.items():
            value = candidates[name][knob.key]
            tried.append(Tried(knob.key, value, outcome, name == best, notes.get(name, "")))
        choice = candidates[best]
    if choice == start:
        return Tuned(tried, skipped, {})
    outcomes = race_choices({"the present settings": start, "what was chosen": choice}, final, end)
    before, after = outcomes.values()
    return Tuned(tried, skipped, list_changes(start, choice), before, after)


def pick(
    candidates: dict[str, Choice],
    outcomes: dict[str, Trial],
    knob: Knob,
    refuse: Callable[[str, Choice], str],
) -> tuple[str, dict[str, str]]:
    """Return the name of the best candidate, which may be the first one (the present value), and
    why faster ones were rejected.
    """
    present, *others = candidates
    notes = {}
    for name in sorted(others, key=lambda name: -outcomes[name].gain):
        if not outcomes[name].beats(knob.least):
            continue
        notes[name] = refuse(knob.key, candidates[name])
        if not notes[name]:
            return name, notes
    return present, notes


def list_changes(start: Choice, choice: Choice) -> Choice:
    """Return the settings that differ. If one of the two thread counts does, return both, because
    an unset one follows the other.
    """
    keys = {key for key in choice if choice[key] != start[key]}
    if keys & {THREADS, BATCH_THREADS}:
        keys |= {THREADS, BATCH_THREADS}
    return {key: choice[key] for key in choice if key in keys}


# --- candidates ---------------------------------------------------------------------------------


def starting_choice(params: EngineParams, cores: int) -> Choice:
    """Return the present settings, with numbers instead of null."""
    options = params.options
    threads = options["n_threads"] or cores
    return {
        BATCH_THREADS: options["n_threads_batch"] or threads,
        THREADS: threads,
        UBATCH: min(options["n_ubatch"], params.max_num_batched_tokens),
        LAYOUT: params.layout,
        KV_TYPE: params.kv_type,
    }


def apply_choice(params: EngineParams, choice: Choice) -> EngineParams:
    """Return ``params`` with the chosen settings."""
    options = {
        key.removeprefix(OPTION_PREFIX): value
        for key, value in choice.items()
        if key.startswith(OPTION_PREFIX)
    }
    return msgspec.structs.replace(
        params,
        options=params.options | options,
        layout=choice.get(LAYOUT, params.layout),
        kv_type=choice.get(KV_TYPE, params.kv_type),
    )


def works(measure: Callable[[SpeedWork], Speeds], max_num_seqs: int, seconds: float) -> Works:
    """Return works that take as long as one measurement may.

    They are smaller on a slower machine.
    """
    several = min(8, max_num_seqs)
    one, many = measure(SpeedWork(1, 16, 8)), measure(SpeedWork(several, 16, 4))
    time_each = seconds / MEASUREMENTS

    def steps(tokens_per_s: float, num_seqs: int) -> int:
        return max(4, min(256, int(tokens_per_s / num_seqs * time_each / 4)))

    prompt = 2 ** int(math.log2(max(16, min(256, many.prompt * time_each / 2 / several))))
    num_steps = steps(many.decode, several)
    return Works(
        SpeedWork(1, 16, steps(one.decode, 1)),
        SpeedWork(several, prompt, num_steps),
        SpeedWork(several, 2 * prompt, num_steps),
        SpeedWork(min(32, max_num_seqs), 16, max(4, num_steps // 2)),
    )


def knobs(
    start: Choice,
    works: Works,
    cores: int,
    max_num_batched_tokens: int,
    traffic: Sequence[Traffic] = (),
) -> list[Knob]:
    """Return what to try for each setting, measured with ``traffic`` if there is any.

    One sequence decodes with n_threads; everything else uses n_threads_batch.

    Values of n_ubatch above the number of tokens in a step of the work have the same effect, so one
    of them is enough.
    """
    shares = {cores, cores * 3 // 4, cores // 2, cores // 4, 1 if cores <= 4 else cores}
    threads = sorted(shares - {0}, reverse=True)
    step = max_num_batched_tokens
    if not traffic:
        step = min(step, works.long.num_seqs * works.long.prompt_tokens)
    passes = [
        size
        for size in (2048, 1024, 512, 256, 128)
        if size <= step and size != min(start[UBATCH], step)
    ]
    several = [SpeedFigure("prompt", works.many), SpeedFigure("decode", works.many)]
    prompt, decode = SpeedFigure("prompt", works.long), SpeedFigure("decode", works.long)
    tries: list[tuple[str, list[object], list[SpeedFigure], float]] = [
        (BATCH_THREADS, [*threads], several, LEAST_GAIN),
        (THREADS, [*threads], [SpeedFigure("decode", works.one)], LEAST_GAIN),
        (UBATCH, [*passes], [prompt], LEAST_GAIN),
        (LAYOUT, ["auto" if start[LAYOUT] == "unified" else "unified"], [decode], CLEAR_GAIN),
        (KV_TYPE, ["f16", "q8_0", "q4_0"], [prompt, decode], LEAST_GAIN),
    ]
    rates = [SpeedFigure("rate", one) for one in traffic]
    return [
        Knob(key, [value for value in values if value != start[key]], rates or figures, least)
        for key, values, figures, least in tries
    ]


def final_figures(works: Works, traffic: Sequence[Traffic] = ()) -> list[SpeedFigure]:
    if traffic:
        return [SpeedFigure("rate", one) for one in traffic]
    figures = [SpeedFigure("prompt", works.many)]
    by_size = {work.num_seqs: work for work in (works.all, works.many, works.one)}
    return figures + [SpeedFigure("decode", by_size[size]) for size in sorted(by_size)]
