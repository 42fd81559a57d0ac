"""Lists the models that a server is to serve, from its settings, before anything is loaded.

It imports little, because ``cllm serve`` needs it before everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cllm.backends.registry import import_loader
from cllm.config import Model, Settings
from cllm.config_sources import LoadedConfig
from cllm.engine.params import EngineParams
from cllm.engine.settings import engine_params
from cllm.errors import StartupError
from cllm.models import catalog
from cllm.models.hub import Progress


@dataclass(frozen=True, slots=True)
class Source:
    """A model's name, its settings, and its file; None if the file is still to be resolved, or if
    the backend needs none. is_first: its engine is started with the server.
    """

    name: str
    settings: Settings
    path: Path | None = None
    is_first: bool = False
    in_folder: bool = False

    def read_params(self, progress: Progress | None = None) -> EngineParams:
        """Return the parameters of its engine, after reading the header of its file, which is
        downloaded if necessary. Raises StartupError.
        """
        path = self.path or resolve(self.settings, progress)
        return engine_params(self.settings, path)


def resolve(settings: Settings, progress: Progress | None = None) -> Path | None:
    model = settings.model
    return import_loader(settings.backend.name).resolve(model.path, model.quantization, progress)


def list_sources(loaded: LoadedConfig, progress: Progress | None = None) -> list[Source]:
    """Return the models of all settings, the default one first.

    The model of model.path, or the built-in one if the settings name no other, is the first to be
    loaded. Only its file is downloaded. Raises StartupError for files that do not exist, and names
    that are not unique.
    """
    settings = loaded.settings
    sources = [
        Source(name, own, None if catalog.is_on_hub(own.model.path) else resolve(own))
        for name, own in loaded.models.items()
    ]
    known = {source.name for source in sources}
    sources += [source for source in list_folder(settings) if source.name not in known]
    if settings.model.path is not None or not (sources or settings.models.folder):
        path = resolve(settings, progress)
        name = settings.model.name or (
            catalog.derive_model_name(path) if path else settings.backend.name
        )
        if any(source.name == name for source in sources):
            raise StartupError(f"two models have the name {name}: set model.name")
        sources.insert(0, Source(name, settings, path, is_first=True))
    return put_default_first(sources, settings.models.default)


def put_default_first(sources: list[Source], default: str | None) -> list[Source]:
    if default is None:
        return sources
    for source in sources:
        if source.name == default:
            return [source, *(other for other in sources if other is not source)]
    names = ", ".join(source.name for source in sources) or "none"
    raise StartupError(f"models.default is {default}, but the models are {names}")


def list_folder(settings: Settings) -> list[Source]:
    """Return the models in the folder models.folder and the folders below it. Raises StartupError
    if there is no such folder.
    """
    if settings.models.folder is None:
        return []
    folder = Path(settings.models.folder).expanduser()
    return [
        Source(
            name,
            settings.model_copy(update={"model": Model(path=str(path), name=name)}),
            path,
            in_folder=True,
        )
        for name, path in catalog.list_folder(folder).items()
    ]
