"""Runs programs that print a result, and finds out why one failed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from cllm.errors import StartupError


def run_program(
    name: str, command: Sequence[str], stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> str:
    """Return what a program prints on stdout. ``name`` is for the error.

    Raises StartupError if the program fails.
    """
    done = subprocess.run(command, input=stdin, env=env, capture_output=True, check=False)
    if done.returncode:
        reason = last_line(done.stderr, f"exit code {done.returncode}")
        raise StartupError(f"{name} failed: {reason}")
    return done.stdout.decode(errors="replace")


def last_line(stderr: bytes, default: str) -> str:
    """Return the last line that a program wrote, or ``default`` if it wrote nothing."""
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else default
