"""Places in lists that a front merges from those of several servers.

The id of an object is a place in the list of the server that stores it. For the others, the front
writes the time of the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cllm.errors import BadRequest

MARK, TIES_FOLLOW = "@", "="


def write_cursor(time: int | str, *, ties_follow: bool) -> str:
    """Return the place of an object that was created at a time. Objects of the same time come after
    it if ``ties_follow``, else before it.
    """
    return f"{MARK}{time}{TIES_FOLLOW if ties_follow else ''}"


def find_split(
    times: Sequence[Any], cursor: str, param: str, *, ascending: bool = False
) -> int | None:
    """Return how many of the objects with these times come before a place, None if that is an id.
    The times are numbers or texts, as they are in the list.

    Raises BadRequest if the cursor is no place.
    """
    if not cursor.startswith(MARK):
        return None
    if not times:
        return 0
    text, ties_follow = cursor.removeprefix(MARK).removesuffix(TIES_FOLLOW), TIES_FOLLOW in cursor
    try:
        time = type(times[0])(text)
    except ValueError:
        raise BadRequest(f"Invalid '{param}': it is no place.", param=param) from None
    return sum(not ties_follow if one == time else bool(one < time) == ascending for one in times)
