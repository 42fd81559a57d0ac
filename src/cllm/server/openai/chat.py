"""POST /v1/chat/completions, GET /v1/models."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, cast

from fastapi import APIRouter
from pydantic import with_config
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm import __version__
from cllm.errors import BadRequest, StartupError
from cllm.server.body import describe_route, example, read_body, rename_parameters
from cllm.server.call import Call, get_call
from cllm.server.http.sse import EventStream, until_disconnect
from cllm.server.off_loop import in_thread, off_loop
from cllm.server.openai.logprobs import chat_logprobs
from cllm.server.openai.schema import ChatBody
from cllm.server.openai.stream import (
    AssistantMessage,
    ChoiceAccumulator,
    Chunks,
    TokenUsage,
    usage_object,
)
from cllm.server.queueing import answer_headers
from cllm.server.resolve import model_for, served_models, service_for
from cllm.server.state import get_state
from cllm.server.timings import EXAMPLE_TIMINGS, Timings, build_timings
from cllm.serving.answer import Answer, Generation
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service

router = APIRouter(prefix="/v1", tags=["OpenAI"])

MANY_LOGPROBS = 5_000


class AnswerHead(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


@with_config(
    example(
        id="chatcmpl-1",
        object="chat.completion",
        created=1735689600,
        model="cllm-builtin",
        system_fingerprint="fp_0123456789ab",
        choices=[
            {
                "index": 0,
                "message": {"role": "assistant", "content": "72", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        usage={"prompt_tokens": 17, "completion_tokens": 3, "total_tokens": 20},
        timings=EXAMPLE_TIMINGS,
    )
)
class ChatCompletion(AnswerHead):
    choices: list[ChatChoice]
    usage: TokenUsage
    timings: Timings


class ModelStatus(TypedDict):
    value: Literal["loaded", "loading", "unloaded"]


class ModelObject(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    loaded: bool
    task: Literal["chat", "completion", "embedding"]
    status: ModelStatus
    context_length: int | None
    max_model_len: int | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]


@router.post(
    "/chat/completions",
    openapi_extra=describe_route(ChatBody, ChatCompletion, stream="text/event-stream"),
)
async def chat_completions(request: Request) -> Response:
    """Generate the next message of a conversation.

    With ``stream``, the answer is server-sent events.
    """
    body = await read_body(request, ChatBody)
    service = await service_for(request, body.model)
    generation = await until_disconnect(request, chat_generation(get_call(request), service, body))
    answer = service.submit(generation)
    if body.stream:
        return chat_stream(service, body, answer)
    with answer:
        content = await until_disconnect(request, chat_completion(service, body, answer))
    return Response(content, headers=make_headers(answer), media_type="application/json")


async def chat_generation(
    call: Call, service: Service, body: ChatBody, request_id: str = "", param: str = "messages"
) -> Generation:
    """Return the generation for a chat, ready to be submitted.

    By default, it gets a new ``request_id``. Errors call its messages ``param``.
    """
    body.check()
    params = await body.params(service)
    scheduling = body.scheduling_options(call)
    bound = await body.grammar(service, scheduling)
    chat = await off_loop(call, body.chat)
    request_id = request_id or f"chatcmpl-{secrets.token_hex(12)}"
    with rename_parameters({"thinking_token_budget": body.budget_field}):
        return await service.prepare(request_id, chat, params, scheduling, param, bound)


@router.get("/models")
async def models(request: Request, reload: bool = False) -> ModelList:
    """List the models, each under its name and under each alias that is not a pattern.

    ``root`` is its name. ``loaded`` is false for a model that the next request will load. ``task``
    is completion for a base model, which only continues texts. With ``reload``, look for new files
    in the folder of models first; an administrator also lets the server read the settings of its
    models again.
    """
    if reload and get_call(request).account().is_admin:
        try:
            faults = await get_state(request).registry.reload()
        except StartupError as error:
            message = f"The settings were not reloaded: {error}"
            raise BadRequest(message, code="invalid_settings") from None
        if faults:
            message = f"The settings were reloaded, but {'; '.join(faults)}"
            raise BadRequest(message, code="model_not_replaced")
    elif reload:
        await get_state(request).registry.rescan()
    registry, served = get_state(request).registry, served_models(request)
    named = [(registry.find(name), name) for name in registry.names]
    data = [model_object(model, name) for model, name in named if model in served]
    return {"object": "list", "data": data}


@router.get("/models/{name:path}", openapi_extra=describe_route(answer=ModelObject))
async def model(request: Request, name: str) -> ModelObject | ModelList:
    """Return a model, by its name or an alias."""
    if not name:  # the list's path with a trailing slash
        return await models(request)
    served = model_for(request, name)
    return model_object(served, served.name if served.is_named(name) else name)


def model_object(model: ServedModel, name: str) -> ModelObject:
    info = model.info
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "cllm",
        "root": model.name,
        "parent": model.parent.name if model.parent else None,
        "loaded": model.is_loaded,
        "task": model.task,
        "status": {"value": model.status},  # as in llama-server
        "context_length": info.context_length if info else None,
        # the same under vLLM's name, which clients look for
        "max_model_len": info.context_length if info else None,
    }


def make_head(service: Service, generation: Generation, kind: str) -> AnswerHead:
    """Return the fields that begin every answer and every chunk.

    The same fingerprint and seed give the same text.
    """
    sha = hashlib.sha256(f"{__version__} {service.info.fingerprint}".encode()).hexdigest()
    return {
        "id": generation.request_id,
        "object": kind,
        "created": int(generation.created),
        "model": service.model_name,
        "system_fingerprint": f"fp_{sha[:12]}",
    }


def make_headers(answer: Answer) -> dict[str, str]:
    return {"x-request-id": answer.generation.request_id, **answer_headers(answer)}


def json_answer(content: Mapping[str, Any] | list[Any], headers: dict[str, str]) -> Response:
    return Response(to_json(content), headers=headers, media_type="application/json")


def choose_logprobs(service: Service, body: ChatBody) -> Callable[[Any], dict[str, Any]] | None:
    return partial(chat_logprobs, service.vocabulary) if body.logprobs else None


def chat_stream(service: Service, body: ChatBody, answer: Answer) -> Response:
    head = make_head(service, answer.generation, "chat.completion.chunk")
    chunks = Chunks(
        answer.generation,
        head,
        chat=True,
        options=body.stream_options,
        logprobs=choose_logprobs(service, body),
    )
    return EventStream(answer, chunks, make_headers(answer))


async def chat_completion(service: Service, body: ChatBody, answer: Answer) -> bytes:
    """Return the whole answer to a chat, as JSON."""
    head = make_head(service, answer.generation, "chat.completion")
    logprobs = choose_logprobs(service, body)
    collected = await collect(answer)
    choices: Iterable[ChatChoice] = (
        {
            "index": i,
            "message": choice.message(),
            "logprobs": logprobs(choice.token_logprobs) if logprobs else None,
            "finish_reason": cast("Literal['stop', 'length', 'tool_calls']", choice.finish),
        }
        for i, choice in enumerate(collected)
    )
    num_tokens = sum(len(choice.token_logprobs) for choice in collected)
    return await encode_choices(answer, head, choices, num_tokens)


async def collect(answer: Answer) -> list[ChoiceAccumulator]:
    """Return all choices of a generation, those of its first prompt first."""
    generation = answer.generation
    num_choices = len(generation.prompts) * generation.params.n
    choices = [ChoiceAccumulator(generation, index) for index in range(num_choices)]
    async for deltas in answer:
        for delta in deltas:
            choices[delta.index].add(delta)
    return choices


async def encode_choices(
    answer: Answer, head: AnswerHead, choices: Iterable[Mapping[str, Any]], num_tokens: int
) -> bytes:
    """Return ``head`` with ``choices``, which have the logprobs of ``num_tokens``, as JSON.

    If there are many logprobs, another thread encodes the answer, one choice after the other:
    encoding holds the GIL.
    """
    generation = answer.generation
    content = {
        **head,
        "usage": usage_object(generation.usage),
        "timings": build_timings(generation),
    }

    def write() -> bytes:
        return to_json(content)[:-1] + b',"choices":[' + b",".join(map(to_json, choices)) + b"]}"

    is_long = num_tokens * (1 + (generation.params.logprobs or 0)) > MANY_LOGPROBS
    return await in_thread(write) if is_long else write()
