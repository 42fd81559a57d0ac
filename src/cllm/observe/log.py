"""Logs: one line per event on stderr; never a prompt, never a key.

Lines are text, or JSON objects for programs. Modules log with the standard library; the fields of
an event are its ``extra={"fields": {...}}``. A thread formats and writes the lines, so that a
terminal or a pipe that is not read delays no request.
"""

from __future__ import annotations

import copy
import logging
import queue
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

FORM = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Characters that move a terminal's cursor or begin a new line, which a log line must not contain.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
CONTROL |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029)}

REQUESTS = "cllm.request"  # the logger of the lines about requests
MAX_PENDING = 10_000  # lines; further ones are dropped
CLOSE_TIMEOUT = 2.0  # seconds

# what the client of the current request may set, if log.allow_header is on: its own lowest level
request_level: ContextVar[int | None] = ContextVar("request_level", default=None)


class Formatter(logging.Formatter):
    """Writes the fields of a record after its message. Escapes control characters, which may have
    come from a client.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        fields = getattr(record, "fields", {})
        text = " ".join((record.message, *(f"{k}={quote(v)}" for k, v in fields.items())))
        record.message = text.translate(CONTROL)
        return super().formatMessage(record)


def quote(value: object) -> str:
    """Return a value as it is, or in quotes if it has spaces or quotes, or is empty."""
    text = str(value)
    return repr(text) if not text or any(one in text for one in " \t\n\"'=") else text


class JsonFormatter(logging.Formatter):
    """Writes a record as a JSON object on one line, with its fields among the others."""

    def format(self, record: logging.LogRecord) -> str:
        content: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_text:  # BackgroundHandler has formatted it
            content["exception"] = record.exc_text
        # line ends that JSON allows within strings
        text = msgspec.json.encode(content).decode()
        return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


class BackgroundHandler(logging.Handler):
    """Passes records to another handler in a thread, without its filters. While that cannot write,
    records that exceed MAX_PENDING are dropped; a later line tells how many.

    A process that ends without the interpreter's shutdown calls ``logging.shutdown`` before.
    """

    def __init__(self, target: logging.Handler) -> None:
        super().__init__()
        self.num_dropped = 0
        self._num_reported = 0  # dropped records that a line has told
        self._target = target
        # unlike Queue's, its ``put`` may be interrupted by a finalizer that logs
        self._pending: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None  # from the first record on

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self._finish(record))
        except Exception:  # noqa: BLE001  # as the library's handlers do
            self.handleError(record)

    def _finish(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return ``record`` with texts in place of arguments, which may change, and of the
        traceback, which keeps what its functions have in memory.
        """
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            formatter = self._target.formatter or logging.Formatter()
            record.exc_text, record.exc_info = formatter.formatException(record.exc_info), None
        return record

    def _put(self, record: logging.LogRecord) -> None:
        if self._pending.qsize() >= MAX_PENDING:
            self.num_dropped += 1
            return
        self._pending.put(record)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="log", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter shuts down
                self._pending.put(None)
                self._write()

    def _write(self) -> None:
        while (record := self._pending.get()) is not None:
            self._target.emit(record)  # ``handle`` would filter it in this thread's context
            if self._pending.empty():
                self._report_dropped()
        self._report_dropped()

    def _report_dropped(self) -> None:
        if not (number := self.num_dropped - self._num_reported):
            return
        self._num_reported += number
        text = "the log was not read in time, so %d lines were dropped"
        arguments = ("cllm.log", logging.WARNING, __file__, 0, text, (number,), None)
        self._target.emit(logging.LogRecord(*arguments))

    def close(self) -> None:
        """Write pending lines for at most CLOSE_TIMEOUT."""
        if self._thread is not None and self._thread.is_alive():
            self._pending.put(None)
            self._thread.join(CLOSE_TIMEOUT)
        super().close()


class LevelFilter(logging.Filter):
    """Lets records at or above a level pass, or at or above that of the current request."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        own = request_level.get()
        return record.levelno >= (self._level if own is None else min(own, self._level))


def configure(
    level: str, form: Literal["console", "json"] = "console", *, by_request: bool = False
) -> None:
    """Send everything at or above ``level`` to stderr; of verbose libraries, only warnings and
    errors.

    With ``by_request``, records below the level pass if ``request_level`` lets them.
    """
    target = logging.StreamHandler(sys.stderr)
    target.setFormatter(JsonFormatter() if form == "json" else Formatter(FORM))
    handler = BackgroundHandler(target)
    number = logging.getLevelNamesMapping()[level.upper()]
    if by_request:
        handler.addFilter(LevelFilter(number))
    root_level = logging.DEBUG if by_request else number
    logging.basicConfig(level=root_level, handlers=[handler], force=True)
    for name in ("uvicorn", "asyncio", "httpx2", "huggingface_hub"):
        logging.getLogger(name).setLevel(max(logging.WARNING, number))
