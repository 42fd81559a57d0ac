"""Loads and unloads the models of a server.

The first request that needs a model loads it. A model is unloaded when it has been idle for its
``keep_alive``, or when another model needs its memory. Then the least recently used model is
unloaded first, once its requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from cllm.backends.registry import import_loader
from cllm.errors import (
    CLLMError,
    EngineError,
    KilledWhileLoading,
    LoadFailed,
    ModelFileError,
    StartupError,
)
from cllm.models.gguf import format_size
from cllm.models.memory import weigh
from cllm.process.pool import Pool
from cllm.routing.residency import choose_to_drain, choose_to_unload, compute_stay
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service

log = logging.getLogger("cllm.registry")

GRACE_SECONDS = 1.0  # an expired model stays so long for a request that is being prepared
REPLACED_SECONDS = 2.0  # a removed model stays so long for requests that are being prepared
LOOK_SECONDS = 0.02  # between checks whether a model has become idle
MAX_KILLS = 3  # after so many kills of an engine while it loads, the load fails
NO_TEMPLATE = (
    "the model %s has no chat template, so it is a base model: it continues texts (cllm generate, "
    "/v1/completions). Chats with it use ChatML, unless --chat-template-file names a template"
)
RETRY_SECONDS = 5.0  # after a load that failed


class LoadedModels:
    """Loads and unloads the models of a server.

    It has all models that were loaded or are being loaded, until ``retire`` or ``end`` has ended
    their engines.
    """

    def __init__(
        self,
        models: Iterable[ServedModel] = (),
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``models`` are the models that already have services. ``max_bytes`` limits the memory of
        all loaded models together; None means no limit. ``clock`` returns seconds.
        """
        self._models = list(models)
        self.draining = False
        self.max_bytes = max_bytes
        self._clock = clock
        self._turn = asyncio.Lock()  # held while a model is loaded or unloaded, one at a time
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def services(self) -> list[Service]:
        """The services of the models that have one. A load makes the service, whether it succeeds
        or not, and the service stays when the model is unloaded.
        """
        return [model.service for model in self._models if model.service is not None]

    @property
    def num_unfinished(self) -> int:
        """The number of requests that have not been answered completely."""
        return sum(service.engine.num_unfinished for service in self.services)

    def seconds_until_ready(self) -> float:
        """Return the expected seconds until an engine is ready."""
        return min((one.engine.seconds_until_ready() for one in self.services), default=0.0)

    def use(self, model: ServedModel) -> Service | None:
        """Return the service of a model for a request; None if the model must be loaded first."""
        origin = model.origin
        origin.last_used, origin.stay = self._clock(), origin.keep_alive
        service = origin.service
        if service is None or origin.is_draining or service.engine.unloaded:
            return None
        return model.view(service)

    async def load(self, model: ServedModel) -> Service:
        """Return the service of a model, after loading it if necessary. The load continues even if
        the caller is cancelled.

        Raises EngineError if there is no memory for it or if it has been removed, and LoadFailed if
        it cannot be loaded.
        """
        if (service := self.use(model)) is not None:
            return service
        successor = model.origin.successor
        if successor is not None and not model.adapter_use.adapters:
            with suppress(CLLMError):  # if this fails, the old model stays
                return model.view(await self.load(successor))
        if model.origin.failure is not None:
            failed_at, error = model.origin.failure
            if self._clock() - failed_at < RETRY_SECONDS:
                raise error
        loading = self.begin_load(model.origin)
        try:
            return model.view(await asyncio.shield(loading))
        except asyncio.CancelledError:
            if loading.cancelled():
                raise shutting_down() from None
            raise

    def _want(self, model: ServedModel) -> None:
        """Load a model because requests wait for its engine, which was unloaded."""
        if not model.is_removed:
            self.begin_load(model)

    def begin_load(self, model: ServedModel) -> asyncio.Task[Service]:
        """Begin to load a model, unless that has begun."""
        if model.is_removed:
            raise EngineError(f"The model {model.name!r} has been removed.")
        if model not in self._models:
            self._models.append(model)
        if model.loading is None or not model.is_loading:
            model.loading = asyncio.create_task(self._load(model))
            model.loading.add_done_callback(take_exception)
        return model.loading

    async def _load(self, model: ServedModel) -> Service:
        """Load a model, and end the requests that wait for it if that fails."""
        try:
            return await self._open_and_start(model)
        except EngineError as error:  # there is no memory, or the server shuts down
            failed: CLLMError = error
        except Exception as error:
            known = isinstance(error, StartupError)
            log.error(
                "the model %s cannot be loaded: %s", model.name, error, exc_info=not known and error
            )
            reason = f": {error.for_clients}" if isinstance(error, ModelFileError) else "."
            failed = LoadFailed(f"The model {model.name!r} cannot be loaded{reason}")
            failed.__cause__ = error
            model.failure = self._clock(), failed
        if model.service is not None:
            model.service.engine.end_all(failed)
        raise failed

    async def _open_and_start(self, model: ServedModel) -> Service:
        if model.service is None:
            assert model.open is not None
            service = await model.open(model)
            service.engine.set_unloaded()
            model.service = service
        while model.is_draining:  # until it has been unloaded  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        async with self._turn:
            if self.draining and not model.is_busy:
                raise shutting_down()
            if not model.is_loaded:
                room = await self._make_room(model)
                begun = self._clock()
                await start(model.service.engine, room or 0)
                seconds = self._clock() - begun
                self._note_loaded(model, seconds)
                log.info("the model %s is loaded, after %.1f s", model.name, seconds)
            return model.service

    async def adopt(self, model: ServedModel, start: Awaitable[None], begun: float) -> None:
        """Wait until ``start`` has started the engine of a model. The caller created that task at
        the time ``begun``.
        """
        async with self._turn:
            await start
            self._note_loaded(model, self._clock() - begun)

    def _note_loaded(self, model: ServedModel, seconds: float) -> None:
        """Note that the engine of a model is ready after ``seconds`` of loading."""
        now, service = self._clock(), model.service
        assert service is not None
        service.engine.on_wanted = partial(self._want, model)
        model.failure = None
        model.num_loads += 1
        info = service.info
        # the next load must have room for a sequence as long as this one
        kv_bytes = info.context_length * info.kv_bytes_per_token
        copied_share = 0 if info.on_gpu else import_loader(model.backend).COPIED_SHARE
        copied = int(info.model_bytes * copied_share)
        needed = weigh(info.model_bytes, kv_bytes, info.kv_bytes_per_token, copied)
        model.min_bytes = max(model.min_bytes, min(needed, model.num_bytes))
        model.last_used = now
        model.stays_until = compute_stay(now, seconds)
        if service.vocabulary.has_template:
            self._keep(asyncio.create_task(service.texts.renderer.start()))
        elif info.generates:
            log.warning(NO_TEMPLATE, model.name)

    def _num_free_bytes(self, model: ServedModel) -> int | None:
        """Return the memory that the loaded models leave for ``model``; None if it is unlimited."""
        if self.max_bytes is None:
            return None
        return self.max_bytes - sum(one.num_bytes for one in self._list_loaded(without=model))

    def _list_loaded(self, without: ServedModel) -> list[ServedModel]:
        """Return the models that take memory, without ``without``."""
        return [one for one in self._models if one.is_loaded and one is not without]

    async def _make_room(self, model: ServedModel) -> int | None:
        """Unload other models until ``model`` fits, and return the memory that it may take; None if
        that is unlimited.

        Raises EngineError if it can never fit.
        """
        while (free := self._num_free_bytes(model)) is not None and free < model.min_bytes:
            others = self._list_loaded(without=model)
            movable = [one for one in others if one.is_removed or not one.pinned]
            most = free + sum(one.num_bytes for one in movable)
            if most < model.min_bytes:
                raise EngineError(
                    f"The model {model.name!r} needs {format_size(model.min_bytes)} of memory, but "
                    f"only {format_size(max(0, most))} can be freed for it.",
                    reason="memory",
                )
            await self._unload_one(movable)
        return free

    async def _unload_one(self, models: Sequence[ServedModel]) -> None:
        """Unload the least recently used model, idle ones first. Wait until it may be unloaded and
        its requests have ended.
        """
        drained: ServedModel | None = None
        try:
            while True:
                now = self._clock()
                if (leaving := choose_to_unload(models, now)) is not None:
                    await self._unload(leaving)
                    return
                if drained is None and (drained := choose_to_drain(models, now)) is not None:
                    drained.is_draining = True
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            if drained is not None:
                drained.is_draining = False

    async def _unload(self, model: ServedModel) -> None:
        """End the engine of a model, which saves its prefixes if it has a disk cache."""
        assert model.service is not None
        log.info("the model %s is unloaded", model.name)
        await model.service.engine.unload()
        model.service.texts.end_idle()

    async def unload(self, model: ServedModel) -> None:
        """Unload a model when its requests have ended, even if the caller is cancelled meanwhile.
        Requests that come later load it again.
        """
        task = asyncio.create_task(self._drain_and_unload(model.origin))
        self._keep(task)
        await asyncio.shield(task)

    async def _drain_and_unload(self, model: ServedModel) -> None:
        model.is_draining = True
        try:
            while model.is_loaded:
                if model.is_busy:  # wait without the turn, so that other models can be loaded
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                async with self._turn:
                    if model.is_loaded and not model.is_busy:
                        await self._unload(model)
        finally:
            model.is_draining = False

    def keep(self, model: ServedModel, seconds: float | None) -> None:
        """Set for how many seconds a model stays loaded after its last request; None means for
        ever. The next request may change this.
        """
        model.origin.stay, model.origin.last_used = seconds, self._clock()

    def unload_expired(self) -> None:
        """Begin to unload models that have been idle for their ``keep_alive``. Call this
        regularly.
        """
        for model in self._models:
            if model.is_busy:
                model.last_used = self._clock()
            elif self._has_expired(model) and not self._turn.locked():
                self._keep(asyncio.create_task(self._unload_if_expired(model)))

    def _has_expired(self, model: ServedModel) -> bool:
        now, expires_at = self._clock(), model.expires_at
        return model.is_loaded and expires_at is not None and expires_at + GRACE_SECONDS <= now

    async def _unload_if_expired(self, model: ServedModel) -> None:
        async with self._turn:
            if self._has_expired(model) and not model.is_busy:
                await self._unload(model)

    def retire_soon(self, model: ServedModel) -> None:
        """Begin to retire a model. It stays for a while, for requests that are being prepared."""
        self._keep(asyncio.create_task(self.retire(model, REPLACED_SECONDS)))

    async def retire(self, model: ServedModel, grace: float = 0.0) -> None:
        """End the engine of a removed model after ``grace`` seconds, or later, when its requests
        have ended.
        """
        try:
            if model.loading is not None and model.is_loading:
                await asyncio.wait([model.loading])
            await asyncio.sleep(grace)
            if model.is_loaded:
                await self.unload(model)
        finally:
            await self.end(model)

    async def end(self, model: ServedModel) -> None:
        """End the engine of a model at once, if it has one."""
        if model in self._models:
            self._models.remove(model)
        if model.service is not None:
            service, model.service = model.service, None
            await service.engine.close()
            await service.texts.close()

    def drain(self) -> None:
        """Accept no further requests, and cancel loads for which no accepted request waits."""
        self.draining = True
        for service in self.services:
            service.engine.draining = True
        for model in self._models:
            if model.loading is not None and not model.is_busy:
                model.loading.cancel()

    async def close(self) -> None:
        """End all engines and what waits for them."""
        self.drain()
        loading = [model.loading for model in self._models if model.loading is not None]
        for task in (*loading, *self._tasks):
            task.cancel()
        await asyncio.gather(*loading, *self._tasks, return_exceptions=True)
        for ending in (
            [service.engine.close() for service in self.services],
            [service.texts.close() for service in self.services],
        ):
            for result in await asyncio.gather(*ending, return_exceptions=True):
                if isinstance(result, Exception):
                    log.error("a model was not closed: %s", result)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(take_exception)


async def start(engine: Pool, max_bytes: int) -> None:
    """Start an engine. Retry if something outside cLLM kills it meanwhile. Raises StartupError."""
    for _ in range(MAX_KILLS):
        try:
            return await engine.start(max_bytes)
        except KilledWhileLoading as error:
            log.warning("%s; starting it again", error)
    return await engine.start(max_bytes)


def shutting_down() -> EngineError:
    return EngineError("The server is shutting down.")


def take_exception(task: asyncio.Task[object]) -> None:
    """Retrieve the exception of a task that nobody awaits, so that asyncio does not report it."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, CLLMError):
        log.error("a model could not be loaded or unloaded", exc_info=error)
