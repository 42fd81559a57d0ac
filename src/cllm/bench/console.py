"""Prints results for a person: lines of text, and tables of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from cllm.bench.distribution import LatencySummary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print each line as it is, without markup or colours."""
    for line in lines:
        console.print(line, markup=False, highlight=False)


def number_table(*columns: str, title: str | None = None) -> Table:
    """Return a table with numbers in all columns except the first."""
    from rich.table import Table

    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def latency_table(latencies: Mapping[str, LatencySummary]) -> Table:
    table = number_table("milliseconds", "mean", "p50", "p95", "p99")
    for name, values in latencies.items():
        table.add_row(name, *(f"{value:,.1f}" for value in msgspec.structs.astuple(values)))
    return table
