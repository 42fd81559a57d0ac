"""Routes about a server itself: its page, health, metrics and scheduler."""

from __future__ import annotations

import asyncio
import math
from typing import Annotated, Literal, NotRequired

import msgspec
from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from typing_extensions import TypedDict

from cllm import __version__
from cllm.core.account import ANONYMOUS
from cllm.core.model_info import ModelInfo
from cllm.errors import BadRequest, EngineError
from cllm.observe.collectors import EngineFigures
from cllm.observe.cpu_time import read_cpu_seconds, read_resident_bytes
from cllm.observe.exposition import render
from cllm.observe.metrics import VLLM_NAMES
from cllm.process.member import Member
from cllm.scheduler.trace import MAX_STEPS, Explanation
from cllm.server.body import describe_route
from cllm.server.call import get_call
from cllm.server.http.sse import until_disconnect
from cllm.server.native.judgements import Judgement, judge_machine, judge_memory, read_machine
from cllm.server.page import answer_page, wants_page
from cllm.server.resolve import (
    check_admin,
    known_service_for,
    model_for,
    served_models,
)
from cllm.server.state import get_state
from cllm.serving.served_model import ServedModel

router = APIRouter(tags=["cLLM"])


class Root(TypedDict):
    """Without a valid API key, if the server needs one, the fields after ``docs`` are missing.
    ``admin`` says whether the account has the rights of an administrator.
    """

    name: Literal["cLLM"]
    version: str
    docs: str
    model: NotRequired[str]
    paths: NotRequired[list[str]]
    admin: NotRequired[bool]


class EngineHealth(TypedDict):
    """One engine of a model. It is bound to the CPUs with the numbers ``cpus``; [] means all of
    them. ``devices`` has the variables that name its GPUs.
    """

    number: int
    ready: bool
    restarts: int
    num_running: int
    num_waiting: int
    num_seq_ids: int
    num_cells: int
    num_cells_held: int
    num_cells_idle: int
    cpus: list[int]
    devices: dict[str, str]


class ModelHealth(TypedDict):
    name: str
    status: Literal["loaded", "loading", "unloaded"]
    engines: list[EngineHealth]


class Health(TypedDict):
    """Only level=full has ``models`` and ``judgements``."""

    status: Literal["healthy", "degraded"]
    model_loaded: bool
    models: NotRequired[list[ModelHealth]]
    judgements: NotRequired[list[Judgement]]


class ServerVersion(TypedDict):
    version: str


class Readiness(TypedDict):
    status: Literal["ready", "loading", "draining"]


class ModelInformation(ModelInfo, frozen=True, kw_only=True):
    """The model, the sizes in use, and the engine's statistics."""

    model_name: str
    stats: dict[str, float]


@router.get("/", openapi_extra=describe_route(answer=Root))
async def root(request: Request) -> Response:
    """Return the server's name and version, and to those who may use it its model and paths. To a
    browser (Accept: text/html), return a page to chat with the models.
    """
    if wants_page(request):
        return answer_page(request)
    content: Root = {"name": "cLLM", "version": __version__, "docs": "/docs"}
    account = get_call(request).account()
    if account != ANONYMOUS:
        models = served_models(request)
        document = await asyncio.to_thread(request.app.openapi)
        paths = sorted(path for path in document["paths"] if path != "/")
        content["model"], content["paths"] = models[0].name if models else "", paths
        content["admin"] = account.is_admin
    return JSONResponse(content, headers={"vary": "accept"})


@router.get("/health")
@router.get("/ping", include_in_schema=False)
async def health(request: Request, level: Literal["basic", "full"] = "basic") -> Health:
    """Return 200 while the server runs. While the engine is not ready, the status is "degraded".
    level=full adds each model and its engines, and judgements with reasons, by the thresholds of
    the alerts in deploy/; it needs an administrator's key.
    """
    if level == "full":
        check_admin(request)
    models = get_state(request).registry.models
    is_loaded = any(model.service and model.service.engine.ready for model in models)
    healthy = is_loaded or get_state(request).registry.ready
    answer: Health = {"status": "healthy" if healthy else "degraded", "model_loaded": is_loaded}
    if level == "full":
        own = [model for model in models if model.parent is None]
        answer["models"] = [describe(model) for model in own]
        machine = await asyncio.to_thread(read_machine)
        judgements = get_state(request).recent.judge() + judge_memory(own)
        answer["judgements"] = judgements + judge_machine(machine, own)
    return answer


def describe(model: ServedModel) -> ModelHealth:
    """Return the state of a model and its engines."""
    members = [] if model.service is None else model.service.engine.members
    engines: list[EngineHealth] = [
        {
            "number": member.number,
            "ready": member.ready,
            "restarts": member.supervisor.num_restarts,
            "num_running": member.stats.num_running,
            "num_waiting": member.stats.num_waiting,
            "num_seq_ids": member.stats.num_seq_ids,
            "num_cells": member.stats.num_cells,
            "num_cells_held": member.stats.num_cells_held,
            "num_cells_idle": member.stats.num_cells_idle,
            "cpus": [*member.place.cpus],
            "devices": {**member.place.variables},
        }
        for member in members
    ]
    return {"name": model.name, "status": model.status, "engines": engines}


@router.get("/version")
async def version() -> ServerVersion:
    """Return the version of this server."""
    return {"version": __version__}


@router.get("/ready", openapi_extra=describe_route(answer=Readiness, error=Readiness))
async def ready(request: Request) -> Response:
    """Return 200 while requests are computed, and 503 while the model loads, the engine restarts
    (requests then wait for it) or the server shuts down.
    """
    registry = get_state(request).registry
    if registry.ready:
        return JSONResponse({"status": "ready"})
    seconds = max(1, math.ceil(registry.loaded.seconds_until_ready()))
    return JSONResponse(
        {"status": "draining" if registry.loaded.draining else "loading"},
        503,
        {"retry-after": str(seconds)},
    )


@router.get("/model/info", openapi_extra=describe_route(answer=ModelInformation))
async def model_info(request: Request, model: str | None = None) -> Response:
    """Return the model, the sizes in use, and the engine's statistics."""
    service = await known_service_for(request, model)
    answer = ModelInformation(
        **msgspec.structs.asdict(service.info),
        model_name=service.model_name,
        stats=msgspec.structs.asdict(service.engine.stats),
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return metrics for Prometheus. Administrators see the usage of each account too."""
    registry, ledger = get_state(request).registry, get_state(request).access.ledger
    account = get_call(request).account()
    usage = ledger.totals() if account.is_admin else {}
    models = served_models(request) if account.has_key else registry.models
    states = [model.status for model in models if model.parent is None]
    machine = await asyncio.to_thread(read_machine)
    pages = [registry.metrics.update(usage, ledger.num_failed_writes, states, machine)]
    pages += [update_metrics(model) for model in models if model.service is not None]
    aliases = VLLM_NAMES if get_state(request).settings.metrics.vllm_names else ()
    content = render(pages, aliases, "vllm:", get_call(request).replica_name)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


def update_metrics(model: ServedModel) -> CollectorRegistry:
    """Return the metrics of a model with the current figures of its engine."""
    service = model.service
    assert service is not None
    engine = service.engine
    return service.metrics.update(
        engine.stats_since_start,
        ready=service.ready,
        num_restarts=engine.num_restarts,
        reservations=engine.backlog.reservations.counts,
        num_loads=model.num_loads,
        num_bytes=engine.num_bytes,
        engines=[describe_engine(member) for member in engine.members],
    )


def describe_engine(member: Member) -> EngineFigures:
    pid = member.supervisor.pid
    return EngineFigures(
        member.ready,
        member.supervisor.num_restarts,
        member.stats,
        member.steps,
        0.0 if pid is None else read_cpu_seconds(pid),
        0 if pid is None else read_resident_bytes(pid),
    )


@router.get("/scheduler", openapi_extra=describe_route(answer=Explanation))
async def scheduler(
    request: Request,
    steps: Annotated[int, Query(ge=1, le=MAX_STEPS)] = 20,
    model: str | None = None,
    engine: Annotated[int, Query(ge=0)] = 0,
) -> Response:
    """Explain the scheduling of an engine: its last steps, which requests run, what others wait
    for, what steps cost. Needs an administrator's key.
    """
    check_admin(request)
    served = model_for(request, model).origin
    service = served.service
    if served.is_loading:
        raise EngineError(
            f"The model is being loaded, {served.loaded_share:.0%}; "
            f"{len(served.waiting)} requests wait for that."
        )
    if service is None:
        raise EngineError("The model is not loaded.")
    if engine >= (count := len(service.engine.members)):
        message = f"Invalid 'engine': the model has {count}, numbered from 0."
        raise BadRequest(message, param="engine", code="invalid_value")
    explanation = await until_disconnect(request, service.engine.explain(steps, engine))
    return Response(msgspec.json.encode(explanation), media_type="application/json")
