"""Finds the service that answers a request, and checks that the operator allows a route."""

from __future__ import annotations

from starlette.requests import Request

from cllm.core.account import Account
from cllm.errors import BadRequest, UnknownModel
from cllm.registry import Registry
from cllm.server.auth import route_not_allowed
from cllm.server.call import Call, call_of
from cllm.service import Service


def registry_of(request: Request) -> Registry:
    registry: Registry = request.app.state.registry
    return registry


def service_for(request: Request, name: str | None = None, message: str = "") -> Service:
    """Return the service of the model that a request names, or of the default model.

    Raises UnknownModel, with the dialect's ``message`` if there is one; also for a model that the
    request's account may not use.
    """
    try:
        return allowed(registry_of(request).get(name), call_of(request), name)
    except UnknownModel as error:
        account, served = call_of(request).account(), error.served
        if account.has_key and not account.may_use_model(served):
            served = ", ".join(account.models)
        if not message:
            raise UnknownModel(error.asked, served) from None
        raise UnknownModel(error.asked, served, message) from None


def allowed(service: Service, call: Call, name: str | None = None) -> Service:
    """Return ``service``. Raises UnknownModel if the account may not use its model, which the
    request calls ``name``.
    """
    account = call.account()
    names = (service.model_name, name or service.model_name)
    if account.has_key and not any(map(account.may_use_model, names)):
        raise unknown_model(account, name)
    return service


def unknown_model(account: Account, name: str | None) -> UnknownModel:
    """Return the error for a model that the account may not use, which names only those that it
    may.
    """
    return UnknownModel(name or "default", ", ".join(account.models))


def check_route(account: Account, path: str) -> None:
    """Raise BadRequest (403) unless the account may use a path."""
    if not account.may_use_route(path):
        raise route_not_allowed(account, path)


def served_models(request: Request) -> list[Service]:
    """Return the services of the models that the request's account may use."""
    account = call_of(request).account()
    return [one for one in registry_of(request).services if account.may_use_model(one.model_name)]


def check_admin(request: Request) -> None:
    """Raise BadRequest (403) unless the request's account may see and manage what concerns all
    accounts.
    """
    account = call_of(request).account()
    if not account.is_admin:
        message = f"{request.method} {request.scope['path']} needs the API key of an administrator."
        raise BadRequest(message, code="admin_required", status=403)


def check_enabled(request: Request, option: str) -> None:
    """Raise BadRequest (403) unless the operator has set ``option`` of the section server, and the
    request's account is an administrator's.
    """
    check_admin(request)
    if getattr(request.app.state.settings.server, option):
        return
    path = request.scope["path"]
    message = (
        f"{request.method} {path} is disabled on this server; the option server.{option} enables "
        "it."
    )
    raise BadRequest(message, code=f"{path.strip('/')}_disabled", status=403)
