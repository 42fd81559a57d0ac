"""Limits what a JSON body may contain, so that reading it neither stalls the event loop nor fills
the memory.

The size in bytes is limited elsewhere. Four megabytes can contain a million lists, and each becomes
an object.
"""

from __future__ import annotations

from typing import Any

from cllm.errors import BadRequest

MAX_STRUCTURE = 100_000  # objects, lists and members of objects
MAX_VALUES = 500_000  # values in all
MAX_PARTS = 10_000  # messages, items and blocks, and parts and calls in them

CONVERSATIONS = ("messages", "input", "system")  # fields of bodies
PARTS = ("content", "tool_calls", "summary", "output")  # fields of messages, items and blocks


def check_structure(data: bytes) -> None:
    """Raise BadRequest if ``data``, JSON that has not been parsed, contains too many values."""
    # also counts characters in strings, because removing strings is slow
    if is_within_limits(data):
        return
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = plain.count(b'"') // 2
    if num_strings > MAX_STRUCTURE + MAX_VALUES or not is_within_limits(
        b"".join(plain.split(b'"')[::2])
    ):
        message = (
            f"The body is too large: at most {MAX_PARTS} messages and parts, "
            f"{MAX_STRUCTURE} objects, lists and members of objects, {MAX_VALUES} values in all "
            f"are accepted."
        )
        raise BadRequest(message, code="body_too_large")


def is_within_limits(data: bytes) -> bool:
    return (
        sum(map(data.count, (b"{", b"[", b":"))) <= MAX_STRUCTURE and data.count(b",") < MAX_VALUES
    )


def check_parts(body: dict[str, Any]) -> None:
    """Raise BadRequest if a conversation in ``body`` has too many messages and parts."""
    for name in CONVERSATIONS:
        if isinstance(value := body.get(name), list):
            check_num_parts(count_parts(value), name)


def check_num_parts(count: int, param: str) -> None:
    """Raise BadRequest, naming ``param``, if a conversation has too many messages and parts."""
    if count > MAX_PARTS:
        message = (
            f"Invalid '{param}': at most {MAX_PARTS} messages and parts are accepted, not {count}."
        )
        raise BadRequest(message, param=param, code="array_above_max_length")


def count_parts(conversation: list[Any]) -> int:
    count, pending = 0, [conversation]
    while pending:
        objects = [item for item in pending.pop() if isinstance(item, dict)]
        count += len(objects)
        pending += [
            item[name] for item in objects for name in PARTS if isinstance(item.get(name), list)
        ]
    return count
