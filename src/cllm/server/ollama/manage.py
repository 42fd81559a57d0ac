"""POST /api/create and /api/copy, DELETE /api/delete: models made from others, and their removal.

All of them need server.allow_model_changes, and with API keys an administrator's.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from cllm.config.settings import Sampling
from cllm.errors import BadRequest, StartupError
from cllm.models import hub
from cllm.models.description import describe_model
from cllm.models.model_file import list_files
from cllm.server.body import describe_route, first_fault, read_body, read_value
from cllm.server.call import Call, get_call
from cllm.server.ollama.errors import UNKNOWN
from cllm.server.ollama.modelfile import read_modelfile
from cllm.server.ollama.pull import PullStatus, answer_success
from cllm.server.ollama.schema import CopyBody, CreateBody, DeleteBody, OllamaOptions
from cllm.server.ollama.stream import MEDIA_TYPE
from cllm.server.resolve import check_enabled, model_for
from cllm.server.sampling import read_sampling_values
from cllm.server.state import get_state
from cllm.serving.registry import MAX_NAME, Registry
from cllm.serving.served_model import ServedModel
from cllm.store.created import CreatedModel, CreatedModels

OPTION = "allow_model_changes"
log = logging.getLogger("cllm.server")
router = APIRouter(prefix="/api", tags=["Ollama"])


@router.post(
    "/create",
    openapi_extra=describe_route(CreateBody, PullStatus, stream=MEDIA_TYPE),
)
async def create(request: Request) -> Response:
    """Make a model from another one, with a system message and defaults of sampling parameters of
    its own. It survives a restart.
    """
    check_enabled(request, OPTION)
    body = await read_body(request, CreateBody, any_type=True)
    if body.modelfile:
        fields = {"model": body.wanted(), "stream": body.stream, **read_modelfile(body.modelfile)}
        body = read_value(fields, CreateBody, get_call(request))
    body.check()
    source = model_for(request, body.source, UNKNOWN)
    await check_template(source, body.template)
    own = {
        **find_sampling(request, source),
        **read_sampling(get_call(request), body.parameters or {}),
    }
    model = CreatedModel(find_base(request, source), body.system or source.system, own)
    await put_model(request, body.wanted(), model)
    return answer_success(
        body, "reading model metadata", "creating system layer", "writing manifest"
    )


@router.post(
    "/copy",
    response_class=PlainTextResponse,
    openapi_extra=describe_route(CopyBody),
)
async def copy(request: Request) -> Response:
    """Give a model another name. It survives a restart."""
    check_enabled(request, OPTION)
    body = await read_body(request, CopyBody, any_type=True)
    source = model_for(request, body.source, UNKNOWN)
    own = find_sampling(request, source)
    model = CreatedModel(find_base(request, source), source.system, own)
    await put_model(request, body.destination, model)
    return Response()


@router.delete(
    "/delete",
    response_class=PlainTextResponse,
    openapi_extra=describe_route(DeleteBody),
)
async def delete(request: Request) -> Response:
    """Delete a model that was created or copied, or that is in the hub's cache: then its files.

    400 for models that the operator's settings name.
    """
    check_enabled(request, OPTION)
    body = await read_body(request, DeleteBody, any_type=True)
    registry, created = get_state(request).registry, get_state(request).created
    name = body.wanted().removesuffix(":latest")
    own = registry.get(name)
    is_created = own is None or own.is_created  # a created model without an entry has lost its base
    if is_created and name in await asyncio.to_thread(created.read):
        get_call(request).audit("delete", model=name)
        await asyncio.to_thread(created.remove, name)
        registry.remove(name)
        return Response()
    model = model_for(request, name, UNKNOWN)
    path = (await asyncio.to_thread(hub.list_cached)).get(model.name)
    files = [] if path is None else await asyncio.to_thread(list_files, path)
    configured = {one.path for one in registry.models if not one.is_found and one.parent is None}
    if not model.is_found or not files or not configured.isdisjoint(map(str, [path, *files])):
        message = f"{model.name!r} is in the settings of this server, so it cannot be deleted."
        raise BadRequest(message, param="model", code="invalid_value")
    get_call(request).audit("delete", model=model.name)
    await registry.discard(model)
    await asyncio.to_thread(hub.remove_cached, files)
    await registry.rescan()
    return Response()


def find_base(request: Request, model: ServedModel) -> str:
    """Return the name of the model, not a created one, that ``model`` is made from."""
    created = get_state(request).created.read().get(model.name) if model.is_created else None
    return model.name if created is None else created.base


def find_sampling(request: Request, model: ServedModel) -> dict[str, Any]:
    """Return the defaults that a created model has itself."""
    created = get_state(request).created.read().get(model.name)
    return {} if created is None else created.sampling


async def put_model(request: Request, name: str, model: CreatedModel) -> None:
    """Add a created model. Raises BadRequest if the name is not valid, or belongs to another kind
    of model.
    """
    registry, name = get_state(request).registry, name.removesuffix(":latest")
    if not is_valid_name(name):
        message = f"Invalid name {name[:40]!r}: it must be a word of at most {MAX_NAME} characters."
        raise BadRequest(message, param="model", code="invalid_value")
    if (other := registry.get(name)) is not None and not other.is_created:
        message = f"{name!r} is the name of a model that was not created here."
        raise BadRequest(message, param="model", code="invalid_value")
    get_call(request).audit("create", model=name, base=model.base)
    try:
        await asyncio.to_thread(get_state(request).created.put, name, model)
    except ValueError as error:
        raise BadRequest(f"{str(error).capitalize()}.", param="model") from None
    add_created(registry, name, model)


def is_valid_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name.isprintable() and not set(" *?[]") & set(name)


def add_created(registry: Registry, name: str, created: CreatedModel) -> None:
    """Add a created model to those that are served. Raises StartupError if its base is not, if the
    name belongs to another model, or if its defaults are not valid.
    """
    base, other = registry.get(created.base), registry.get(name)
    if base is None or base.is_created:
        raise StartupError(f"{created.base} is not served")
    if other is not None and not other.is_created:
        raise StartupError("another model has the name")
    try:
        sampling = Sampling.model_validate(base.sampling.model_dump() | created.sampling)
    except ValidationError as error:
        field = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
        raise StartupError(f"its {field} is not valid") from None
    new = ServedModel(
        name=name,
        parent=base.origin,
        is_created=True,
        system=created.system,
        sampling=sampling,
        adapter_use=base.adapter_use,
        backend=base.backend,
        path=base.path,
    )
    same = ("parent", "system", "sampling", "adapter_use")
    if other is None or any(getattr(other, each) != getattr(new, each) for each in same):
        registry.add(new)


def add_all_created(registry: Registry, created: CreatedModels) -> None:
    """Add the models that were created earlier, except those that can no longer be served."""
    try:
        models = created.read()
    except StartupError as error:
        log.error("%s", error)
        return
    for name, model in models.items():
        try:
            add_created(registry, name, model)
        except StartupError as error:
            log.warning("the created model %s is not served: %s", name, error)


def read_sampling(call: Call, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults that Ollama's parameters set. Others have no effect. Raises BadRequest
    for values out of range.
    """
    options = read_value(parameters, OllamaOptions, call)
    params = options.params(Sampling(), None)  # this also checks the ranges
    given = read_sampling_values(options, "ollama")
    given["max_tokens"] = params.max_tokens
    if options.repeat_last_n == 0:
        given["repetition_penalty"] = params.repetition_penalty
    own = {
        name: getattr(params, name)
        for name, value in given.items()
        if value is not None and name in Sampling.model_fields
    }
    try:
        Sampling.model_validate(own)
    except ValidationError as error:
        raise first_fault(error) from None
    return own


async def check_template(model: ServedModel, template: str | None) -> None:
    """Raise BadRequest for a template that is not the model's own."""
    if not template:
        return
    try:
        own = (await asyncio.to_thread(describe_model, Path(model.origin.path))).template
    except StartupError:
        own = ""
    if own.strip() != template.strip():
        raise BadRequest(
            "Invalid 'template': a model keeps the template in its file.",
            param="template",
            code="unsupported_value",
        )
