"""Two reports of the load client side by side: their figures, and whether these differ by more than
one run tells.

A figure of a run is an estimate. Its interval is the one in which it would be in 95 of 100 runs
like it, as far as one run can tell: percentiles from the order statistics of the requests, means
and rates from the spread of requests and of bins of time. Gaps between the chunks of a request
resemble each other, so requests count, not gaps. Whatever changes only from one run to the next,
such as the temperature of the machine, shows only in repeated runs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from cllm.bench.console import number_table, print_lines
from cllm.bench.load.answer import printable
from cllm.bench.load.report import Report, figures
from cllm.server.bench.messages import ComparedFigure

if TYPE_CHECKING:
    from rich.console import Console

DEVIATIONS = 1.96  # standard deviations on each side, for 95 of 100
FEWEST = 5  # requests or bins that tell a spread

HEAD = ("", "before", "after", "after / before", "beyond the spread")
KNOWN = {None: "", True: "yes", False: "no"}

Interval = tuple[float, float]


def print_diff(before: Report, after: Report, console: Console) -> None:
    """Print the settings that differ, and a table of both reports' figures and their ratios."""
    print_lines(console, differences(before, after))
    table = number_table(*HEAD)
    for figure in compare_figures(before, after):
        table.add_row(*describe(figure))
    console.print(table)


def describe(figure: ComparedFigure) -> tuple[str, str, str, str, str]:
    """Return the cells of a table."""
    return (
        figure.name,
        f"{figure.before:,.2f}",
        "" if figure.after is None else f"{figure.after:,.2f}",
        "" if figure.ratio is None else f"{figure.ratio:.3f}",
        KNOWN[figure.differ],
    )


def differences(before: Report, after: Report) -> list[str]:
    """Return a line for each setting in which two reports differ."""
    pairs = {
        name: (before.settings.get(name), after.settings.get(name))
        for name in dict.fromkeys([*before.settings, *after.settings])
    }
    return [
        printable(f"{name}: {old} before, {new} after")
        for name, (old, new) in pairs.items()
        if old != new
    ]


def compare_figures(before: Report, after: Report) -> list[ComparedFigure]:
    """Return a comparison for each figure of the first report."""
    news, (olds_in, news_in) = figures(after), map(find_intervals, (before, after))
    compared = []
    for name, old in figures(before).items():
        new, old_in, new_in = news.get(name), olds_in.get(name), news_in.get(name)
        differ = None
        if new is not None and old_in and new_in:
            differ = old_in[1] < new_in[0] or new_in[1] < old_in[0]
        ratio = new / old if new is not None and old else None
        compared.append(ComparedFigure(name, old, new, ratio, old_in, new_in, differ))
    return compared


def find_intervals(report: Report) -> dict[str, Interval]:
    """Return the intervals of the figures of a report, by their names."""
    intervals: dict[str, Interval] = {}
    count = report.num_succeeded
    if count >= FEWEST:
        for name, summary in report.latencies.items():
            values = report.percentiles_ms.get(name.lower())
            if values is None:
                continue
            for share in (50, 95, 99):
                intervals[f"{name} p{share} ms"] = around_percentile(values, share, count)
            reach = DEVIATIONS * float(np.std(values)) / math.sqrt(count)
            intervals[f"{name} mean ms"] = (max(0.0, summary.mean - reach), summary.mean + reach)
    bins = report.timeline.output_tokens_per_s if report.timeline else []
    if len(bins) >= FEWEST and np.mean(bins) > 0:
        reach = DEVIATIONS * float(np.std(bins) / np.mean(bins)) / math.sqrt(len(bins))
        rates = {
            "output tokens/s": report.output_tokens_per_s,
            "requests/s": report.requests_per_s,
        }
        for name, rate in rates.items():
            intervals[name] = (max(0.0, rate * (1 - reach)), rate * (1 + reach))
    return intervals


def around_percentile(values: list[float], share: int, count: int) -> Interval:
    """Return the interval of a percentile of ``count`` requests, whose percentiles 0 to 100 are
    ``values``.
    """
    reach = 100 * DEVIATIONS * math.sqrt(share / 100 * (1 - share / 100) / count)
    low, high = np.interp((share - reach, share + reach), range(len(values)), values)
    return float(low), float(high)
