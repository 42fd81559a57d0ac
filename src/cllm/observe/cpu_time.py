"""CPU time of processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds; 0 if there is no /proc or no such
    process.
    """
    fields = _read_stat(pid)
    return _seconds(fields[11:13])


def read_tree_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its descendants, in seconds, including those that have
    ended and were waited for.
    """
    return sum(_seconds(_read_stat(member)[11:15]) for member in process_tree(pid))


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and its descendants; only its own if there is no /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        if fields := _read_stat(int(path.name)):
            parents[int(path.name)] = int(fields[1])
    tree = [pid]
    for member in tree:
        tree += [child for child, parent in parents.items() if parent == member]
    return tree


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, or []."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _seconds(ticks: list[str]) -> float:
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
