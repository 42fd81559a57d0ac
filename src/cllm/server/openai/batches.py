"""/v1/batches: computes the requests in a file, with the lowest priority."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query
from pydantic import Field
from starlette.requests import Request

from cllm.config import Settings
from cllm.server.body import Body, documented, example, read_body
from cllm.server.openai.batch_record import BatchRecord
from cllm.server.openai.batch_runner import Batches, Endpoint
from cllm.server.openai.file_store import FileStore
from cllm.server.openai.files import ExpiresAfter, opened
from cllm.server.openai.paging import page
from cllm.server.openai.schema import Metadata
from cllm.server.openai.stored_answers import BatchList, BatchObject
from cllm.server.queueing import account
from cllm.server.resolve import service_for

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


def make(app: FastAPI, settings: Settings) -> Batches | None:
    """Return the batches and files of an application; None if its settings have no folder for
    them.
    """
    storage = settings.storage
    if storage.folder is None:
        return None
    folder = Path(storage.folder).expanduser()
    files = FileStore(folder / "files", storage.max_files, storage.max_files_mb * 1_000_000)
    return Batches(app, folder, files, settings.scheduler.max_num_seqs)


@router.post("", openapi_extra=documented(BatchBody, BatchObject))
async def create(request: Request) -> dict[str, Any]:
    """Compute all requests of an uploaded file, with the lowest priority.

    The answers are written to one file and the errors to another, in any order. A batch continues
    after a crash or a restart, if the server has the same model. Files and batches are visible only
    with the API key that created them.
    """
    batches = opened(request)
    body = await read_body(request, BatchBody)
    owner, now = account(request, None), int(time.time())
    batches.files.get(body.input_file_id, owner, "input_file_id")
    window = re.fullmatch(WINDOW, body.completion_window)
    assert window is not None
    record = BatchRecord(
        id=f"batch_{secrets.token_hex(12)}",
        owner=owner,
        model=service_for(request).model_name,
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
    await batches.create(record)
    return record.public()


@router.get("", openapi_extra=documented(answer=BatchList))
async def list_batches(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> dict[str, Any]:
    """List the batches of this API key, newest first."""
    records = opened(request).owned_by(account(request, None))
    return page([record.public() for record in records], after, limit)


@router.get("/{batch_id}", openapi_extra=documented(answer=BatchObject))
async def retrieve(request: Request, batch_id: str) -> dict[str, Any]:
    """Return the progress of a batch, and the ids of its output files once it has ended."""
    return opened(request).get(batch_id, account(request, None)).public()


@router.post("/{batch_id}/cancel", openapi_extra=documented(answer=BatchObject))
async def cancel(request: Request, batch_id: str) -> dict[str, Any]:
    """Cancel a batch. It keeps the answers that it has so far."""
    batches = opened(request)
    record = batches.get(batch_id, account(request, None))
    await batches.cancel(record)
    return record.public()
