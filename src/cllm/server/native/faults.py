"""POST /faults: injects faults into the engine, for tests, if the operator allows it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cllm.engine.commands import FaultKind, InjectedFault
from cllm.server.body import Body, describe_route, example, read_body
from cllm.server.resolve import check_enabled, service_for

router = APIRouter(tags=["cLLM"])


class FaultBody(Body):
    """A fault of the engine, in its next step or a later one."""

    kind: Annotated[
        FaultKind,
        Field(
            description="crash: as after a failed assertion; kill: as by another process; hang: "
            "the step never ends; slow: it takes `seconds` longer; raise: it fails; memory: it "
            "finds no memory."
        ),
    ]
    after_steps: int = Field(default=0, ge=0, description="How many steps succeed first.")
    num_steps: int = Field(default=1, ge=1, description="How many steps then have the fault.")
    seconds: float = Field(default=0.0, ge=0, le=86_400)
    token: int | None = Field(
        default=None,
        ge=0,
        description="Only steps with a request whose prompt contains this token have the fault. It "
        "lasts until other faults are set, also in engines that are started later.",
    )


class FaultsBody(Body):
    model_config = example(faults=[{"kind": "slow", "seconds": 0.5}])

    model: str | None = None
    faults: Annotated[list[FaultBody], Field(max_length=100)]


@router.post("/faults", openapi_extra=describe_route(FaultsBody, FaultsBody))
async def faults(request: Request) -> Response:
    """Cause these faults, and none that were set before.

    Rejected unless ``server.enable_faults`` is set (403).
    """
    check_enabled(request, "enable_faults")
    body = await read_body(request, FaultsBody)
    service = await service_for(request, body.model)
    with service.admission():
        service.engine.check_available()
    service.engine.set_faults([InjectedFault(**fault.model_dump()) for fault in body.faults])
    return JSONResponse(body.model_dump())
