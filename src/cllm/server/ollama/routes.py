"""Ollama's routes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter
from pydantic import with_config
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm.core.model_info import ModelInfo
from cllm.core.params import SamplingParams
from cllm.errors import BadRequest, StartupError, UnknownModel
from cllm.models.memory import read_resident_bytes
from cllm.process.pool import Pool
from cllm.server import resolve
from cllm.server.body import Model, describe_route, example, read_body
from cllm.server.call import get_call
from cllm.server.http.sse import EventStream, until_disconnect
from cllm.server.infill import build_suffix_prompts
from cllm.server.off_loop import off_loop
from cllm.server.ollama import pull
from cllm.server.ollama.card import Card, Details, format_time, read_card, write_modelfile
from cllm.server.ollama.errors import UNKNOWN
from cllm.server.ollama.pull import PullStatus
from cllm.server.ollama.schema import (
    MAX_TEXTS,
    LoadingBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    PullBody,
    ShowBody,
)
from cllm.server.ollama.stream import (
    MEDIA_TYPE,
    Clock,
    Durations,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    OllamaLines,
    collect,
    no_prompt,
)
from cllm.server.queueing import answer_headers
from cllm.server.resolve import (
    check_admin,
    may_change_models,
    model_for,
    served_models,
)
from cllm.server.state import get_state
from cllm.server.vectors import encode_vectors
from cllm.serving.answer import Generation, SchedulingOptions
from cllm.serving.embedding import embed, encode_texts, shorten
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service
from cllm.text.chat import Chat
from cllm.text.grammar import FREE, CheckedGrammar
from cllm.text.pairs import name_texts

service_for = partial(resolve.service_for, message=UNKNOWN)
router = APIRouter(tags=["Ollama"])

API_VERSION = "0.12.11"
"""The version of Ollama whose API this is. Clients ask for it and reject versions that are too
old.
"""

NEVER = "2999-12-31T00:00:00Z"


@with_config(example(version=API_VERSION))
class OllamaVersion(TypedDict):
    version: str


class EmbedAnswer(Durations):
    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int


class EmbeddingsAnswer(TypedDict):
    embedding: list[float]


class ModelEntry(TypedDict):
    """``size`` is in bytes. ``digest`` has 64 hex digits that identify the content of the file."""

    name: str
    model: str
    size: int
    digest: str
    details: Details


class TagsModel(ModelEntry):
    modified_at: str


class TagsAnswer(TypedDict):
    models: list[TagsModel]


class PsModel(ModelEntry):
    """``size`` is the most that the model takes, of which ``size_used`` is in use. ``engines`` is
    the number of engines that share its requests. ``shares_cores`` says whether it leaves some of
    the cores to other models while these compute.
    """

    size_used: int
    size_vram: int
    expires_at: str
    context_length: int
    engines: int
    shares_cores: bool


class PsAnswer(TypedDict):
    models: list[PsModel]


class ShowAnswer(TypedDict):
    license: str
    modelfile: str
    parameters: str
    template: str
    system: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


@router.get("/api/version")
async def version() -> OllamaVersion:
    """Return the version of Ollama's API. The server's own version is at /."""
    return {"version": API_VERSION}


@router.post(
    "/api/generate",
    openapi_extra=describe_route(OllamaGenerateBody, OllamaGenerateAnswer, stream=MEDIA_TYPE),
)
async def generate(request: Request) -> Response:
    """Answer a prompt as the first message of a chat.

    With ``raw``, continue it as it is; with ``suffix``, fill in.
    """
    return await answer_prompt(request, OllamaGenerateBody)


@router.post(
    "/api/chat",
    openapi_extra=describe_route(OllamaChatBody, OllamaChatAnswer, stream=MEDIA_TYPE),
)
async def chat(request: Request) -> Response:
    """Generate the next message of a conversation."""
    return await answer_prompt(request, OllamaChatBody)


async def answer_prompt(request: Request, model: type[OllamaGenerationBody]) -> Response:
    """Stream the answer to a prompt or a chat, which is the default, or collect it. Without a
    prompt, load the model, or unload it if ``keep_alive`` is 0.

    A request is only rejected before the first byte.
    """
    clock = Clock()
    body = await read(request, model)
    if not body.has_prompt and body.stay == 0:
        return await unload(request, body)
    service, call = await service_for(request, body.model), get_call(request)
    asked, scheduling = await off_loop(call, body.chat), body.scheduling_options(call)
    params, bound = await read_params(service, body, scheduling)
    if not body.has_prompt:
        keep(request, body)
        return json_answer(no_prompt(body.model, "load", chat=body.is_chat))
    generation = await until_disconnect(
        request, make_generation(service, body, asked, params, scheduling, bound)
    )
    clock.submit()
    answer = service.submit(generation)
    with contextlib.suppress(UnknownModel):  # it may have been deleted meanwhile
        keep(request, body)
    headers, vocabulary = answer_headers(answer), service.vocabulary
    if body.stream is not False:
        lines = OllamaLines(generation, body.model, clock, vocabulary, chat=body.is_chat)
        return EventStream(answer, lines, headers, media_type=MEDIA_TYPE, heartbeat=b" ")
    with answer:
        content = await until_disconnect(
            request, collect(answer, body.model, clock, vocabulary, chat=body.is_chat)
        )
    return json_answer(content, headers)


async def make_generation(
    service: Service,
    body: OllamaGenerationBody,
    asked: Chat,
    params: SamplingParams,
    scheduling: SchedulingOptions,
    bound: CheckedGrammar,
) -> Generation:
    """Return the generation for ``body``, ready to be submitted."""
    name = secrets.token_hex(12)
    if isinstance(body, OllamaGenerateBody):
        prompts = await encode_plain(service, body, scheduling)
        if prompts:
            generation = Generation(name, prompts, params, scheduling)
            generation.bind(bound)
            return generation
    return await service.prepare(name, asked, params, scheduling, body.prompt_field, bound)


async def encode_plain(
    service: Service, body: OllamaGenerateBody, scheduling: SchedulingOptions
) -> list[list[int]]:
    """Return the prompt if it is not a chat's, else []."""
    text = body.prompt or ""
    if body.suffix:
        return await build_suffix_prompts(service, [text], body.suffix, scheduling)
    if body.raw or not service.vocabulary.chat_template:
        prompt = "\n\n".join(filter(None, (body.system, text)))
        return [await service.encode(prompt, scheduling=scheduling)]
    return []


async def read_params(
    service: Service, body: OllamaGenerationBody, scheduling: SchedulingOptions
) -> tuple[SamplingParams, CheckedGrammar]:
    """Return the sampling parameters, and the constraint that ``format`` sets.

    Raises BadRequest.
    """
    if body.think and "thinking" not in service.capabilities:
        raise BadRequest(
            f"{body.model[:100]!r} does not support thinking.",
            param="think",
            code="unsupported_value",
        )
    params, constraint = body.params(service.sampling), body.constraint()
    if constraint is None:
        return params, FREE
    return params, await service.grammar(constraint, "format", scheduling)


@router.post(
    "/api/embed",
    openapi_extra=describe_route(OllamaEmbedBody, EmbedAnswer),
)
async def embed_texts(request: Request) -> Response:
    """Return the embeddings of one or more texts."""
    clock = Clock()
    body = await read(request, OllamaEmbedBody)
    service = await service_for(request, body.model)
    if not body.input:  # which asks Ollama to load the model
        keep(request, body)
        none: EmbedAnswer
        none = {"model": body.model, "embeddings": [], **clock.durations(), "prompt_eval_count": 0}
        return json_answer(none)
    given = [body.input] if isinstance(body.input, str) else body.input
    params = ["input"] if isinstance(body.input, str) else name_texts("input", len(given))
    size = service.info.embedding_size
    if len(given) > MAX_TEXTS:
        raise BadRequest(
            f"Invalid 'input': at most {MAX_TEXTS} texts are accepted, not {len(given)}.",
            param="input",
        )
    if body.dimensions is not None and size and body.dimensions > size:
        message = f"Invalid 'dimensions': it must be at most {size}, not {body.dimensions}."
        raise BadRequest(message, param="dimensions", code="invalid_value")
    scheduling, truncate = body.scheduling_options(get_call(request)), body.truncate is not False
    texts = await until_disconnect(
        request, encode_texts(service, given, params, scheduling, truncate=truncate)
    )
    clock.submit()
    embedding = await until_disconnect(request, embed(service, texts, params, scheduling))
    keep(request, body)
    vectors = shorten(embedding.vectors, body.dimensions)
    data = await encode_vectors(vectors, lambda _, vector: to_json(vector.tolist()))
    head = to_json(
        {"model": body.model, **clock.durations(), "prompt_eval_count": embedding.num_tokens}
    )[:-1]
    return Response(head + b',"embeddings":[' + data + b"]}", media_type="application/json")


@router.post(
    "/api/embeddings",
    openapi_extra=describe_route(OllamaEmbeddingsBody, EmbeddingsAnswer),
)
async def embeddings(request: Request) -> Response:
    """Return the embedding of one text."""
    body = await read(request, OllamaEmbeddingsBody)
    service = await service_for(request, body.model)
    if not body.prompt:
        keep(request, body)
        return json_answer(EmbeddingsAnswer(embedding=[]))
    scheduling = body.scheduling_options(get_call(request))
    texts = await until_disconnect(
        request, encode_texts(service, [body.prompt], ["prompt"], scheduling, truncate=True)
    )
    embedding = await until_disconnect(request, embed(service, texts, ["prompt"], scheduling))
    keep(request, body)
    return json_answer(EmbeddingsAnswer(embedding=embedding.vectors[0].tolist()))


@router.get("/api/tags", openapi_extra=describe_route(answer=TagsAnswer))
async def tags(request: Request) -> Response:
    """List the models, loaded or not."""
    models: list[TagsModel] = []
    for model in served_models(request):
        card = await find_card(model)
        models.append({**describe_model(model, card), "modified_at": card.modified})
    return json_answer(TagsAnswer(models=models))


@router.get("/api/ps", openapi_extra=describe_route(answer=PsAnswer))
async def running(request: Request) -> Response:
    """List the loaded models."""
    models: list[PsModel] = []
    now = time.monotonic()
    for model in served_models(request):
        info = model.info
        if info is None or model.parent is not None or not model.is_loaded:
            continue
        assert model.service is not None
        engine = model.service.engine
        card = await find_card(model)
        weights = (info.model_bytes or card.size) * len(engine.members)
        size = weights + info.num_cells * info.kv_bytes_per_token * len(engine.members)
        expires = model.expires_at
        loaded_model: PsModel = {
            **describe_model(model, card),
            "size": size,
            "size_used": measure_used(engine, info, weights, size),
            "size_vram": size if info.on_gpu else 0,
            "expires_at": NEVER if expires is None else format_time(time.time() + expires - now),
            "context_length": info.context_length,
            "engines": len(engine.members),
            "shares_cores": engine.shares_cores,
        }
        models.append(loaded_model)
    return json_answer(PsAnswer(models=models))


def measure_used(engine: Pool, info: ModelInfo, weights: int, size: int) -> int:
    """Return the bytes of a model's weights and KV cache that are in use, at most ``size``."""
    if info.layout == "paged":
        num_cells = engine.stats.num_cells_held + engine.stats.num_cells_idle
        return min(size, weights + num_cells * info.kv_bytes_per_token)
    if info.on_gpu:
        return size
    resident = [read_resident_bytes(member.supervisor.pid) for member in engine.members]
    return min(size, sum(resident)) if all(resident) else size


@router.post("/api/show", openapi_extra=describe_route(ShowBody, ShowAnswer))
async def show(request: Request) -> Response:
    """Return the metadata in the model's file, and the model's capabilities. A model that has not
    been loaded yet is described by its file alone.
    """
    body = await read(request, ShowBody)
    model = model_for(request, body.wanted(), UNKNOWN)
    card, info, service = await find_card(model), model.info, model.origin.service
    defaults = {
        **model.sampling.model_dump(),
        "num_ctx": card.context_length if info is None else info.context_length,
    }
    defaults["num_predict"] = defaults.pop("max_tokens")
    defaults = {name: value for name, value in defaults.items() if value is not None}
    capabilities, template = card.guess_capabilities(), card.template
    model_info = {"general.basename": model.origin.name, **card.model_info}
    if info is not None:  # clients send prompts of up to this length
        model_info[f"{model_info['general.architecture']}.context_length"] = info.context_length
    if info is not None and service is not None:
        capabilities = ["completion", *sorted(service.capabilities)] if info.generates else []
        capabilities += ["insert"] if service.vocabulary.infill_tokens else []
        capabilities += ["embedding"] if info.embedding_size else []
        template = service.vocabulary.chat_template or ""
    base = model.origin.name
    answer: ShowAnswer = {
        "license": card.license,
        "modelfile": write_modelfile(base, template, model.system, defaults, card.license),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in defaults.items()),
        "template": template,
        "system": model.system,
        "details": {**card.details, "parent_model": base if model.parent else ""},
        "model_info": model_info,
        "capabilities": capabilities,
        "modified_at": card.modified,
    }
    return json_answer(answer)


@router.post(
    "/api/pull",
    openapi_extra=describe_route(PullBody, PullStatus, stream=MEDIA_TYPE),
)
async def pull_model(request: Request) -> Response:
    """Download a model into the hub's cache, if the server's settings allow it.

    The served model needs no download. Needs an administrator's key.
    """
    check_admin(request)
    body = await read(request, PullBody)
    with contextlib.suppress(UnknownModel):
        if not get_state(request).registry.find(body.wanted()).is_found:
            return pull.answer_success(body, "pulling manifest")
    return await pull.pull(request, body)


def keep(request: Request, body: LoadingBody) -> None:
    """Let the model stay for the request's ``keep_alive``, if the request may change that. Call it
    once the request has been submitted: a model without requests may be unloaded at once.
    """
    stay = body.stay
    if body.keep_alive is not None and may_change_models(request):
        get_state(request).registry.loaded.keep(model_for(request, body.model), stay)


async def unload(request: Request, body: OllamaGenerationBody) -> Response:
    """Unload a model as soon as it has no requests, if the request may do that."""
    registry, model = get_state(request).registry, model_for(request, body.model, UNKNOWN)
    if may_change_models(request):
        get_call(request).audit("unload", model=model.name)
        registry.loaded.keep(model, 0.0)
        if not model.is_busy:
            await registry.loaded.unload(model)
    return json_answer(no_prompt(body.model, "unload", chat=body.is_chat))


async def read(request: Request, model: type[Model]) -> Model:
    """Return the body, with any Content-Type: Ollama ignores it, and its clients send none."""
    return await read_body(request, model, any_type=True)


def json_answer(content: Mapping[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(
        to_json(content, inf_nan_mode="null"), headers=headers, media_type="application/json"
    )


async def find_card(model: ServedModel) -> Card:
    """Return the card of a model, one without details if its file cannot be read."""
    try:
        return await asyncio.to_thread(read_card, model.path, model.backend)
    except StartupError:
        return await asyncio.to_thread(read_card, "", model.backend)


def describe_model(model: ServedModel, card: Card) -> ModelEntry:
    name = model.name if ":" in model.name else f"{model.name}:latest"
    return {
        "name": name,
        "model": name,
        "size": card.size,
        "digest": card.digest,
        "details": card.details,
    }
