"""Finds the service that answers a request, and checks that the operator allows a route."""

from __future__ import annotations

from starlette.requests import Request

from cllm.errors import BadRequest, UnknownModel
from cllm.registry import Registry
from cllm.service import Service


def registry_of(request: Request) -> Registry:
    registry: Registry = request.app.state.registry
    return registry


def service_for(request: Request, name: str | None = None, message: str = "") -> Service:
    """Return the service of the model that a request names, or of the default model.

    Raises UnknownModel, with the dialect's ``message`` if there is one.
    """
    try:
        return registry_of(request).get(name)
    except UnknownModel as error:
        if not message:
            raise
        raise UnknownModel(error.asked, error.served, message) from None


def check_enabled(request: Request, option: str) -> None:
    """Raise BadRequest (403) unless the operator has set ``option`` of the section server."""
    if getattr(request.app.state.settings.server, option):
        return
    path = request.scope["path"]
    message = (
        f"{request.method} {path} is disabled on this server; the option server.{option} enables "
        "it."
    )
    raise BadRequest(message, code=f"{path.strip('/')}_disabled", status=403)
