"""The log file of a replica."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path

MAX_BYTES = 50_000_000  # then a new file begins; one old file is kept


class LogFile(RotatingFileHandler):
    """Gets the lines that a replica writes to stderr.

    Lines that cannot be written are lost. An error must not end the thread that reads stderr,
    because a replica whose pipe is full stops.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8")

    def write(self, line: str) -> None:
        self.emit(logging.makeLogRecord({"msg": line.removesuffix("\n")}))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the library's name
        """Ignore the error of a write."""
