"""The stored batches and files of an application, which several dialects use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request

from cllm.config.settings import Settings
from cllm.errors import BadRequest
from cllm.server.state import get_state
from cllm.serving.batches import Batches, BatchLines
from cllm.serving.registry import Registry
from cllm.store.files import StoredFile
from cllm.store.store import Store

CHUNK = 1 << 20


def make_batches(
    registry: Registry, settings: Settings, lines: Mapping[str, BatchLines]
) -> Batches | None:
    """Return the batches and files of an application; None if its settings have no folder for
    them.
    """
    storage = settings.storage
    if storage.folder is None:
        return None
    folder = Path(storage.folder).expanduser()
    store = Store(folder, storage.max_files, storage.max_files_mb * 1_000_000)
    return Batches(store, registry, lines, settings.scheduler.max_num_seqs)


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
