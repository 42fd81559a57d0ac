"""Lists of what replicas store: a page of each one's list becomes a page of one list.

Newer objects come first. Of objects with the same time, those of the replica whose name comes first
do.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlencode

import msgspec
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cllm.cluster.ask import ReplicaAnswer, quote_path
from cllm.cluster.leases import Replica
from cllm.core.stored_ids import find_replica
from cllm.errors import BadRequest, EngineError
from cllm.server.list_cursors import write_cursor

MESSAGE_BATCHES = "/v1/messages/batches"
# The number of entries in a page by default
STORED_LISTS = {"/v1/files": 10_000, "/v1/batches": 20, MESSAGE_BATCHES: 20}
read_limit = TypeAdapter(int).validate_python  # as replicas read it: 20.0 too
CURSORS = {MESSAGE_BATCHES: ("before_id", "after_id")}  # by path; the first one counts
ID = re.compile(r"[\w-]{1,200}")
# asks a replica, in the name of a client, for the answer to a target
Ask = Callable[[Replica, Request, str], Awaitable[ReplicaAnswer | None]]


class StoredObject(msgspec.Struct):
    """What the front reads of a file or a batch. Its time is a text in Anthropic's list."""

    id: str
    created_at: int | str


class StoredPage(msgspec.Struct):
    """A page of files or batches."""

    data: list[StoredObject]
    has_more: bool


async def answer_list(request: Request, replicas: Sequence[Replica], ask: Ask) -> Response:
    """Answer with a page of a list, of which each replica is asked for one page."""
    path, query = request.scope["path"], request.query_params
    ascending = query.get("order") == "asc"
    cursors = CURSORS.get(path, ("after",))
    cursor = next((name for name in cursors if query.get(name)), "")
    owner, time = await find_owner(request, replicas, ask, cursor) if cursor else (None, 0)
    rest = [one for one in query.multi_items() if one[0] not in ("replica", *cursors)]

    def write_target(replica: Replica) -> str:
        place = query.get(cursor, "")
        if owner is not None and replica is not owner:
            follows = (replica.name > owner.name) != ascending
            place = write_cursor(time, ties_follow=follows)
        fields = [*rest, (cursor, place)] if cursor else rest
        return f"{quote_path(path)}?{urlencode(fields)}"

    answers = await asyncio.gather(*(ask(one, request, write_target(one)) for one in replicas))
    answered = [one for one in answers if one is not None]
    if not answered:
        raise EngineError("No replica has answered the request.")
    if (error := next((one for one in answered if one.status != 200), None)) is not None:
        return error.pass_on()
    pages = [page for one in answered if (page := one.read(StoredPage)) is not None]
    limit = read_limit(query.get("limit", STORED_LISTS[path]))
    return JSONResponse(
        merge_pages(
            pages,
            limit,
            ascending=ascending,
            is_before=cursor == "before_id",
            is_message_list=path == MESSAGE_BATCHES,
        )
    )


async def find_owner(
    request: Request, replicas: Sequence[Replica], ask: Ask, cursor: str
) -> tuple[Replica, int | str]:
    """Return the replica that stores the object that a cursor names, and the time of the object.
    Raises BadRequest if no replica has it, or its replica gets no requests.
    """
    name = request.query_params[cursor]
    unknown = f"Invalid '{cursor}': {name[:100]!r} is not in this list."
    if not ID.fullmatch(name):
        raise BadRequest(unknown, param=cursor, code="invalid_value")
    if stored_on := find_replica(name):
        replicas = [one for one in replicas if one.name == stored_on]
        if not replicas:
            message = (
                f"Invalid '{cursor}': {name[:100]!r} is stored on the replica {stored_on!r}, which "
                "gets no requests now."
            )
            raise BadRequest(message, param=cursor, code="invalid_value")
    target = quote_path(f"{request.scope['path']}/{name}")
    answers = await asyncio.gather(*(ask(one, request, target) for one in replicas))
    for replica, answer in zip(replicas, answers, strict=True):
        found = answer.read(StoredObject) if answer and answer.status == 200 else None
        if found is not None:
            return replica, found["created_at"]
    raise BadRequest(unknown, param=cursor, code="invalid_value")


def find_time(entry: dict[str, Any]) -> tuple[bool, int | str]:
    """Return when something was stored, as a key for sorting, even if replicas differ in form."""
    time = entry["created_at"]
    return isinstance(time, str), time


def merge_pages(
    pages: Sequence[dict[str, Any]],
    limit: int,
    *,
    ascending: bool,
    is_before: bool,
    is_message_list: bool,
) -> dict[str, Any]:
    """Return a page of at most ``limit`` entries, the first ones of ``pages``, or the last ones if
    the pages end at a cursor: ``is_before``. The pages have the order of the replicas' names.
    """
    ordered = pages[::-1] if ascending else pages
    entries = [entry for page in ordered for entry in page["data"]]
    entries.sort(key=find_time, reverse=not ascending)
    has_more = len(entries) > limit or any(page["has_more"] for page in pages)
    data = entries[-limit:] if is_before else entries[:limit]
    none = None if is_message_list else ""
    ends = {
        "first_id": data[0]["id"] if data else none,
        "last_id": data[-1]["id"] if data else none,
        "has_more": has_more,
    }
    return {"data": data, **ends} if is_message_list else {"object": "list", "data": data, **ends}
