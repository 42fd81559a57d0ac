"""/v1/messages/batches: computes many messages with the lowest priority."""

from __future__ import annotations

import io
import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm.core.stored_ids import make_id
from cllm.errors import BadRequest
from cllm.server.anthropic.batch_lines import (
    CUSTOM_ID,
    ENDPOINT,
    MAX_REQUESTS,
    BatchRequest,
    read_requests,
    write_requests,
)
from cllm.server.anthropic.routes import check_version, format_time
from cllm.server.batches import open_batches, send_files, store_file
from cllm.server.body import Body, check_type, describe_route, example, read_bytes
from cllm.server.call import get_call
from cllm.server.list_cursors import find_split
from cllm.server.off_loop import admit, off_loop
from cllm.server.resolve import check_route, model_for
from cllm.server.state import get_state
from cllm.serving.batches import Batches
from cllm.store.batches import BatchRecord
from cllm.store.files import new_file

router = APIRouter(
    prefix="/v1/messages/batches", tags=["Anthropic"], dependencies=[Depends(check_version)]
)

ENDPOINTS = (ENDPOINT,)
WINDOW = 24 * 3600  # seconds until requests without a result expire
KEPT = 29 * 24 * 3600  # seconds for which the results can be read
PURPOSE = "message_batch"  # purpose of their files, which /v1/files does not list


EXAMPLE = {
    "model": "cllm-builtin",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "What is 27 plus 45?"}],
}


class RequestBody(Body):
    custom_id: Annotated[str, Field(pattern=f"^{CUSTOM_ID.pattern}$")]
    params: dict[str, Any] = Field(description="The body of POST /v1/messages, without stream.")


class MessageBatchBody(Body):
    model_config = example(requests=[{"custom_id": "a", "params": EXAMPLE}])

    requests: Annotated[list[RequestBody], Field(min_length=1, max_length=MAX_REQUESTS)]


class MessageBatchCounts(TypedDict):
    """The numbers of requests in each state. They add up to all, also while the batch runs."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(TypedDict):
    """Times are in RFC 3339."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchList(TypedDict):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatch(TypedDict):
    id: str
    type: Literal["message_batch_deleted"]


@router.post("", openapi_extra=describe_route(MessageBatchBody))
async def create(request: Request) -> MessageBatch:
    """Compute all requests, with the lowest priority.

    Each gets a result, in any order; one that is not valid gets an error as its result. A batch
    continues after a crash or a restart, and expires after 24 hours. Batches are visible only with
    the API key that created them.
    """
    batches = await open_batches(request)
    check_type(request.headers.get("content-type", ""))
    data = await read_bytes(request, get_state(request).settings.storage.max_file_mb)
    call = get_call(request)
    account, now = call.account(), int(time.time())
    check_route(account, ENDPOINT)
    admit(call, len(data))
    requests = await off_loop(call, lambda: read_requests(data))
    content = await off_loop(call, lambda: write_requests(requests))
    batch_id = make_id("msgbatch_", call.replica_name)
    file_id = make_id("file-", call.replica_name)
    file = new_file(account.name, f"{batch_id}.jsonl", PURPOSE, len(content), KEPT, file_id)
    record = BatchRecord(
        id=batch_id,
        account=account.name,
        carried=call.carried,
        model=find_model(request, requests[0]),
        endpoint=ENDPOINT,
        input_file_id=file.id,
        completion_window="24h",
        created_at=now,
        expires_at=now + WINDOW,
        output_expires_after=KEPT,
        output_purpose=PURPOSE,
        total=len(requests),
    )
    await store_file(batches.store, file, io.BytesIO(content))
    try:
        await batches.create(record, account)
    except BaseException:
        await batches.store.run(batches.store.files.delete, file.id, account)
        raise
    return batch_object(request, record)


class ModelField(msgspec.Struct):
    model: str


def find_model(request: Request, first: BatchRequest) -> str:
    """Return the name of the model for which a batch waits after a restart: that of its first
    request, or else the default one.
    """
    try:
        return model_for(request, msgspec.json.decode(first.params, type=ModelField).model).name
    except (msgspec.DecodeError, BadRequest):
        return model_for(request).name


@router.get("")
async def list_batches(
    request: Request,
    before_id: str | None = None,
    after_id: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
) -> MessageBatchList:
    """List the batches of this API key, newest first."""
    batches = await open_batches(request)
    records = await batches.list_for(get_call(request).account(), ENDPOINTS)
    ids = [record.id for record in records]
    times = [format_time(record.created_at) for record in records]
    begin, end, has_more = choose_page(ids, times, before_id, after_id, limit)
    shown = records[begin:end]
    return {
        "data": [batch_object(request, record) for record in shown],
        "has_more": has_more,
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
    }


@router.get("/{batch_id}")
async def retrieve(request: Request, batch_id: str) -> MessageBatch:
    """Return the progress of a batch, and where its results are once it has ended."""
    _, record = await find(request, batch_id)
    return batch_object(request, record)


@router.get(
    "/{batch_id}/results",
    openapi_extra=describe_route(stream="application/x-jsonl"),
)
async def results(request: Request, batch_id: str) -> Response:
    """Return the results of a batch that has ended, one line of JSON for each request."""
    batches, record = await find(request, batch_id)
    if not record.has_ended:
        message = f"The batch {record.id} has not ended, so it has no results yet."
        raise BadRequest(message, param="batch_id", code="invalid_status")
    if is_archived(record):
        message = f"The results of the batch {record.id} are no longer available."
        raise BadRequest(message, param="batch_id", code="file_not_found", status=404)
    file_ids = [one for one in (record.output_file_id, record.error_file_id) if one]
    account = get_call(request).account()
    return await send_files(batches.store, file_ids, account, "application/x-jsonl")


@router.post("/{batch_id}/cancel")
async def cancel(request: Request, batch_id: str) -> MessageBatch:
    """Cancel a batch. It keeps the results that it has so far."""
    batches, record = await find(request, batch_id)
    return batch_object(request, await batches.cancel(record))


@router.delete("/{batch_id}")
async def delete(request: Request, batch_id: str) -> DeletedBatch:
    """Delete a batch that has ended, with its results."""
    batches, record = await find(request, batch_id)
    if not record.has_ended:
        message = f"The batch {record.id} has not ended; cancel it first, or wait."
        raise BadRequest(message, param="batch_id", code="invalid_status")
    await batches.store.run(batches.store.batches.delete, record, get_call(request).account())
    return {"id": record.id, "type": "message_batch_deleted"}


async def find(request: Request, batch_id: str) -> tuple[Batches, BatchRecord]:
    """Return the batches, and the message batch ``batch_id``. Raises BadRequest (404)."""
    batches = await open_batches(request)
    return batches, await batches.get(batch_id, get_call(request).account(), ENDPOINTS)


def choose_page(
    ids: list[str], times: list[str], before_id: str | None, after_id: str | None, limit: int
) -> tuple[int, int, bool]:
    """Return the begin and the end of a page of ``ids``, and whether there are more. Instead of an
    id, a front may have written a place among the ``times``. Raises BadRequest if an id is not
    among them.
    """
    if before_id:
        end = find_split(times, before_id, "before_id")
        if end is None:
            end = find_place(before_id, ids, "before_id")
        begin = max(0, end - limit)
        return begin, end, begin > 0
    split = find_split(times, after_id, "after_id") if after_id else 0
    begin = find_place(after_id or "", ids, "after_id") + 1 if split is None else split
    end = min(begin + limit, len(ids))
    return begin, end, end < len(ids)


def find_place(batch_id: str, ids: list[str], param: str) -> int:
    if batch_id not in ids:
        message = f"Invalid '{param}': {batch_id[:100]!r} is not in this list."
        raise BadRequest(message, param=param, code="invalid_value")
    return ids.index(batch_id)


def is_archived(record: BatchRecord) -> bool:
    return time.time() >= record.created_at + KEPT


def batch_object(request: Request, record: BatchRecord) -> MessageBatch:
    """Return a batch in the form that Anthropic's clients expect."""
    status: Literal["in_progress", "canceling", "ended"]
    status = "ended" if record.has_ended else "in_progress"
    cancelled_at = record.times.get("cancelling")
    if cancelled_at and not record.has_ended:
        status = "canceling"
    ended_at = record.times.get(record.status) if record.has_ended else None
    has_results = record.has_ended and not is_archived(record)
    carried = get_call(request).carried
    base_url = carried.base_url if carried else request.base_url
    url = f"{base_url}v1/messages/batches/{record.id}/results"
    return {
        "id": record.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": count_requests(record),
        "created_at": format_time(record.created_at),
        "expires_at": format_time(record.expires_at),
        "ended_at": format_time(ended_at) if ended_at else None,
        "cancel_initiated_at": format_time(cancelled_at) if cancelled_at else None,
        "archived_at": format_time(record.created_at + KEPT) if is_archived(record) else None,
        "results_url": url if has_results else None,
    }


def count_requests(record: BatchRecord) -> MessageBatchCounts:
    left = record.total - record.completed - record.failed
    lost = left if record.has_ended else 0  # the disk was full
    return {
        "processing": left - lost,
        "succeeded": record.completed,
        "errored": record.failed - record.missing + lost,
        "canceled": record.missing if record.ending == "cancelled" else 0,
        "expired": record.missing if record.ending == "expired" else 0,
    }
