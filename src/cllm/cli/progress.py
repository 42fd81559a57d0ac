"""Progress on stderr: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Protocol

SILENCE = 5.0  # seconds between lines where there is no terminal


class Bar(Protocol):
    def update(self, share: float, text: str = "") -> None: ...
    def close(self) -> None: ...


class TerminalBar:
    def __init__(self, text: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
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
        self._last = time.monotonic()

    def update(self, share: float, text: str = "") -> None:
        self._text = text or self._text
        now = time.monotonic()
        if now - self._last >= SILENCE:
            self._last = now
            print(f"{self._text}: {share:.0%}", file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


def loading_bar(text: str) -> Bar:
    """A bar that fits where stderr goes."""
    return TerminalBar(text) if sys.stderr.isatty() else LineBar(text)
