"""Lists the models of a server, and finds the one that a request names."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from cllm.errors import CLLMError, StartupError, UnknownModel, describe_os_error
from cllm.observe.server_metrics import ServerMetrics
from cllm.observe.trace_file import Recorder
from cllm.serving.loaded_models import LoadedModels
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service

log = logging.getLogger("cllm.registry")

MAX_NAME = 300  # characters of a model's name
MAX_SHOWN = 8  # models in an error


class Registry:
    """All models of a server. The first one is the default.

    ``loaded`` loads and unloads them.
    """

    def __init__(
        self,
        models: Iterable[ServedModel],
        max_bytes: int | None = None,
        recorder: Recorder | None = None,
        scan: Callable[[bool], list[ServedModel]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_bytes`` limits the memory of all loaded models together; None means no limit.
        ``recorder`` writes the trace file, and is closed with the registry. ``scan`` returns all
        models of the settings and the folder; if its argument is true, it reads the settings again.
        It is called in another thread. ``clock`` returns seconds.
        """
        self.models = list(models)
        with_services = [model for model in self.models if model.service is not None]
        self.loaded = LoadedModels(with_services, max_bytes, clock)
        self.metrics = ServerMetrics()
        self.on_rescan: Callable[[], None] = lambda: None
        self._recorder = recorder
        self._scan = scan
        self._clock = clock
        self._scanned = clock()
        self._scanning = asyncio.Lock()
        self._has_served = False
        self._failed: dict[str, object] = {}  # recipes that failed to replace models

    @property
    def has_served(self) -> bool:
        """Whether the start is complete, so that all models to preload have been loaded."""
        if not self._has_served:
            self._has_served = all(model.num_loads for model in self.models if model.preload)
        return self._has_served

    @property
    def ready(self) -> bool:
        """Whether requests are computed: the start is complete, and at least one loaded model has a
        working engine, or no model is loaded.
        """
        if self.loaded.draining or not self.has_served:
            return False
        loaded = [model.service for model in self.models if model.is_loaded and model.service]
        return not loaded or any(service.engine.ready for service in loaded)

    def describe(self) -> str:
        """Return the names of the models, or as many as fit into an error."""
        names = [model.name for model in self.models]
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        return ", ".join(names[:MAX_SHOWN]) + more

    @property
    def default(self) -> ServedModel:
        """The model for requests without a model name. Raises UnknownModel if there is no model."""
        if not self.models:
            raise UnknownModel("default", "no model")
        return self.models[0]

    @property
    def names(self) -> list[str]:
        """The models' names, and their aliases that are not patterns."""
        aliases = (alias for model in self.models for alias in model.aliases)
        plain = (alias for alias in aliases if not set("*?[") & set(alias))
        return list(dict.fromkeys([*(model.name for model in self.models), *plain]))

    def get(self, name: str) -> ServedModel | None:
        """Return the model of exactly this name, with or without :latest."""
        return next((model for model in self.models if model.is_named(name)), None)

    def find(self, name: str | None = None) -> ServedModel:
        """Return the model that has ``name`` as its name, with or without :latest, or as an alias.

        None and "" mean the default model. Raises UnknownModel.
        """
        if not name:
            return self.default
        if (model := self.get(name)) is not None:
            return model
        if len(name) <= MAX_NAME:
            for model in self.models:
                if any(fnmatchcase(name, alias) for alias in model.aliases):
                    return model
        raise UnknownModel(name, self.describe())

    async def load(self, model: ServedModel) -> Service:
        """Return the service of a model; see LoadedModels.

        Raises UnknownModel if the model has been removed and its engine takes no more requests.
        """
        if model.origin.is_removed and self.loaded.use(model) is None:
            raise UnknownModel(model.name, self.describe())
        return await self.loaded.load(model)

    def list_adapters(self, model: ServedModel) -> list[ServedModel]:
        """Return the adapters of a model, which are models too."""
        return [one for one in self.models if one.adapter_file and one.origin is model.origin]

    async def rescan(self, min_age: float = 0.0) -> None:
        """Scan the folder of models: add new files, forget those that are gone and not loaded, and
        replace models whose files have changed.

        Do nothing if a scan is running, or if the last one is less than ``min_age`` seconds old.
        """
        if min_age and (self._scanning.locked() or self._clock() - self._scanned < min_age):
            return
        try:
            await self._scan_again(reads_settings=False)
        except (StartupError, OSError) as error:
            log.error("the folder of models cannot be read: %s", error)

    async def reload(self) -> list[str]:
        """Do what ``rescan`` does, and also use the present settings of the models. Return the
        reasons why some models were not changed.

        Raises StartupError if the settings cannot be used; then nothing has changed.
        """
        self._failed.clear()
        try:
            return await self._scan_again(reads_settings=True)
        except OSError as error:
            raise StartupError(describe_os_error(error)) from error

    async def _scan_again(self, *, reads_settings: bool) -> list[str]:
        if self._scan is None:
            return []
        if not self.has_served:
            if reads_settings:
                raise StartupError("the server is still loading its first model")
            return []
        async with self._scanning:
            models = await asyncio.to_thread(self._scan, reads_settings)
            self._scanned = self._clock()
            faults = await self._use({model.name: model for model in models})
        self.on_rescan()
        return faults

    async def _use(self, present: dict[str, ServedModel]) -> list[str]:
        """Use the ``present`` models from now on. Return the reasons why some were not changed."""
        faults = []
        for model in [one for one in self.models if not one.is_created and one.parent is None]:
            new = present.get(model.name)
            is_used = model.is_loaded or model.is_loading
            if new is None or new.parent is not None:
                if not (model.is_found and is_used):
                    self.remove(model.name)
                    self.loaded.retire_soon(model)
            elif new.recipe == model.recipe:
                model.aliases, model.pinned, model.preload = new.aliases, new.pinned, new.preload
                if model.keep_alive != new.keep_alive:
                    model.keep_alive = model.stay = new.keep_alive
            elif self._failed.get(model.name) != new.recipe:
                faults += await self._replace(model, new)
        for model in self.models:
            is_gone = model.adapter_file and present.get(model.name) is None
            model.is_removed |= bool(is_gone) and not model.is_created
        self.models = [model for model in self.models if not model.is_removed]
        known = {model.name for model in self.models}
        for model in present.values():
            if model.name not in known and self._adopt_parent(model):
                self.models.append(model)
                if model.preload:
                    self.loaded.begin_load(model)
        first = next(iter(present), None)
        self.models.sort(key=lambda model: model.name != first)
        return faults

    def _adopt_parent(self, model: ServedModel) -> bool:
        """Attach an adapter to the model that now has its parent's name.

        Return False if that model could not be replaced and therefore lacks the adapter.
        """
        if model.parent is None:
            return True
        parent = self.get(model.parent.name)
        if parent is None or parent.recipe != model.parent.recipe:
            log.warning("the adapter %s is not served: its model stays as it was", model.name)
            return False
        model.parent = parent
        return True

    async def _replace(self, old: ServedModel, new: ServedModel) -> list[str]:
        """Replace ``old`` by ``new`` for all further requests.

        If ``old`` is loaded, load ``new`` first. If that fails, keep ``old`` and return the reason.
        """
        if old.is_loaded or old.is_loading:
            old.successor = new
            try:
                await self.loaded.load(new)
            except CLLMError as error:
                reason = f"the model {old.name} stays as it was: {error.__cause__ or error}"
                log.error("%s", reason)
                self._failed[old.name] = new.recipe
                await self.loaded.end(new)
                return [reason]
            finally:
                old.successor = None
            log.info("the model %s is replaced", old.name)
        new.num_loads = max(new.num_loads, old.num_loads)
        old.is_removed = True
        self.models = [new if model is old else model for model in self.models]
        for model in self.models:
            if model.parent is old:
                model.parent = new
                # the adapters of ``new`` come with it; models that clients made from them follow
                model.is_removed = bool(model.adapter_use.adapters)
        self.models = [model for model in self.models if not model.is_removed]
        if old.service is not None:
            self.loaded.retire_soon(old)
        return []

    def add(self, model: ServedModel) -> None:
        """Add a model, in place of one with the same name."""
        self.remove(model.name)
        self.models.append(model)

    def remove(self, name: str) -> None:
        """Forget the model ``name``, and the models that it computes for."""
        for model in self.models:
            model.is_removed |= name in (model.name, model.origin.name)
        self.models = [model for model in self.models if not model.is_removed]

    async def discard(self, model: ServedModel) -> None:
        """Forget a model, and end its engine once its requests have ended."""
        self.remove(model.name)
        if model.parent is None:
            await self.loaded.retire(model)

    async def close(self) -> None:
        """End all engines and everything that waits for them."""
        await self.loaded.close()
        if self._recorder is not None:
            self._recorder.close()
