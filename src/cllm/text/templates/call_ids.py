"""Give calls the ids that a chat template accepts, or in which it shows their names."""

from __future__ import annotations

import re
import zlib
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

Messages = list[dict[str, Any]]
MakeId = Callable[[str, str, int], str]  # from an id, the function's name, and the call's ordinal

SAMPLES = ("call_0_1", "c", "call_0123456789abcdef01234567", "12345678-90ab-cdef-1234-567890abcdef")
MAX_KNOWN = 1000  # remembered forms of ids, each with whether the template accepts it


def short_id(key: str, *_: Any) -> str:
    """Return nine letters and digits for the id of a call: the id itself if it has that form, else
    a checksum.
    """
    return key if re.fullmatch(r"[a-zA-Z0-9]{9}", key) else f"{zlib.crc32(key.encode()):09x}"


def numbered_id(length: int, prefix: str, _: str, __: str, ordinal: int) -> str:
    return f"{prefix}{ordinal % 10**length:0{length}d}"


def name_id(_: str, name: str, ordinal: int) -> str:
    """Return the id of a call as Kimi K2 writes it."""
    return f"functions.{name}:{ordinal}"


FORMS: tuple[MakeId, ...] = (
    short_id,
    partial(numbered_id, 24, "call_"),
    *(partial(numbered_id, length, "") for length in (*range(10, 65), *range(8, 0, -1))),
)


def link_results(messages: Messages) -> Messages:
    """Return ``messages`` with ids in all calls and results, and the name of the function in each
    result of a call.

    A result without an id belongs to the first unanswered call of its name, or else to any
    unanswered call, if there is one.
    """
    linked: Messages = []
    calls = CallIndex()
    for i, message in enumerate(messages):
        if made := message.get("tool_calls"):
            made = [calls.add(call, f"call_{i}_{j}") for j, call in enumerate(made)]
            message = {**message, "tool_calls": made}  # noqa: PLW2901
        elif message["role"] == "tool":
            name = message.get("name")
            key = message.get("tool_call_id") or calls.first(name) or f"call_{i}"
            name = name or calls.names.get(key)
            message = {**message, "tool_call_id": key}  # noqa: PLW2901
            message |= {"name": name} if name else {}  # noqa: PLW2901
        linked.append(message)
    return linked


class CallIndex:
    """The calls of a conversation: names by id, and ids of unanswered calls by name."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self._open: dict[str, deque[str]] = {}

    def add(self, call: dict[str, Any], key: str) -> dict[str, Any]:
        """Return the call with an id, which is ``key`` if it has none."""
        key, name = call.get("id") or key, call["function"]["name"]
        self.names[key] = name
        self._open.setdefault(name, deque()).append(key)
        return {**call, "id": key}

    def first(self, name: str | None) -> str | None:
        """Return the id of the first unanswered call of ``name``, or else of any call, and count
        the call as answered.
        """
        name = name if name in self._open else next(iter(self._open), "")
        if name not in self._open:
            return None
        key = self._open[name].popleft()
        if not self._open[name]:
            del self._open[name]
        return key


class CallIds:
    """The ids of calls that one chat template requires."""

    def __init__(self, show: Callable[[Messages], str | None]) -> None:
        """``show`` renders messages; it returns None if the template refuses them."""
        self._show = show
        self._known: dict[str, bool] = {}

    def adapt(self, messages: Messages) -> Messages:
        """Return ``messages`` with ids that the template accepts in calls and their results."""
        if not (self._make or self._writes_names):
            return messages
        adapted: Messages = []
        new: dict[str, str] = {}
        ordinal = 0
        for message in messages:
            if self._restarts:
                ordinal = 0
            if calls := message.get("tool_calls"):
                for call in calls:
                    name = call["function"]["name"]
                    new[call.get("id", "")] = self._new_id(call.get("id", ""), name, ordinal)
                    ordinal += 1
                called = [{**call, "id": new[call.get("id", "")]} for call in calls]
                message = {**message, "tool_calls": called}  # noqa: PLW2901
            elif "tool_call_id" in message:
                key = message["tool_call_id"]
                if key not in new:  # the call is not in the conversation
                    new[key] = self._new_id(key, message.get("name") or "unknown", ordinal)
                    ordinal += 1
                message = {**message, "tool_call_id": new[key]}  # noqa: PLW2901
            adapted.append(message)
        return adapted

    @property
    def sample(self) -> str:
        """An id that the template accepts."""
        return self._new_id("probe1234", "probe", 0)

    def _new_id(self, key: str, name: str, ordinal: int) -> str:
        if self._writes_names:
            return name_id(key, name, ordinal)
        if self._make is None or self._accepts(key):
            return key
        return self._make(key, name, ordinal)

    @cached_property
    def _make(self) -> MakeId | None:
        """The function that makes ids, if the template rejects some."""
        if all(map(self._accepts, SAMPLES)):
            return None
        forms = (form for form in FORMS if self._accepts(form("probe", "probe", 1)))
        return next(forms, None)

    @cached_property
    def _writes_names(self) -> bool:
        """Whether the template shows the ids of calls in place of their names."""
        own = name_id("", "probename", 0)
        text, with_own = (self._show(history(key)) or "" for key in ("probe1234", own))
        shows_ids = "probe1234" in text and own in with_own
        return shows_ids and ("probename" not in text or self._restarts)

    @cached_property
    def _restarts(self) -> bool:
        """Whether the template itself writes such ids, and restarts their numbers in each message.
        Results must then use these ids.
        """
        own = name_id("", "probename", 0)
        text = self._show(history("probe1234", "probe5678")) or ""
        return text.count(own) == 2

    def _accepts(self, key: str) -> bool:
        """Return whether the template accepts ids with the prefix and the length of ``key``."""
        prefix, mark, rest = key.rpartition("_")
        like = prefix + mark + re.sub("[a-zA-Z0-9]", "0" if rest.isdigit() else "a", rest)
        if like not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            is_plain = re.fullmatch(r"[\w.:-]+", like) is not None
            self._known[like] = is_plain and self._show(history(like)) is not None
        return self._known[like]


def history(*keys: str) -> Messages:
    """Return a conversation with a call and its result for each of the ids ``keys``."""
    messages: Messages = [{"role": "user", "content": "a"}]
    for key in keys:
        function = {"name": "probename", "arguments": {}}
        call = {"id": key, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": key, "content": "b", "name": "probetool"})
    return messages
