"""Starts one engine process, watches it, and starts the next one when it has died or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from cllm.core.model_info import ModelInfo
from cllm.core.vocabulary import VocabularyTable
from cllm.engine.commands import Close
from cllm.engine.params import EngineParams
from cllm.errors import KilledWhileLoading, StartupError
from cllm.models.memory import count_oom_kills
from cllm.private_files import remove_shared_file
from cllm.process.futures import resolve
from cllm.process.launch import EngineSpec
from cllm.process.liveness import WATCH_SECONDS, Hang, Liveness
from cllm.process.messages import Failed, FromChild, Ping, Ready, Start, frame
from cllm.process.spawn import EngineProcess, spawn
from cllm.process.step_record import CurrentStep, StepRecord, create_file

log = logging.getLogger("cllm.process")

# Seconds before a restart. The first one after HEALTHY_AFTER seconds of service is immediate.
FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0
LONGEST_SEARCH_BACKOFF = 1.0  # while each death narrows down which request kills engines
HEALTHY_AFTER = 60.0
CLOSE_TIMEOUT = 5.0
UNLOAD_SECONDS = 10.0  # for saving prefixes, and again for writing them to disk
USUAL_LOAD_SECONDS = 5.0  # assumed load time of a model, until it is measured
# An engine does not respond if it finishes no step within QUIET_SECONDS, or QUIET_FACTOR times the
# expected duration of its step if that is more. This only matters to requests in the queue.
QUIET_SECONDS, QUIET_FACTOR = 0.3, 3.0
# A restart is treated as hung after LOAD_SECONDS, or LOAD_FACTOR times the last load if that is
# more. The first load has no limit, because the user can end it.
LOAD_SECONDS, LOAD_FACTOR = 60.0, 10.0
PING = frame(Ping())


class Death(NamedTuple):
    """The end of an engine: its ``cause`` in words, and the requests ``in_step`` when it died.
    ``is_own_fault`` says that nothing outside cLLM ended it. The next engine is expected to be
    ready ``retry_after`` seconds later.
    """

    cause: str
    in_step: list[str]
    is_own_fault: bool
    retry_after: float


Event = FromChild | Death


class EngineClient(Protocol):
    """Handles the events of a supervisor, and knows the work of its engine."""

    def take(self, event: Event) -> None:
        """Handle a message of the engine, or its death.

        Failed comes only from engines after the first one.
        """
        ...

    def has_work(self) -> bool:
        """Return whether the engine must make steps."""
        ...

    def owes_answers(self) -> bool:
        """Return whether anything waits for the engine process."""
        ...


class Supervisor:
    """Owns one engine process after the other.

    ``info`` and ``vocabulary`` are set once an engine has been ready, and ``ready`` says whether
    one is ready now. ``num_failed`` counts the restarts that have failed since then. ``unloaded``
    says that ``unload`` has ended the engine, and that none is started until ``start``. The last
    engine has taken ``num_bytes`` of memory, 0 if unknown.
    """

    def __init__(
        self,
        params: EngineParams,
        client: EngineClient,
        spec: EngineSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` returns seconds."""
        self.info: ModelInfo | None = None
        self.vocabulary: VocabularyTable | None = None
        self.ready = False
        self.num_bytes = 0
        self.num_failed = 0
        self.num_restarts = 0
        self.pid: int | None = None
        self.process: EngineProcess | None = None
        self._params = params
        self._restart_params = params  # with the sizes of the last engine, once one was ready
        self._client = client
        self._launched = spec.launched
        self._place = spec.place
        self._label = spec.label
        self._clock = clock
        self._loaded: asyncio.Future[Ready]
        self._record: StepRecord | None = None
        # the count now and one look earlier, because a kill may be counted before the process ends
        self._num_oom_kills = self._num_oom_kills_before = 0
        # what ``is_responding`` saw last: a step's version, the time when that was first seen, and
        # the time of the last call
        self._looked: tuple[int, float, float] = (-1, 0.0, 0.0)
        self._hang: Hang | None = None  # why the engine has been killed
        self._serving: asyncio.Task[None] | None = None
        self.closing = False
        self.unloaded = False
        self._backoff = 0.0  # seconds before the next start
        # during the back-off, _started is the time of the next start
        self._started = self._ready_since = clock()
        self._load_seconds = USUAL_LOAD_SECONDS

    async def start(self, max_bytes: int = 0) -> None:
        """Start the engine, which may take ``max_bytes`` of memory (0 for any amount), and wait
        until it is ready.

        Raises StartupError if it cannot load the model.
        """
        if self._serving is not None and not self._serving.done():
            raise RuntimeError("the engine has been started")
        self._params = msgspec.structs.replace(self._params, max_bytes=max_bytes)
        self._restart_params = self._params
        await self._spawn()
        self.unloaded = False
        self._serving = asyncio.create_task(self._serve_and_restart())

    def write(self, data: bytes) -> None:
        """Send frames to the engine. A dead engine does not get them."""
        assert self.process is not None
        self.process.write(data)

    def seconds_until_ready(self) -> float:
        """Return the rest of the back-off plus the duration of the last load, at least 1; 0 if the
        engine is ready.
        """
        if self.ready:
            return 0.0
        elapsed = 0.0 if self.unloaded else self._clock() - self._started
        return max(1.0, self._load_seconds - elapsed)

    def is_responding(self) -> bool:
        """Return whether the engine is ready and makes steps as fast as expected, as far as the
        calls of this method within the last seconds show.
        """
        if not self.ready or self._record is None:
            return False
        entry, now = self._record.read(), time.monotonic()
        version, first, last = self._looked
        if entry.version != version or now - last > QUIET_SECONDS:
            first = now
        self._looked = entry.version, first, now
        if entry.is_unknown:
            return True
        return now - first <= max(QUIET_SECONDS, QUIET_FACTOR * entry.expected_seconds)

    async def unload(self) -> None:
        """End the engine process, which saves its prefixes if it has a disk cache. It has ended
        when this returns. ``start`` starts the next one.
        """
        self.unloaded = True
        seconds = UNLOAD_SECONDS if self._params.disk_cache else 0.0
        await self._end(Close(seconds), 2 * seconds + CLOSE_TIMEOUT)

    async def close(self) -> None:
        """End the engine process for good. It has ended when this returns."""
        self.closing = True
        await self._end(Close(), CLOSE_TIMEOUT)

    async def _end(self, command: Close, limit: float) -> None:
        if self._serving is not None and not self._serving.done() and not self.ready:
            self._serving.cancel()
        self.ready = False
        if self.process is not None and not self.process.ended.is_set():
            self.write(frame(command))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.ended.wait(), limit)
            await self.process.stop()
        if self._serving is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving

    # --- one engine ------------------------------------------------------------------------------

    async def _spawn(self) -> None:
        self._loaded = asyncio.get_running_loop().create_future()
        self._started = self._clock()
        self._hang = None
        self._num_oom_kills = self._num_oom_kills_before = count_oom_kills()
        path = create_file()
        try:
            self._record = StepRecord(path)
            ready = await self._load(str(path))
        finally:
            remove_shared_file(path)
        self._ready_since = self._clock()
        self._load_seconds = self._ready_since - self._started
        self.ready, self.num_failed = True, 0
        self._client.take(ready)

    async def _load(self, step_record: str) -> Ready:
        """Start a process, and return its message that it is ready, or raise StartupError."""
        launched, self._launched = self._launched, None
        process = self.process = await spawn(self._take, launched, self._place)
        self.pid = process.pid
        process.write(frame(Start(self._restart_params, step_record)))
        try:
            await self._wait_for_load(process)
            if not self._loaded.done():
                if process.was_ended_from_outside:
                    how = f"the engine was ended while loading ({process.describe_end()})"
                    raise KilledWhileLoading(how)
                raise StartupError(
                    f"the engine died ({process.describe_end()}) while loading "
                    f"{self._params.path or 'the model'}: "
                    "the file may be damaged; run `cllm doctor` to check this machine"
                )
            ready = self._loaded.result()
            self.info, self.vocabulary = ready.info, ready.vocabulary
            self.num_bytes = ready.params.max_bytes
            # accepted requests must fit into later engines, whatever memory is free then
            self._params = msgspec.structs.replace(
                self._params, context_length=ready.info.context_length
            )
            self._restart_params = msgspec.structs.replace(
                self._params,
                kv_memory=ready.params.kv_memory,
                ram_cache_bytes=ready.params.ram_cache_bytes,
                max_bytes=ready.params.max_bytes,
                resident_bytes=ready.params.resident_bytes,
            )
            return ready
        except BaseException:
            await process.stop()
            raise
        finally:
            if not self._loaded.cancel():
                self._loaded.exception()  # so that asyncio does not report it as never retrieved

    async def _wait_for_load(self, process: EngineProcess) -> None:
        """Wait until ``process`` has loaded the model, or has ended.

        Raises StartupError if it hangs.
        """
        assert self._record is not None
        limit = max(LOAD_SECONDS, LOAD_FACTOR * self._load_seconds) if self.info else math.inf
        liveness = Liveness(time.monotonic(), self._record.read())
        ended = asyncio.ensure_future(process.ended.wait())
        try:
            for num_looks in itertools.count(1):  # none while this process is suspended
                done, _ = await asyncio.wait(
                    (self._loaded, ended),
                    timeout=WATCH_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if done:
                    return
                if num_looks * WATCH_SECONDS > limit:
                    raise StartupError(f"the engine was not ready after {limit:.0f} s")
                # a process that has read nothing yet is being started, which may take long
                if self._record.num_read and (hang := self._look(liveness, process)):
                    raise StartupError(f"the engine {hang.cause}")
        finally:
            ended.cancel()

    def _take(self, message: FromChild) -> None:
        match message:
            case Ready():
                resolve(self._loaded, message)
            case Failed():
                resolve(self._loaded, StartupError(message.reason))
            case _:
                self._client.take(message)

    def _look(
        self, liveness: Liveness, process: EngineProcess, has_work: bool = False
    ) -> Hang | None:
        """Return why ``process`` hangs, or None."""
        assert self._record is not None
        entry, num_read = self._record.read(), self._record.num_read
        hang = liveness.look(time.monotonic(), entry, process.num_sent, num_read, has_work)
        if num_read >= process.num_sent and (not self.ready or self._client.owes_answers()):
            process.write(PING)
        return hang

    async def _watch(self, process: EngineProcess, record: StepRecord) -> None:
        """Wait until ``process`` has ended; kill it if it hangs."""
        liveness = Liveness(time.monotonic(), record.read())
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.ended.wait(), WATCH_SECONDS)
                return
            self._hang = self._look(liveness, process, self._client.has_work())
            if self._hang is not None:
                log.error("%s %s; killing it", self._label, self._hang.cause)
                await process.stop()
                return
            if liveness.is_stepping:
                self._num_oom_kills_before = self._num_oom_kills
                self._num_oom_kills = count_oom_kills()

    async def _serve_and_restart(self) -> None:
        while True:
            process, record = self.process, self._record
            assert process is not None
            assert record is not None
            await self._watch(process, record)
            await process.ended.wait()
            entry = record.read()
            record.close()
            self.ready = False
            if self.closing or self.unloaded:
                return
            self._client.take(self._record_death(process, entry))
            while not self.ready:
                self._started = self._clock() + self._backoff
                await asyncio.sleep(self._backoff)
                self._backoff = min(max(2 * self._backoff, FIRST_BACKOFF), LONGEST_BACKOFF)
                try:
                    await self._spawn()
                except Exception as error:  # whatever it is, the next attempt may succeed
                    self.num_failed += 1
                    is_expected = isinstance(error, StartupError)
                    log.error(
                        "%s failed to start: %s; next attempt in %.1f s",
                        self._label,
                        error,
                        self._backoff,
                        exc_info=None if is_expected else error,
                    )
                    self._client.take(Failed(str(error)))
            self.num_restarts += 1
            log.warning("%s is ready again", self._label)

    def _record_death(self, process: EngineProcess, entry: CurrentStep) -> Death:
        """Choose the back-off. Log and return the cause of the engine's end."""
        cause = "it hung" if self._hang else process.describe_end()
        out_of_memory = count_oom_kills() > self._num_oom_kills_before
        if out_of_memory:
            cause += ", out of memory"
        was_stopped = self._hang is not None and self._hang.is_stopped
        is_own_fault = out_of_memory or not (was_stopped or process.was_ended_from_outside)
        if self._clock() - self._ready_since >= HEALTHY_AFTER:
            self._backoff = 0.0
        elif is_own_fault and self._client.owes_answers():
            self._backoff = min(self._backoff, LONGEST_SEARCH_BACKOFF)
        log.error(
            "%s died (%s) with %d requests in its step; restarting it in %.1f s",
            self._label,
            cause,
            len(entry.request_ids),
            self._backoff,
        )
        return Death(cause, entry.request_ids, is_own_fault, self._backoff + self._load_seconds)
