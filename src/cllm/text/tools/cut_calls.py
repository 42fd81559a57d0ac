"""Says whether a text that was cut off could have become a call."""

from __future__ import annotations

import re
from collections.abc import Collection

from cllm.text.tools.model_family import Calls

# The beginning of the head of a call in JSON, without white space.
HEAD_KEYS = ("id", "type", "function", "name")  # keys with which a head in JSON may begin
HEAD_BEGUN = re.compile(r'\[?(?:\{(?:"(?P<key>[^"]*)(?P<closed>"?).*)?)?', re.DOTALL)
HEAD_NAME = re.compile(r'"name":"([^"]*)("?)')


def may_begin_call(head: str, opener: str, calls: Calls, names: Collection[str]) -> bool:
    """Whether ``head``, the text after the mark ``opener``, can become a call of one of ``names``.

    It is compared with how the family writes calls, without white space.
    """
    text = "".join(head.split())
    whole = calls.begin + calls.write
    lead = calls.write  # after a separator
    if not opener or (opener in calls.open and opener in whole):
        lead = whole.partition(opener)[2] if opener else whole
    lead = "".join(lead.partition("$")[0].split())
    if text.startswith(("{", "[{")) or (text in ("", "[") and "json" in calls.head):
        return may_begin_object(text, calls, names)
    variants = {"", lead, lead.removeprefix("[")}
    return any(
        is_begun(text.removeprefix("[") if lead.startswith("[") else text, variant + name)
        for variant in variants
        for name in names
    )


def may_begin_object(text: str, calls: Calls, names: Collection[str]) -> bool:
    match = HEAD_BEGUN.fullmatch(text)
    if match is None or "json" not in calls.head:
        return match is not None
    key, is_closed = match["key"], match["closed"]
    if key is not None and not any(
        known == key if is_closed else known.startswith(key) for known in HEAD_KEYS
    ):
        return False
    name = HEAD_NAME.search(text)
    return name is None or any(
        known == name[1] if name[2] else known.startswith(name[1]) for known in names
    )


def is_begun(text: str, word: str) -> bool:
    """Whether one of two texts begins with the other."""
    return text.startswith(word) or word.startswith(text)
