"""Finds the service that answers a request."""

from __future__ import annotations

from starlette.requests import Request

from cllm.registry import Registry
from cllm.service import Service


def registry_of(request: Request) -> Registry:
    registry: Registry = request.app.state.registry
    return registry


def service_for(request: Request, name: str | None = None) -> Service:
    """Return the service of the model that a request names, or of the default model.

    Raises UnknownModel.
    """
    return registry_of(request).get(name)
