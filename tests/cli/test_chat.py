"""``cllm chat`` on a terminal: a process in a pseudo-terminal, with a server that the test controls."""

from __future__ import annotations

import json
import os
import random
import re
import select
import stat
import subprocess
import sys
import threading
import time

import pytest
from conftest import PATIENCE
from openai_server import Reasoning, openai_server
from prompt_toolkit.layout.processors import TransformationInput

from cllm.cli.conversation.reader import is_open, unquote
from cllm.cli.conversation.word_wrap import WordWrap, find_gaps

pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
pytestmark = pytest.mark.slow

PROMPT = ">>> "
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[=>])")
SLOW_IMPORT = """
import threading
print("importing", flush=True)
threading.Event().wait()
"""
# Makes the pseudo-terminal the controlling one, so that Ctrl-C sends a signal, and starts the command.
START = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "cllm", *sys.argv[1:]])
"""


class Terminal:
    """A command in a pseudo-terminal. ``screen``: what it has printed, without escape sequences."""

    def __init__(self, *arguments: str, term: str = "xterm-256color") -> None:
        self._file, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={
                **os.environ,
                "TERM": term,
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "COLUMNS": "80",
                "LINES": "24",
            },
        )
        os.close(inner)
        self.raw = ""
        self._seen = 0

    @property
    def screen(self) -> str:
        return ESCAPES.sub("", self.raw).replace("\r", "")

    def expect(self, text: str) -> str:
        """Wait until ``text`` is printed after what was waited for before; return all up to it."""
        end = time.monotonic() + PATIENCE
        while (at := self.screen.find(text, self._seen)) < 0:
            assert time.monotonic() < end, f"{text!r} is not in {self.screen[self._seen :]!r}"
            assert self._read(), f"{text!r} is not in {self.screen[self._seen :]!r}, and it ended"
        begin, self._seen = self._seen, at + len(text)
        return self.screen[begin : self._seen]

    def _read(self) -> bool:
        """Read what is printed within a second; return False at the end."""
        if not select.select([self._file], [], [], 1)[0]:
            return True
        try:
            data = os.read(self._file, 1 << 16)
        except OSError:  # how Linux reports that the other end is closed
            data = b""
        self.raw += data.decode("utf-8", "replace")
        return bool(data)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def ask(self, text: str) -> None:
        """Wait for the prompt, and type a line."""
        self.expect(PROMPT)
        self.type(f"{text}\r")

    def wait(self) -> int:
        """Return the exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._file)


@pytest.fixture
def open_terminal():
    terminals = []

    def start(*arguments, **options):
        terminals.append(Terminal(*arguments, **options))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


@pytest.fixture
def chat(open_terminal):
    """A function that starts a chat with a server."""
    return lambda server, *arguments, **options: open_terminal(
        "chat", "--url", server.url, *arguments, **options
    )


def questions(server) -> list[str]:
    return [body["messages"][-1]["content"] for body in server.bodies]


def test_answers_are_formatted_and_reasoning_is_dimmed(chat):
    """Tokens and times follow each answer, and the conversation goes on with its messages."""
    answer = [Reasoning("Let me think."), "Some **bold** words.\n\n", "* one\n* two\n"]
    with openai_server(answer) as server:
        terminal = chat(server, "--system", "Be brief.")
        terminal.ask("Why?")
        terminal.expect("Let me think.")
        printed = terminal.expect("5 of 9 prompt tokens cached")
        assert "Some bold words." in printed
        assert " • one" in printed
        assert "to the first token" in printed
        assert "\x1b[2mLet me think." in terminal.raw
        terminal.ask("And?")
        terminal.expect("cached")
        terminal.ask("/bye")
        assert terminal.wait() == 0
    text = "Some **bold** words.\n\n* one\n* two\n"
    assert server.bodies[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And?"},
    ]


def test_what_is_typed_during_an_answer_waits_for_the_prompt(chat):
    """It is not echoed into the answer, and it is the next message."""
    gate = threading.Event()
    with openai_server(["Once ", "there ", gate, "was."], ["Yes."]) as server:
        terminal = chat(server)
        terminal.ask("A story!")
        terminal.expect("there")
        terminal.type("And then?\r")
        time.sleep(0.2)  # an echo would come at once
        gate.set()
        assert "And then?" not in terminal.expect("cached")
        terminal.expect("And then?")
        terminal.expect("Yes.")
    assert questions(server) == ["A story!", "And then?"]


@pytest.mark.parametrize("width", [5, 8, 20])
def test_typed_words_are_not_broken(width):
    """Unless a word is longer than a row. What is shown and what is typed have the same order."""
    choose = random.Random(width)
    for _ in range(200):
        words = ["x" * choose.randint(0, width + 3) for _ in range(choose.randint(1, 15))]
        text = " ".join(words)
        gaps, shown, starts = find_gaps(text, width), "", {}
        for at, char in enumerate(text):
            shown += "." * gaps.get(at, 0)
            starts[at] = len(shown)
            shown += char
        at = 0
        for word in words:
            if 0 < len(word) <= width:
                assert starts[at] // width == starts[at + len(word) - 1] // width, shown
            at += len(word) + 1
        given = TransformationInput(None, None, 0, None, [("", text)], width + 4, 9)
        done = WordWrap(4).apply_transformation(given)
        for at, place in starts.items():
            assert done.source_to_display(at) == place
            assert done.display_to_source(place) == at


def test_long_line_is_wrapped_fast() -> None:
    """A screen asks for each position of a line, after each key."""
    text = "words of a line " * 3000
    given = TransformationInput(None, None, 0, None, [("", text)], 84, 9)
    start = time.process_time()
    done = WordWrap(4).apply_transformation(given)
    shown = [done.source_to_display(position) for position in range(len(text))]
    assert [done.display_to_source(position) for position in shown] == list(range(len(text)))
    assert time.process_time() - start < 5


def test_control_characters_in_answers_do_not_reach_the_terminal(chat):
    with openai_server(["a\x1b]0;title\x07b\x9bc"]) as server:
        terminal = chat(server)
        terminal.ask("Why?")
        terminal.expect("a]0;titlebc")


def test_ctrl_c_stops_an_answer_and_a_second_one_leaves(chat):
    """The server notices it, and what has arrived of the answer is kept."""
    with openai_server(["Once ", "there was", threading.Event()], ["Yes."]) as server:
        terminal = chat(server)
        terminal.ask("A story!")
        terminal.expect("there was")
        terminal.type("\x03")
        terminal.expect("(stopped)")
        assert server.gone.wait(PATIENCE)
        terminal.ask("Go on.")
        terminal.expect("cached")
        assert [m["content"] for m in server.bodies[1]["messages"]] == [
            "A story!",
            "Once there was",
            "Go on.",
        ]
        terminal.expect(PROMPT)
        terminal.type("\x03")
        terminal.expect("Ctrl-C once more")
        terminal.expect(PROMPT)
        terminal.type("\x03")
        assert terminal.wait() == 130


def test_ctrl_c_stops_what_precedes_an_answer(chat, monkeypatch, tmp_path):
    """At the first answer, libraries are imported. The chat goes on."""
    (tmp_path / "markdown_it.py").write_text(SLOW_IMPORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with openai_server() as server:
        terminal = chat(server)
        terminal.ask("Why?")
        terminal.expect("importing")
        terminal.type("\x03")
        terminal.expect("(stopped)")
        terminal.ask("/show")
        terminal.expect("messages            0")


def test_ctrl_c_clears_a_line_and_ctrl_d_leaves(chat):
    with openai_server() as server:
        terminal = chat(server)
        terminal.expect(PROMPT)
        terminal.type("nonsense")
        terminal.expect("nonsense")
        terminal.type("\x03Why?\r")
        terminal.expect("cached")
        terminal.expect(PROMPT)
        terminal.type("\x04")
        assert terminal.wait() == 0
    assert questions(server) == ["Why?"]


def test_messages_may_have_several_lines(chat):
    """They are pasted, typed with Alt-Enter, or between triple quotes."""
    with openai_server() as server:
        terminal = chat(server)
        terminal.ask("\x1b[200~one\r\ntwo\nthree\x1b[201~")
        terminal.expect("cached")
        terminal.ask("one\x1b\rtwo")
        terminal.expect("cached")
        terminal.ask('"""one')
        terminal.expect("...")
        terminal.type('two\rthree"""\r')
        terminal.expect("cached")
        terminal.ask("/bye")
        assert terminal.wait() == 0
    assert questions(server) == ["one\ntwo\nthree", "one\ntwo", "one\ntwo\nthree"]


def test_conversations_are_saved_and_loaded(chat, home):
    """Only the user can read the files. The history of the prompt survives too."""
    with openai_server(["Blue."]) as server:
        terminal = chat(server, "--temperature", "0.5")
        terminal.ask("/system Be brief.")
        terminal.ask("Which colour?")
        terminal.expect("cached")
        terminal.ask("/save colours")
        terminal.expect("Saved as ")
        terminal.ask("/bye")
        assert terminal.wait() == 0
        folder = home / ".local" / "state" / "cllm"
        for file in (folder / "chats" / "colours.json", folder / "chat_history"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        saved = json.loads((folder / "chats" / "colours.json").read_text())
        assert saved["sampling"] == {"temperature": 0.5}

        terminal = chat(server)
        terminal.ask("/load nothing")
        terminal.expect("cannot load")
        terminal.ask("/load colours")
        terminal.expect(">>> Which colour?")
        terminal.expect("Blue.")
        terminal.expect("Loaded 2 messages.")
        terminal.expect(PROMPT)
        terminal.type(
            "\x1b[A" * 5 + "\r"
        )  # /load colours, /load nothing, /bye, /save, the question
        terminal.expect("cached")
    body = server.bodies[1]
    assert body["temperature"] == 0.5
    assert [message["content"] for message in body["messages"]] == [
        "Be brief.",
        "Which colour?",
        "Blue.",
        "Which colour?",
    ]


def test_settings_of_a_conversation(chat):
    with openai_server() as server:
        terminal = chat(server)
        for line, printed in (
            ("/nothing", "There is no command /nothing"),
            ("/set temperature", "needs a value"),
            ("/set temperature warm", "temperature must be a number, not warm"),
            ("/set temperature -1", "temperature"),
            ("/set num_ctx 9", "--context"),
            ("/set colour blue", "There is no setting colour"),
            ("/set temperature 0", "Set."),
            ("/set parameter num_predict 7", "Set."),
            ("/set think much", "/set think takes low, medium, high, or nothing."),
            ("/set think high", "Set."),
            ("/show", "high"),
            ("/set nothink", "Set."),
            ("/set format json", "Set."),
            ("/model nothing", "the server has no model nothing; it has m, other/model:Q4"),
            ("/model other/model:Q4", "answers from now on"),
            ("/show", "other/model:Q4"),
            ("/set quiet", "Set."),
        ):
            terminal.ask(line)
            terminal.expect(printed)
        terminal.ask("Why?")
        terminal.expect("Yes.")
        terminal.ask("/new")
        terminal.expect("A new conversation begins.")
        terminal.ask("How?")
        terminal.expect("Yes.")
    assert "to the first token" not in terminal.screen
    first, second = server.bodies
    assert {**first, "messages": []} == {
        "model": "other/model:Q4",
        "messages": [],
        "temperature": 0.0,
        "max_tokens": 7,
        "reasoning_effort": "none",
        "response_format": {"type": "json_object"},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert len(second["messages"]) == 1


def test_tab_completes_commands(chat):
    with openai_server() as server:
        terminal = chat(server)
        terminal.expect(PROMPT)
        terminal.type("/sys")
        terminal.expect("/system")  # in the menu
        terminal.type("\t Be brief.\r")
        terminal.expect("The system message is set.")


def test_chat_survives_the_end_of_the_server(chat):
    """The connection ends in the middle of an answer; the next one comes from a new server."""
    with openai_server(["Once", None]) as server:
        terminal = chat(server)
        terminal.ask("A story!")
        terminal.expect("lost the connection to the server")
    terminal.ask("Hello?")
    terminal.expect("lost the connection to the server")
    with openai_server(["Here."], port=server.server_port) as again:
        terminal.ask("Hello?")
        terminal.expect("Here.")
        terminal.ask("/bye")
        assert terminal.wait() == 0
    assert [m["content"] for m in again.bodies[0]["messages"]] == ["A story!", "Once", "Hello?"]


def test_dumb_terminal_gets_plain_text(chat):
    """No escape sequences, and no redrawing."""
    with openai_server([Reasoning("Hm."), "Some **bold** ", "words."]) as server:
        terminal = chat(server, term="dumb")
        terminal.ask("Why?")
        terminal.expect("Hm.")
        terminal.expect("Some **bold** words.\n")
        terminal.ask('"""one')
        terminal.expect("...")
        terminal.type('two"""\r')
        terminal.expect("cached")
        terminal.ask("/bye")
        assert terminal.wait() == 0
    assert "\x1b" not in terminal.raw
    assert questions(server) == ["Why?", "one\ntwo"]


def test_run_asks_once_or_talks(open_terminal):
    """Without a prompt, ``cllm run`` is a conversation on a terminal."""
    with openai_server() as server:
        once = open_terminal("run", "m", "Why?", "--url", server.url)
        once.expect("Yes.")
        assert once.wait() == 0
        assert "first token" not in once.screen
        terminal = open_terminal("run", "m", "--url", server.url)
        terminal.ask("How?")
        terminal.expect("Yes.")
        terminal.ask("/bye")
        assert terminal.wait() == 0
    assert questions(server) == ["Why?", "How?"]


@pytest.mark.parametrize(
    ("text", "open_block", "message"),
    [
        ("a", False, "a"),
        ('"""', True, ""),
        ('"""a', True, "a"),
        ('"""a\nb"""', False, "a\nb"),
        ('""""""', False, ""),
        ('a"""b', False, 'a"""b'),
        (' """a""" ', False, "a"),
    ],
)
def test_triple_quotes_begin_and_end_a_message(text, open_block, message):
    assert (is_open(text), unquote(text)) == (open_block, message)
