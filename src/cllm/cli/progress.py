"""Progress on stderr: a bar in a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol

SILENCE = 5.0  # seconds between lines without a terminal
SHORT_SILENCE = 1.0  # the same, if another quarter has been completed


class Bar(Protocol):
    def update(self, share: float, text: str = "") -> None: ...
    def close(self) -> None: ...


class TerminalBar:
    def __init__(self, text: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(text, total=1.0)
        self._progress.start()

    def update(self, share: float, text: str = "") -> None:
        if text:
            self._progress.update(self._task, completed=share, description=text)
        else:
            self._progress.update(self._task, completed=share)

    def close(self) -> None:
        self._progress.stop()


class LineBar:
    def __init__(self, text: str) -> None:
        self._text = text
        self._last, self._quarter = time.monotonic(), 0

    def update(self, share: float, text: str = "") -> None:
        self._text = text or self._text
        silence = time.monotonic() - self._last
        if silence >= SILENCE or (silence >= SHORT_SILENCE and int(4 * share) > self._quarter):
            self._last, self._quarter = time.monotonic(), int(4 * share)
            print(f"{self._text}: {share:.0%}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def open_bar(text: str, *, announce: bool = False) -> Bar:
    """Return a bar for the terminal, or one that prints lines. With ``announce``, the latter prints
    ``text`` immediately.
    """
    if sys.stderr.isatty():
        return TerminalBar(text)
    if announce:
        print(text, file=sys.stderr, flush=True)
    return LineBar(text)
