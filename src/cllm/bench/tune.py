"""Which settings make a model fastest on this machine: measured one after the other, the one that matters most first.

All candidates for a setting, and what it is now, are measured in turn, round after round, so that a slow minute of the
machine meets all of them. What counts is the ratio to the present value in the same round: a candidate is taken if the
median of these ratios is better by more than their noise. In the end the settings as they were and all that was chosen
are measured against each other once more, and what does not show then is not recommended.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple, TypeVar

import msgspec

from cllm.bench.measure import CandidateError, Speeds, Work
from cllm.engine.params import EngineParams
from cllm.errors import StartupError

T = TypeVar("T")
Choice = dict[str, Any]
"""Values of settings by their dotted keys."""
Clock = Callable[[], float]

THREADS, BATCH_THREADS = "backend.llama_cpp.n_threads", "backend.llama_cpp.n_threads_batch"
UBATCH, LAYOUT, KV_TYPE = "backend.llama_cpp.n_ubatch", "kv.layout", "kv.type"
FIELDS = {
    THREADS: "n_threads",
    BATCH_THREADS: "n_threads_batch",
    UBATCH: "n_ubatch",
    LAYOUT: "layout",
    KV_TYPE: "kv_type",
}
"""Setting -> its field of EngineParams."""

MIN_ROUNDS, MAX_ROUNDS = 3, 7
ENOUGH = 5  # rounds, from which a median distance says something
LEAST_GAIN, CLEAR_GAIN = 0.02, 0.1  # shares that are worth a line in a file; that are worth giving up `auto` for
KV_KL_LIMIT = 0.01  # nats; what nobody asked for must not change the answers more
HOPELESS = {1: 0.0, 2: 0.7, 3: 0.95}  # rounds -> ratio; who was below it in all of them is not measured any more
MEASUREMENTS = 60  # of one candidate each, about, for which the time is to suffice


class Outcome(msgspec.Struct, frozen=True):
    """speeds: tokens a second by figure, of each round. gain, noise: shares, against what it was compared with.

    failure: why it could not be measured; "" if it could.
    """

    speeds: dict[str, list[float]]
    gain: float = 0.0
    noise: float = 0.0
    failure: str = ""

    def beats(self, least: float) -> bool:
        return not self.failure and self.gain > max(least, self.noise)


class Tried(msgspec.Struct, frozen=True):
    """A value of a setting. note: why it was not taken although it was faster."""

    key: str
    value: object
    outcome: Outcome
    chosen: bool
    note: str = ""


class Tuned(msgspec.Struct, frozen=True):
    """What came of it. before and after: the settings as they were and all choices, measured in turn; None if nothing
    was chosen.

    confirmed: the choices are faster in this last measurement too. skipped: settings for which there was nothing to try
    or no time left.
    """

    tried: list[Tried]
    skipped: list[str]
    chosen: Choice
    before: Outcome | None = None
    after: Outcome | None = None

    @property
    def confirmed(self) -> bool:
        return self.after is not None and self.after.beats(0.0)

    @property
    def recommended(self) -> Choice:
        return self.chosen if self.confirmed else {}


class Figure(NamedTuple):
    """A number that is looked at: ``part`` (prompt or decode) of the speeds of a work."""

    part: str
    work: Work

    @property
    def label(self) -> str:
        return "prompt" if self.part == "prompt" else f"decode {self.work.num_seqs}"


class Works(NamedTuple):
    """What is measured: one sequence; several; several with longer prompts; as many as run at all."""

    one: Work
    many: Work
    long: Work
    all: Work


class Knob(NamedTuple):
    """A setting, the values to try beside the present one, what to look at, and the least gain."""

    key: str
    values: list[object]
    figures: list[Figure]
    least: float = LEAST_GAIN


def race(
    runners: Mapping[str, T], measure: Callable[[T], dict[str, float]], going_on: Callable[[int], bool]
) -> dict[str, Outcome]:
    """Measure all in turn, round after round; the first is the one that the others are compared with.

    measure: tokens a second by figure; a CandidateError takes a runner out. ``going_on`` is asked after each round.
    What a runner has in a round is the geometric mean of its figures' ratios to the first one's. Raises StartupError if
    the first one fails.
    """
    first, *others = runners
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    failures: dict[str, str] = {}

    def ratios(name: str) -> list[float]:
        pairs = zip(found[name], found[first], strict=False)
        return [statistics.geometric_mean(own[figure] / its[figure] for figure in own) for own, its in pairs]

    for num_rounds in count(1):
        order = [first, *others]
        for name in order if num_rounds % 2 else reversed(order):
            try:
                found[name].append(measure(runners[name]))
            except CandidateError as error:
                if name == first:
                    raise StartupError(f"{name} cannot be measured: {error}") from None
                failures[name] = str(error)
        limit = HOPELESS[min(num_rounds, max(HOPELESS))]
        others = [name for name in others if name not in failures and max(ratios(name)) >= limit]
        if not others or not going_on(num_rounds):
            break
    return {name: outcome_of(found[name], ratios(name), failures.get(name, "")) for name in runners}


def outcome_of(rounds: list[dict[str, float]], ratios: list[float], failure: str) -> Outcome:
    """The noise is twice the median distance of the rounds from their median; of few rounds the largest distance."""
    speeds = {figure: [found[figure] for found in rounds] for figure in (rounds[0] if rounds else ())}
    if failure or not ratios:
        return Outcome(speeds, failure=failure or "not measured")
    middle = statistics.median(ratios)
    distances = [abs(ratio - middle) for ratio in ratios]
    noise = 2 * statistics.median(distances) if len(ratios) >= ENOUGH else max(distances)
    return Outcome(speeds, middle - 1, noise)


def figures_of(figures: list[Figure], measure: Callable[[Work], Speeds]) -> dict[str, float]:
    """Each work is done once."""
    speeds = {work: measure(work) for work in dict.fromkeys(figure.work for figure in figures)}
    return {figure.label: getattr(speeds[figure.work], figure.part) for figure in figures}


def search(
    knobs: list[Knob],
    final: list[Figure],
    start: Choice,
    measure: Callable[[Choice, Work], Speeds],
    refuse: Callable[[str, Choice], str],
    seconds: float,
    clock: Clock = time.monotonic,
) -> Tuned:
    """Coordinate descent: settle one setting after the other, beginning with ``start``.

    refuse: why a faster choice is still not to be taken; "" if it is. The time is shared by the number of measurements
    a setting needs; what is begun gets MIN_ROUNDS whatever they take. Raises StartupError if ``start`` fails.
    """
    end = clock() + seconds
    sizes = [(1 + len(knob.values)) * len({figure.work for figure in knob.figures}) for knob in knobs]
    sizes.append(2 * len({figure.work for figure in final}))
    choice, tried, skipped = dict(start), list[Tried](), list[str]()

    def raced(runners: dict[str, Choice], figures: list[Figure], until: float) -> dict[str, Outcome]:
        def going_on(num_rounds: int) -> bool:
            return num_rounds < MIN_ROUNDS or (num_rounds < MAX_ROUNDS and clock() < until)

        return race(runners, lambda it: figures_of(figures, lambda work: measure(it, work)), going_on)

    for i, knob in enumerate(knobs):
        if not knob.values or clock() >= end:
            skipped.append(knob.key)
            continue
        candidates = {"the present settings": choice}
        candidates |= {str(value): choice | {knob.key: value} for value in knob.values}
        until = clock() + (end - clock()) * sizes[i] / sum(sizes[i:])
        outcomes = raced(candidates, knob.figures, until)
        best, notes = pick(candidates, outcomes, knob, refuse)
        for name, outcome in outcomes.items():
            value = candidates[name][knob.key]
            tried.append(Tried(knob.key, value, outcome, name == best, notes.get(name, "")))
        choice = candidates[best]
    if choice == start:
        return Tuned(tried, skipped, {})
    outcomes = raced({"the present settings": start, "what was chosen": choice}, final, end)
    before, after = outcomes.values()
    return Tuned(tried, skipped, changed(start, choice), before, after)


def pick(
    candidates: dict[str, Choice], outcomes: dict[str, Outcome], knob: Knob, refuse: Callable[[str, Choice], str]
) -> tuple[str, dict[str, str]]:
    """The name of the best, which may be the first, the present value; and why others were refused."""
    present, *others = candidates
    notes = {}
    for name in sorted(others, key=lambda name: -outcomes[name].gain):
        if not outcomes[name].beats(knob.least):
            continue
        notes[name] = refuse(knob.key, candidates[name])
        if not notes[name]:
            return name, notes
    return present, notes


def changed(start: Choice, choice: Choice) -> Choice:
    """What differs; of the two numbers of threads both if one does, for one that is not given follows the other."""
    keys = {key for key in choice if choice[key] != start[key]}
    if keys & {THREADS, BATCH_THREADS}:
        keys |= {THREADS, BATCH_THREADS}
    return {key: choice[key] for key in choice if key in keys}


# --- what is tried ---------------------------------------------------------------------------------------------------


def starting_choice(params: EngineParams, cores: int) -> Choice:
    """The settings as they are, with numbers in place of null."""
    threads = params.n_threads or cores
    return {
        BATCH_THREADS: params.n_threads_batch or threads,
        THREADS: threads,
        UBATCH: min(params.n_ubatch, params.max_num_batched_tokens),
        LAYOUT: params.layout,
        KV_TYPE: params.kv_type,
    }


def applied(params: EngineParams, choice: Choice) -> EngineParams:
    return msgspec.structs.replace(params, **{FIELDS[key]: value for key, value in choice.items()})


def works(measure: Callable[[Work], Speeds], max_num_seqs: int, seconds: float) -> Works:
    """Works that take the time a measurement may take on this machine: the slower it is, the less they are."""
    several = min(8, max_num_seqs)
    one, many = measure(Work(1, 16, 8)), measure(Work(several, 16, 4))
    time_each = seconds / MEASUREMENTS

    def steps(tokens_per_s: float, num_seqs: int) -> int:
        return max(4, min(256, int(tokens_per_s / num_seqs * time_each / 4)))

    prompt = 2 ** int(math.log2(max(16, min(256, many.prompt * time_each / 2 / several))))
    num_steps = steps(many.decode, several)
    return Works(
        Work(1, 16, steps(one.decode, 1)),
        Work(several, prompt, num_steps),
        Work(several, 2 * prompt, num_steps),
        Work(min(32, max_num_seqs), 16, max(4, num_steps // 2)),
    )


def knobs(start: Choice, works: Works, cores: int, max_num_batched_tokens: int) -> list[Knob]:
    """What to try for each setting. One sequence decodes with n_threads, all else with n_threads_batch.

    Passes over more tokens than a step of the work has cannot be told apart, so one of them is enough.
    """
    shares = {cores, cores * 3 // 4, cores // 2, cores // 4, 1 if cores <= 4 else cores}
    threads = sorted(shares - {0}, reverse=True)
    step = min(max_num_batched_tokens, works.long.num_seqs * works.long.prompt_tokens)
    passes = [size for size in (2048, 1024, 512, 256, 128) if size <= step and size != min(start[UBATCH], step)]
    several = [Figure("prompt", works.many), Figure("decode", works.many)]
    prompt, decode = Figure("prompt", works.long), Figure("decode", works.long)
    tries: list[tuple[str, list[object], list[Figure], float]] = [
        (BATCH_THREADS, [*threads], several, LEAST_GAIN),
        (THREADS, [*threads], [Figure("decode", works.one)], LEAST_GAIN),
        (UBATCH, [*passes], [prompt], LEAST_GAIN),
        (LAYOUT, ["auto" if start[LAYOUT] == "unified" else "unified"], [decode], CLEAR_GAIN),
        (KV_TYPE, ["f16", "q8_0", "q4_0"], [prompt, decode], LEAST_GAIN),
    ]
    return [
        Knob(key, [value for value in values if value != start[key]], figures, least)
        for key, values, figures, least in tries
    ]


def final_figures(works: Works) -> list[Figure]:
    figures = [Figure("prompt", works.many)]
    by_size = {work.num_seqs: work for work in (works.all, works.many, works.one)}
    return figures + [Figure("decode", by_size[size]) for size in sorted(by_size)]
