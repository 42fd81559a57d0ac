"""Computes batches alongside other requests. Continues them after a restart or a crash.

A dialect reads the requests of a batch and computes their answers (``BatchLines``). The answer to a
request is on disk before it is counted. Requests in flight when the server stops have no answer
yet, so the next server computes them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from cllm.core.account import Account
from cllm.core.stored_ids import find_replica, make_id
from cllm.errors import (
    BadRequest,
    CLLMError,
    EngineError,
    FatalRequest,
    RateLimited,
    Unauthorized,
    UnknownModel,
)
from cllm.process.backlog import QueueFull
from cllm.serving.answer import RequestTimeout
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.store.batches import FINAL, BatchRecord, Status, no_batch
from cllm.store.charges import HeldCharges, hold_charges
from cllm.store.store import Store
from cllm.store.usage_reports import UsageReports

T = TypeVar("T")

TRIES = 3  # for a request, if the engine fails
PAUSE = 0.1  # seconds between two checks of an engine that is not ready
MISSING = {  # why a request has no answer, by the status of its batch
    "expired": "The completion window ended before this request was computed.",
    "cancelled": "The batch was cancelled before this request was computed.",
}
INTERNAL = {"code": "internal_error", "message": "Internal error.", "line": None, "param": None}
KEY_PAUSE = 10.0  # seconds between two checks of an account without a key, or without a budget
DISK_PAUSE = 2.0  # seconds between two attempts to use a disk that is full or fails
MISSING_LINES_PER_WRITE = 500  # unanswered requests that are reported in one write

log = logging.getLogger("cllm.batches")


class BatchLines(Protocol):
    """Reads the requests of batches and writes their answers, one line for each, in a dialect."""

    def check(self, path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
        """Return the number of requests in a file, and the faults that make a batch fail."""
        ...

    def read(self, path: Path) -> Iterator[tuple[str, Any]]:
        """Yield the id and the body of each request in a file without faults."""
        ...

    async def answer(
        self, record: BatchRecord, request_id: str, body: Any, model: ServedModel
    ) -> bytes:
        """Return the answer to a request, computed with the lowest priority by the model that the
        request names, or else by ``model``.

        Raises an error if there is no answer.
        """
        ...

    def fault(self, request_id: str, error: Exception) -> bytes:
        """Return the answer to a request that has failed."""
        ...

    def unanswered(self, request_id: str, code: str, message: str) -> bytes:
        """Return the line for a request that has not been computed."""
        ...

    def identify(self, answer: bytes) -> tuple[str, dict[str, int]]:
        """Return the id of an answer's request, and its numbers of tokens: input, cached, output,
        reasoning.
        """
        ...


class Batches:
    """All batches, and the files that they read and write.

    Batches run concurrently and take turns.
    """

    def __init__(
        self,
        store: Store,
        registry: Registry,
        lines: Mapping[str, BatchLines],
        max_lines_at_once: int,
        reports: UsageReports | None = None,
    ) -> None:
        """``lines`` maps each endpoint to the BatchLines of its dialect. ``reports`` gets the usage
        of batches that came from a front.
        """
        self._reports = reports or UsageReports()
        self.store = store
        self._registry = registry
        self._lines = lines
        self._unfinished: dict[str, BatchRecord] = {}  # with newer counts than those on disk
        self._running: dict[str, asyncio.Task[None]] = {}
        self._working: dict[str, asyncio.Task[None]] = {}  # tasks that answer the lines of a batch
        self._max_lines = max_lines_at_once
        self._slots = asyncio.Semaphore(max_lines_at_once)
        self._opening = asyncio.Lock()
        self._is_open = False

    async def open(self) -> None:
        """Open the store, and continue the batches of an earlier server.

        Raises BadRequest (503).
        """
        async with self._opening:  # no batch is created before the earlier ones continue
            if not self._is_open:
                await self.store.open()
                for record in await self.store.run(self.store.batches.unfinished):
                    log.info("resuming batch %s", record.id)
                    self._start(record)
                self._is_open = True

    async def start(self) -> None:
        """Continue the batches of an earlier server, if there is a folder.

        An error does not prevent the server from starting; the next request for a file or a batch
        tries again.
        """
        try:
            if self.store.folder.exists():
                await self.open()
        except BadRequest:
            pass  # it has been logged
        except Exception:
            log.exception("the batches of an earlier server cannot be continued")

    async def stop(self) -> None:
        """Stop computing, and close the store."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.store.close()

    async def create(self, record: BatchRecord, account: Account) -> None:
        """Start a batch of ``account``.

        Its record is on disk when this returns. Raises what ``BatchStore.add`` raises.
        """
        await self.store.run(self.store.batches.add, record, account)
        self._start(record)

    async def get(self, batch_id: str, account: Account, endpoints: Collection[str]) -> BatchRecord:
        """Return a batch.

        Raises BadRequest (404) if it does not exist, belongs to another account or has none of the
        ``endpoints``, which are those of a dialect.
        """
        unfinished = self._unfinished.copy()
        record = await self.store.run(self.store.batches.get, batch_id, account)
        if record.endpoint not in endpoints:
            raise no_batch(batch_id)
        return choose_newest(record, unfinished)

    async def list_for(self, account: Account, endpoints: Collection[str]) -> list[BatchRecord]:
        """Return the batches of ``account`` with one of the ``endpoints``, newest first."""
        unfinished = self._unfinished.copy()
        records = await self.store.run(self.store.batches.list_for, account)
        return [choose_newest(one, unfinished) for one in records if one.endpoint in endpoints]

    async def cancel(self, record: BatchRecord) -> BatchRecord:
        """End a batch with its present answers, and return its newest record.

        Raises BadRequest if it is too late for that.
        """
        record = self._unfinished.get(record.id, record)
        can_cancel = record.status in ("validating", "in_progress") and not record.ending
        if not can_cancel and record.status != "cancelling":
            message = f"The batch is {record.status}; it can no longer be cancelled."
            raise BadRequest(message, param="batch_id", code="invalid_status")
        if can_cancel:
            await self._save_status(record, "cancelling")
        if record.id in self._working:
            self._working[record.id].cancel()
        return record

    def list_accounts(self, front: str) -> list[str]:
        """Return the accounts of the unfinished batches that came from a front."""
        carried = (record.carried for record in self._unfinished.values())
        return sorted({one.account.name for one in carried if one and one.front == front})

    def _start(self, record: BatchRecord) -> None:
        self._unfinished[record.id] = record
        task = asyncio.create_task(self._run(record))
        self._running[record.id] = task
        task.add_done_callback(lambda _: self._running.pop(record.id))

    async def _on_disk(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``work``. While the disk is full or fails, wait and retry."""
        while True:
            try:
                return await self.store.run(work, *arguments)
            except OSError as error:
                log.warning("batches wait for the disk: %s", error)
                await asyncio.sleep(DISK_PAUSE)

    async def _save_status(self, record: BatchRecord, status: Status) -> None:
        """Change the status of ``record``, in memory and on disk."""
        set_status(record, status)
        await self._on_disk(self.store.batches.save, record)

    async def _run(self, record: BatchRecord) -> None:
        """Run a batch from its current status to its end.

        After an unexpected error, the batch ends as failed, with its present answers. If even that
        is impossible, it stays unfinished, and the next server tries again.
        """
        try:
            if record.status == "validating" or not record.total:  # or cancelled before
                await self._validate(record)
            if record.status not in FINAL:
                record.ending = record.ending or await self._work(record)
                await self._finish(record)
        except Exception:
            log.exception("the batch %s failed", record.id)
            record.errors, record.ending = [INTERNAL], "failed"
            try:
                await self._finish(record)
            except Exception:
                log.exception("the batch %s stays unfinished until the next start", record.id)
        finally:
            del self._unfinished[record.id]

    async def _validate(self, record: BatchRecord) -> None:
        path = self.store.files.path(record.input_file_id)
        record.total, record.errors = await asyncio.to_thread(
            self._lines[record.endpoint].check, path, record.endpoint
        )
        if record.errors:
            await self._save_status(record, "failed")
        elif record.status == "validating":  # and not cancelled meanwhile
            await self._save_status(record, "in_progress")

    def _model_for(self, record: BatchRecord) -> ServedModel | None:
        """Return the batch's model, or None if this server does not have that model."""
        with contextlib.suppress(UnknownModel):
            model = self._registry.find(record.model)
            if model.name == record.model:  # an alias may be another model
                return model
        return None

    async def _work(self, record: BatchRecord) -> Status:
        """Answer requests until all are answered or the batch expires, is cancelled or fails.

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
        """Answer every request that has no answer yet."""
        answered = await self._recount(record)
        model = self._model_for(record)
        if model is None:
            log.warning("batch %s waits until the model %s is served", record.id, record.model)
            # until it is cancelled, or expires
            model = await asyncio.get_running_loop().create_future()
        waiting = asyncio.Semaphore(self._max_lines)  # lines of this batch that have been read
        async with asyncio.TaskGroup() as group:
            async for request_id, body in self._requests(record):
                if request_id not in answered:
                    await waiting.acquire()
                    slot = Slot(self._slots)
                    await slot.take()
                    try:
                        task = group.create_task(
                            self._answer(record, request_id, body, model, slot)
                        )
                    except BaseException:
                        slot.give_back()
                        raise
                    task.add_done_callback(lambda _, slot=slot: slot.give_back())  # type: ignore[misc]
                    task.add_done_callback(lambda _: waiting.release())

    async def _requests(self, record: BatchRecord) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield the ids and the bodies of the requests of a batch."""
        requests = self._lines[record.endpoint].read(self.store.files.path(record.input_file_id))
        while (request := await asyncio.to_thread(next, requests, None)) is not None:
            yield request

    async def _recount(self, record: BatchRecord) -> set[str]:
        """Return the ids of the requests that have an answer.

        Set their number and their tokens in ``record``.
        """
        answers = self.store.batches.answers(record.id)
        completed, failed, record.usage = await self._on_disk(
            answers.read_answered, self._lines[record.endpoint].identify
        )
        record.completed, record.failed = len(completed), len(failed)
        return completed | failed

    async def _answer(
        self, record: BatchRecord, request_id: str, body: Any, model: ServedModel, slot: Slot
    ) -> None:
        with hold_charges() as charges:
            answer, succeeded = await self._compute(record, request_id, body, model, slot, charges)
            self.store.room.take(len(answer))
            answers = self.store.batches.answers(record.id)
            answers.add(answer, succeeded=succeeded)
            await self._on_disk(answers.flush)
            used = charges.confirm()
            if record.carried is not None:
                for name, counts in used.items():
                    self._reports.add(record.carried, counts, request="", model=name)
        if succeeded:
            record.completed += 1
        else:
            record.failed += 1

    async def _compute(
        self,
        record: BatchRecord,
        request_id: str,
        body: Any,
        model: ServedModel,
        slot: Slot,
        charges: HeldCharges,
    ) -> tuple[bytes, bool]:
        """Return the answer to a request, and whether the request has succeeded. Afterwards,
        ``charges`` has the charges of the last try.
        """
        lines, tries = self._lines[record.endpoint], 0
        while True:
            while model.is_starting or self._registry.loaded.draining:  # noqa: ASYNC110  # too rare to be worth an event
                await asyncio.sleep(PAUSE)
            charges.forget()
            try:
                return await lines.answer(record, request_id, body, model), True
            except QueueFull as error:
                await asyncio.sleep(error.retry_after)
            except (RateLimited, Unauthorized) as error:
                pause = seconds_to_wait(error)
                if pause is None:
                    return lines.fault(request_id, error), False
                slot.give_back()  # to batches of other accounts
                await asyncio.sleep(pause)
                await slot.take()
            except Exception as error:
                tries += 1
                again = isinstance(error, (EngineError, RequestTimeout))
                again = again and not isinstance(error, FatalRequest)
                if not again or tries == TRIES:
                    if not isinstance(error, CLLMError):
                        log.exception("a line of the batch %s failed", record.id)
                    return lines.fault(request_id, error), False
                await asyncio.sleep(getattr(error, "retry_after", PAUSE))

    async def _finish(self, record: BatchRecord) -> None:
        """Complete a batch whose lines are done. This can be repeated after a crash."""
        # else counted, and files may have moved
        if record.output_file_id is None and record.error_file_id is None:
            answered = await self._recount(record)
            if record.ending in MISSING:
                await self._report_missing(record, answered)
            elif record.status != "finalizing":
                await self._save_status(record, "finalizing")
            replica = find_replica(record.id)
            record.output_file_id = make_id("file-", replica) if record.completed else None
            record.error_file_id = make_id("file-", replica) if record.failed else None
            await self._on_disk(self.store.batches.save, record)
        assert record.ending
        final = msgspec.structs.replace(record)
        set_status(final, record.ending)
        await self._on_disk(self.store.batches.finish, final)
        log.info(
            "the batch %s is %s: %d answers, %d errors",
            record.id,
            record.ending,
            record.completed,
            record.failed,
        )

    async def _report_missing(self, record: BatchRecord, answered: set[str]) -> None:
        """Write a line for each request without an answer, with the reason."""
        answers, num_missing = self.store.batches.answers(record.id), 0
        async for request_id, _ in self._requests(record):
            if request_id not in answered:
                code, message = f"batch_{record.ending}", MISSING[record.ending]
                line = self._lines[record.endpoint].unanswered(request_id, code, message)
                self.store.room.take(len(line), check=False)
                answers.add(line, succeeded=False)
                num_missing += 1
                if num_missing % MISSING_LINES_PER_WRITE == 0:
                    await self._on_disk(answers.flush)
        await self._on_disk(answers.flush)
        record.failed += num_missing
        record.missing = num_missing


class Slot:
    """A place among the lines that are computed at the same time, over all batches."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._is_taken = False

    async def take(self) -> None:
        await self._slots.acquire()
        self._is_taken = True

    def give_back(self) -> None:
        if self._is_taken:
            self._is_taken = False
            self._slots.release()


def seconds_to_wait(error: RateLimited | Unauthorized) -> float | None:
    """Return the seconds after which a line may be allowed; None if it never is.

    A budget or a key may come back before the batch expires.
    """
    if isinstance(error, RateLimited) and (error.is_final or error.retry_after is not None):
        return None if error.is_final else error.retry_after
    return KEY_PAUSE


def choose_newest(stored: BatchRecord, unfinished: dict[str, BatchRecord]) -> BatchRecord:
    """Return the newest record of a batch: that in ``unfinished``, unless the batch has ended since
    ``unfinished`` was read, which was before ``stored``.
    """
    return stored if stored.has_ended else unfinished.get(stored.id, stored)


def set_status(record: BatchRecord, status: Status) -> None:
    """Change the status of ``record``, and note the time."""
    record.status = status
    record.times = {**record.times, status: int(time.time())}
