"""/v1/files: the input and output files of batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, cast

import pydantic
from fastapi import APIRouter, Query
from pydantic import Field, with_config
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm.core.stored_ids import make_id
from cllm.errors import BadRequest
from cllm.server.batches import open_batches, send_files, store_file
from cllm.server.body import (
    Body,
    check_encoding,
    check_parameters,
    describe_route,
    example,
    first_fault,
    receive_parts,
)
from cllm.server.call import get_call
from cllm.server.openai.paging import ListPage, make_page
from cllm.server.state import get_state
from cllm.store.files import StoredFile, new_file, no_file
from cllm.store.store import Store

router = APIRouter(prefix="/v1/files", tags=["OpenAI"])

MAX_OTHER_BYTES = 65_536  # bytes of an upload for its other fields and the separators
MAX_FIELDS = 10
MAX_NAME = 1024  # characters
PURPOSES = ("batch", "batch_output")  # of this dialect's files


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2_592_000)]


def check_name(name: str) -> str:
    if len(name) > MAX_NAME:
        raise ValueError(f"a file name must have at most {MAX_NAME} characters, not {len(name)}")
    return name


class UploadBody(Body):
    """Sent as multipart/form-data, with ``expires_after`` as expires_after[anchor] and
    expires_after[seconds].
    """

    model_config = example(
        file='{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}',
        purpose="batch",
    )

    # The value is the file's name. A maxLength in the schema would limit the content of the file.
    file: Annotated[
        str,
        pydantic.AfterValidator(check_name),
        Field(description="JSON lines, one request each.", json_schema_extra={"format": "binary"}),
    ]
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


@with_config(
    example(
        id="file-1",
        object="file",
        bytes=120,
        created_at=1735689600,
        filename="requests.jsonl",
        purpose="batch",
        status="processed",
    )
)
class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: NotRequired[int]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


@router.post("", openapi_extra=describe_route(UploadBody, takes="multipart/form-data"))
async def upload(request: Request) -> FileObject:
    """Upload a file with the requests of a batch."""
    store = (await open_batches(request)).store
    form = await read_form(request)
    try:
        values = read_fields(form)
        check_parameters(values, UploadBody, get_call(request))
        try:
            body = UploadBody.model_validate(values)
        except pydantic.ValidationError as error:
            raise first_fault(error) from None
        content = form["file"]
        assert isinstance(content, UploadFile)
        size = content.size or 0
        expires_after = body.expires_after.seconds if body.expires_after else None
        call = get_call(request)
        file_id = make_id("file-", call.replica_name)
        file = new_file(call.account().name, body.file, body.purpose, size, expires_after, file_id)
        await store_file(store, file, content.file)
    finally:
        await form.close()
    return file_object(file)


@router.get("")
async def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> ListPage[FileObject]:
    """List the files of this API key, newest first."""
    store = (await open_batches(request)).store
    files = await store.run(store.files.list_for, get_call(request).account())
    own = [file for file in files if file.purpose in PURPOSES]
    objects = [file_object(file) for file in own if purpose in (None, file.purpose)]
    ascending = order == "asc"
    return make_page(objects if ascending else objects[::-1], after, limit, ascending=ascending)


@router.get("/{file_id}")
async def retrieve(request: Request, file_id: str) -> FileObject:
    """Return the description of a file."""
    _, file = await find(request, file_id)
    return file_object(file)


@router.get("/{file_id}/content", openapi_extra=describe_route(stream="application/octet-stream"))
async def content(request: Request, file_id: str) -> Response:
    """Return the content of a file."""
    store, _ = await find(request, file_id)
    account = get_call(request).account()
    return await send_files(store, [file_id], account, "application/octet-stream")


@router.delete("/{file_id}")
async def delete(request: Request, file_id: str) -> DeletedFile:
    """Delete a file, unless a batch still reads it."""
    store, _ = await find(request, file_id)
    await store.run(store.files.delete, file_id, get_call(request).account())
    return {"id": file_id, "object": "file", "deleted": True}


async def find(request: Request, file_id: str) -> tuple[Store, StoredFile]:
    """Return the store and a file. Raises BadRequest (404), also for one of another dialect."""
    store = (await open_batches(request)).store
    file = await store.run(store.files.get, file_id, get_call(request).account())
    if file.purpose not in PURPOSES:
        raise no_file(file_id, "file_id")
    return store, file


def read_fields(form: FormData) -> dict[str, Any]:
    """Return the fields of a form; a[b] becomes b within a. Raises BadRequest."""
    values: dict[str, Any] = {}
    for name, value in form.multi_items():
        outer, _, inner = name.partition("[")
        if isinstance(value, UploadFile):
            values[name] = value.filename or "file"
        elif inner and isinstance(within := values.setdefault(outer, {}), dict):
            within[inner.removesuffix("]")] = (
                int(value) if value.isdecimal() and len(value) < 12 else value
            )
        elif name == "file":
            raise BadRequest(
                "Invalid 'file': it must be a file with a name.", param="file", code="invalid_type"
            )
        else:
            values[name] = value
    return values


async def read_form(request: Request) -> FormData:
    """Return the form, with its file in memory or, if it is large, on disk.

    Raises BadRequest: 400, 408, 413 or 415.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        message = f"The Content-Type must be multipart/form-data, not {content_type[:80]!r}."
        raise BadRequest(message, code="unsupported_media_type", status=415)
    check_encoding(request)
    limit = get_state(request).settings.storage.max_file_mb * 1_000_000
    too_large = BadRequest(
        f"The file is larger than {limit} bytes (storage.max_file_mb).",
        param="file",
        code="file_too_large",
        status=413,
    )
    parts = receive_parts(request, limit + MAX_OTHER_BYTES, too_large)
    parser = MultiPartParser(
        request.headers, parts, max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_OTHER_BYTES
    )
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise BadRequest(
            f"The form cannot be read: {error.message[:200]}", code="invalid_form"
        ) from None


def file_object(file: StoredFile) -> FileObject:
    answer: FileObject = {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": cast("Literal['batch', 'batch_output']", file.purpose),
        "status": "processed",
    }
    if file.expires_at is not None:
        answer["expires_at"] = file.expires_at
    return answer
