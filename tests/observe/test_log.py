"""What a client sends cannot forge or hide lines of the log."""

import logging

import pytest

from cllm.observe.log import FORM, Formatter


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\r\nERROR b", "a\\x0d\\x0aERROR b"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("nul \0 csi \x9b31m", "nul \\x00 csi \\x9b31m"),
        ("line\u2028paragraph\u2029", "line\\u2028paragraph\\u2029"),
        ("Grüße 🦊", "Grüße 🦊"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    record = logging.LogRecord("cllm", logging.ERROR, "", 1, "%s failed", (text,), None)
    line = Formatter(FORM).format(record)
    assert line.endswith(f"cllm: {shown} failed")
    assert len(line.splitlines()) == 1


def test_traceback_keeps_its_lines():
    try:
        raise ValueError("x")
    except ValueError as error:
        exc_info = type(error), error, error.__traceback__
    record = logging.LogRecord("cllm", logging.ERROR, "", 1, "failed", (), exc_info)
    assert "\nTraceback (most recent call last):\n" in Formatter(FORM).format(record)
