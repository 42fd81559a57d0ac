"""The HTTP application: dialects and error handlers over one service."""

from __future__ import annotations

from fastapi import FastAPI

from cllm import __version__
from cllm.config import Settings
from cllm.server import errors
from cllm.server.defaults import SamplingDefaults
from cllm.server.native import routes as native
from cllm.server.openai import batches, files, responses
from cllm.server.openai import routes as openai
from cllm.server.openai.response_store import ResponseStore
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
    app.state.responses = ResponseStore(settings.storage.max_responses, settings.storage.max_responses_mb * 1_000_000)
    app.state.batches = batches.make(app, settings)
    errors.install(app)
    app.include_router(openai.router)
    app.include_router(responses.router)
    app.include_router(files.router)
    app.include_router(batches.router)
    app.include_router(native.router)
    gather_schemas(app)
    return app


def gather_schemas(app: FastAPI) -> None:
    """Move the definitions that hang under single bodies into the components of the OpenAPI document."""
    document = app.openapi()
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for operations in document["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                components.update(content.get("schema", {}).pop("$defs", {}))
