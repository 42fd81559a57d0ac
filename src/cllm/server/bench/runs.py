"""The load run of a server, one at a time, whose requests a process of its own sends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Literal

import msgspec

from cllm.config.settings import Settings
from cllm.errors import BadRequest, describe_os_error
from cllm.observe.server_metrics import ServerMetrics
from cllm.server.access import Access
from cllm.server.bench.messages import REQUEST_SECONDS, LoadPlan, Running, Send
from cllm.server.bench.process import Refused, carry_out
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.store.keys import make_key
from cllm.store.reports import FOLDER, KeptReports

LOOK = 0.2  # seconds between two looks at the model
HEARTBEAT = 15.0  # seconds of silence
# The longest time of a run: START_SECONDS, and as many times those of the plan, which are those of
# a request too, because of the warm-up and the last answers
START_SECONDS, SPAN = 60.0, 3.0
DRAINING = "The server is shutting down."

log = logging.getLogger("cllm.bench")

Status = Literal["running", "completed", "cancelled", "failed"]


class LoadRun(msgspec.Struct, frozen=True, kw_only=True):
    """A load run. It has a ``report`` once it is completed, and a ``reason`` if it was cancelled or
    has failed. ``begun`` is a Unix time.
    """

    id: str
    status: Status
    reason: str = ""
    begun: float
    model: str
    plan: LoadPlan
    progress: Running = Running()
    report: str | None = None


class LoadRuns:
    """Does load runs, one at a time, and keeps their reports.

    ``url`` is the address of the server for processes on this machine. Without a folder, there are
    no ``reports``, and no runs.
    """

    url = ""

    def __init__(
        self, settings: Settings, registry: Registry, access: Access, certificate: str | None
    ) -> None:
        """``certificate`` is the file of the server's TLS certificate, if it has one."""
        folder = settings.storage.folder
        self.reports = None if folder is None else KeptReports(Path(folder).expanduser() / FOLDER)
        self.last: LoadRun | None = None
        self.reading = asyncio.Lock()  # held while a process reads reports
        self._registry = registry
        self._metrics: ServerMetrics = registry.metrics
        self._access = access
        self._certificate = certificate
        self._task: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[bytes] | None = None
        self._end: tuple[Status, str] | None = None  # why the run is to end early
        self._changed = asyncio.Event()

    def start(self, model: ServedModel, plan: LoadPlan) -> LoadRun:
        """Begin a run with a model that is loaded. Raises BadRequest (409) if one is running."""
        if self.last is not None and self.last.status == "running":
            message = "Another load run is running; cancel it, or retry when it has ended."
            raise BadRequest(message, code="conflict", status=409)
        run = LoadRun(
            id=f"run-{secrets.token_hex(8)}",
            status="running",
            begun=round(time.time(), 3),
            model=model.name,
            plan=plan,
        )
        self._end = None
        self._set(run)
        self._task = asyncio.create_task(self._run(run, model))
        return run

    async def cancel(self) -> LoadRun | None:
        """End the run, if there is one, and return the last one."""
        await self._stop("cancelled", "It was cancelled.")
        return self.last

    async def stop(self) -> None:
        """End the run, because the server ends."""
        await self._stop("failed", DRAINING)

    async def _stop(self, status: Status, reason: str) -> None:
        if self._task is not None and not self._task.done():
            self._end_early(status, reason)
            await asyncio.wait({self._task})

    async def watch(self) -> AsyncGenerator[LoadRun | None, None]:
        """Yield the last run, and again whenever it has changed, until it has ended; None after
        silence.
        """
        shown = None
        while (run := self.last) is not None:
            changed = self._changed
            yield None if run is shown else run
            shown = run
            if run.status != "running":
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), HEARTBEAT)

    def _set(self, run: LoadRun) -> None:
        self.last = run
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _end_early(self, status: Status, reason: str) -> None:
        """Let the run end. The first reason counts."""
        self._end = self._end or (status, reason)
        if self._sending is not None:
            self._sending.cancel()

    async def _run(self, run: LoadRun, model: ServedModel) -> None:
        report = None
        try:
            report = await self._send(run, model)
        except Exception as error:
            known = isinstance(error, Refused)
            log.error("a load run has failed: %s", error, exc_info=not known and error)
            why = str(error) if known else "It has failed; the server's log says why."
            self._end = self._end or ("failed", why)
        done: tuple[Status, str] = "completed", ""
        status, reason = done if report is not None else self._end or done
        last = self.last or run
        self._set(msgspec.structs.replace(last, status=status, reason=reason, report=report))
        self._metrics.load_runs.labels(status).inc()

    async def _send(self, run: LoadRun, model: ServedModel) -> str | None:
        """Let a process send the requests, and return the id of the report; None if ``_end`` says
        why there is none. Raises Refused.
        """
        if self._end is not None:  # set between the start of the task and now
            return None
        key = self._access.load_key = make_key()
        order = Send(self.url, key, self._certificate, run.model, run.plan)
        self._sending = sending = asyncio.create_task(carry_out(order, self._note))
        most = START_SECONDS + SPAN * max(run.plan.seconds, REQUEST_SECONDS)
        ends_at, num_loads = time.monotonic() + most, model.origin.num_loads
        try:
            while not (await asyncio.wait({sending}, timeout=LOOK))[0]:
                if self._registry.loaded.draining:
                    self._end_early("failed", DRAINING)
                elif not model.is_loaded or model.origin.num_loads != num_loads:
                    self._end_early("failed", f"The model {run.model} has been unloaded.")
                elif time.monotonic() > ends_at:
                    self._end_early("failed", f"It took more than {most:g} seconds.")
        finally:
            self._access.load_key = ""
            sending.cancel()
            await asyncio.wait({sending})
        if self._end is not None or self.reports is None:
            return None
        try:
            return (await asyncio.to_thread(self.reports.add, sending.result())).id
        except OSError as error:
            raise Refused(f"Its report was not stored: {describe_os_error(error)}") from error

    def _note(self, progress: Running) -> None:
        if self.last is not None:
            self._set(msgspec.structs.replace(self.last, progress=progress))
