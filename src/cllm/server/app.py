"""The HTTP application: dialects and error handlers on top of the registry of models."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.routing import APIRoute

from cllm import __version__
from cllm.config.settings import Settings
from cllm.server import errors, openapi, page
from cllm.server.access import Access
from cllm.server.anthropic import batches as message_batches
from cllm.server.anthropic import errors as anthropic_errors
from cllm.server.anthropic import routes as anthropic
from cllm.server.anthropic.batch_lines import ENDPOINT, MessageLines
from cllm.server.batches import make_batches
from cllm.server.bench import routes as bench
from cllm.server.cluster import routes as cluster
from cllm.server.http import paths
from cllm.server.live import routes as live
from cllm.server.llama_server import adapters, control, model_events, tokens
from cllm.server.llama_server import routes as llama_server
from cllm.server.native import benchmark, faults, rerank, streams, texts, tracing, usage
from cllm.server.native import routes as native
from cllm.server.ollama import errors as ollama_errors
from cllm.server.ollama import manage
from cllm.server.ollama import routes as ollama
from cllm.server.openai import chat as openai
from cllm.server.openai import completions, embeddings
from cllm.server.openai.batches import files
from cllm.server.openai.batches import routes as batches
from cllm.server.openai.batches.lines import ENDPOINTS, OpenAILines
from cllm.server.openai.responses import routes as responses
from cllm.server.state import ServerState
from cllm.serving.batches import BatchLines
from cllm.serving.registry import Registry
from cllm.store.created import CreatedModels
from cllm.store.responses import ResponseStore

ROUTERS = (
    anthropic.router,  # first, because it matches only requests in its own dialect
    message_batches.router,
    openai.router,
    completions.router,
    embeddings.router,
    responses.router,
    files.router,
    batches.router,
    ollama.router,
    manage.router,
    tokens.router,
    model_events.router,
    llama_server.router,
    control.router,
    adapters.router,
    adapters.vllm_router,
    native.router,
    texts.router,
    rerank.router,
    usage.router,
    streams.router,
    benchmark.router,
    bench.router,
    tracing.router,
    faults.router,
    live.router,
    cluster.router,
    openapi.router,
    page.router,
)


def routes() -> list[APIRoute]:
    """Return all routes, grouped by dialect, including those that are not in the OpenAPI
    document.
    """
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


PATHS = paths.KnownPaths(routes())
# The first dialect that recognizes a request determines the form of its errors; OpenAI's is the
# default.
DIALECTS = (
    anthropic_errors.DIALECT,
    ollama_errors.DIALECT,
    llama_server.DIALECT,
    errors.Dialect(lambda path, _: path in PATHS, errors.openai_error),
    anthropic_errors.OF_UNKNOWN_PATHS,
)
ERROR_TYPES = {  # route tag -> type
    "Anthropic": anthropic_errors.AnthropicErrorAnswer,
    "Ollama": ollama_errors.OllamaErrorAnswer,
}
answer_fault = errors.make_answer(DIALECTS, PATHS)


def create_app(registry: Registry, settings: Settings, access: Access | None = None) -> FastAPI:
    """Return the application. ``access`` has the accounts; by default, those of the settings."""
    app = FastAPI(
        title="cLLM",
        version=__version__,
        summary="Serves language models to many clients at once",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    storage = settings.storage
    state = ServerState(
        registry,
        settings,
        access or Access(settings),
        ResponseStore(storage.max_responses, storage.max_responses_mb * 1_000_000),
        CreatedModels(None if storage.folder is None else Path(storage.folder)),
        routes(),
    )
    lines: dict[str, BatchLines] = dict.fromkeys(ENDPOINTS, OpenAILines(state))
    lines[ENDPOINT] = MessageLines(state)
    state.batches = make_batches(state, lines)
    app.state = state  # type: ignore[assignment]  # typed, unlike the framework's
    errors.install(app, answer_fault)
    for router in ROUTERS:
        app.include_router(router)
    paths.install(app, PATHS)
    openapi.install(app, ERROR_TYPES)
    return app
