"""CPU time of processes."""

from __future__ import annotations

import os
from pathlib import Path


def read_cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, in seconds; 0 if there is no /proc or no such
    process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
