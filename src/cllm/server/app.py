"""The HTTP application: dialects and error handlers over one service."""

from __future__ import annotations

from fastapi import FastAPI

from cllm import __version__
from cllm.config import Settings
from cllm.server import errors, openapi
from cllm.server.anthropic import errors as anthropic_errors
from cllm.server.anthropic import routes as anthropic
from cllm.server.defaults import SamplingDefaults
from cllm.server.native import benchmark, rerank
from cllm.server.native import routes as native
from cllm.server.ollama import errors as ollama_errors
from cllm.server.ollama import routes as ollama
from cllm.server.openai import embeddings, tokens
from cllm.server.openai import routes as openai
from cllm.service import Service

DIALECTS = (anthropic_errors.DIALECT, ollama_errors.DIALECT)  # beside OpenAI's, whose form is that of all other paths


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
    errors.install(app, DIALECTS)
    app.include_router(anthropic.router)  # first, because it leaves to others what it does not know
    app.include_router(openai.router)
    app.include_router(embeddings.router)
    app.include_router(ollama.router)
    app.include_router(tokens.router)
    app.include_router(native.router)
    app.include_router(rerank.router)
    app.include_router(benchmark.router)
    app.include_router(openapi.router)
    openapi.install(app)
    return app
