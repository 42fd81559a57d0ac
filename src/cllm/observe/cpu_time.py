"""CPU time and memory of processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SYSTEM_STAT = Path("/proc/stat")


class CpuMeter:
    """Adds up the CPU time of this process, of all its threads, during the calls of functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and whose calls are measured."""

        def timed(*arguments: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.process_time() - begun

        return timed


decoding = CpuMeter()
"""The computations of a backend in this process: llama_decode, or PyTorch's decoder."""


def read_idle_seconds() -> float | None:
    """Return the seconds that the CPUs of this process have been idle so far, added up; None if the
    system does not say.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    with contextlib.suppress(OSError):
        lines = [line.split() for line in SYSTEM_STAT.read_text().splitlines()]
        # idle, and idle while a disk is read
        idle = sum(_seconds(line[4:6]) for line in lines if line and line[0] in names)
        return idle or None  # some containers show only zeros
    return None


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds; 0 if there is no /proc or no such
    process.
    """
    fields = _read_stat(pid)
    return _seconds(fields[11:13])


def read_resident_bytes(pid: int) -> int:
    """Return the memory that a process has in RAM; 0 if there is no /proc or no such process."""
    with contextlib.suppress(OSError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def read_tree_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its descendants, in seconds, including those that have
    ended and were waited for.
    """
    return sum(_seconds(_read_stat(member)[11:15]) for member in list_process_tree(pid))


def list_process_tree(pid: int) -> list[int]:
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
