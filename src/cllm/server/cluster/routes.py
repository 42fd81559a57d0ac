"""Routes for fronts. Without the cluster key, they do not exist."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Query
from starlette.requests import Request
from starlette.responses import Response

from cllm.errors import BadRequest, EngineError
from cllm.server.call import get_call
from cllm.server.cluster.continuation import CONTINUE_PATH, read_continue
from cllm.server.cluster.hand_over import (
    STATE_PATH,
    Cache,
    find_cache,
    list_stored,
    receive_prefix,
)
from cllm.server.cluster.lease import LEASE_PATH, write_lease
from cllm.server.state import get_state
from cllm.store.usage_reports import ReportBatch


def check_front(request: Request) -> None:
    """Raise HTTPException (404) unless the request comes from a front."""
    if not get_state(request).access.is_front(request.headers):
        raise HTTPException(404, "Not Found")


ADDRESS = r"^https?://[^/?#\s]+$"
USAGE_PATH = "/internal/usage"
RESPONSES_PATH = "/internal/responses/"

router = APIRouter(include_in_schema=False, dependencies=[Depends(check_front)])


@router.get(LEASE_PATH)
async def lease(
    request: Request,
    heir: Annotated[str, Query(max_length=300, pattern=ADDRESS)] = "",
    front: Annotated[str, Query(max_length=100)] = "",
    epoch: Annotated[str, Query(max_length=100)] = "",
    after: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """Return the lease of this server. Its prefixes are handed over to ``heir`` when it shuts
    down. The last lease for ``front`` was of ``epoch``, and its ``num_noted`` was ``after``.
    """
    state = get_state(request)
    if heir:
        state.hand_over.name_heir(heir)
    recent = state.access.recent_prefixes
    news = recent.list_others(front, after if epoch == state.identity.epoch else 0)
    content = write_lease(
        state.identity, state.registry, state.settings.scheduler, recent.num_noted, news
    )
    return Response(content, media_type="application/json")


@router.post(CONTINUE_PATH)
async def continue_stream(request: Request) -> Response:
    """Return the rest of a stream that another replica has begun."""
    return await read_continue(request)


@router.get(RESPONSES_PATH + "{stored_id}")
async def stored_response(request: Request, stored_id: str) -> Response:
    """Answer with 204 if this server stores a response of the account, or an item of one; else with
    404.
    """
    call = get_call(request)
    is_stored = call.state.responses.has(stored_id, call.account())
    return Response(status_code=204 if is_stored else 404)


@router.get(USAGE_PATH)
async def usage(
    request: Request,
    front: Annotated[str, Query(min_length=1, max_length=100)],
    epoch: Annotated[str, Query(max_length=100)] = "",
    after: Annotated[int, Query(ge=0)] = 0,
    paused: Annotated[list[str] | None, Query()] = None,
) -> Response:
    """Return what requests of a front have cost: the reports that it has not taken yet, because
    their numbers are higher than ``after``, if that was a number of this epoch. Batches of the
    accounts ``paused`` wait until the next call.
    """
    state = get_state(request)
    own, reports = state.identity.epoch, state.access.reports
    reports.pause(front, paused or ())
    taken = ReportBatch(
        own,
        reports.take(front, after if epoch == own else 0),
        state.batches.list_accounts(front) if state.batches else [],
    )
    content = msgspec.json.encode(taken)
    return Response(content, media_type="application/json")


@router.get(STATE_PATH)
async def stored_prefixes(request: Request, model: str = "") -> Response:
    """Return which saved prefixes of a model this server has, before others are sent to it."""
    content = await asyncio.to_thread(list_stored, get_cache(request, model))
    return Response(msgspec.json.encode(content), media_type="application/json")


@router.put(STATE_PATH)
async def put_prefix(request: Request, model: str = "") -> Response:
    """Take over a saved prefix of another replica."""
    cache, registry = get_cache(request, model), get_state(request).registry
    try:
        name = await receive_prefix(request.stream(), cache)
    except BadRequest:
        registry.metrics.received_prefixes.labels("refused").inc()
        raise
    registry.metrics.received_prefixes.labels("stored").inc()
    if (engine := registry.find(model).engine) is not None:
        engine.add_prefix(name)
    return Response(status_code=204)


def get_cache(request: Request, model: str) -> Cache:
    """Return the disk cache of a model. Raises HTTPException (404) if prefixes cannot be handed
    over to it, and EngineError (503) if this server shuts down too.
    """
    state = get_state(request)
    cache = find_cache(state.registry.get(model)) if state.settings.cluster.hand_over else None
    if cache is None:
        raise HTTPException(404, "Not Found")
    if state.registry.loaded.draining:
        raise EngineError("The server is shutting down.")
    return cache
