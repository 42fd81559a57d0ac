"""LoRA adapters of a running server: llama-server's /lora-adapters, and vLLM's routes to load and
unload them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, ClassVar, NotRequired

import pydantic
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict

from cllm.core.request import AdapterFile
from cllm.errors import BadRequest, EngineError
from cllm.server.body import (
    Body,
    admit,
    check_structure,
    check_type,
    describe_route,
    example,
    parse_json,
    read_body,
    read_bytes,
    read_value,
)
from cllm.server.call import get_call
from cllm.server.http.sse import until_disconnect
from cllm.server.llama_server.routes import Done
from cllm.server.off_loop import off_loop
from cllm.server.openai.schema import MAX_ADAPTERS, AdapterScale
from cllm.server.resolve import (
    check_enabled,
    make_adapter_use,
    may_use,
    model_for,
    service_for,
)
from cllm.server.state import get_state
from cllm.serving.adapter_use import AdapterUse
from cllm.serving.registry import MAX_NAME, Registry
from cllm.serving.served_model import ServedModel
from cllm.serving.sources import inspect_adapter

router = APIRouter(tags=["llama-server"])
vllm_router = APIRouter(prefix="/v1", tags=["vLLM"])

OPTION = "allow_model_changes"
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f]+$")]


class ScalesBody(Body):
    """The body of POST /lora-adapters, which is a list, as an object."""

    lora: Annotated[list[AdapterScale], Field(max_length=MAX_ADAPTERS)]


class ScaleList(pydantic.RootModel[list[AdapterScale]]):
    """Adapters by their numbers, and the factors of their changes."""

    model_config = pydantic.ConfigDict(json_schema_extra={"examples": [[{"id": 0, "scale": 0.5}]]})


class LoadAdapterBody(Body):
    """With ``load_inplace``, an adapter with the same name is replaced."""

    model_config = example(lora_name="poet", lora_path="/models/poet-lora.gguf")
    ignored: ClassVar = {"is_3d_lora_weight": "the file says how its weights are stored"}

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    model_config = example(lora_name="poet")
    ignored: ClassVar = {"lora_int_id": "adapters are known by their names"}

    lora_name: Name


class AdapterEntry(TypedDict):
    """``path`` is the adapter's name. Only an activated LoRA has ``alora_invocation_tokens``."""

    id: int
    path: str
    scale: float
    alora_invocation_tokens: NotRequired[list[int]]


@router.get("/lora-adapters")
async def adapters(request: Request, model: str | None = None) -> list[AdapterEntry]:
    """List the adapters of a model with their numbers, for the field ``lora`` of requests. Each is
    a model too.
    """
    served = model_for(request, model)
    known = get_state(request).registry.list_adapters(served)
    in_use = dict(served.adapter_use.adapters)
    entries: list[AdapterEntry] = []
    for i, one in enumerate(known):
        if not may_use(get_call(request).account(), one):
            continue
        scale = in_use.get(one.adapter_key, 0.0)
        entry: AdapterEntry = {"id": i, "path": one.name, "scale": scale}
        entries.append(entry)
        if one.adapter_file and one.adapter_file.invocation:
            entry["alora_invocation_tokens"] = [*one.adapter_file.invocation]
    return entries


@router.post("/lora-adapters", openapi_extra=describe_route(ScaleList))
async def set_adapters(request: Request, model: str | None = None) -> Done:
    """Set the adapters of a model's requests without the field ``lora``; those that are not named
    get the scale 0. The body is a list such as [{"id": 0, "scale": 0.5}].

    Rejected unless ``server.allow_model_changes`` is set (403).
    """
    check_enabled(request, OPTION)
    check_type(request.headers.get("content-type", ""))
    data = await read_bytes(request)
    call = get_call(request)
    admit(call, len(data))

    def read() -> ScalesBody:
        check_structure(data)
        return read_value(parse_json(b'{"lora":' + data + b"}"), ScalesBody, call)

    body = await off_loop(call, read)
    call.lora = None
    served = model_for(request, model)
    known = get_state(request).registry.list_adapters(served)
    served.adapter_use = make_adapter_use(body.lora, known, call.account())
    call.audit("adapters", model=served.name)
    return {"success": True}


@vllm_router.post(
    "/load_lora_adapter",
    response_class=PlainTextResponse,
    openapi_extra=describe_route(LoadAdapterBody),
)
async def load_adapter(request: Request) -> Response:
    """Load a LoRA adapter from a file of this machine; it is then a model. It ends with the server,
    or when the settings of its base change.

    Rejected unless ``server.allow_model_changes`` is set (403).
    """
    check_enabled(request, OPTION)
    body = await read_body(request, LoadAdapterBody)
    registry = get_state(request).registry
    base = model_for(request, body.base_model_name).origin
    check_name(registry, body)
    try:
        path, file = await asyncio.to_thread(find_file, body.lora_path)
    except OSError as error:
        message = f"Invalid 'lora_path': the file cannot be read: {error.strerror}."
        raise BadRequest(message, param="lora_path", code="not_found", status=404) from None
    except ValueError as error:  # not a path, or not an adapter
        message = f"Invalid 'lora_path': {error}."
        raise BadRequest(message, param="lora_path", code="invalid_value") from None
    service = await service_for(request, base.name)
    key = f"{body.lora_name}\n{file.hash}"  # requests with a former file go on with that
    get_call(request).audit("load adapter", model=body.lora_name)
    fault = await until_disconnect(request, service.engine.load_adapter(key, path))
    if fault:
        message = "Invalid 'lora_path': this file is not an adapter of the model."
        raise BadRequest(message, param="lora_path", code="invalid_value")
    known = check_name(registry, body)  # again: much may have happened
    if base.is_removed:
        service.engine.more_adapters.pop(key, None)
        raise EngineError("The base of the adapter has been replaced; please retry.")
    if known is not None:
        forget_adapter(registry, known)
    registry.add(make_adapter(body.lora_name, base, key, file))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


def check_name(registry: Registry, body: LoadAdapterBody) -> ServedModel | None:
    """Return the adapter that is to be replaced, if there is one. Raises BadRequest if the name is
    that of another model.
    """
    known = registry.get(body.lora_name)
    if known is not None and not (body.load_inplace and known.adapter_file and known.is_created):
        message = f"The model {body.lora_name!r} exists already."
        raise BadRequest(message, param="lora_name", code="invalid_value")
    return known


def forget_adapter(registry: Registry, model: ServedModel) -> None:
    """Forget an adapter that was loaded while the server runs. Engines that have it keep it for
    requests that have begun; the next ones do not load it.
    """
    registry.remove(model.name)
    for service in registry.loaded.services:
        service.engine.more_adapters.pop(model.adapter_key, None)


def find_file(name: str) -> tuple[str, AdapterFile]:
    """Return the path of a file and what it is. Raises OSError and ValueError."""
    path = Path(name).expanduser().resolve()
    return str(path), inspect_adapter(path)


def make_adapter(name: str, base: ServedModel, key: str, file: AdapterFile) -> ServedModel:
    """Return the model that ``base`` becomes with the adapter that its engines have as ``key``."""
    fields: dict[str, Any] = {"parent": base, "sampling": base.sampling, "backend": base.backend}
    use = AdapterUse.of({key: 1.0}, {key: file})
    fields |= {"adapter_use": use, "adapter_key": key, "adapter_file": file}
    return ServedModel(name=name, is_created=True, path=base.path, **fields)


@vllm_router.post(
    "/unload_lora_adapter",
    response_class=PlainTextResponse,
    openapi_extra=describe_route(UnloadAdapterBody),
)
async def unload_adapter(request: Request) -> Response:
    """Forget a LoRA adapter that was loaded by the route above. Requests that have begun end as
    usual.

    Rejected unless ``server.allow_model_changes`` is set (403).
    """
    check_enabled(request, OPTION)
    body = await read_body(request, UnloadAdapterBody)
    registry = get_state(request).registry
    known = registry.get(body.lora_name)
    if known is None or not known.adapter_file or not known.is_created:
        message = f"No adapter {body.lora_name!r} was loaded by this API."
        raise BadRequest(message, param="lora_name", code="not_found", status=404)
    get_call(request).audit("unload adapter", model=known.name)
    forget_adapter(registry, known)
    return PlainTextResponse(f"Success: LoRA adapter '{known.name}' removed successfully.")
