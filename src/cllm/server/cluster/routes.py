"""Routes for fronts. Without the cluster key, they do not exist."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, HTTPException, Query
from starlette.requests import Request
from starlette.responses import Response

from cllm.server.cluster.continuation import CONTINUE_PATH, read_continue
from cllm.server.cluster.lease import LEASE_PATH, write_lease
from cllm.server.state import get_state
from cllm.store.usage_reports import TakenReports


def check_front(request: Request) -> None:
    """Raise HTTPException (404) unless the request comes from a front."""
    if not get_state(request).access.is_front(request.headers):
        raise HTTPException(404, "Not Found")


USAGE_PATH = "/internal/usage"

router = APIRouter(include_in_schema=False, dependencies=[Depends(check_front)])


@router.get(LEASE_PATH)
async def lease(request: Request) -> Response:
    """Return the lease of this server."""
    state = get_state(request)
    content = write_lease(state.identity, state.registry, state.settings.scheduler)
    return Response(content, media_type="application/json")


@router.post(CONTINUE_PATH)
async def continue_stream(request: Request) -> Response:
    """Return the rest of a stream that another replica has begun."""
    return await read_continue(request)


@router.get(USAGE_PATH)
async def usage(
    request: Request,
    front: Annotated[str, Query(min_length=1, max_length=100)],
    epoch: Annotated[str, Query(max_length=100)] = "",
    after: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """Return what requests of a front have cost: the reports that it has not taken yet, because
    their numbers are higher than ``after``, if that was a number of this epoch.
    """
    state = get_state(request)
    own = state.identity.epoch
    reports = state.access.reports.take(front, after if epoch == own else 0)
    content = msgspec.json.encode(TakenReports(own, reports))
    return Response(content, media_type="application/json")
