"""The models of a server: which there are, and which one a request means."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from cllm.errors import CLLMError, StartupError, UnknownModel, describe_os_error
from cllm.observe.metrics import ServerMetrics
from cllm.observe.trace_file import Recorder
from cllm.serving.loaded_models import LoadedModels
from cllm.serving.served_model import ServedModel

log = logging.getLogger("cllm.registry")

MAX_NAME = 300  # characters of a model's name
REPLACED_SECONDS = 2.0  # that a removed model stays for requests that are being prepared


class Registry(LoadedModels):
    """All models of a server. The first one is the default."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        max_bytes: int | None = None,
        recorder: Recorder | None = None,
        scan: Callable[[bool], list[ServedModel]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_bytes`` limits the memory of all loaded models together; None for no limit.
        ``recorder`` writes the trace file, and is closed with the registry. ``scan`` returns all
        models of the settings and the folder, and reads the settings again if its argument says so;
        it is called in another thread. ``clock`` returns seconds.
        """
        super().__init__(models, max_bytes, clock)
        self.metrics = ServerMetrics()
        self.on_rescan: Callable[[], None] = lambda: None
        self._recorder = recorder
        self._scan = scan
        self._scanned = clock()
        self._scanning = asyncio.Lock()
        self._failed: dict[str, object] = {}  # recipes with which models could not be replaced

    @property
    def default(self) -> ServedModel:
        """The model of requests that name none. Raises UnknownModel if there is no model."""
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
        """Return the model ``name``: its name with or without :latest, or an alias.

        None and "" mean the default model. Raises UnknownModel.
        """
        if not name:
            return self.default
        if (own := self.get(name)) is not None:
            return own
        if len(name) <= MAX_NAME:
            for model in self.models:
                if any(fnmatchcase(name, alias) for alias in model.aliases):
                    return model
        raise UnknownModel(name, self.describe())

    def list_adapters(self, model: ServedModel) -> list[ServedModel]:
        """Return the adapters of a model, which are models too."""
        return [one for one in self.models if one.adapter_file and one.origin is model.origin]

    async def rescan(self, min_age: float = 0.0) -> None:
        """Add the files that are new in the folder of models, forget those that are gone and not
        loaded, and replace models whose files have changed, unless the last scan is less than
        ``min_age`` seconds old, or is going on.
        """
        if min_age and (self._scanning.locked() or self._clock() - self._scanned < min_age):
            return
        try:
            await self._scan_again(reads_settings=False)
        except (StartupError, OSError) as error:
            log.error("the folder of models cannot be read: %s", error)

    async def reload(self) -> list[str]:
        """Do what ``rescan`` does, and use the present settings of the models. Return why some
        models stay as they were.

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
        self._has_served = True  # whatever models come now
        async with self._scanning:
            found = await asyncio.to_thread(self._scan, reads_settings)
            self._scanned = self._clock()
            faults = await self._use_found({model.name: model for model in found})
        self.on_rescan()
        return faults

    async def _use_found(self, found: dict[str, ServedModel]) -> list[str]:
        """Use ``found`` from now on. Return why some models stay as they were."""
        faults = []
        for model in [one for one in self.models if not one.is_created and one.parent is None]:
            new = found.get(model.name)
            is_used = model.is_loaded or model.is_loading
            if new is None or new.parent is not None:
                if not (model.is_found and is_used):
                    self.remove(model.name)
                    self._keep(asyncio.create_task(self._end(model, REPLACED_SECONDS)))
            elif new.recipe == model.recipe:
                model.aliases, model.pinned, model.preload = new.aliases, new.pinned, new.preload
                if model.keep_alive != new.keep_alive:
                    model.keep_alive = model.stay = new.keep_alive
            elif self._failed.get(model.name) != new.recipe:
                faults += await self._replace(model, new)
        for model in self.models:
            is_gone = model.adapter_file and found.get(model.name) is None
            model.is_removed |= bool(is_gone) and not model.is_created
        self.models = [model for model in self.models if not model.is_removed]
        known = {model.name for model in self.models}
        for model in found.values():
            if model.name not in known and self._adopt_parent(model):
                self.models.append(model)
                if model.preload:
                    self._begin_load(model)
        first = next(iter(found), None)
        self.models.sort(key=lambda model: model.name != first)
        return faults

    def _adopt_parent(self, model: ServedModel) -> bool:
        """Let an adapter belong to the model that is there under its parent's name. Return False if
        that has other adapters, because it could not be replaced.
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
        """Let ``new`` answer the requests from now on that ``old`` would have got. If that is
        loaded, load ``new`` first; if it cannot be loaded, ``old`` stays. Return why, if so.
        """
        if old.is_loaded or old.is_loading:
            old.successor = new
            self._arriving.append(new)
            try:
                await self.load(new)
            except CLLMError as error:
                reason = f"the model {old.name} stays as it was: {error.__cause__ or error}"
                log.error("%s", reason)
                self._failed[old.name] = new.recipe
                if new.service is not None:
                    await new.service.engine.close()
                    await new.service.close()
                return [reason]
            finally:
                old.successor = None
                self._arriving.remove(new)
            log.info("the model %s is replaced", old.name)
        new.num_loads = max(new.num_loads, old.num_loads)
        old.is_removed = True
        self.models = [new if model is old else model for model in self.models]
        for model in self.models:
            if model.parent is old:
                model.parent = new
                # adapters of ``new`` come with it, and what clients have made from them follows
                model.is_removed = bool(model.adapter_use.adapters)
        self.models = [model for model in self.models if not model.is_removed]
        if old.service is not None:
            self._keep(asyncio.create_task(self._end(old, REPLACED_SECONDS)))
        return []

    def add(self, model: ServedModel) -> None:
        """Add a model, in place of one with the same name."""
        self.remove(model.name)
        self.models.append(model)

    def remove(self, name: str) -> None:
        """Forget the model ``name``, and those that it computes for."""
        for model in self.models:
            model.is_removed |= name in (model.name, model.origin.name)
        self.models = [model for model in self.models if not model.is_removed]

    async def discard(self, model: ServedModel) -> None:
        """Forget a model, and end its engine once its requests have ended."""
        self.remove(model.name)
        await self._end(model)

    async def _end(self, model: ServedModel, grace: float = 0.0) -> None:
        """End the engine of a model that has been removed, once its requests have ended.
        ``grace``: seconds for requests that are being prepared.
        """
        if model.parent is not None:
            return
        self._leaving.append(model)
        try:
            if model.loading is not None and model.is_loading:
                await asyncio.wait([model.loading])
            await asyncio.sleep(grace)
            if model.is_loaded:
                await self.unload(model)
        finally:
            self._leaving.remove(model)
            if model.service is not None:
                service, model.service = model.service, None
                await service.engine.close()
                await service.close()

    async def close(self) -> None:
        """End all engines and what waits for them."""
        await super().close()
        if self._recorder is not None:
            self._recorder.close()
