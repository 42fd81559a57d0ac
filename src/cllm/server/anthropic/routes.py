"""POST /v1/messages, POST /v1/messages/count_tokens, GET /v1/models."""

from __future__ import annotations

import datetime
import re
import secrets
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.routing import APIRoute
from pydantic import with_config
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope
from typing_extensions import TypedDict

from cllm.errors import BadRequest
from cllm.server import resolve
from cllm.server.anthropic.errors import speaks_anthropic
from cllm.server.anthropic.schema import CountBody, MessagesBody
from cllm.server.anthropic.stream import PING, MessageAnswer, MessageEvents, collect
from cllm.server.body import describe_route, example, read_body, rename_parameters
from cllm.server.call import Call, get_call
from cllm.server.http.request_id import request_id
from cllm.server.http.sse import EventStream, until_disconnect
from cllm.server.off_loop import off_loop
from cllm.server.queueing import answer_headers
from cllm.server.resolve import served_models
from cllm.server.skipped import note_skipped
from cllm.serving.answer import Generation
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service
from cllm.text.grammar import FREE, Constraint

VERSION = re.compile(r"20[2-9]\d-[01]\d-[0-3]\d")


class Route(APIRoute):
    """Matches only requests in this dialect, because other dialects share some of its paths."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or not speaks_anthropic(scope["path"], Headers(scope=scope)):
            return Match.NONE, {}
        return super().matches(scope)


UNKNOWN = "model: {asked!r} does not exist; this server has {served!r}."
service_for = partial(resolve.service_for, message=UNKNOWN)


async def check_version(request: Request) -> None:
    """Raise BadRequest if the API version is not a date. All versions get the same answers."""
    version = request.headers.get("anthropic-version")
    if version is not None and not VERSION.fullmatch(version):
        message = f"anthropic-version: {version[:40]!r} is not a version such as 2023-06-01."
        raise BadRequest(message, param="anthropic-version", code="invalid_value")


router = APIRouter(
    prefix="/v1",
    tags=["Anthropic"],
    route_class=Route,
    dependencies=[Depends(check_version)],
)


@router.post(
    "/messages",
    openapi_extra=describe_route(MessagesBody, MessageAnswer, stream="text/event-stream"),
)
async def messages(request: Request) -> Response:
    """Generate the next message of a conversation, whole or as a stream of events."""
    body = await read_body(request, MessagesBody)
    service = await service_for(request, body.model)
    call = get_call(request)
    generation = await until_disconnect(request, message_generation(call, service, body))
    answer = service.submit(generation)
    headers = {**answer_headers(answer), **note_skipped(call, service, body.skipped_blocks())}
    if body.stream:
        events = MessageEvents(
            generation, service.model_name, request_id(request), shows_thinking=body.shows_thinking
        )
        return EventStream(answer, events, headers, heartbeat=PING)
    with answer:
        message = await until_disconnect(
            request, collect(answer, service.model_name, shows_thinking=body.shows_thinking)
        )
    return Response(to_json(message), headers=headers, media_type="application/json")


async def message_generation(call: Call, service: Service, body: MessagesBody) -> Generation:
    """Return the generation of the next message, ready to be submitted."""
    params, scheduling = body.params(service.sampling), body.scheduling_options(call)
    chat, bound = await off_loop(call, body.chat), FREE
    if schema := body.output_schema():
        bound = await service.grammar(Constraint("json_schema", schema[0]), schema[1], scheduling)
    with rename_parameters({"thinking_token_budget": "thinking.budget_tokens"}):
        return await service.prepare(
            f"msg_{secrets.token_hex(12)}", chat, params, scheduling, answer=bound
        )


@with_config(example(input_tokens=18))
class TokenCount(TypedDict):
    input_tokens: int


@router.post("/messages/count_tokens", openapi_extra=describe_route(CountBody))
async def count_tokens(request: Request) -> TokenCount:
    """Count the tokens of a prompt, with the chat template and the tokenizer that a generation
    would use. The prompt may be longer than the context.
    """
    body = await read_body(request, CountBody)
    service = await service_for(request, body.model)
    chat = await off_loop(get_call(request), body.chat)
    return {"input_tokens": await until_disconnect(request, service.count_chat(chat))}


@router.get("/models", include_in_schema=False)
async def models(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,  # noqa: ARG001  # it is checked
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """List the models. There is only one page."""
    served = [] if after_id or before_id else served_models(request)
    names = [model.name for model in served]
    return {
        "data": [model_object(model) for model in served],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }


@router.get("/models/{name:path}", include_in_schema=False)
async def model(request: Request, name: str) -> dict[str, Any]:
    if not name:  # this is the list's path with a trailing slash
        return await models(request)
    return model_object(resolve.model_for(request, name, UNKNOWN))


def model_object(model: ServedModel) -> dict[str, Any]:
    info = model.info
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": format_time(model.created),
        "lifecycle": "active",
        "max_input_tokens": info.context_length - 1 if info else None,
        "max_tokens": info.context_length - 1 if info else None,
    }


def format_time(seconds: int) -> str:
    """Return a time in the form of RFC 3339."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
