"""Plots of measurements, readable when printed in grey and with colour blindness.

No display is needed. Names are drawn literally, never as formulas.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from cllm.bench.load.report import Report, Timeline
from cllm.errors import StartupError

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullFormatter, StrMethodFormatter
except ImportError:
    raise StartupError("Pictures need the extra `bench`: pip install 'cllm[bench]'") from None

LineStyle = str | tuple[int, tuple[int, ...]]

SUFFIXES = (".png", ".svg")

# The colours of Okabe and Ito, "Color Universal Design", each with its own line style and marker.
LOOKS: tuple[tuple[str, LineStyle, str], ...] = (
    ("#0072b2", "-", "o"),
    ("#d55e00", "--", "s"),
    ("#009e73", "-.", "^"),
    ("#cc79a7", ":", "D"),
    ("#56b4e9", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#000000", (0, (1, 1)), "x"),
)
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.hspace": 0.06,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.dpi": 160,
    "svg.fonttype": "none",
    "svg.hashsalt": "cllm",  # the same picture has the same bytes
    "text.parse_math": False,
}
# If the maximum exceeds the median this many times, the axis is logarithmic. Otherwise the maximum
# would squeeze most curves.
LOGARITHMIC = 20
LATENCIES = ("ttft", "itl", "tpot", "e2e")

Measured = Mapping[str, Mapping[float, Sequence[float]]]


def check_picture(path: Path) -> Path:
    """Return ``path``. Raises StartupError if its suffix is not one of SUFFIXES."""
    if path.suffix.lower() not in SUFFIXES:
        raise StartupError(f"{path}: a picture's name ends in {' or '.join(SUFFIXES)}")
    return path


def picture(figure: Figure, suffix: str) -> bytes:
    """Return the content of the picture's file. ``suffix`` is one of SUFFIXES."""
    content = io.BytesIO()
    with style():
        figure.savefig(
            content, format=suffix[1:], metadata={"Date": None} if suffix == ".svg" else None
        )
    return content.getvalue()


@contextmanager
def style() -> Iterator[None]:
    with mpl.rc_context():
        mpl.rcdefaults()  # ignores the user's matplotlibrc
        mpl.rcParams.update(STYLE)
        yield


def curves(lines: Measured, *, x: str, y: str) -> Figure:
    """Draw the medians of ``lines``, with bars from the least to the greatest value.

    ``lines`` maps the name of each line to {x: values measured there}. The x axis is logarithmic.
    ``x`` and ``y`` name the axes, with units.
    """
    with style():
        figure = Figure(figsize=(6.4, 4))
        axes = figure.subplots()
        for (color, line, marker), points in zip(
            choose_styles(len(lines)), lines.values(), strict=True
        ):
            middles, spread = medians_and_spread(points.values())
            axes.errorbar(
                list(points),
                middles,
                spread,
                color=color,
                linestyle=line,
                marker=marker,
                capsize=3,
                elinewidth=1,
            )
        places = sorted({at for points in lines.values() for at in points})
        axes.set_xscale("log")
        axes.set_xticks(places, [f"{at:g}" for at in places])
        axes.minorticks_off()
        axes.set(xlabel=x, ylabel=y)
        axes.set_ylim(0)
        legend(figure, axes.containers, list(lines))
    return figure


def bars(groups: Mapping[str, Mapping[str, Sequence[float]]], *, y: str) -> Figure:
    """Draw the median of each bar, with its spread, as ``curves`` does.

    ``groups`` maps names of groups to names of bars, which are the same in all groups, to measured
    values. In each group, the colours change from dark to light. ``y`` names the axis, with its
    unit.
    """
    with style():
        names = list(next(iter(groups.values())))
        width = 0.86 / len(names)
        figure = Figure(figsize=(max(6.4, 0.36 * len(names) * len(groups) + 1), 4))
        axes = figure.subplots()
        shades = mpl.colormaps["cividis"](
            [0.35 + 0.65 * i / max(1, len(names) - 1) for i in range(len(names))]
        )
        drawn = []
        for i, (name, shade) in enumerate(zip(names, shades, strict=True)):
            middles, spread = medians_and_spread([group[name] for group in groups.values()])
            places = [at + (i - (len(names) - 1) / 2) * width for at in range(len(groups))]
            drawn.append(
                axes.bar(
                    places, middles, 0.9 * width, color=shade, edgecolor="#333333", linewidth=0.5
                )
            )
            axes.errorbar(
                places, middles, spread, fmt="none", ecolor="black", elinewidth=0.8, capsize=2
            )
        axes.set_xticks(range(len(groups)), list(groups))
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.set(ylabel=y)
        legend(figure, drawn, names)
    return figure


def load_figure(reports: Mapping[str, Report]) -> Figure:
    """Draw the cumulative distributions of the latencies, and the rate and the running requests
    over time.

    Several reports share the same axes. Reports from a version without percentiles have no lines.
    """
    with style():
        figure = Figure(figsize=(10, 5.6))
        cells = figure.subplots(2, 3)
        for axes, name in zip(cells.flat, LATENCIES, strict=False):
            draw_shares(axes, name, list(reports.values()))
        timelines = [report.timeline for report in reports.values()]
        draw_over_time(cells[1, 1], "output tokens/s", timelines, "output_tokens_per_s")
        draw_over_time(cells[1, 2], "running requests", timelines, "running")
        if len(reports) > 1:
            legend(figure, cells[1, 2].lines, list(reports))
    return figure


def draw_shares(axes: Axes, name: str, reports: list[Report]) -> None:
    series = [report.percentiles_ms.get(name, []) for report in reports]
    for (color, line, _), percentiles in zip(choose_styles(len(series)), series, strict=True):
        axes.plot(percentiles, range(len(percentiles)), color=color, linestyle=line)
    for limit in {
        limit for report in reports if isinstance(limit := report.settings.get(name), (int, float))
    }:
        axes.axvline(limit, color="#888888", linewidth=1, linestyle=(0, (2, 2)))
    drawn = [percentiles for percentiles in series if percentiles]
    if any(percentiles[-1] > LOGARITHMIC * percentiles[50] > 0 for percentiles in drawn):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif drawn:
        axes.set_xlim(0)
    axes.set(xlabel=f"{name.upper()} (ms)", ylabel="share within (%)")
    axes.set_yticks([0, 25, 50, 75, 95])
    axes.set_ylim(0, 101)


def draw_over_time(axes: Axes, what: str, timelines: list[Timeline | None], field: str) -> None:
    for (color, line, _), timeline in zip(choose_styles(len(timelines)), timelines, strict=True):
        values = [*getattr(timeline, field), 0] if timeline else []
        edges = [i * timeline.bin_s for i in range(len(values))] if timeline else []
        axes.plot(edges, values, color=color, linestyle=line, drawstyle="steps-post", linewidth=1.2)
    axes.set(xlabel="time (s)", ylabel=what)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlim(0)
    axes.set_ylim(0)


def medians_and_spread(
    measured: Iterable[Sequence[float]],
) -> tuple[list[float], list[list[float]]]:
    """Return the medians, and the distances of the least and the greatest value from each
    median.
    """
    values = [(min(each), statistics.median(each), max(each)) for each in measured]
    below = [middle - least for least, middle, _ in values]
    above = [most - middle for _, middle, most in values]
    return [middle for _, middle, _ in values], [below, above]


def choose_styles(count: int) -> list[tuple[str, LineStyle, str]]:
    return list(islice(cycle(LOOKS), count))


def legend(figure: Figure, drawn: Sequence[Any], names: Sequence[str]) -> None:
    figure.legend(drawn, names, loc="outside lower center", ncols=min(len(names), 4))
