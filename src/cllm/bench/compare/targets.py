"""The figures that ``cllm bench compare`` derives from its rounds, and their targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from cllm.bench.compare.intervals import Median
from cllm.bench.compare.rounds import CLLM, DEFAULT_SERVER, LLAMA_SERVER, Rounds, StoredRun
from cllm.bench.compare.rows import ROWS, SUCCEEDED, ComparisonRow, Target

CLOSE = 0.1  # settings that were worse by less than this in the first round may be the best ones


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A number with a target.

    ``values`` has one value for each round. Their median, or each value with ``every``, must be at
    least ``target``; at most ``target`` without ``at_least``. ``settings`` are the peer's.
    ``default_values`` and ``default_target`` compare with llama.cpp's default build instead.
    ``noisy`` says that other processes took too much of the CPU in a round.
    """

    name: str
    values: list[float]
    target: float | None = None
    at_least: bool = True
    every: bool = False
    unit: str = ""
    settings: str = ""
    default_values: list[float] = []
    default_target: float | None = None
    noisy: bool = False

    @property
    def judged(self) -> float:
        if not self.every:
            return statistics.median(self.values)
        return min(self.values) if self.at_least else max(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        return None if self.target is None else self._meets(self.judged, self.target)

    @property
    def default_met(self) -> bool | None:
        """Whether the target against the default build is met; None without one."""
        if self.default_target is None or not self.default_values:
            return None
        return self._meets(statistics.median(self.default_values), self.default_target)

    @property
    def certain(self) -> bool:
        """Whether the whole confidence interval is on one side of the target."""
        if self.target is None or self.every:
            return True
        median = Median.of(self.values)
        return self._meets(median.low, self.target) == self._meets(median.high, self.target)

    def _meets(self, value: float, target: float) -> bool:
        return value >= target if self.at_least else value <= target

    def verdict(self) -> str:
        if self.target is None:
            return ""
        by = abs(self.judged - self.target)
        distance = f"{by:.1f}{self.unit}" if self.unit else f"{by / self.target:.1%}"
        text = f"{'met' if self.met else '**missed**'} by {distance}" if by else "met"
        text += "" if self.certain else ", not certain"
        return text + (", noisy" if self.noisy else "")


def find_figures(rounds: Rounds) -> list[Figure]:
    """Return the figures that were measured, with their targets."""
    figures, shares = [], list[float]()
    for row in ROWS.values():
        runs = rounds.of(row.name)
        figures += [make_figure(runs, row, target) for target in row.targets]
        shares += [run.values.get(SUCCEEDED, 0.0) for run in runs if is_load(run)]
    name = "share of all requests to cLLM that succeed"
    figures.append(Figure(name=name, values=shares, target=1.0, every=True))
    return [figure for figure in figures if figure.values]


def is_load(run: StoredRun) -> bool:
    return run.system == CLLM and bool(run.num_requests)


def make_figure(runs: Sequence[StoredRun], row: ComparisonRow, target: Target) -> Figure:
    own = {run.round: run for run in runs if run.system == target.of}
    settings = best_settings(runs, row, target.against, target) if target.against else ""
    theirs = {
        run.round: run for run in runs if run.system == target.against and run.settings == settings
    }
    default = {
        run.round: run
        for run in runs
        if run.system == DEFAULT_SERVER and target.against == LLAMA_SERVER
    }
    used = [*own.values(), *theirs.values()]
    if target.default_limit is not None:
        used += default.values()
    return Figure(
        name=name_figure(row, target),
        values=[*compare_rounds(own, theirs if target.against else None, target)],
        target=target.limit,
        at_least=target.at_least,
        unit=target.unit,
        settings=settings or "",
        default_values=[*compare_rounds(own, default, target)],
        default_target=target.default_limit,
        noisy=any(run.noisy for run in used if target.value in run.values),
    )


def name_figure(row: ComparisonRow, target: Target) -> str:
    sign = "-" if target.unit else "/"
    systems = f", {target.of} {sign} {target.against}" if target.against else ""
    return f"{row.name}: {target.name}{systems}"


def compare_rounds(
    own: dict[int, StoredRun], theirs: dict[int, StoredRun] | None, target: Target
) -> Iterator[float]:
    """Yield the ratio, or the difference, of the values of each round in which both have one;
    without a peer, the values.
    """
    for i, run in own.items():
        value = run.values.get(target.value)
        if theirs is None:
            other: float | None = 1.0
        else:
            other = theirs[i].values.get(target.value) if i in theirs else None
        if value is not None and other is not None and (other or target.unit):
            yield value - other if target.unit else value / other


# --- the best settings of a peer ----------------------------------------------------------------


def best_settings(
    runs: Iterable[StoredRun], row: ComparisonRow, system: str, target: Target
) -> str | None:
    """Return the settings that served every request and had the best median, of those that were
    measured in the most rounds; None if there are none.
    """
    groups = by_settings((run for run in runs if run.system == system), row, target)
    most = max((len(values) for values in groups.values()), default=0)
    medians = {
        settings: statistics.median(values)
        for settings, values in groups.items()
        if len(values) == most
    }
    if not medians:
        return None
    return (max if more_is_better(row, target) else min)(medians, key=medians.__getitem__)


def close_settings(runs: Sequence[StoredRun], row: ComparisonRow) -> set[str]:
    """Return the settings of one system that are the best ones of a round, or nearly so, for any
    target.
    """
    close = set()
    for target in row.targets:
        groups = by_settings(runs, row, target)
        values = {settings: statistics.median(measured) for settings, measured in groups.items()}
        if not values:
            continue
        if more_is_better(row, target):
            limit = max(values.values()) * (1 - CLOSE)
            close |= {settings for settings, value in values.items() if value >= limit}
        else:
            limit = min(values.values()) * (1 + CLOSE)
            close |= {settings for settings, value in values.items() if value <= limit}
    return close


def by_settings(
    runs: Iterable[StoredRun], row: ComparisonRow, target: Target
) -> dict[str, list[float]]:
    """Return, for all settings that served every request, the values by which the best one is
    chosen.
    """
    value = row.primary[0] or target.value
    share = f"{target.part}: {SUCCEEDED}" if target.part and not row.primary[0] else SUCCEEDED
    groups: dict[str, list[float]] = {}
    failed = set()
    for run in runs:
        if run.values.get(share, 1.0) < 1 or (run.failures and not run.values):
            failed.add(run.settings)
        elif value in run.values:
            groups.setdefault(run.settings, []).append(run.values[value])
    return {settings: values for settings, values in groups.items() if settings not in failed}


def more_is_better(row: ComparisonRow, target: Target) -> bool:
    return row.primary[1] if row.primary[0] else target.at_least
