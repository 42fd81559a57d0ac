"""A trace of what a server does within a few seconds, for Perfetto."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from cllm.core.timeline import Timeline
from cllm.errors import EngineError
from cllm.observe.perfetto import write_trace_file
from cllm.observe.request_record import RequestRecord
from cllm.process.member import Member
from cllm.server.body import describe_route
from cllm.server.http.sse import until_disconnect
from cllm.server.resolve import check_admin
from cllm.server.state import ServerState, get_state

MAX_SECONDS = 60
MAX_REQUESTS = 10_000  # the last ones

router = APIRouter(tags=["cLLM"])


@router.get("/debug/trace", openapi_extra=describe_route(answer=dict))
async def trace(
    request: Request, seconds: Annotated[float, Query(gt=0, le=MAX_SECONDS)] = 5.0
) -> Response:
    """Record what the server and the engines of all loaded models do during ``seconds``, and return
    it as a trace for https://ui.perfetto.dev. Needs an administrator's key. Rejected while another
    one is recorded (409).
    """
    check_admin(request)
    state = get_state(request)
    with state.only("trace"):
        content = await until_disconnect(request, record_trace(state, seconds))
    headers = {"content-disposition": 'attachment; filename="cllm-trace.json"'}
    return Response(content, media_type="application/json", headers=headers)


async def record_trace(state: ServerState, seconds: float) -> bytes:
    """Return the trace of the next ``seconds``."""
    engines = {
        f"engine {member.number} of {model.name}": member
        for model in state.registry.models
        if model.parent is None and model.service is not None
        for member in model.service.engine.members
        if member.ready
    }
    records: deque[RequestRecord] = deque(maxlen=MAX_REQUESTS)
    state.request_log.listeners.append(records.append)
    begun = time.monotonic()
    try:
        timelines = await asyncio.gather(
            asyncio.sleep(seconds, Timeline()),  # also without any engine
            *(record_engine(member, seconds) for member in engines.values()),
        )
    finally:
        state.request_log.listeners.remove(records.append)
    named = dict(zip(engines, timelines[1:], strict=True))
    return await asyncio.to_thread(write_trace_file, begun, records, named)


async def record_engine(member: Member, seconds: float) -> Timeline:
    """Return what an engine does; an empty timeline if it ends meanwhile."""
    try:
        return await member.record_timeline(seconds)
    except EngineError:
        return Timeline()
