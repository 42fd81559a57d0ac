"""The audit log of changes to the server: who made which change, and when."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from cllm.private_files import open_private

log = logging.getLogger("cllm.access")


def write_audit(folder: Path, who: str, what: str, **details: object) -> None:
    """Append a line of JSON to the file ``audit.log``, which only its owner can read.

    If the file cannot be written, this is only logged, because the change has already been made.
    """
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = msgspec.json.encode({"when": when, "who": who, "what": what, **details}) + b"\n"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_private(folder / "audit.log", "ab") as file:
            file.write(line)
    except OSError as error:
        log.error("%s cannot be written: %s", folder / "audit.log", error.strerror)
