"""Reads the messages of a conversation: lines of a file or pipe, or a prompt on a terminal with
history, editing and completion.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cllm.cli.conversation.printer import is_capable
from cllm.errors import CLLMError
from cllm.private_files import open_private

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output

QUOTES = '"""'
PROMPT, CONTINUED = ">>> ", "... "
Complete = Callable[[str], Iterable[str]]
"""Returns the words that may follow a text."""


class MessageReader(Protocol):
    is_interactive: bool

    def read(self) -> str | None:
        """Return the next message, or None at the end of the input. Raises KeyboardInterrupt, and
        CLLMError if the input is not text.
        """
        ...


def read_stdin() -> str:
    """Return all of stdin, without a byte order mark. Raises CLLMError if it is not text."""
    with expect_text():
        return sys.stdin.read().removeprefix("\ufeff")


@contextmanager
def expect_text() -> Iterator[None]:
    """Raise CLLMError in the ``with`` block if the input from stdin is not text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise CLLMError(f"stdin is not {error.encoding.upper()} text") from None


def open_reader(complete: Complete) -> MessageReader:
    """Return a reader of stdin."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return LineReader()
    if is_capable(sys.stdout):
        return PromptReader(complete)
    return LineReader(PROMPT, CONTINUED)


def is_open(text: str) -> bool:
    '''Return whether ``text`` begins a """ block and does not end it.'''
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 6 or not text.endswith(QUOTES))


def unquote(text: str) -> str:
    '''Return a message without the marks of a """ block.'''
    text = text.strip()
    return text.removeprefix(QUOTES).removesuffix(QUOTES).strip() if is_quoted(text) else text


def is_quoted(text: str) -> bool:
    return text.startswith(QUOTES)


class LineReader:
    '''Reads a message from each line, and from the lines of a """ block.'''

    def __init__(self, prompt: str = "", continued: str = "") -> None:
        self._prompt, self._continued = prompt, continued
        self.is_interactive = bool(prompt)

    def read(self) -> str | None:
        with expect_text():
            try:
                text = input(self._prompt)
            except EOFError:
                return None
            try:
                while is_open(text):
                    text += "\n" + input(self._continued)
            except EOFError:
                pass  # the end of the input ends the block too
        return unquote(text)


class PromptReader:
    '''Reads messages with prompt_toolkit. Alt-Enter and """ blocks give several lines.'''

    is_interactive = True

    def __init__(
        self, complete: Complete, keyboard: Input | None = None, screen: Output | None = None
    ) -> None:
        """``keyboard`` and ``screen`` are the terminal's unless others are given."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        class Words(Completer):
            def get_completions(self, document, event):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
                text = document.text_before_cursor
                word = text.rpartition(" ")[2]
                for completion in complete(text):
                    yield Completion(completion, -len(word))

        from cllm.cli.conversation.word_wrap import WordWrap

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        def _(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt())

        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=Condition(lambda: is_open(get_app().current_buffer.text)),
            prompt_continuation=CONTINUED,
            completer=Words(),
            complete_in_thread=True,  # it may ask the server
            history=open_history(history_file()),
            key_bindings=keys,
            input_processors=[WordWrap(len(PROMPT))],
            placeholder=[("ansibrightblack", "Send a message (/? for help)")],
            input=keyboard,
            output=screen,
            reserve_space_for_menu=4,
        )

    def read(self) -> str | None:
        try:
            return unquote(self._session.prompt())
        except EOFError:
            return None


def state_folder() -> Path:
    """Return the folder for the data that chats store on this machine."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "cllm"


def history_file() -> Path:
    return state_folder() / "chat_history"


def open_history(path: Path) -> History:
    """Return the history in a file that only its owner can read, or in memory if it cannot be
    written.
    """
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        open_private(path, "ab").close()
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)
