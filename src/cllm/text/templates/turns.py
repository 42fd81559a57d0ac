"""Rearrange conversations that a chat template rejects or renders incompletely.

A repair takes messages and returns messages that say the same in an order that more templates
accept. ``find_repair`` finds the smallest repair by rendering the conversation with short marks in
place of its texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from typing import Any

Messages = list[dict[str, Any]]
Repair = Callable[[Messages], Messages]

MARK = "zq{}qz"
MARKS = re.compile(r"zq(\d+)qz")
REFUSED = (1 << 30, 0)
LONG = 100  # messages; for conversations of this length or more, fewer repairs are combined
MAX_TRIALS = 48  # repairs
MAX_ROUND = 64  # messages of the longest repetition that ``shorten`` looks for


def join_systems(messages: Messages) -> Messages:
    """Join the system messages at the beginning to one."""
    count = count_systems(messages)
    if count < 2:
        return messages
    content = join_texts(*(message["content"] for message in messages[:count]))
    return [{**messages[0], "content": content}, *messages[count:]]


def fold_later_systems(messages: Messages) -> Messages:
    """Move the texts of all system messages but the first to their neighbours."""
    return fold_systems(messages, is_first_shown=True)


def fold_all_systems(messages: Messages) -> Messages:
    return fold_systems(messages, is_first_shown=False)


def fold_systems(messages: Messages, *, is_first_shown: bool) -> Messages:
    """Move the text of a system message to the end of the message before it, or to the beginning of
    the user's next message, so that roles that alternated still do.
    """
    folded: Messages = []
    was_folded = False
    for i, message in enumerate(messages):
        role, before = message["role"], folded[-1]["role"] if folded else ""
        is_folded = role == "system" and not (is_first_shown and i == 0)
        if (is_folded and before in ("system", "user")) or (
            was_folded and role == before == "user"
        ):
            folded[-1] = append_text(folded[-1], message)
        else:
            folded.append({**message, "role": "user"} if is_folded else message)
        was_folded = is_folded
    return folded


def merge_neighbours(messages: Messages) -> Messages:
    """Merge consecutive messages of one role, and a tool's result with the user text after it."""
    merged: Messages = []
    for message in messages:
        role, before = message["role"], merged[-1] if merged else {"role": None}
        if role == before["role"] != "tool" and not before.get("tool_calls"):
            merged[-1] = append_message(before, message)
        elif role == "user" and before["role"] == "tool":
            merged[-1] = append_text(before, message)
        else:
            merged.append(message)
    return merged


def drop_empty(messages: Messages) -> Messages:
    """Drop messages without content, except tool results, which may be empty."""
    return [
        message
        for message in messages
        if message["role"] == "tool"
        or any(message.get(field) for field in ("content", "reasoning_content", "tool_calls"))
    ]


def drop_reasoning_only(messages: Messages) -> Messages:
    """Drop messages that contain only reasoning."""
    fields = ("content", "tool_calls")
    return [
        message
        for message in messages
        if not message.get("reasoning_content") or any(message.get(field) for field in fields)
    ]


def separate_calls(messages: Messages) -> Messages:
    """Split messages with several calls: each call gets its own message, followed by its result."""
    separated: Messages = []
    i = 0
    while i < len(messages):
        message = messages[i]
        i += 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            separated.append(message)
            continue
        results = []
        while i < len(messages) and messages[i]["role"] == "tool":
            results.append(messages[i])
            i += 1
        for n, call in enumerate(calls):
            one = message if n == 0 else {"role": "assistant", "content": ""}
            separated.append({**one, "tool_calls": [call]})
            is_last = n == len(calls) - 1
            own = [r for r in results if is_last or r.get("tool_call_id") == call.get("id")]
            results = [result for result in results if result not in own]
            separated += own
    return separated


def separate_texts(messages: Messages) -> Messages:
    """Split messages with text and calls: the text comes first, in a message of its own."""
    separated: Messages = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            separated.append({"role": message["role"], "content": message["content"]})
            separated.append({**message, "content": ""})
        else:
            separated.append(message)
    return separated


def fill_gaps(messages: Messages) -> Messages:
    """Insert empty messages where a role is missing: a user message at the beginning and between
    two assistant messages, and an assistant message between a tool's result and a user message.
    """
    filled: Messages = []
    for message in messages:
        role, before = message["role"], filled[-1] if filled else {"role": "system"}
        if role == "user" and before.get("tool_calls"):
            filled.append({"role": "assistant", "content": ""})
        elif (role in ("assistant", "tool") and before["role"] == "system") or (
            role == before["role"] == "assistant" and not before.get("tool_calls")
        ):
            filled.append({"role": "user", "content": ""})
        filled.append(message)
    if not any(message["role"] == "user" for message in filled):
        filled.append({"role": "user", "content": ""})
    return filled


# in the order in which several of them are applied
REPAIRS: tuple[Repair, ...] = (
    drop_empty,
    drop_reasoning_only,
    join_systems,
    fold_later_systems,
    fold_all_systems,
    merge_neighbours,
    separate_calls,
    separate_texts,
    fill_gaps,
)


def append_text(message: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": join_texts(message.get("content"), other.get("content"))}


def append_message(message: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    merged = {**other, **append_text(message, other)}
    fields = [message.get("reasoning_content"), other.get("reasoning_content")]
    return merged | ({"reasoning_content": join_texts(*fields)} if any(fields) else {})


def join_texts(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)


def count_systems(messages: Messages) -> int:
    """Return how many system messages the conversation begins with."""
    others = (i for i, message in enumerate(messages) if message["role"] != "system")
    return next(others, len(messages))


def list_repairs(marked: Messages, max_count: int) -> Iterator[Repair]:
    """Yield repairs, starting with those that change least: each combination of up to
    ``max_count`` of REPAIRS, then all mild ones together, then all of them.
    """
    later = (merge_neighbours, fill_gaps)  # may apply to what another repair returns
    useful = [repair for repair in REPAIRS if repair in later or repair(marked) != marked]
    for count in range(max_count + 1):
        yield from map(compose, combinations(useful, count))
    strong = (fold_all_systems, drop_reasoning_only)
    yield compose(tuple(repair for repair in useful if repair not in strong))
    yield compose(tuple(useful))


def compose(repairs: tuple[Repair, ...]) -> Repair:
    def apply(messages: Messages) -> Messages:
        for repair in repairs:
            messages = repair(messages)
        return messages

    return apply


def find_repair(
    marked: Messages,
    show: Callable[[Messages], str | None],
    fallback: Repair,
    names: tuple[str, ...] = (),
) -> Repair:
    """Return the repair after which the rendered conversation is most complete.

    ``show`` renders messages, or returns None if the template rejects them. The result should
    contain each text of ``marked`` once and in order, and each of ``names``, the tools' names.
    If a text or name is missing after every repair, all are tried again after ``fallback``.
    """
    best, fewest = compose(()), REFUSED
    max_count = 3 if len(marked) < LONG else 1
    for begin in ((), (fallback,)):
        tried: list[Messages] = []
        for repair in list_repairs(compose(begin)(marked), max_count):
            whole = compose((*begin, repair))
            repaired = whole(marked)
            if repaired in tried:
                continue
            tried.append(repaired)
            text = show(repaired)
            faults = REFUSED if text is None else count_faults(text, marked, names)
            if faults < fewest:
                best, fewest = whole, faults
            if not any(fewest) or len(tried) == MAX_TRIALS:
                break
        if not fewest[0]:
            break
    return best


def shorten(messages: Messages) -> Messages:
    """Return ``messages`` without repetitions, such as the rounds of a long exchange.

    For any three neighbours in ``messages``, the result has three neighbours of the same forms.
    """
    forms = [None, *map(describe_form, messages), None]
    places = [tuple(forms[i : i + 3]) for i in range(len(messages))]
    kept: list[int] = []
    count: Counter[Any] = Counter()
    for i, place in enumerate(places):
        kept.append(i)
        count[place] += 1
        if i + 1 < len(messages) and messages[i + 1]["role"] == "tool":
            continue  # a call must stay with its results
        recent = range(len(kept) - 2, max(-1, len(kept) - MAX_ROUND), -1)
        start = next((at for at in recent if places[kept[at]] == place), None)
        if start is None:
            continue
        again = Counter(places[at] for at in kept[start + 1 :])
        if all(count[other] - again[other] >= 2 for other in again):
            count -= again
            del kept[start + 1 :]
    return [messages[i] for i in kept]


def describe_form(message: dict[str, Any]) -> tuple[Any, ...]:
    """Return the properties of a message that repairs and templates may depend on."""
    fields = ("content", "reasoning_content", "name")
    calls = len(message.get("tool_calls") or ())
    return message["role"], calls, *(bool(message.get(field)) for field in fields)


def with_marks(messages: Messages) -> Messages:
    """Return messages of the same form, with marks as texts and with ids of one length."""
    marked: Messages = []
    ids: dict[str, str] = {}
    for i, message in enumerate(messages):
        mark = MARK.format(2 * i)
        short = {"role": message["role"], "content": mark if message.get("content") else ""}
        if message.get("reasoning_content"):
            short["reasoning_content"] = "thought"
        if calls := message.get("tool_calls"):
            short["tool_calls"] = [mark_call(call, ids) for call in calls]
        if "tool_call_id" in message:
            short["tool_call_id"] = ids.get(message["tool_call_id"], "call99999")
        if message.get("name"):
            short["name"] = "named"
        marked.append(short)
    return marked


def mark_call(call: dict[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    """Return ``call`` with an odd mark as its name and argument, and add its id to ``ids``."""
    mark = MARK.format(2 * len(ids) + 1)
    key = f"call{len(ids):05d}"
    ids[call.get("id") or key] = key
    return {"id": key, "type": "function", "function": {"name": mark, "arguments": {"key": mark}}}


def count_faults(text: str, marked: Messages, names: tuple[str, ...]) -> tuple[int, int]:
    """Return how many texts, calls and ``names`` are missing from ``text``, and how many texts are
    shown more than once or too early.

    Templates may put the system messages from the beginning anywhere.
    """
    begins = count_systems(marked)
    shown = [int(number) for number in MARKS.findall(text)]
    wanted = {2 * i for i, message in enumerate(marked) if message["content"]}
    num_calls = sum(len(message.get("tool_calls") or ()) for message in marked)
    wanted.update(range(1, 2 * num_calls, 2))
    texts = [number for number in shown if number % 2 == 0 and number >= 2 * begins]
    disorder = sum(after <= before for before, after in pairwise(texts))
    num_names = sum(name not in text for name in names)
    return len(wanted.difference(shown)) + num_names, disorder
