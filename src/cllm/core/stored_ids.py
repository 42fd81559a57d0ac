"""Ids of what clients store: responses, files and batches.

Behind a front, they name the replica that stores it.
"""

from __future__ import annotations

import hashlib
import re
import secrets

REPLICA_NAME = r"[0-9a-z]{1,32}"
NAMED = re.compile(
    rf"(?:resp_|msg_|rs_|fc_|ctc_|file-|batch_|msgbatch_)({REPLICA_NAME})_[0-9a-f]{{1,64}}"
)


def make_id(kind: str, replica: str = "", num_bytes: int = 12) -> str:
    """Return a new id, which begins with ``kind`` and the name of the replica, if there is one."""
    name = f"{replica}_" if replica else ""
    return f"{kind}{name}{secrets.token_hex(num_bytes)}"


def derive_id(kind: str, parent: str, number: int) -> str:
    """Return the id of part ``number`` of what has the id ``parent``: always the same one, so a
    replica that continues another one's answer gives its parts the same ids.
    """
    replica = find_replica(parent)
    name = f"{replica}_" if replica and kind != "call_" else ""
    digest = hashlib.blake2b(f"{kind}{parent} {number}".encode(), digest_size=16).hexdigest()
    return f"{kind}{name}{digest}"


def find_replica(stored_id: str) -> str:
    """Return the name of the replica that an id names; "" if it names none."""
    found = NAMED.fullmatch(stored_id)
    return found[1] if found else ""
