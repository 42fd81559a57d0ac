"""What a client sends cannot forge or hide lines of the log."""

import json
import logging
import subprocess
import sys
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
    assert f"so {handler.num_dropped} lines were dropped" in last


FULL_PIPE = """
import logging, sys
from cllm.observe import log
log.configure("info", sys.argv[1])
for _ in range(100):
    logging.getLogger("cllm.any").warning("%s", "x" * 10_000)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("uvicorn.error").exception("last")
print("done", flush=True)
sys.stdin.read()
"""


def start_logging(form: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FULL_PIPE, form]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["console", "json"])
def test_no_line_waits_for_a_pipe_that_nobody_reads(form):
    """All of them are written once somebody reads."""
    with start_logging(form) as process:
        assert process.stdout.readline() == "done\n"
        written = process.communicate("\n")[1]
    assert process.returncode == 0
    assert written.count("x" * 10_000) == 100
    assert "ZeroDivisionError: division by zero" in written[written.index("last") :]


@pytest.mark.slow
def test_process_ends_although_nobody_reads_its_pipe():
    with start_logging("console") as process:
        assert process.stdout.readline() == "done\n"
        process.stdin.close()
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_request_lowers_only_its_own_level():
    kept = LevelFilter(logging.WARNING)
    assert not kept.filter(make_record("x"))
    token = request_level.set(logging.DEBUG)
    try:
        assert kept.filter(make_record("x"))
    finally:
        request_level.reset(token)
    assert not kept.filter(make_record("x"))
