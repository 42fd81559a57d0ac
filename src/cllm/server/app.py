"""The HTTP application: dialects and error handlers over one service."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI

from cllm import __version__
from cllm.config import PriorityName
from cllm.server import errors
from cllm.server.defaults import SamplingDefaults
from cllm.server.native import routes as native
from cllm.server.openai import routes as openai
from cllm.service import Service


def create_app(
    service: Service, sampling: SamplingDefaults, max_body: int, priorities: Mapping[str, PriorityName]
) -> FastAPI:
    """``max_body``: the largest request body, in bytes. ``priorities``: the classes of some keys."""
    app = FastAPI(
        title="cLLM",
        version=__version__,
        summary="GGUF language models for many at once",
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    app.state.sampling = sampling
    app.state.max_body = max_body
    app.state.priorities = priorities
    errors.install(app)
    app.include_router(openai.router)
    app.include_router(native.router)
    gather_schemas(app)
    return app


def gather_schemas(app: FastAPI) -> None:
    """Move the definitions that hang under single bodies into the components of the OpenAPI document."""
    document = app.openapi()
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for operations in document["paths"].values():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            components.update(content.get("schema", {}).pop("$defs", {}))
