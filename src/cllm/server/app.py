"""The HTTP application: dialects and error handlers over one service."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.routing import APIRoute

from cllm import __version__
from cllm.config import Settings
from cllm.server import errors
from cllm.server.anthropic import errors as anthropic_errors
from cllm.server.anthropic import routes as anthropic
from cllm.server.defaults import SamplingDefaults
from cllm.server.native import routes as native
from cllm.server.ollama import errors as ollama_errors
from cllm.server.ollama import routes as ollama
from cllm.server.openai import batches, embeddings, files, responses
from cllm.server.openai import routes as openai
from cllm.server.openai.response_store import ResponseStore
from cllm.service import Service

DIALECTS = (anthropic_errors.DIALECT, ollama_errors.DIALECT)  # beside OpenAI's, whose form is that of all other paths
ROUTERS = (
    anthropic.router,  # first, because it leaves to others what it does not know
    openai.router,
    embeddings.router,
    responses.router,
    files.router,
    batches.router,
    ollama.router,
    native.router,
)


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
    errors.install(app, DIALECTS)
    for router in ROUTERS:
        app.include_router(router)
    app.state.routes = routes()
    gather_schemas(app)
    return app


def routes() -> list[APIRoute]:
    """All of them, those of one dialect together."""
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


def gather_schemas(app: FastAPI) -> None:
    """Move the definitions that hang under single bodies into the components of the OpenAPI document."""
    document = app.openapi()
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for operations in document["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                components.update(content.get("schema", {}).pop("$defs", {}))
