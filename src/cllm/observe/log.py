"""Logs: one line per event on stderr; never a prompt, never a key."""

from __future__ import annotations

import logging
import sys

FORM = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Characters that move a terminal's cursor or begin a new line, which a log line must not contain.
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
CONTROL |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029)}


class Formatter(logging.Formatter):
    """Escapes control characters of the message, which may have come from a client."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the library's name
        record.message = record.message.translate(CONTROL)
        return super().formatMessage(record)


def configure(level: str) -> None:
    """Send everything at or above ``level`` to stderr; of verbose libraries, only warnings and
    errors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(FORM))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn", "asyncio", "httpx2", "huggingface_hub"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
