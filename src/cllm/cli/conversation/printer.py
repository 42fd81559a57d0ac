"""Prints answers while they are generated: as Markdown on a terminal, as plain text elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from cllm.cli.answers import AnswerPart, Parts

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESHES = 8  # a second
DIM, RESET = "\x1b[2m", "\x1b[0m"
# A terminal would obey control characters in an answer.
CONTROL = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")


class Printer(Protocol):
    def add(self, part: AnswerPart) -> None:
        """Print a part of an answer."""
        ...

    def close(self) -> None:
        """End the answer."""
        ...


def open_printer(*, hides_reasoning: bool = False, is_markdown: bool = True) -> Printer:
    """Return a printer of one answer, as Markdown if stdout is a terminal."""
    if is_markdown and is_capable(sys.stdout):
        return MarkdownPrinter(hides_reasoning=hides_reasoning)
    return PlainPrinter(hides_reasoning=hides_reasoning)


def print_answer(parts: Parts, printer: Printer, collected: list[AnswerPart]) -> None:
    """Print the parts as they arrive, and add them to ``collected``.

    Whatever happens, the generation has ended and the last line is complete afterwards.
    """
    try:
        with silence_keyboard(), closing(parts):
            for part in parts:
                collected.append(part)
                printer.add(part)
    finally:
        printer.close()


@contextmanager
def silence_keyboard() -> Iterator[None]:
    """Do not echo typed characters. The next prompt gets them; Ctrl-C still interrupts."""
    settings = read_terminal()
    if settings is None:
        yield
        return
    import termios

    quiet = [*settings]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)


def read_terminal() -> list[Any] | None:
    """Return the settings of the terminal, or None if this process does not own one."""
    try:
        import termios
    except ImportError:  # on Windows
        return None
    try:
        number = sys.stdin.fileno()
        is_own = os.isatty(number) and os.tcgetpgrp(number) == os.getpgrp()
        return termios.tcgetattr(number) if is_own else None
    except (OSError, ValueError, AttributeError, termios.error):
        return None


def join_text(parts: list[AnswerPart]) -> str:
    """Return the text without the reasoning."""
    return "".join(part.text for part in parts if not part.is_reasoning)


def is_capable(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def print_dim(text: str) -> None:
    """Print a remark about an answer on stderr."""
    if is_capable(sys.stderr):
        text = DIM + fill(text, max(1, get_terminal_size().columns)) + RESET
    print(text, file=sys.stderr, flush=True)


class PlainPrinter:
    """Prints text on stdout unchanged, and reasoning on stderr."""

    def __init__(self, *, hides_reasoning: bool = False) -> None:
        self._hides_reasoning = hides_reasoning
        self._is_reasoning = False  # whether an incomplete line of reasoning was printed last
        self._has_text = False
        self._is_terminal = sys.stdout.isatty()
        self._dim, self._reset = (DIM, RESET) if is_capable(sys.stderr) else ("", "")

    def add(self, part: AnswerPart) -> None:
        if part.is_reasoning:
            if self._hides_reasoning:
                return
            text = part.text.translate(CONTROL) if sys.stderr.isatty() else part.text
            print(f"{self._dim}{text}{self._reset}", end="", file=sys.stderr, flush=True)
            self._is_reasoning = True
            return
        self._end_reasoning()
        text = part.text.translate(CONTROL) if self._is_terminal else part.text
        print(text, end="", flush=True)
        self._has_text = self._has_text or bool(part.text)

    def close(self) -> None:
        self._end_reasoning()
        if self._has_text:
            print(flush=True)

    def _end_reasoning(self) -> None:
        if self._is_reasoning:
            print(file=sys.stderr, flush=True)
            self._is_reasoning = False


class MarkdownPrinter:
    """Prints each block of Markdown, such as a paragraph, when it is complete. The incomplete block
    is shown below and redrawn. Reasoning is dimmed and not formatted.
    """

    def __init__(self, *, hides_reasoning: bool = False) -> None:
        from rich.console import Console
        from rich.live import Live

        from cllm.cli.conversation.answer_markdown import make_parser

        self._hides_reasoning = hides_reasoning
        self._parser = make_parser()
        self._console = Console(highlight=False)
        self._growing = ""  # text of the incomplete block
        self._is_reasoning = False
        self._num_printed = 0
        self._live = Live(
            console=self._console,
            get_renderable=self._preview,
            refresh_per_second=REFRESHES,
            transient=True,
        )
        self._live.start()

    def add(self, part: AnswerPart) -> None:
        if part.is_reasoning and self._hides_reasoning:
            return
        if part.is_reasoning != self._is_reasoning:
            self._print(self._take())
            self._is_reasoning = part.is_reasoning
        self._growing += part.text.translate(CONTROL)
        complete, growing = self._split(self._growing)
        if complete:
            self._growing = growing
            self._print(complete)

    def close(self) -> None:
        rest = self._take()
        self._live.stop()
        self._print(rest)

    def _take(self) -> str:
        text, self._growing = self._growing, ""
        return text

    def _split(self, text: str) -> tuple[str, str]:
        """Return the blocks that no further text can change, and the rest."""
        if self._is_reasoning:
            complete, end, growing = text.rpartition("\n\n")
            return complete + end, growing
        starts = [
            token.map[0] for token in self._parser.parse(text) if not token.level and token.map
        ]
        if len(set(starts)) < 2:
            return "", text
        lines = text.split("\n")  # as the parser does; splitlines() knows more ends of lines
        return "\n".join([*lines[: starts[-1]], ""]), "\n".join(lines[starts[-1] :])

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._live.is_started:
            self._live.refresh()  # so that the block below no longer shows this text
        if self._num_printed:
            self._console.print()
        self._num_printed += 1
        self._console.print(self._format(text.strip("\n")))

    def _format(self, text: str) -> RenderableType:
        from rich.text import Text

        from cllm.cli.conversation.answer_markdown import AnswerMarkdown

        return Text(text, style="dim") if self._is_reasoning else AnswerMarkdown(text)

    def _preview(self) -> RenderableType:
        """Return the incomplete block, or its last lines as plain text if it is long.

        Drawing all of it again and again would be slow, and lines above the screen cannot be
        redrawn.
        """
        from rich.text import Text

        text = self._growing.strip("\n")
        if not text:
            return Text()
        width, height = self._console.size
        room = max(1, height - 3)
        if len(text) < room * width // 2 and text.count("\n") < room // 2:
            return self._format(text)
        lines = [
            line
            for paragraph in text.splitlines()[-room:]
            for line in Text(paragraph).wrap(self._console, width) or [Text()]
        ]
        return Text("\n", style="dim" if self._is_reasoning else "").join(lines[-room:])
