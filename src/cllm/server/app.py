"""The HTTP application: dialects and error handlers over one service."""

from __future__ import annotations

from fastapi import FastAPI

from cllm import __version__
from cllm.config import Settings
from cllm.server import errors, openapi
from cllm.server.defaults import SamplingDefaults
from cllm.server.native import benchmark, rerank
from cllm.server.native import routes as native
from cllm.server.openai import embeddings, tokens
from cllm.server.openai import routes as openai
from cllm.service import Service


def create_app(service: Service, settings: Settings) -> FastAPI:
    app = FastAPI(
        title="cLLM",
        version=__version__,
        summary="GGUF language models for many at once",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    app.state.settings = settings
    app.state.sampling = SamplingDefaults(**settings.sampling.model_dump())
    errors.install(app)
    app.include_router(openai.router)
    app.include_router(embeddings.router)
    app.include_router(tokens.router)
    app.include_router(native.router)
    app.include_router(rerank.router)
    app.include_router(benchmark.router)
    app.include_router(openapi.router)
    openapi.install(app)
    return app
