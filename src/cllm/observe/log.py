"""Logs: one line per event on stderr; never a prompt, never a key."""

from __future__ import annotations

import logging
import sys

FORM = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def configure(level: str) -> None:
    """Send everything at or above ``level`` to stderr; of verbose libraries, only warnings and
    errors.
    """
    logging.basicConfig(level=level.upper(), format=FORM, stream=sys.stderr, force=True)
    for name in ("uvicorn", "asyncio", "httpx2", "huggingface_hub"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))
