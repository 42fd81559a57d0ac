"""The tokens of one sequence, turned into text until its end."""

from __future__ import annotations

from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams
from cllm.text.choice import Choice

PIECES = [bytes([i]) for i in range(256)] + [b""]


def run(
    data: bytes, stops: tuple[str, ...] = (), finish: str = "", *, is_text: bool = True
) -> tuple[str, str]:
    choice, shown = Choice(0, PIECES, SamplingParams(stop=stops)), ""
    for i, byte in enumerate(data):
        last = i == len(data) - 1
        output = TokenOutput("A", 0, byte, finish if last else "", is_text or not last)
        text, ended = choice.feed(output)
        shown += text
        assert ended == choice.finish
        if ended:
            break
    return shown, choice.finish


def test_text_is_returned_as_it_arrives():
    """Except for an ending that may begin a stop string."""
    assert run("grün".encode()) == ("grün", "")
    assert run(b"one\n", ("\n\n",)) == ("one", "")


def test_last_token_releases_held_back_text():
    """A broken character is shown as U+FFFD."""
    assert run(b"one\n", ("\n\n",), "length") == ("one\n", "length")
    assert run(b"a\xe2\x82", (), "length") == ("a\ufffd", "length")


def test_stop_string_ends_the_text_and_is_not_shown():
    """The reason is "stop", even if the length ended the sequence too."""
    assert run(b"one.two", (".",)) == ("one", "stop")
    assert run(b"one.", (".",), "length") == ("one", "stop")


def test_end_token_adds_no_text():
    assert run(b"abc", (), "stop", is_text=False) == ("ab", "stop")
