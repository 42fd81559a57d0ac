"""A measured figure has one home; other pages quote it with a comment that names it.

A quotation is a number followed by ``<!-- figure: NAME -->``, where NAME is a cell in a table of
one of the HOMES.
"""

from __future__ import annotations

import re

import pytest
from doc_pages import PAGES, ROOT, name_of, without_blocks

from cllm.config.settings import SchedulerSettings
from cllm.scheduler.pacing import MAX_TARGET_STEPS, MIN_TARGET_STEPS

# page -> the columns of the names and of the values in its tables of figures
HOMES = {"docs/performance.md": (0, 2), "docs/scheduling.md": (1, 2)}
# pages with figures of their own, each with the run that it is from
REPORTS = re.compile(
    r"docs/(performance|reliability|lab_notes|simulation|models|benchmarks|decisions/.*)\.md"
)
QUOTED = re.compile(r"(\d[\d,]*(?:\.\d+)?)[^\d|]*?<!-- figure: (.+?) -->")
RATIO = re.compile(r"\d\.\d+\**(?: to \d+\.\d+)? times[^|.]*")


def read_figures() -> dict[str, set[str]]:
    """Return name -> values as they are written in the tables of HOMES."""
    figures: dict[str, set[str]] = {}
    for page, (name, value) in HOMES.items():
        for line in (ROOT / page).read_text().splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if len(cells) > value and cells[name] and cells[value]:
                figures.setdefault(cells[name], set()).add(cells[value])
    return figures


def is_rounded(quoted: str, value: str) -> bool:
    """Return whether ``quoted`` is the first number of ``value``, rounded to its own digits."""
    number = re.match(r"\**(-?[\d,]+(?:\.\d+)?)", value)
    if number is None:
        return False
    digits = len(quoted.partition(".")[2])
    return round(float(number[1].replace(",", "")), digits) == float(quoted.replace(",", ""))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quoted_figures_are_those_that_were_measured(page):
    figures = read_figures()
    wrong = [
        (number, name, sorted(figures.get(name, ())))
        for number, name in QUOTED.findall(without_blocks(page))
        if not any(is_rounded(number, value) for value in figures.get(name, ()))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not REPORTS.match(name_of(page))], ids=name_of
)
def test_measured_ratios_name_their_home(page):
    text = without_blocks(page)
    unnamed = [
        match[0]
        for match in RATIO.finditer(text)
        if "<!-- figure: " not in match[0] + text[match.end() : match.end() + 120].partition("|")[0]
    ]
    assert unnamed == []


def test_the_default_target_between_tokens_is_the_same_everywhere():
    bounds = f"{MIN_TARGET_STEPS} to {MAX_TARGET_STEPS} times"
    assert bounds in (SchedulerSettings.model_fields["target_itl_ms"].description or "")
    assert bounds in " ".join((ROOT / "docs/scheduling.md").read_text().split())


def test_rounding_accepts_only_the_measured_figure():
    assert is_rounded("2.8", "2.757 (2.6 to 2.9)")
    assert is_rounded("3", "2.757")
    assert not is_rounded("2.7", "2.757")
    assert not is_rounded("2.8", "**missed**")
