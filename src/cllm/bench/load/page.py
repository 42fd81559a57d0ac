"""Reports of the load client as one HTML file that needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

import msgspec

from cllm.bench.load.comparison import HEAD, compare_figures, describe, differences
from cllm.bench.load.plots import load_figure, picture
from cllm.bench.load.report import Report, remarks, results

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1, h2 { font-weight: 600; line-height: 1.2 }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
pre { font: inherit; white-space: pre-wrap; overflow-wrap: anywhere }
svg { width: 100%; height: auto }
@media print { body { margin: 0; max-width: none } }
"""
CAPTION = (
    "The first four plots show the share of successful requests within a time. TTFT is the time from "
    "sending a request to its first text, ITL from one chunk to the next, TPOT per token after the "
    "first, and E2E from sending to the last byte. The last two plots show the tokens of successful "
    "requests, and the requests that had been sent and had not ended, over time. Dotted lines are "
    "the goodput limits, if there are any."
)


def report_page(report: Report) -> str:
    return page(
        f"{report.model} under load",
        [
            paragraph(f"At {report.url}. {report.note}"),
            *summary(report),
            draw_picture({report.model: report}),
        ],
    )


def diff_page(before: Report, after: Report) -> str:
    both = {"before": before, "after": after}
    parts = [
        lines(differences(before, after)),
        table(HEAD, map(describe, compare_figures(before, after))),
    ]
    parts.append(draw_picture(both))
    for name, report in both.items():
        parts += [
            f"<h2>{name}: {escape(report.model)} at {escape(report.url)}</h2>",
            *summary(report),
        ]
    return page("Two reports", parts)


def summary(report: Report) -> list[str]:
    rows = [
        (name, *(f"{ms:,.1f}" for ms in msgspec.structs.astuple(of)))
        for name, of in report.latencies.items()
    ]
    return [
        lines([*results(report), *remarks(report)]),
        table(["milliseconds", "mean", "p50", "p95", "p99"], rows),
        table(["setting", ""], [(name, str(value)) for name, value in report.settings.items()]),
    ]


def draw_picture(reports: Mapping[str, Report]) -> str:
    """Return the SVG element in a figure, without the header of an SVG file."""
    svg = picture(load_figure(reports), ".svg").decode()
    return f"<figure>{svg[svg.index('<svg') :]}<figcaption>{CAPTION}</figcaption></figure>"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"

    return f"<table>\n{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>\n"


def lines(texts: Iterable[str]) -> str:
    return f"<pre>{escape(chr(10).join(texts))}</pre>\n"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def page(title: str, parts: Iterable[str]) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    body = f"<h1>{escape(title)}</h1>\n{''.join(parts)}"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'
