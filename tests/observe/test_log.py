"""What a client sends cannot forge or hide lines of the log."""

import json
import logging
import threading

import pytest

from cllm.observe import log
from cllm.observe.log import (
    FORM,
    BackgroundHandler,
    Formatter,
    JsonFormatter,
    LevelFilter,
    request_level,
)


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


def make_record(message: str, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("cllm", logging.INFO, "", 1, message, (), None)
    record.fields = fields
    return record


def test_fields_follow_the_message_and_cannot_be_forged():
    line = Formatter(FORM).format(make_record("done", id="req_1", account="a b=c\nx", empty=""))
    assert line.endswith(r"""cllm: done id=req_1 account='a b=c\nx' empty=''""")


def test_json_lines_have_the_fields_and_one_line_each():
    record = make_record("a\nb\u2028", id="req_1", ttft_ms=1.5)
    line = JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    content = json.loads(line)
    assert content.pop("time").endswith("+00:00")
    assert content == {
        "level": "info",
        "logger": "cllm",
        "message": "a\nb\u2028",
        "id": "req_1",
        "ttft_ms": 1.5,
    }


class Stuck(logging.Handler):
    """Writes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.written: list[str] = []

    def emit(self, record):
        self.may_write.wait()
        self.written.append(record.getMessage())


def test_log_that_is_not_read_delays_no_request_and_tells_what_it_has_dropped(monkeypatch):
    monkeypatch.setattr(log, "MAX_PENDING", 3)
    stuck = Stuck()
    handler = BackgroundHandler(stuck)
    for _ in range(10):
        handler.handle(make_record("x"))
    assert handler.num_dropped in (6, 7)  # the thread may have taken one
    stuck.may_write.set()
    handler.close()
    *lines, last = stuck.written
    assert lines == ["x"] * (10 - handler.num_dropped)
    assert f"so {handler.num_dropped} lines about requests were dropped" in last


def test_request_lowers_only_its_own_level():
    kept = LevelFilter(logging.WARNING)
    assert not kept.filter(make_record("x"))
    token = request_level.set(logging.DEBUG)
    try:
        assert kept.filter(make_record("x"))
    finally:
        request_level.reset(token)
    assert not kept.filter(make_record("x"))
