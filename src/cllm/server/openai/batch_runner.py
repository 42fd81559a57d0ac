"""Computes batches alongside other requests, with the priority ``batch``.

Continues them after a restart or a crash.

A line is computed by the route that it names, in this process and without HTTP. Its answer is on
disk before it is counted. Lines in flight when the server stops have no answer yet, so the next
server computes them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.types import Message

from cllm.answer import RequestTimeout
from cllm.errors import BadRequest, EngineError
from cllm.process.backlog import QueueFull
from cllm.registry import Registry
from cllm.server.errors import describe, openai_form
from cllm.server.openai.batch_record import (
    FINAL,
    BatchFiles,
    BatchRecord,
    check_lines,
    load_records,
    numbered_lines,
)
from cllm.server.openai.file_store import FileStore, StateFolder, disk_fault, new_file, new_id
from cllm.server.queueing import BATCH_OWNER
from cllm.server.request_id import request_id
from cllm.service import Service

T = TypeVar("T")

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
MAX_UNFINISHED = 100
MAX_RECORDS = 1000  # beyond that, the oldest batches that have ended are deleted
TRIES = 3  # of a line, if the engine fails
PAUSE = 0.1  # seconds between two checks of an engine that is not ready
MISSING = {  # why a line has no answer, by the status of its batch
    "expired": "The completion window has ended before this request could be computed.",
    "cancelled": "The batch was cancelled before this request was computed.",
}

INTERNAL = {"code": "internal_error", "message": "Internal error.", "line": None, "param": None}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DISK_PAUSE = 2.0  # seconds between two attempts to write to a full disk
LINES_AT_ONCE = 500  # unanswered lines that are reported in one write

log = logging.getLogger("cllm.batches")


class Batches:
    """All batches, and the files that they read and write.

    Batches run concurrently and take turns.
    """

    def __init__(
        self, app: FastAPI, folder: Path, files: FileStore, max_lines_at_once: int
    ) -> None:
        self.files = files
        self._app = app
        self._folder = StateFolder(folder)
        self._records: dict[str, BatchRecord] = {}
        self._parts: dict[str, BatchFiles] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._working: dict[str, asyncio.Task[None]] = {}  # tasks that answer the lines of a batch
        self._slots = asyncio.Semaphore(max_lines_at_once)
        # one thread, so that files are written in order
        self._disk = ThreadPoolExecutor(1, "cllm-batches")
        files.is_read = lambda file_id: self.reader_of(file_id) is not None

    def open(self) -> None:
        """Open the folder, and continue the batches of an earlier server.

        Raises BadRequest (503).
        """
        if self._folder.is_open:
            return
        self._folder.open()
        try:
            self.files.load()
            self._load()
        except BaseException:
            self._folder.close()
            raise

    def _load(self) -> None:
        for record in load_records(self._folder.path / "batches"):
            self._records[record.id] = record
            self.files.take_room(self._files_of(record).num_bytes(), check=False)
            if record.status not in FINAL:
                log.info("the batch %s goes on", record.id)
                self._start(record)

    def start(self) -> None:
        """Continue the batches of an earlier server, if there is a folder.

        Call this when the event loop runs.
        """
        if self._folder.path.exists():
            with contextlib.suppress(BadRequest):  # which has been logged
                self.open()

    async def stop(self) -> None:
        """Stop computing. The next server computes the lines that have no answer yet."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._disk.shutdown)
        self._folder.close()

    async def create(self, record: BatchRecord) -> None:
        """Start a batch.

        Its record is on disk when this returns. Raises BadRequest if there is no room.
        """
        if sum(other.status not in FINAL for other in self._records.values()) >= MAX_UNFINISHED:
            message = (
                f"{MAX_UNFINISHED} batches are being computed or wait; please retry when "
                f"one has ended."
            )
            raise BadRequest(message, code="too_many_batches", status=429)
        self.files.check_room(2)
        self._records[record.id] = record  # from now on its input file cannot be deleted
        try:
            await self._in_thread(self._files_of(record).save, record)
        except OSError as error:
            del self._records[record.id], self._parts[record.id]
            raise disk_fault(error) from None
        ended = [other for other in self._records.values() if other.status in FINAL]
        for other in sorted(ended, key=lambda other: other.created_at)[
            : max(0, len(self._records) - MAX_RECORDS)
        ]:
            del self._records[other.id]
            self._files_of(other).delete()
            del self._parts[other.id]
        self._start(record)

    def get(self, batch_id: str, owner: str) -> BatchRecord:
        """Return a batch.

        Raises BadRequest (404) if it does not exist or belongs to another account.
        """
        record = self._records.get(batch_id)
        if record is None or record.owner != owner:
            message = f"There is no batch {batch_id[:100]!r}."
            raise BadRequest(message, param="batch_id", code="batch_not_found", status=404)
        return record

    def owned_by(self, owner: str) -> list[BatchRecord]:
        """Return the batches of ``owner``, newest first."""
        records = [record for record in self._records.values() if record.owner == owner]
        return sorted(records, key=lambda record: record.created_at, reverse=True)

    def reader_of(self, file_id: str) -> str | None:
        """Return the id of a batch that still needs a file, or None."""
        readers = (
            r.id
            for r in self._records.values()
            if r.input_file_id == file_id and r.status not in FINAL
        )
        return next(readers, None)

    async def cancel(self, record: BatchRecord) -> None:
        """End a batch with the answers that it has.

        Raises BadRequest if it is too late for that.
        """
        if record.status not in ("validating", "in_progress", "cancelling"):
            message = f"The batch is {record.status}; it cannot be cancelled any longer."
            raise BadRequest(message, param="batch_id", code="invalid_status")
        if record.status != "cancelling":
            await self._turn(record, "cancelling")
        if record.id in self._working:
            self._working[record.id].cancel()

    def _files_of(self, record: BatchRecord) -> BatchFiles:
        files = self._parts.get(record.id)
        if files is None:
            files = self._parts[record.id] = BatchFiles(self._folder.path / "batches", record.id)
        return files

    def _start(self, record: BatchRecord) -> None:
        task = asyncio.create_task(self._run(record))
        self._running[record.id] = task
        task.add_done_callback(lambda _: self._running.pop(record.id))

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *arguments)

    async def _on_disk(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``work``. While the disk is full, wait and retry."""
        while True:
            try:
                return await self._in_thread(work, *arguments)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                log.warning("a batch waits for room on the disk: %s", error)
                await asyncio.sleep(DISK_PAUSE)

    async def _turn(self, record: BatchRecord, status: str) -> None:
        """Change the status of ``record``, in memory and on disk."""
        record.status = status
        record.times = {**record.times, status: int(time.time())}
        await self._on_disk(self._files_of(record).save, record)

    async def _run(self, record: BatchRecord) -> None:
        """Run a batch from its current status to its end."""
        try:
            if record.status == "validating":
                await self._validate(record)
            if record.status not in FINAL:
                record.ending = record.ending or await self._work(record)
                await self._finish(record)
        except Exception:
            log.exception("the batch %s failed", record.id)
            record.errors = [INTERNAL]
            await self._turn(record, "failed")

    async def _validate(self, record: BatchRecord) -> None:
        path = self.files.path(record.input_file_id)
        record.total, record.errors = await asyncio.to_thread(
            check_lines, path, record.endpoint, self._max_line()
        )
        if record.errors:
            await self._turn(record, "failed")
        elif record.status == "validating":  # and not cancelled meanwhile
            await self._turn(record, "in_progress")

    @property
    def _service(self) -> Service:
        """The service of the default model."""
        registry: Registry = self._app.state.registry
        return registry.get()

    def _max_line(self) -> int:
        return int(self._app.state.settings.server.max_body_mb) * 1_000_000

    async def _work(self, record: BatchRecord) -> str:
        """Answer lines until all are answered or the batch expires, is cancelled or fails.

        Return its final status.
        """
        if record.status == "cancelling":
            return "cancelled"
        self._working[record.id] = work = asyncio.create_task(self._answer_all(record))
        try:
            await asyncio.wait({work}, timeout=max(0.0, record.expires_at - time.time()))
            if not work.done():
                return "expired"
            if work.cancelled():
                return "cancelled"
            work.result()
            return "completed"
        except ExceptionGroup as group:
            full, others = group.split(BadRequest)
            if full is None or others is not None:
                log.exception("the batch %s failed", record.id)
                record.errors = [INTERNAL]
            else:
                message = str(full.exceptions[0])
                record.errors = [
                    {"code": "storage_full", "message": message, "line": None, "param": None}
                ]
            return "failed"
        finally:
            del self._working[record.id]
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _answer_all(self, record: BatchRecord) -> None:
        """Answer every line that has no answer yet."""
        if record.model != self._service.model_name:
            log.warning(
                "the batch %s waits for a server with the model %s", record.id, record.model
            )
            await asyncio.get_running_loop().create_future()  # until it is cancelled, or expires
        answered = await self._recount(record)
        async with asyncio.TaskGroup() as group:
            async for line in self._lines(record):
                if line["custom_id"] not in answered:
                    await self._slots.acquire()
                    try:
                        task = group.create_task(self._answer(record, line))
                    except BaseException:
                        self._slots.release()
                        raise
                    task.add_done_callback(lambda _: self._slots.release())

    async def _lines(self, record: BatchRecord) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the requests of a batch."""
        lines = (
            from_json(text)
            for _, text in numbered_lines(self.files.path(record.input_file_id), self._max_line())
        )
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            yield line

    async def _recount(self, record: BatchRecord) -> set[str]:
        """Return the custom_ids that have an answer.

        Set their number and their tokens in ``record``.
        """
        completed, failed, record.usage = await self._on_disk(self._files_of(record).answered)
        record.completed, record.failed = len(completed), len(failed)
        return completed | failed

    async def _answer(self, record: BatchRecord, line: dict[str, Any]) -> None:
        status, content, name = await self._compute(record, line["body"])
        answer = b'{"status_code":%d,"request_id":%s,"body":%s}' % (status, to_json(name), content)
        self._add(record, line["custom_id"], answer, b"null", succeeded=status == 200)
        await self._on_disk(self._files_of(record).flush)
        if status == 200:
            record.completed += 1
        else:
            record.failed += 1

    def _add(
        self, record: BatchRecord, custom_id: str, answer: bytes, error: bytes, *, succeeded: bool
    ) -> None:
        """Add a line, to be flushed. Raises BadRequest if there is no room for an answer."""
        head = to_json({"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id})[:-1]
        data = head + b',"response":' + answer + b',"error":' + error + b"}\n"
        self.files.take_room(len(data), check=error == b"null")
        self._files_of(record).add(data, succeeded=succeeded)

    async def _compute(self, record: BatchRecord, body: dict[str, Any]) -> tuple[int, bytes, str]:
        """Return the status, the content and the request id of the answer to one line."""
        tries = 0
        while True:
            while not self._service.ready:  # noqa: ASYNC110  # too rare to be worth an event
                await asyncio.sleep(PAUSE)
            request = request_of(self._app, record, to_json(body))
            try:
                response = await endpoint_of(self._app, record.endpoint).endpoint(request)
                return (
                    response.status_code,
                    bytes(response.body),
                    response.headers.get("x-request-id", request_id(request)),
                )
            except QueueFull as error:
                await asyncio.sleep(error.retry_after)
            except Exception as error:
                tries += 1
                again = isinstance(error, (EngineError, RequestTimeout))
                if not again or tries == TRIES:
                    if not isinstance(error, (BadRequest, EngineError, RequestTimeout)):
                        log.exception("a line of the batch %s failed", record.id)
                    status, content = openai_form(describe(error))
                    return status, to_json(content), request_id(request)
                await asyncio.sleep(getattr(error, "retry_after", PAUSE))

    async def _finish(self, record: BatchRecord) -> None:
        """Complete a batch whose lines are done. This can be repeated after a crash."""
        parts = self._files_of(record)
        # else counted, and files may have moved
        if record.output_file_id is None and record.error_file_id is None:
            answered = await self._recount(record)
            if record.ending in MISSING:
                await self._say_what_is_missing(record, answered)
            elif record.status != "finalizing":
                await self._turn(record, "finalizing")
            record.output_file_id = new_id() if record.completed else None
            record.error_file_id = new_id() if record.failed else None
            await self._on_disk(parts.save, record)
        for path, file_id in (
            (parts.output, record.output_file_id),
            (parts.errors, record.error_file_id),
        ):
            if file_id is not None and path.exists():
                name, size = f"{record.id}{path.suffix}.jsonl", path.stat().st_size
                file = new_file(
                    record.owner, name, "batch_output", size, record.output_expires_after, file_id
                )
                await self._on_disk(self.files.adopt, file, path)
                self.files.keep(file)
        await self._turn(record, record.ending)
        log.info(
            "the batch %s is %s: %d answers, %d errors",
            record.id,
            record.ending,
            record.completed,
            record.failed,
        )

    async def _say_what_is_missing(self, record: BatchRecord, answered: set[str]) -> None:
        error = to_json({"code": f"batch_{record.ending}", "message": MISSING[record.ending]})
        files, num_missing = self._files_of(record), 0
        async for line in self._lines(record):
            if line["custom_id"] not in answered:
                self._add(record, line["custom_id"], b"null", error, succeeded=False)
                num_missing += 1
                if num_missing % LINES_AT_ONCE == 0:
                    await self._on_disk(files.flush)
        await self._on_disk(files.flush)
        record.failed += num_missing


def endpoint_of(app: FastAPI, path: str) -> APIRoute:
    """Return the route of an endpoint."""
    routes: list[APIRoute] = app.state.routes
    return next(route for route in routes if route.path == path)


def request_of(app: FastAPI, record: BatchRecord, body: bytes) -> Request:
    """Return the request of one line, as its route reads it. Its client never disconnects."""
    scope = {
        "type": "http",
        "app": app,
        "method": "POST",
        "path": record.endpoint,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        BATCH_OWNER: record.owner,
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        gone: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await gone

    return Request(scope, receive)
