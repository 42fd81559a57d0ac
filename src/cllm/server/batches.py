"""The stored batches and files of an application, which several dialects use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from starlette.requests import Request

from cllm.errors import BadRequest
from cllm.server.call import Call
from cllm.server.off_loop import admit, off_loop
from cllm.server.resolve import check_route, find_allowed, load, with_adapters
from cllm.server.state import ServerState, get_state
from cllm.serving.batches import Batches, BatchLines
from cllm.serving.service import Service
from cllm.store.batches import BatchRecord
from cllm.store.files import StoredFile
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
    return Batches(store, state.registry, lines, state.settings.scheduler.max_num_seqs)


async def open_batches(request: Request) -> Batches:
    """Return the batches, with their store open.

    Raises BadRequest if the settings have no folder (404), or if it cannot be opened (503).
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


async def begin_request(
    state: ServerState,
    record: BatchRecord,
    custom_id: str,
    num_bytes: int,
    read: Callable[[Call], Any],
    default_model: str | None = None,
) -> tuple[Call, Service, Any]:
    """Return the call of a request of a batch, the service of its model, and its body.

    ``read`` returns the body, which has ``num_bytes``. ``default_model`` is the model of a body
    that names none. Raises what a route with the same body would raise.
    """
    call = Call(state, record.account, body_hash=hash((record.id, custom_id)))
    account = call.account()
    check_route(account, record.endpoint)
    admit(call, num_bytes)
    body = await off_loop(call, lambda: read(call))
    model = find_allowed(state.registry, account, body.model or default_model)
    service = await load(state.registry, model, call)
    return call, with_adapters(state.registry, model, service, call), body


def chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while data := file.read(CHUNK):
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
