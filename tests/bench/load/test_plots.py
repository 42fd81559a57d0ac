"""Pictures and pages show what was measured, and contain nothing that a browser would run or fetch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest

from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.client import Outcome
from cllm.bench.load.dialects import TokenCounts
from cllm.bench.load.page import diff_page, report_page
from cllm.bench.load.plots import bars, check_picture, curves, load_figure, picture
from cllm.bench.load.report import Report, summarize
from cllm.bench.load.workload import Task
from cllm.errors import StartupError

pytestmark = pytest.mark.slow  # matplotlib takes seconds to load and to draw

EVIL = '<script>alert(1)</script>"&$x_1$'


def report(*, slow: int = 1, model: str = "m") -> Report:
    answers = []
    for i in range(20):
        answer = TimedAnswer(Task(b""), i / 10)
        answer.content_times = [i / 10 + slow * (j + i / 30) for j in range(1, 5)]
        answer.ended, answer.finish_reason, answer.usage = (
            answer.content_times[-1],
            "length",
            TokenCounts(4, 9, 0),
        )
        answers.append(answer)
    answers[0].fail(EVIL, EVIL)
    settings = {"workload": "words", "ttft": 1200.0, EVIL: EVIL}
    return summarize(
        Outcome(answers, wall=4.0, cpu=0.1), url=f"http://{EVIL}", model=model, settings=settings
    )


def texts(svg: bytes) -> list[str]:
    return [
        "".join(element.itertext())
        for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.mark.slow
def test_same_figure_gives_same_bytes() -> None:
    pictures = [
        picture(load_figure({"a": report()}), suffix) for suffix in (".svg", ".png", ".svg", ".png")
    ]
    assert pictures[:2] == pictures[2:]
    assert pictures[1].startswith(b"\x89PNG")


def test_load_figure_shows_report() -> None:
    """Every axis has a name and a unit. Each report has a line in each panel, with its name."""
    figure = load_figure({"before": report(), "$x_1$ <after>": report(slow=2)})
    assert [
        len([line for line in axes.lines if len(line.get_xdata()) > 2]) for axes in figure.axes
    ] == [2] * 6
    assert all(axes.get_xlabel().endswith(("(ms)", "(s)")) for axes in figure.axes)
    labels = texts(picture(figure, ".svg"))
    assert {"before", "$x_1$ <after>", "TTFT (ms)", "ITL (ms)", "TPOT (ms)", "E2E (ms)"} <= set(
        labels
    )
    assert {"output tokens/s", "running requests"} <= set(labels)
    first = figure.axes[0].lines[0]
    assert list(first.get_xdata()) == report().percentiles_ms["ttft"]
    assert list(first.get_ydata()) == list(range(101))


def test_long_tail_uses_log_scale() -> None:
    tail = report()
    tail.percentiles_ms["ttft"][-1] = 1e5
    scales = [axes.get_xscale() for axes in load_figure({"a": tail}).axes]
    assert scales == ["log", *["linear"] * 5]


def test_old_and_empty_reports_can_be_drawn() -> None:
    old = msgspec.structs.replace(report(), percentiles_ms={}, timeline=None)
    empty = summarize(Outcome([], 0.0, 0.0), url="u", model="m", settings={})
    assert (
        len(texts(picture(load_figure({"old": old, "new": report(), "empty": empty}), ".svg"))) > 20
    )
    assert "0 of 0" in report_page(empty)


def test_curve_figure_shows_each_series() -> None:
    """The figure shows medians, with the spread as error bars, for any number of series."""
    lines = {f"_server {i}": {1: [1.0, 2.0, 6.0], 8: [4.0 + i]} for i in range(8)}
    figure = curves(lines, x="requests at a time", y="tokens/s")
    axes = figure.axes[0]
    drawn, _, (spread,) = axes.containers[0]
    assert drawn.get_ydata().tolist() == [2.0, 4.0]
    assert [part[:, 1].tolist() for part in spread.get_segments()] == [[1.0, 6.0], [4.0, 4.0]]
    assert {*lines, "requests at a time", "tokens/s", "1", "8"} <= set(
        texts(picture(figure, ".svg"))
    )


def test_bar_figure_shows_each_system() -> None:
    groups = {
        "1 sequence": {"backend": [1.0], "+ HTTP": [0.8, 0.9, 0.7]},
        "8": {"backend": [1.0], "+ HTTP": [0.9]},
    }
    figure = bars(groups, y="share")
    heights = [
        [bar.get_height() for bar in bars]
        for bars in figure.axes[0].containers
        if hasattr(bars, "patches")
    ]
    assert heights == [[1.0, 1.0], [0.8, 0.9]]
    assert {"1 sequence", "8", "backend", "+ HTTP", "share"} <= set(texts(picture(figure, ".svg")))


class Page(HTMLParser):
    """Collects a page's text and everything that a browser would run or fetch."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [
            value or "" for name, value in attrs if name in {"href", "src", "xlink:href"}
        ]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    "make_page",
    [lambda: report_page(report(model=EVIL)), lambda: diff_page(report(), report(model=EVIL))],
)
def test_page_is_self_contained(make_page: Callable[[], str]) -> None:
    """The page uses no network and no script, and shows foreign text as text."""
    content = make_page()
    page = Page(content)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "image"}
    assert {"table", "svg", "figcaption"} <= page.tags
    assert all(link.startswith("#") for link in page.links)
    assert page.text.count(EVIL) >= 4
    for word in (
        "19 of 20 requests succeeded",
        "workload",
        "TTFT",
        "p99",
        "client:",
        f"1 failed: {EVIL}",
    ):
        assert word in page.text


def test_diff_page_shows_difference() -> None:
    page = Page(diff_page(report(), report(slow=2)))
    assert "after / before" in page.text
    assert "E2E p50 ms" in page.text


@pytest.mark.parametrize("name", ["a.jpg", "png", "a.png.gz"])
def test_other_formats_are_rejected(name: str) -> None:
    assert check_picture(Path("a.PNG")) == Path("a.PNG")
    with pytest.raises(StartupError, match="a picture's name ends in"):
        check_picture(Path(name))


def test_missing_bench_extra_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "cllm.bench.load.plots")
    with pytest.raises(StartupError, match="need the extra `bench`"):
        importlib.import_module("cllm.bench.load.plots")
