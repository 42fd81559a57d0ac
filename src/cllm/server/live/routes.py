"""The page of the live view, and its stream of snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cllm.server.page import answer_file
from cllm.server.resolve import check_admin
from cllm.server.state import get_state

router = APIRouter(tags=["cLLM"])

EVENTS_PATH = "/live/events"
MEDIA_TYPE = "text/event-stream"


@router.get("/live", include_in_schema=False)
async def page(request: Request) -> Response:
    """Return the page, which contains no data and asks for the key."""
    return answer_file(request, "live/index.html", "text/html")


@router.get(EVENTS_PATH, include_in_schema=False)
async def events(request: Request) -> Response:
    """Stream snapshots, see schema.py, as server-sent events. Needs an administrator's key."""
    check_admin(request)
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    if request.method == "HEAD":
        return Response(headers=headers, media_type=MEDIA_TYPE)
    stream = closing(get_state(request).live.watch())
    return StreamingResponse(stream, headers=headers, media_type=MEDIA_TYPE)


async def closing(stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield what ``stream`` yields, and close it even if the reader stops early."""
    async with contextlib.aclosing(stream):
        async for data in stream:
            yield data
