"""Splits lists of objects into pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from typing_extensions import TypedDict

from cllm.errors import BadRequest
from cllm.server.list_cursors import find_split

ListItem = TypeVar("ListItem", bound=Mapping[str, Any])


class ListPage(TypedDict, Generic[ListItem]):
    object: Literal["list"]
    data: Sequence[ListItem]
    first_id: str
    last_id: str
    has_more: bool


def make_page(
    objects: Sequence[ListItem], after: str | None, limit: int, *, ascending: bool = False
) -> ListPage[ListItem]:
    """Return at most ``limit`` of the ``objects`` after the one with the id ``after``, or after a
    place that a front has written; None or "" is the beginning. The newest object is the first one
    unless ``ascending``.

    Raises BadRequest if no object has that id.
    """
    begin = 0
    times = [entry.get("created_at", 0) for entry in objects] if after else []
    split = find_split(times, after or "", "after", ascending=ascending)
    if split is not None:
        begin = split
    elif after:
        ids = [entry["id"] for entry in objects]
        if after not in ids:
            raise BadRequest(
                f"Invalid 'after': {after[:100]!r} is not in this list.",
                param="after",
                code="invalid_value",
            )
        begin = ids.index(after) + 1
    data = objects[begin : begin + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": begin + limit < len(objects),
    }
