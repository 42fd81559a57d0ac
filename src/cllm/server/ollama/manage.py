"""POST /api/create and /api/copy, DELETE /api/delete: models made from others, and their removal.

All of them need server.allow_model_changes, and with API keys an administrator's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cllm.config import Sampling
from cllm.errors import BadRequest, StartupError
from cllm.models import hub
from cllm.models.gguf import read_header
from cllm.registry import MAX_NAME, Registry, ServedModel
from cllm.server.body import describe_route, read_body, read_value
from cllm.server.call import call_of
from cllm.server.ollama.answers import Error, PullStatus
from cllm.server.ollama.modelfile import read_modelfile
from cllm.server.ollama.schema import CopyBody, CreateBody, DeleteBody, Options
from cllm.server.ollama.stream import MEDIA_TYPE
from cllm.server.resolve import check_enabled, model_for, registry_of
from cllm.server.sampling import read_sampling_values
from cllm.store.created import CreatedModel, CreatedModels

UNKNOWN = "model {asked!r} not found; this server has {served!r}"
OPTION = "allow_model_changes"
router = APIRouter(prefix="/api", tags=["Ollama"])


@router.post(
    "/create",
    openapi_extra=describe_route(CreateBody, PullStatus, stream=MEDIA_TYPE, error=Error),
)
async def create(request: Request) -> Response:
    """Make a model from another one, with a system message and defaults of sampling parameters of
    its own. It survives a restart.
    """
    check_enabled(request, OPTION)
    body = await read_body(request, CreateBody, any_type=True)
    if body.modelfile:
        fields = {"model": body.wanted(), "stream": body.stream, **read_modelfile(body.modelfile)}
        body = read_value(fields, CreateBody, call_of(request))
    body.check()
    source = model_for(request, body.source, UNKNOWN)
    await check_template(source, body.template)
    own = {**own_sampling(request, source), **sampling_of(body.parameters or {})}
    model = CreatedModel(source.origin.name, body.system or source.system, own)
    await put(request, body.wanted(), model)
    statuses = ("reading model metadata", "creating system layer", "writing manifest", "success")
    if body.stream is False:
        return JSONResponse({"status": "success"})
    lines = b"".join(to_json({"status": status}) + b"\n" for status in statuses)
    return Response(lines, media_type=MEDIA_TYPE)


@router.post("/copy", openapi_extra=describe_route(CopyBody, error=Error))
async def copy(request: Request) -> Response:
    """Give a model another name. It survives a restart."""
    check_enabled(request, OPTION)
    body = await read_body(request, CopyBody, any_type=True)
    source = model_for(request, body.source, UNKNOWN)
    own = own_sampling(request, source)
    await put(request, body.destination, CreatedModel(source.origin.name, source.system, own))
    return Response()


@router.delete("/delete", openapi_extra=describe_route(DeleteBody, error=Error))
async def delete(request: Request) -> Response:
    """Delete a model that was created or copied, or that is in the hub's cache: then its files.

    400 for models that the operator's settings name.
    """
    check_enabled(request, OPTION)
    body = await read_body(request, DeleteBody, any_type=True)
    registry, model = registry_of(request), model_for(request, body.wanted(), UNKNOWN)
    call_of(request).audit("delete", model=model.name)
    if model.parent is not None:
        await asyncio.to_thread(created_of(request).remove, model.name)
        registry.remove(model.name)
        return Response()
    files = await asyncio.to_thread(hub.list_cached)
    if not model.is_found or model.name not in files:
        message = f"{model.name!r} is in the settings of this server, so it cannot be deleted."
        raise BadRequest(message, param="model", code="invalid_value")
    if model.is_loaded:
        await registry.unload(model)
    registry.remove(model.name)
    await asyncio.to_thread(hub.remove_cached, files[model.name])
    await registry.rescan()
    return Response()


def created_of(request: Request) -> CreatedModels:
    created: CreatedModels = request.app.state.created
    return created


def own_sampling(request: Request, model: ServedModel) -> dict[str, Any]:
    """Return the defaults that a created model has itself."""
    created = created_of(request).models.get(model.name)
    return {} if created is None else created.sampling


async def put(request: Request, name: str, model: CreatedModel) -> None:
    """Add a created model. Raises BadRequest if the name belongs to another kind of model."""
    registry = registry_of(request)
    name = name.removesuffix(":latest")
    if len(name) > MAX_NAME or not name.isprintable():
        raise BadRequest("The model's name is too long, or has control characters.", param="model")
    if any(one.is_named(name) and one.parent is None for one in registry.models):
        message = f"{name!r} is the name of a model that was not created here."
        raise BadRequest(message, param="model", code="invalid_value")
    call_of(request).audit("create", model=name, base=model.base)
    try:
        await asyncio.to_thread(created_of(request).put, name, model)
    except ValueError as error:
        raise BadRequest(f"{str(error).capitalize()}.", param="model") from None
    add_created(registry, name, model)


def add_created(registry: Registry, name: str, created: CreatedModel) -> None:
    """Add a created model to those that are served. Raises UnknownModel without its base."""
    parent = registry.find(created.base)
    defaults = parent.origin.sampling.model_copy(update=created.sampling)
    registry.add(
        ServedModel(
            name=name,
            parent=parent.origin,
            system=created.system,
            sampling=defaults,
            backend=parent.backend,
            path=parent.path,
        )
    )


def sampling_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that Ollama's parameters set. Others have no effect. Raises BadRequest
    for values out of range.
    """
    options = Options.model_validate(parameters, strict=False)
    options.params(Sampling(), None)  # checks the ranges
    values = read_sampling_values(options, "ollama")
    values["max_tokens"] = options.num_predict if (options.num_predict or 0) > 0 else None
    return {
        name: value
        for name, value in values.items()
        if value is not None and name in Sampling.model_fields
    }


async def check_template(model: ServedModel, template: str | None) -> None:
    """Raise BadRequest for a template that is not the model's own."""
    if not template:
        return
    try:
        header = await asyncio.to_thread(read_header, Path(model.origin.path))
        own = header.metadata.get("tokenizer.chat_template")
    except StartupError:
        own = None
    if str(own or "").strip() != template.strip():
        raise BadRequest(
            "Invalid 'template': a model keeps the template in its file.",
            param="template",
            code="unsupported_value",
        )
