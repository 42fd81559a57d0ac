"""Routes for fronts. Without the cluster key, they do not exist."""

from __future__ import annotations

from fastapi import APIRouter, Depends, HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cllm.server.cluster.lease import LEASE_PATH, write_lease
from cllm.server.state import get_state


def check_front(request: Request) -> None:
    """Raise HTTPException (404) unless the request comes from a front."""
    if not get_state(request).access.is_front(request.headers):
        raise HTTPException(404, "Not Found")


router = APIRouter(include_in_schema=False, dependencies=[Depends(check_front)])


@router.get(LEASE_PATH)
async def lease(request: Request) -> Response:
    """Return the lease of this server."""
    state = get_state(request)
    content = write_lease(state.identity, state.registry, state.settings.scheduler)
    return Response(content, media_type="application/json")
