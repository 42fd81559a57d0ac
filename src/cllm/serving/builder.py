"""Makes the models of a server from its settings, and the services and engines that they need."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from cllm.backends.registry import choose_backend, import_loader
from cllm.config.settings import Adapter, Settings
from cllm.errors import StartupError
from cllm.models.memory import USUAL_KV_BYTES, weigh
from cllm.observe.metrics import Metrics
from cllm.observe.trace_file import Recorder
from cllm.process.pool import Pool
from cllm.serving.adapter_use import AdapterUse
from cllm.serving.engines import Engines
from cllm.serving.model_texts import ModelTexts
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service
from cllm.serving.sources import ReadAgain, Source, adapter_path, inspect_adapter, list_found
from cllm.store.usage import UsageLedger

log = logging.getLogger("cllm.server")

# a model is loaded only if a KV cache of this share of the memory for all models fits
MIN_KV_SHARE = 1 / 8


class Builder:
    """Makes a server's ``registry``, each model's service when it is first needed, and all models
    anew when the settings or the files have changed.
    """

    def __init__(
        self,
        settings: Settings,
        sources: Sequence[Source],
        engines: Engines,
        first_pool: Pool | None = None,
        ledger: UsageLedger | None = None,
        read_again: ReadAgain | None = None,
        on_settings: Callable[[Settings], None] = lambda _: None,
    ) -> None:
        """``first_pool`` is the pool of the source that is loaded first, if its engines already
        run. ``ledger`` limits accounts with keys. ``read_again`` returns the current settings and
        sources, and ``on_settings`` is called with settings when they take effect.

        Raises StartupError.
        """
        self._settings = settings
        self._sources = sources
        self._engines = engines
        self._ledger = ledger or UsageLedger()
        self._read_again = read_again
        self._on_settings = on_settings
        path = settings.scheduler.trace_file
        self._recorder = None if path is None else Recorder(Path(path).expanduser())
        models = self._make_models(sources, first_pool)
        max_bytes = engines.limit_memory(settings, sources)
        self.registry = Registry(models, max_bytes or None, self._recorder, self._scan)

    def _scan(self, reads_settings: bool) -> list[ServedModel]:
        """Return all models. With ``reads_settings``, read the settings again before that."""
        settings, sources = self._settings, self._sources
        if reads_settings and self._read_again is not None:
            settings, sources = self._read_again()
        adapters = {source.name: source.adapters for source in sources}
        listed = [source for source in sources if not source.is_found]
        listed += [
            replace(source, adapters=adapters.get(source.name, {}))
            for source in list_found(settings, listed)
        ]
        # no error in the new settings can be found after this point
        self._settings, self._sources = settings, sources
        self._on_settings(settings)
        self.registry.loaded.max_bytes = self._engines.limit_memory(settings, sources) or None
        return self._make_models(listed)

    def _make_models(
        self, sources: Iterable[Source], first_pool: Pool | None = None
    ) -> list[ServedModel]:
        """Return the models of ``sources``, followed by those with an adapter."""
        models, adapted = [], []
        for source in sources:
            model = self._make_model(source)
            if source.is_first and first_pool is not None:
                model.service = self._make_service(source, first_pool)
            models.append(model)
            adapted += make_adapted(model, source.adapters)
        return models + adapted

    def _make_model(self, source: Source) -> ServedModel:
        options = source.settings.model
        return ServedModel(
            name=source.name,
            aliases=options.aliases,
            open=partial(self._open_service, source),
            keep_alive=options.keep_alive,
            pinned=options.pinned,
            preload=options.preload or source.is_first,
            is_found=source.is_found,
            sampling=source.settings.sampling,
            backend=choose_backend(source.settings.backend.name, source.path),
            path=str(source.path or ""),
            file_task=source.task,
            recipe=source.recipe(),
        )

    async def _open_service(self, source: Source, model: ServedModel) -> Service:
        """Return the service of a model, whose file is downloaded if necessary."""
        read_params = partial(source.read_params, self._raise_if_shutting_down)
        params = await run_in_daemon_thread(read_params)
        most = self.registry.loaded.max_bytes or 0
        kv_bytes = params.kv_memory or min(USUAL_KV_BYTES, int(MIN_KV_SHARE * most))
        kv_bytes *= params.has_kv_cache
        # in a thread, because it may ask another process for the GPUs
        pool = await run_in_daemon_thread(partial(self._engines.make_pool, source.settings, params))
        model.path, model.backend = params.path, params.backend
        copied = int(params.weight_bytes * import_loader(params.backend).COPIED_SHARE)
        needed = weigh(params.weight_bytes, kv_bytes, params.kv_bytes_per_token, copied)
        model.min_bytes = needed * len(pool.members)
        return self._make_service(source, pool)

    def _make_service(self, source: Source, pool: Pool) -> Service:
        return Service(
            ModelTexts(pool, Metrics(source.name)),
            source.name,
            source.settings.scheduler.request_timeout,
            self._recorder,
            self._ledger,
            source.settings.sampling,
        )

    def _raise_if_shutting_down(self, *_: object) -> None:
        """End a download when the server shuts down."""
        if self.registry.loaded.draining:
            raise StartupError("the server shuts down")


def make_adapted(parent: ServedModel, adapters: Mapping[str, Adapter]) -> list[ServedModel]:
    """Return a model for each adapter of ``parent``, without those whose file cannot be read."""
    models = []
    for name, adapter in adapters.items():
        try:
            file = inspect_adapter(adapter_path(adapter))
        except (OSError, ValueError) as error:
            # the log must not contain the file's path
            reason = getattr(error, "strerror", None) or error
            log.warning("the adapter %s is not served: %s", name, reason)
            continue
        models.append(
            ServedModel(
                name=name,
                parent=parent,
                sampling=parent.sampling,
                adapter_use=AdapterUse.of({name: adapter.scale}, {name: file}),
                adapter_key=name,
                adapter_file=file,
                backend=parent.backend,
                path=parent.path,
            )
        )
    return models


T = TypeVar("T")


async def run_in_daemon_thread(work: Callable[[], T]) -> T:
    """Return the result of ``work``, computed in a daemon thread. Any other thread that waits for a
    server would keep this process from ending.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller that is cancelled does not cancel the work

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # raised again where the result is awaited
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(future)
