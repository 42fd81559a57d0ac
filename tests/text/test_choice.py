"""Tokens of one sequence to its text, with its end."""

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


def test_text_comes_as_it_grows():
    """Text without an end is shown and goes on; what could be the beginning of a stop string
    waits.
    """
    assert run("grün".encode()) == ("grün", "")
    assert run(b"one\n", ("\n\n",)) == ("one", "")


def test_the_end_shows_what_was_held_back():
    """With the last token everything comes out, and a broken character as U+FFFD."""
    assert run(b"one\n", ("\n\n",), "length") == ("one\n", "length")
    assert run(b"a\xe2\x82", (), "length") == ("a\ufffd", "length")


def test_a_stop_string_ends_it():
    """A stop string wins over going on and over the length, and is not shown."""
    assert run(b"one.two", (".",)) == ("one", "stop")
    assert run(b"one.", (".",), "length") == ("one", "stop")


def test_the_end_token_is_no_text():
    """A token that ends the sequence and is no text adds none."""
    assert run(b"abc", (), "stop", is_text=False) == ("ab", "stop")
