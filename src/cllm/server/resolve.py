"""Finds the model that answers a request, and checks that the operator allows a route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from starlette.requests import Request

from cllm.core.account import Account
from cllm.errors import BadRequest, EngineError, UnknownModel
from cllm.server.auth import route_not_allowed
from cllm.server.call import Call, get_call
from cllm.server.http.sse import until_disconnect
from cllm.server.state import get_state
from cllm.serving.adapter_use import AdapterUse
from cllm.serving.answer import list_limits, took_too_long
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service

MIN_SCAN_AGE = 2.0  # seconds


def model_for(request: Request, name: str | None = None, message: str = "") -> ServedModel:
    """Return the model that a request names, or the default model, loaded or not.

    Raises UnknownModel, with the dialect's ``message`` if there is one; also for a model that the
    request's account may not use.
    """
    try:
        return find_allowed(get_state(request).registry, get_call(request).account(), name)
    except UnknownModel as error:
        if message:
            raise UnknownModel(error.asked, error.served, message) from None
        raise


def find_allowed(registry: Registry, account: Account, name: str | None) -> ServedModel:
    """Return the model ``name``. Without a name, return the default model, or else the first model
    that the account may use.

    Raises UnknownModel, also for a model that the account may not use.
    """
    if not account.has_key:
        return registry.find(name)
    usable = [model for model in registry.models if account.may_use_model(model.name)]
    unknown = UnknownModel(name or "default", ", ".join(account.models))
    if not name:
        if registry.models and registry.default in usable:
            return registry.default
        if usable:
            return usable[0]
        raise unknown
    try:
        model = registry.find(name)
    except UnknownModel as error:
        raise unknown if account.models else error from None
    if model in usable or account.may_use_model(name):
        return model
    raise unknown


async def service_for(request: Request, name: str | None = None, message: str = "") -> Service:
    """Return the service of the model that a request names, or of the default model, after loading
    it if necessary.

    Raises what ``model_for`` and ``load`` raise.
    """
    registry = get_state(request).registry
    try:
        model = model_for(request, name, message)
    except UnknownModel:
        await registry.rescan(MIN_SCAN_AGE)  # its file may be new
        model = model_for(request, name, message)
    call = get_call(request)
    call.record.model = model.name
    if (service := registry.loaded.use(model)) is None:
        service = await until_disconnect(request, load(registry, model, call))
    return with_adapters(registry, model, service, call)


def may_use(account: Account, model: ServedModel) -> bool:
    return not account.has_key or account.may_use_model(model.name)


def with_adapters(registry: Registry, model: ServedModel, service: Service, call: Call) -> Service:
    """Return ``service`` with the adapters that the request names, if it names any. Raises
    BadRequest.
    """
    if call.lora is None:
        return service
    account = call.account()
    use = make_adapter_use(call.lora, registry.list_adapters(model), account)
    if not use.adapters and not may_use(account, model.origin):
        raise BadRequest("Invalid 'lora': it leaves no adapter.", param="lora")
    return replace(service, adapter_use=use)


def make_adapter_use(
    lora: Iterable[Any], adapters: Sequence[ServedModel], account: Account
) -> AdapterUse:
    """Return the use of ``adapters`` that ``lora`` asks for by numbers (id) and scales.

    Raises BadRequest.
    """
    scales = {}
    for entry in lora:
        known = entry.id < len(adapters)
        if not known or not may_use(account, adapters[entry.id]):
            message = f"Invalid 'lora': there is no adapter {entry.id} among {len(adapters)}."
            raise BadRequest(message, param="lora", code="invalid_value")
        scales[adapters[entry.id].adapter_key] = entry.scale
    files = {one.adapter_key: one.adapter_file for one in adapters if one.adapter_file}
    try:
        return AdapterUse.of(scales, files)
    except ValueError as error:
        message = f"Invalid 'lora': {error}."
        raise BadRequest(message, param="lora", code="invalid_value") from None


async def known_service_for(request: Request, name: str | None = None) -> Service:
    """Do what ``service_for`` does, but do not reload a model that has been unloaded."""
    model = model_for(request, name)
    service = model.origin.service
    if service is not None and (model.info is not None or not service.engine.unloaded):
        return model.view(service)
    return await service_for(request, name)


async def load(registry: Registry, model: ServedModel, call: Call) -> Service:
    """Load ``model`` within the time limits of the request, and return its service.

    Raises EngineError, RequestTimeout and LoadFailed.
    """
    timeout = call.state.settings.scheduler.request_timeout
    first = min(list_limits(timeout, call.time_limits), key=attrgetter("at"), default=None)
    call.record.account = call.scheduling_account().name
    model.origin.waiting.append(call.record)
    try:
        with call.record.timing("load"):
            async with asyncio.timeout(first and first.at - time.monotonic()):
                return await registry.load(model)
    except TimeoutError:
        raise first.error if first else took_too_long(0) from None
    except EngineError as error:
        registry.metrics.count_rejection(error.reason)
        raise
    finally:
        model.origin.waiting.remove(call.record)


def check_route(account: Account, path: str) -> None:
    """Raise BadRequest (403) unless the account may use a path."""
    if not account.may_use_route(path):
        raise route_not_allowed(account, path)


def served_models(request: Request) -> list[ServedModel]:
    """Return the models that the request's account may use."""
    account = get_call(request).account()
    return [one for one in get_state(request).registry.models if account.may_use_model(one.name)]


def check_admin(request: Request) -> None:
    """Raise BadRequest (403) unless the request's account is an administrator's."""
    account = get_call(request).account()
    if not account.is_admin:
        message = f"{request.method} {request.scope['path']} needs the API key of an administrator."
        raise BadRequest(message, code="admin_required", status=403)


def may_change_models(request: Request) -> bool:
    """Return whether the request may load, unload and change models."""
    return (
        get_state(request).settings.server.allow_model_changes
        and get_call(request).account().is_admin
    )


def may_bench(request: Request) -> bool:
    """Return whether the request may use load runs, which a front does not pass on."""
    call = get_call(request)
    is_allowed = call.state.settings.server.benchmark and call.account().is_admin
    return is_allowed and call.carried is None


def check_enabled(request: Request, option: str, what: str = "") -> None:
    """Raise BadRequest (403) unless the operator has set ``option`` of the section server, and the
    request's account is an administrator's. The error's code begins with ``what``, by default the
    path.
    """
    check_admin(request)
    if getattr(get_state(request).settings.server, option):
        return
    path = request.scope["path"]
    message = (
        f"{request.method} {path} is disabled on this server; the option server.{option} enables "
        "it."
    )
    what = what or path.strip("/").replace("/", "_")
    raise BadRequest(message, code=f"{what}_disabled", status=403)
