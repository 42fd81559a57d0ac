"""GET and DELETE /v1/streams/{id}: streams that a client has lost."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm.errors import BadRequest
from cllm.server.auth import find_owner
from cllm.server.body import describe_route
from cllm.server.http.resumption import EventReader, KeptStream
from cllm.server.state import get_state

PREFIX = "/v1/streams/"

router = APIRouter(prefix=PREFIX.rstrip("/"), tags=["cLLM"])


class EndedStream(TypedDict):
    id: str
    deleted: bool


@router.get("/{stream_id}", openapi_extra=describe_route(stream="text/event-stream"))
async def resume(
    request: Request,
    stream_id: str,
    after: Annotated[int | None, Query(ge=0, le=10**9)] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Return the events of a stream after the one that ``after`` or the header Last-Event-ID names
    (default: all), and then those that follow.

    The request of the stream must have had the header ``x-cllm-resumable``; its answer has the id
    in the header ``x-cllm-stream``. A stream without a reader ends after 60 seconds; a complete one
    is kept as long. It can be resumed with the same API key.
    """
    stream = find_stream(request, stream_id)
    if after is None:
        after = parse_event_id(last_event_id)
    if after > stream.num_events:
        message = f"Invalid 'after': the stream has {stream.num_events} events so far."
        raise BadRequest(message, param="after", code="invalid_value")
    if after + 1 < stream.first:
        message = f"The events before {stream.first} of the stream {stream_id[:100]!r} are gone."
        raise BadRequest(message, param="after", code="events_not_found", status=404)
    return EventReader(get_state(request).streams, stream, after)


@router.delete("/{stream_id}")
async def end(request: Request, stream_id: str) -> EndedStream:
    """End a stream that can be resumed, and forget it."""
    get_state(request).streams.remove(find_stream(request, stream_id))
    return {"id": stream_id, "deleted": True}


def find_stream(request: Request, stream_id: str) -> KeptStream:
    """Return a stream of the request's account. Raises BadRequest (404)."""
    stream = get_state(request).streams.find(stream_id, find_owner(request.scope))
    if stream is None:
        message = f"There is no stream {stream_id[:100]!r}, or it is no longer kept."
        raise BadRequest(message, param="stream_id", code="stream_not_found", status=404)
    return stream


def parse_event_id(text: str | None) -> int:
    """Return the number in a header Last-Event-ID, 0 without one. Raises BadRequest."""
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        message = "Invalid 'Last-Event-ID': it is not the id of an event."
        raise BadRequest(message, param="Last-Event-ID", code="invalid_value")
    return int(text)
