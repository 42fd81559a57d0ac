"""POST /v1/responses, and the routes for stored responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from fastapi import APIRouter, Query
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from cllm.core.params import LARGEST
from cllm.core.stored_ids import make_id
from cllm.errors import BadRequest
from cllm.server.body import describe_route, read_body
from cllm.server.body_limits import check_num_parts
from cllm.server.call import Call, get_call
from cllm.server.http.sse import EventStream, until_disconnect
from cllm.server.off_loop import admit, off_loop
from cllm.server.openai.chat import chat_generation
from cllm.server.openai.logprobs import chat_logprobs
from cllm.server.openai.paging import ListPage, make_page
from cllm.server.openai.responses.items import PLACES
from cllm.server.openai.responses.schema import ResponseBody, TextFormat, rename_fields
from cllm.server.openai.responses.stream import ResponseEvents, ResponseUsage
from cllm.server.openai.responses.tools import OtherTool
from cllm.server.openai.schema import ChatBody
from cllm.server.queueing import answer_headers
from cllm.server.resolve import service_for
from cllm.server.skipped import note_skipped
from cllm.serving.answer import Answer, Generation
from cllm.serving.service import Service
from cllm.store.responses import Stored, list_items

router = APIRouter(prefix="/v1/responses", tags=["OpenAI"])


class ResponseObject(TypedDict):
    """``output`` has items of the types message, reasoning, function_call and custom_tool_call."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: NotRequired[str]
    usage: NotRequired[ResponseUsage]


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


class ItemList(ListPage[dict[str, Any]]):
    """The items that the model has read."""


@router.post(
    "", openapi_extra=describe_route(ResponseBody, ResponseObject, stream="text/event-stream")
)
async def create(request: Request) -> Response:
    """Generate a response and store it, so that a later request can continue from it by its id.

    Responses are stored in memory, limited by number and size (storage.max_responses,
    storage.max_responses_mb). The least recently used ones are removed first, and a restart removes
    all. A response is visible only with the API key that created it.
    """
    body = await read_body(request, ResponseBody)
    service = await service_for(request, body.model)
    generation, events, skipped = await until_disconnect(
        request, response_generation(get_call(request), service, body)
    )
    answer = service.submit(generation)
    headers = {"x-request-id": generation.request_id, **answer_headers(answer), **skipped}
    if body.stream:
        return EventStream(answer, events, headers)
    with answer:
        content = await until_disconnect(request, complete_response(answer, events))
    return Response(content, headers=headers, media_type="application/json")


async def response_generation(
    call: Call, service: Service, body: ResponseBody
) -> tuple[Generation, ResponseEvents, dict[str, str]]:
    """Return the generation of a response, ready to be submitted; its events; and a header that
    names the parts of the body that were left out.
    """
    chat, items, skipped = await translate(call, service, body)
    response_id = make_id("resp_", call.replica_name, 16)
    with rename_fields():
        generation = await chat_generation(call, service, chat, response_id, param="input")
    head = response_head(call, service, body, generation)
    logprobs = partial(chat_logprobs, service.vocabulary) if body.wants_logprobs else None
    events = ResponseEvents(
        generation, head, make_keeper(call, items), body.toolset().called, logprobs
    )
    return generation, events, skipped


@router.post("/input_tokens", openapi_extra=describe_route(ResponseBody, InputTokens))
async def input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a response, without generating it. The prompt may be longer than
    the context.
    """
    body = await read_body(request, ResponseBody)
    service = await service_for(request, body.model)
    call = get_call(request)
    chat, _, skipped = await translate(call, service, body)
    with rename_fields():
        asked = await off_loop(call, chat.chat)
        count = await until_disconnect(request, service.count_chat(asked, "input"))
    content = InputTokens(object="response.input_tokens", input_tokens=count)
    return JSONResponse(content, headers=skipped)


@router.get("/{response_id}", openapi_extra=describe_route(answer=ResponseObject))
async def retrieve(request: Request, response_id: str, *, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        message = "'stream' applies to background responses, which this server does not support."
        raise BadRequest(message, param="stream", code="unsupported_parameter")
    call = get_call(request)
    stored = call.state.responses.get(response_id, call.account())
    return Response(stored.response, media_type="application/json")


@router.delete("/{response_id}")
async def delete(request: Request, response_id: str) -> DeletedResponse:
    """Delete a stored response.

    Later responses of the same conversation can no longer be continued.
    """
    call = get_call(request)
    call.state.responses.delete(response_id, call.account())
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/{response_id}/cancel", openapi_extra=describe_route(answer=ResponseObject))
async def cancel(request: Request, response_id: str) -> Response:
    """Always rejected, because nothing is computed in the background."""
    call = get_call(request)
    call.state.responses.get(response_id, call.account())
    message = (
        "Only background responses can be cancelled, and this server does not support them; to end "
        "one, close its connection."
    )
    raise BadRequest(message, param="response_id", code="unsupported_operation")


@router.get("/{response_id}/input_items", openapi_extra=describe_route(answer=ItemList))
async def input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the items that the model has read: the input of the request, and the items of all
    responses before it.
    """
    call = get_call(request)
    store, account = call.state.responses, call.account()
    stored = store.get(response_id, account)
    turns = store.find_conversation(stored.previous_id, account)
    check_turns(call, [*turns, stored])

    def answer() -> bytes:
        items = list_items(turns) + from_json(stored.items)
        return to_json(make_page(items if order == "asc" else items[::-1], after, limit))

    return Response(await off_loop(call, answer), media_type="application/json")


async def translate(
    call: Call, service: Service, body: ResponseBody
) -> tuple[ChatBody, list[dict[str, Any]], dict[str, str]]:
    """Return ``body`` as a chat, the input items, and a header that names the parts of the body
    that were left out.

    Raises BadRequest with the field names of this dialect.
    """
    body.check()
    store, account = call.state.responses, call.account()
    sent = await off_loop(call, body.items)
    references = {item["id"] for item in sent if item["type"] == "item_reference"}
    referred, turns = (
        store.find_by_items(references, account),
        store.find_conversation(body.previous_response_id, account),
    )
    check_turns(call, [*referred, *turns])

    def build() -> tuple[ChatBody, list[dict[str, Any]], list[str]]:
        items_by_id = {
            item["id"]: item
            for stored in referred
            for item in stored.output()
            if item["id"] in references
        }
        whole = [
            items_by_id.pop(item["id"], item) if item["type"] == "item_reference" else item
            for item in sent
        ]
        items = [item for item in whole if item["type"] in PLACES]
        skipped = [
            *body.toolset().skipped,
            *(item["type"] for item in whole if item["type"] not in PLACES),
        ]
        conversation = list_items(turns) + items
        check_num_parts(len(conversation), "input")
        return body.chat(conversation), items, skipped

    with rename_fields():
        chat, items, skipped = await off_loop(call, build)
    return chat, items, note_skipped(call, service, skipped)


def check_turns(call: Call, turns: list[Stored]) -> None:
    """Raise BadRequest if the responses together are larger than a body may be, because all of them
    go into a prompt.

    Otherwise count their bytes as the call's. Raises EngineError if too many large requests
    wait.
    """
    limit = call.state.settings.server.max_body_mb * 1_000_000
    num_bytes = sum(stored.num_bytes for stored in turns)
    if num_bytes > limit:
        message = (
            f"The conversation is too long: its previous responses have {num_bytes} bytes, "
            f"and at most {limit} are allowed."
        )
        raise BadRequest(message, param="previous_response_id", code="conversation_too_long")
    admit(call, num_bytes)


def make_keeper(call: Call, items: list[dict[str, Any]]) -> Callable[[dict[str, Any]], None]:
    """Return a function that stores a finished response, unless the request forbids it."""
    account, store = call.account(), call.state.responses
    return lambda response: store.add(account, response, items) if response["store"] else None


async def complete_response(answer: Answer, events: ResponseEvents) -> bytes:
    """Return the response when it is complete, as JSON."""
    async for deltas in answer:
        events.deltas(deltas)
    events.end()
    return msgspec.json.encode(events.response)


def response_head(
    call: Call, service: Service, body: ResponseBody, generation: Generation
) -> ResponseObject:
    """Return the response before generation: the request's parameters, with defaults filled in."""
    text_format = (body.text and body.text.format) or TextFormat()
    choice = body.tool_choice or "auto"
    head: ResponseObject = {
        "id": generation.request_id,
        "object": "response",
        "created_at": int(generation.created),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": None if body.max_output_tokens == LARGEST else body.max_output_tokens,
        "max_tool_calls": None,
        "model": service.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": call.request is not None if body.store is None else body.store,
        "temperature": generation.params.temperature,
        "text": {"format": text_format.resource()},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.resource() for tool in body.tools or [] if not isinstance(tool, OtherTool)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": generation.params.top_p,
        "truncation": "disabled",
        "metadata": body.metadata or {},
    }
    if body.user is not None:
        head["user"] = body.user
    return head
