"""POST /v1/chat/completions/control: ends the reasoning of an answer that is being generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from typing_extensions import TypedDict

from cllm.core.request import Request as EngineRequest
from cllm.errors import BadRequest
from cllm.process.pool import Pool
from cllm.server.body import Body, describe_route, example, read_body
from cllm.server.call import Call, get_call
from cllm.server.http.paths import CONTROL_PATH
from cllm.server.state import get_state
from cllm.serving.delivered import find_answer_id

router = APIRouter(tags=["llama-server"])


class ControlBody(Body):
    model_config = example(id="chatcmpl-1", action="reasoning_end")

    id: Annotated[str, Field(min_length=1, max_length=200)] = Field(
        description="The id of a chat completion, or of a response."
    )
    action: Literal["reasoning_end"]
    model: str | None = Field(default=None, description="It has no effect; ids are unique.")


class ControlAnswer(TypedDict):
    success: bool
    message: NotRequired[str]


@router.post(CONTROL_PATH, openapi_extra=describe_route(ControlBody))
async def control(request: Request) -> ControlAnswer:
    """End the reasoning of an answer now, or as soon as it begins, so that the text follows.

    The request of the answer must have had ``reasoning_control``, and belong to the same account;
    an administrator may end the reasoning of any. Nothing happens if the reasoning has ended.
    """
    body, call = await read_body(request, ControlBody), get_call(request)
    parts = [
        (pool, part)
        for pool, part in list_parts(request, body.id)
        if may_control(call, part.account)
    ]
    if not parts:
        account = get_state(request).ended.find_account(body.id)
        if account is None or not may_control(call, account):
            message = f"There is no completion {body.id[:100]!r}, or it has ended long ago."
            raise BadRequest(message, param="id", code="completion_not_found", status=404)
        return {"success": False, "message": "no active completion for this id"}
    for pool, part in parts:
        if part.params.thinking is None or not part.params.thinking.ends_on_request:
            message = "reasoning control not enabled for this completion"
            return {"success": False, "message": message}
        pool.end_reasoning(part.request_id)
    return {"success": True}


def may_control(call: Call, account: str) -> bool:
    return call.account().is_admin or call.scheduling_account().name == account


def list_parts(request: Request, answer_id: str) -> Iterator[tuple[Pool, EngineRequest]]:
    """Yield the unfinished requests to engines for an answer, one for each of its prompts."""
    pools = [model.engine for model in get_state(request).registry.models if model.parent is None]
    for pool in filter(None, pools):
        for _, entry in pool.list_requests():
            for stream in entry.readers:
                for part in stream.requests:
                    if find_answer_id(part.request_id) == answer_id:
                        yield pool, part
