"""Finds the service that answers a request."""

from __future__ import annotations

from starlette.requests import Request

from cllm.errors import UnknownModel
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
