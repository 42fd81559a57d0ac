"""The stored batches and files of an application, which several dialects use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cllm.core.account import Account
from cllm.errors import BadRequest
from cllm.observe.request_record import RequestRecord
from cllm.process.backlog import QueueFull
from cllm.server.call import Call
from cllm.server.errors import describe
from cllm.server.http.request_id import new_request_id
from cllm.server.off_loop import admit, off_loop
from cllm.server.resolve import check_route, find_allowed, load, with_adapters
from cllm.server.state import ServerState, get_state
from cllm.serving.batches import Batches, BatchLines
from cllm.serving.service import Service
from cllm.store.batches import BatchRecord
from cllm.store.files import FileStore, StoredFile
from cllm.store.store import Store

CHUNK = 1 << 20


def make_batches(state: ServerState, lines: Mapping[str, BatchLines]) -> Batches | None:
    """Return the batches and files of an application; None if its settings have no folder for
    them.
    """
    storage = state.settings.storage
    if storage.folder is None:
        return None
    folder = Path(storage.folder).expanduser()
    store = Store(folder, storage.max_files, storage.max_files_mb * 1_000_000)
    max_lines = state.settings.scheduler.max_num_seqs
    return Batches(store, state.registry, lines, max_lines, state.access.reports)


async def open_batches(request: Request) -> Batches:
    """Return the batches, with their store open.

    Raises BadRequest if the settings name no folder (404), or if the store cannot be opened (503).
    """
    batches = get_state(request).batches
    if batches is None:
        raise BadRequest(
            "Files and batches are disabled on this server (storage.folder).",
            code="storage_off",
            status=404,
        )
    await batches.open()
    return batches


@contextmanager
def recording(
    state: ServerState, batch: BatchRecord, dialect: str
) -> Generator[RequestRecord, None, None]:
    """Make the record of a request of a batch, which ends with the context, but not if the request
    will be tried again because the queue is full.
    """
    record = RequestRecord(new_request_id(), "POST", batch.endpoint, dialect, batch_id=batch.id)
    if state.request_log.tracer is not None:
        state.request_log.tracer(record, "")
    try:
        yield record
        record.status = 200
    except QueueFull:
        raise
    except Exception as error:
        fault = describe(error)
        record.status, record.error_code = fault.status, fault.code or ""
        record.error_field = (fault.param or "")[:100]
        raise
    finally:
        if record.status:
            state.request_log.end(record)


async def begin_request(
    state: ServerState,
    request: RequestRecord,
    record: BatchRecord,
    custom_id: str,
    num_bytes: int,
    read: Callable[[Call], Any],
    default_model: str | None = None,
) -> tuple[Call, Service, Any]:
    """Return the call of a request of a batch, the service of its model, and its body.

    ``request`` gets what becomes of it. ``read`` returns the body, which has ``num_bytes``.
    ``default_model`` is the model of a body that names none. Raises what a route with the same body
    would raise.
    """
    body_hash = hash((record.id, custom_id))
    call = Call(state, record.account, body_hash=body_hash, carried=record.carried, record=request)
    account = call.account()
    if record.carried is not None:
        state.access.reports.check(record.carried)
    check_route(account, record.endpoint)
    admit(call, num_bytes)
    body = await off_loop(call, lambda: read(call))
    model = find_allowed(state.registry, account, body.model or default_model)
    service = await load(state.registry, model, call)
    return call, with_adapters(state.registry, model, service, call), body


async def send_files(
    store: Store, file_ids: Iterable[str], account: Account, media_type: str
) -> Response:
    """Return an answer with the contents of stored files. Raises BadRequest if one does not
    exist.
    """
    opened = await store.run(open_all, store.files, file_ids, account)
    headers = {"content-length": str(sum(file.bytes for file, _ in opened))}
    contents = [content for _, content in opened]
    return StreamingResponse(read_all(contents), headers=headers, media_type=media_type)


def open_all(
    files: FileStore, file_ids: Iterable[str], account: Account
) -> list[tuple[StoredFile, BinaryIO]]:
    """Return the records and the contents of files. Raises BadRequest; then no content is open."""
    opened = []
    with ExitStack() as stack:
        for file_id in file_ids:
            opened.append(files.open(file_id, account))
            stack.enter_context(opened[-1][1])
        stack.pop_all()
    return opened


def read_all(contents: list[BinaryIO]) -> Generator[bytes, None, None]:
    """Yield the contents, and close all of them, also if no more is read."""
    with ExitStack() as stack:
        for content in contents:
            stack.enter_context(content)
        for content in contents:
            while data := content.read(CHUNK):
                yield data


async def store_file(store: Store, file: StoredFile, content: BinaryIO) -> None:
    """Write a file to disk. Raises BadRequest if there is no room, or the disk fails."""
    store.room.take(file.bytes, 1)
    try:
        await asyncio.to_thread(store.files.write, file, content)
        await store.run(store.files.add, file)
    except BaseException:
        store.room.give_back(file.bytes, 1)
        raise
