"""The HTTP application: dialects and error handlers over one service."""

from __future__ import annotations

from fastapi import FastAPI

from cllm import __version__
from cllm.config import Settings
from cllm.server import errors
from cllm.server.defaults import SamplingDefaults
from cllm.server.native import routes as native
from cllm.server.openai import completions, embeddings
from cllm.server.openai import routes as openai
from cllm.service import Service


def create_app(service: Service, settings: Settings) -> FastAPI:
    app = FastAPI(
        title="cLLM",
        version=__version__,
        summary="GGUF language models for many at once",
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    app.state.settings = settings
    app.state.sampling = SamplingDefaults(**settings.sampling.model_dump())
    errors.install(app)
    app.include_router(openai.router)
    app.include_router(completions.router)
    app.include_router(embeddings.router)
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
