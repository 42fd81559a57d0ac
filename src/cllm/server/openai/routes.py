"""POST /v1/chat/completions, POST /v1/completions, GET /v1/models."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from cllm.errors import BadRequest
from cllm.server.body import documented, read_body
from cllm.server.openai.answers import ChatCompletion, Completion, ModelList, ModelObject
from cllm.server.openai.schema import ChatBody, CompletionBody, GenerationBody
from cllm.server.openai.stream import Chunks, Whole, usage_object
from cllm.server.queueing import place_headers
from cllm.server.sse import EventStream, until_disconnect
from cllm.service import Answer, Generation, Service

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/chat/completions", openapi_extra=documented(ChatBody, ChatCompletion, stream="text/event-stream"))
async def chat_completions(request: Request) -> Response:
    """The next message of a conversation; with ``stream`` as server-sent events."""
    body = await read_body(request, ChatBody)
    check_model(body.model, request.app.state.service)
    generation = await chat_generation(request, body, f"chatcmpl-{secrets.token_hex(12)}")
    return await respond(request, body, generation, chat=True)


async def chat_generation(request: Request, body: ChatBody, request_id: str, param: str = "messages") -> Generation:
    """What is to be computed for a chat, ready to be submitted; ``param`` names its messages in errors."""
    service: Service = request.app.state.service
    body.check()
    params = body.params(request.app.state.sampling)
    if grammar := await body.grammar(service):
        params = msgspec.structs.replace(params, grammar=grammar)
    return await service.prepare(request_id, body.chat(), params, body.terms(request), param)


@router.post("/completions", openapi_extra=documented(CompletionBody, Completion, stream="text/event-stream"))
async def completions(request: Request) -> Response:
    """A prompt, or some, continued; with ``stream`` as server-sent events."""
    service: Service = request.app.state.service
    body = await read_body(request, CompletionBody)
    check_model(body.model, service)
    body.check()
    params = body.params(request.app.state.sampling)
    terms = body.terms(request)
    if grammar := await body.grammar(service):
        params = msgspec.structs.replace(params, grammar=grammar)
    prompts = [
        await service.encode(prompt, terms=terms) if isinstance(prompt, str) else prompt for prompt in body.prompts()
    ]
    generation = Generation(f"cmpl-{secrets.token_hex(12)}", prompts, params, terms)
    return await respond(request, body, generation, chat=False)


@router.get("/models", openapi_extra=documented(answer=ModelList))
async def models(request: Request) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [model_object(request.app.state.service)]}


@router.get("/models/{name:path}", openapi_extra=documented(answer=ModelObject))
async def model(request: Request, name: str) -> dict[str, Any]:
    """The model that is served, if that is its name."""
    check_model(name, request.app.state.service)
    return model_object(request.app.state.service)


def model_object(service: Service) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "cllm",
        "context_length": info.context_length if info else None,
    }


def check_model(name: str | None, service: Service) -> None:
    """Raise BadRequest (404) if a request names another model than the one that is served."""
    if name is not None and name != service.model_name:
        message = f"The model {name[:100]!r} does not exist; this server has {service.model_name!r}."
        raise BadRequest(message, param="model", code="model_not_found", status=404)


async def respond(request: Request, body: GenerationBody, generation: Generation, *, chat: bool) -> Response:
    """Stream the generation, or collect it; what can be refused is refused before the first byte."""
    service: Service = request.app.state.service
    head = {
        "id": generation.request_id,
        "object": ("chat.completion" if chat else "text_completion") + (".chunk" if chat and body.stream else ""),
        "created": int(time.time()),
        "model": service.model_name,
    }
    answer = service.submit(generation)
    headers = {"x-request-id": generation.request_id, **place_headers(answer.place)}
    if body.stream:
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(answer, Chunks(generation, head, chat=chat, include_usage=include_usage), headers)
    with answer:
        choices = await until_disconnect(request, collect(answer, chat=chat))
    content = {**head, "choices": choices, "usage": usage_object(generation.usage)}
    return Response(to_json(content), headers=headers, media_type="application/json")


async def collect(answer: Answer, *, chat: bool) -> list[dict[str, Any]]:
    """All choices of a generation, whole."""
    generation = answer.generation
    choices = [Whole() for _ in range(len(generation.prompts) * generation.params.n)]
    async for deltas in answer:
        for delta in deltas:
            choices[delta.index].add(delta)
    return [
        {
            "index": i,
            **({"message": choice.message()} if chat else {"text": "".join(choice.text)}),
            "logprobs": None,
            "finish_reason": choice.finish,
        }
        for i, choice in enumerate(choices)
    ]
