"""/v1/batches: computes the requests in a file, with the lowest priority."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Literal, NotRequired, cast

from fastapi import APIRouter, Query
from pydantic import Field, with_config
from starlette.requests import Request
from typing_extensions import TypedDict

from cllm.core.stored_ids import make_id
from cllm.server.batches import open_batches
from cllm.server.body import Body, describe_route, example, read_body
from cllm.server.call import get_call
from cllm.server.openai.batches.files import ExpiresAfter
from cllm.server.openai.batches.lines import ENDPOINTS, Endpoint
from cllm.server.openai.paging import ListPage, make_page
from cllm.server.openai.schema import Metadata
from cllm.server.resolve import check_route, model_for
from cllm.store.batches import STATUSES, BatchRecord, Status

router = APIRouter(prefix="/v1/batches", tags=["OpenAI"])

WINDOW = r"^([1-9][0-9]{0,2})([hd])$"
SECONDS = {"h": 3600, "d": 86_400}


class BatchBody(Body):
    model_config = example(
        input_file_id="file-1", endpoint="/v1/chat/completions", completion_window="24h"
    )

    input_file_id: Annotated[str, Field(max_length=200)]
    endpoint: Endpoint
    completion_window: Annotated[
        str,
        Field(
            pattern=WINDOW,
            description="Time limit, such as 24h or 2d; requests without an answer by then expire.",
        ),
    ]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchInputDetails(TypedDict):
    cached_tokens: int


class BatchOutputDetails(TypedDict):
    reasoning_tokens: int


class BatchUsage(TypedDict):
    """Tokens of all answers together. Complete once the batch has ended."""

    input_tokens: int
    input_tokens_details: BatchInputDetails
    output_tokens: int
    output_tokens_details: BatchOutputDetails
    total_tokens: int


@with_config(
    example(
        id="batch_1",
        object="batch",
        endpoint="/v1/chat/completions",
        model="cllm-builtin",
        input_file_id="file-1",
        completion_window="24h",
        status="in_progress",
        created_at=1735689600,
        expires_at=1735776000,
        request_counts={"total": 100, "completed": 40, "failed": 1},
        usage={
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
        metadata=None,
    )
)
class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    validating_at: NotRequired[int]
    in_progress_at: NotRequired[int]
    finalizing_at: NotRequired[int]
    completed_at: NotRequired[int]
    failed_at: NotRequired[int]
    expired_at: NotRequired[int]
    cancelling_at: NotRequired[int]
    cancelled_at: NotRequired[int]
    request_counts: RequestCounts
    usage: BatchUsage
    output_file_id: NotRequired[str]
    error_file_id: NotRequired[str]
    errors: NotRequired[dict[str, Any]]
    metadata: dict[str, str] | None


@router.post("", openapi_extra=describe_route(BatchBody))
async def create(request: Request) -> BatchObject:
    """Compute all requests of an uploaded file, with the lowest priority.

    The answers are written to one file and the errors to another, in any order. A batch continues
    after a crash or a restart, if the server has the same model. Files and batches are visible only
    with the API key that created them.
    """
    batches = await open_batches(request)
    body = await read_body(request, BatchBody)
    account, now = get_call(request).account(), int(time.time())
    check_route(account, body.endpoint)
    window = re.fullmatch(WINDOW, body.completion_window)
    assert window is not None
    record = BatchRecord(
        id=make_id("batch_", get_call(request).replica_name),
        account=account.name,
        carried=get_call(request).carried,
        model=model_for(request).name,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + int(window[1]) * SECONDS[window[2]],
        metadata=body.metadata,
        output_expires_after=body.output_expires_after.seconds
        if body.output_expires_after
        else None,
    )
    await batches.create(record, account)
    return batch_object(record)


@router.get("")
async def list_batches(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> ListPage[BatchObject]:
    """List the batches of this API key, newest first."""
    records = await (await open_batches(request)).list_for(get_call(request).account(), ENDPOINTS)
    return make_page([batch_object(record) for record in records], after, limit)


@router.get("/{batch_id}")
async def retrieve(request: Request, batch_id: str) -> BatchObject:
    """Return the progress of a batch, and the ids of its output files once it has ended."""
    return batch_object(
        await (await open_batches(request)).get(batch_id, get_call(request).account(), ENDPOINTS)
    )


@router.post("/{batch_id}/cancel")
async def cancel(request: Request, batch_id: str) -> BatchObject:
    """Cancel a batch. It keeps the answers that it has so far."""
    batches = await open_batches(request)
    record = await batches.get(batch_id, get_call(request).account(), ENDPOINTS)
    return batch_object(await batches.cancel(record))


def batch_object(record: BatchRecord) -> BatchObject:
    """Return a batch as OpenAI's clients see it."""
    content = {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "input_file_id": record.input_file_id,
        "completion_window": record.completion_window,
        "status": record.status,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        **{f"{status}_at": record.times.get(status) for status in STATUSES},
        "request_counts": {
            "total": record.total,
            "completed": record.completed,
            "failed": record.failed,
        },
        "usage": usage_object(record.usage),
        "output_file_id": record.output_file_id if record.has_ended else None,
        "error_file_id": record.error_file_id if record.has_ended else None,
        "errors": {"object": "list", "data": record.errors} if record.errors else None,
    }
    known = {key: value for key, value in content.items() if value is not None}
    return cast("BatchObject", {**known, "metadata": record.metadata})


def usage_object(usage: dict[str, int]) -> BatchUsage:
    read, written = usage.get("input", 0), usage.get("output", 0)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": usage.get("cached", 0)},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": usage.get("reasoning", 0)},
        "total_tokens": read + written,
    }
