"""Lists the models that a server will serve, from its settings, before anything is loaded.

It imports little, because ``cllm serve`` needs it before everything else.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from cllm.config.settings import Adapter, ModelSettings, Settings
from cllm.config.sources import LoadedConfig
from cllm.core.params import LARGEST
from cllm.core.request import AdapterFile
from cllm.engine.params import EngineParams
from cllm.engine.settings import make_engine_params, resolve_model
from cllm.errors import StartupError
from cllm.models import catalog, hub
from cllm.models.checkpoint import read_json
from cllm.models.file_names import SPLIT
from cllm.models.gguf import read_header
from cllm.models.hub import Progress
from cllm.models.model_file import is_model, list_files
from cllm.models.peft_adapter import ADAPTER_CONFIG, INVOCATION, list_adapter_files
from cllm.models.task import Task, find_task
from cllm.models.template_file import read_template

log = logging.getLogger("cllm.server")

INVOCATION_TOKENS = "adapter.alora.invocation_tokens"
MAX_INVOCATION = 256  # tokens


@dataclass(frozen=True, slots=True)
class Source:
    """A model's name, its settings, and its file; None if the file is still to be resolved, or if
    the backend needs none. ``adapters`` can change it. ``is_first`` says that its engine is started
    with the server, and ``is_found`` that it was found in a folder or a cache.
    """

    name: str
    settings: Settings
    path: Path | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    is_first: bool = False
    is_found: bool = False

    @property
    def task(self) -> Task:
        """The purpose of the model, read from its file."""
        has_template = self.settings.model.chat_template_file is not None
        return "chat" if self.path is None or has_template else find_task(self.path)

    def recipe(self) -> object:
        """Return everything that its engine and service are made from, to detect changes."""
        settings = self.settings
        live = settings.model.model_copy(
            update={"aliases": [], "keep_alive": None, "pinned": False, "preload": False}
        )
        adapters = [
            (name, one, stamp_adapter(adapter_path(one))) for name, one in self.adapters.items()
        ]
        scheduler = settings.scheduler.model_copy(update={"weights": {}, "priorities": {}})
        others = (settings.kv, settings.engine, settings.backend, settings.sampling, scheduler)
        template = settings.model.chat_template_file
        template_stamp = stamp(Path(template).expanduser()) if template else ()
        return live, others, self.path, stamp(self.path), template_stamp, adapters

    def read_params(self, progress: Progress | None = None) -> EngineParams:
        """Return the parameters of its engine, after reading the header of its file, which is
        downloaded if necessary. Raises StartupError.
        """
        path = self.path or resolve_model(self.settings, progress)
        params = make_engine_params(self.settings, path)
        files = {name: adapter_path(adapter) for name, adapter in self.adapters.items()}
        files = {name: file for name, file in files.items() if file.exists()}
        if weight_bytes := params.weight_bytes:  # 0 disables the check
            parts = (part for file in files.values() for part in list_adapter_files(file))
            weight_bytes += sum(part.stat().st_size for part in parts if part.is_file())
        names = {name: str(file) for name, file in files.items()}
        return msgspec.structs.replace(params, adapters=names, weight_bytes=weight_bytes)


ReadAgain = Callable[[], tuple[Settings, Sequence[Source]]]
"""Returns the settings and the models that they name, read again."""


def list_sources(
    loaded: LoadedConfig, progress: Progress | None = None, *, again: bool = False
) -> list[Source]:
    """Return the models of all settings, the default one first. With ``again``, for a running
    server, adapters of models whose files are gone are left out.

    The model of model.path, or the built-in one if the settings name no other, is the first to be
    loaded. Only its file is downloaded. Raises StartupError for files that do not exist, and names
    that are not unique.
    """
    settings = loaded.settings
    sources = [
        Source(name, one, None if catalog.is_on_hub(one.model.path) else resolve_model(one))
        for name, one in loaded.models.items()
    ]
    names_models = loaded.models or settings.models.folder or settings.models.hub_cache
    if settings.model.path is not None or not names_models:
        path = resolve_model(settings, progress)
        name = settings.model.name or (
            catalog.derive_model_name(path) if path else settings.backend.name
        )
        sources.insert(0, Source(name, settings, path, is_first=True))
    counts = Counter(source.name.removesuffix(":latest") for source in sources)
    if doubles := [name for name, count in counts.items() if count > 1]:
        raise StartupError(f"two models have the name {doubles[0]}")
    sources += list_found(settings, sources)
    for source in sources:
        check_template(source.settings.model)
    sources = put_default_first(sources, settings.models.default)
    names = {source.name for source in sources}
    adapters = loaded.adapters
    if again:
        gone = {name for name, one in adapters.items() if one.base and one.base not in names}
        for name in gone:
            log.warning("the adapter %s is not served: its model is not there", name)
        adapters = {name: one for name, one in adapters.items() if name not in gone}
    return add_adapters(sources, adapters)


def check_template(model: ModelSettings) -> None:
    """Raise StartupError if the chat template that the settings name cannot be used."""
    if (name := model.chat_template_file) is None:
        return
    from cllm.text.templates.sandbox import compile_template  # slow to import

    compile_template(read_template(name), name)


def add_adapters(sources: list[Source], adapters: Mapping[str, Adapter]) -> list[Source]:
    """Return the models with their adapters. Raises StartupError for an adapter whose model is not
    served, whose name is a model's, or that has no file.
    """
    names = {source.name for source in sources}
    for name, adapter in adapters.items():
        base = adapter.base or (sources[0].name if sources else "")
        if name in names:
            raise StartupError(f"adapters.{name} has the name of a model")
        if base not in names:
            raise StartupError(f"adapters.{name}.base: there is no model {base or 'yet'}")
        if not adapter_path(adapter).exists():
            raise StartupError(f"adapters.{name}: there is no file {adapter.path}")
    return [
        replace(
            source,
            adapters={
                name: adapter
                for name, adapter in adapters.items()
                if (adapter.base or sources[0].name) == source.name
            },
        )
        for source in sources
    ]


def stamp(path: Path | None) -> tuple[int, ...]:
    """Return numbers that change with a file, or with a checkpoint's files; () if there is none."""
    numbers: list[int] = []
    with suppress(OSError):
        for file in [] if path is None else list_files(path) if path.is_dir() else [path]:
            status = file.stat()
            numbers += [status.st_ino, status.st_size, status.st_mtime_ns]
    return tuple(numbers)


def stamp_adapter(path: Path) -> tuple[int, ...]:
    """Return numbers that change with an adapter's file or folder."""
    return tuple(number for file in list_adapter_files(path) for number in stamp(file))


def inspect_adapter(path: Path) -> AdapterFile:
    """Return a description of an adapter's file or folder. Raises OSError, and ValueError if it is
    an activated LoRA whose invocation tokens are not a list of token ids.
    """
    return _inspect_file(path, stamp_adapter(path))


@lru_cache(maxsize=1000)
def _inspect_file(path: Path, _stamp: tuple[int, ...]) -> AdapterFile:
    digest = hashlib.blake2b(digest_size=16)
    for each in list_adapter_files(path):
        with each.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    try:
        name, tokens = read_invocation(path)
    except StartupError:  # the engine will say so, if it needs such files
        return AdapterFile(digest.hexdigest())
    if tokens is None:
        return AdapterFile(digest.hexdigest())
    if not (
        isinstance(tokens, tuple | list)
        and 0 < len(tokens) <= MAX_INVOCATION
        and all(type(token) is int and 0 <= token <= LARGEST for token in tokens)
    ):
        raise ValueError(f"{name} must be 1 to {MAX_INVOCATION} token ids")
    return AdapterFile(digest.hexdigest(), tuple(tokens))


def read_invocation(path: Path) -> tuple[str, Any]:
    """Return what the file calls the tokens that activate an adapter, and these tokens, unchecked;
    None if nothing must activate it. Raises StartupError if it is not an adapter.
    """
    if path.is_dir():
        return INVOCATION, read_json(path / ADAPTER_CONFIG).get(INVOCATION)
    header = read_header(path)
    is_there = INVOCATION_TOKENS in header.metadata.keys() | header.array_lengths.keys()
    return INVOCATION_TOKENS, header.metadata.get(INVOCATION_TOKENS, ()) if is_there else None


def adapter_path(adapter: Adapter) -> Path:
    return Path(adapter.path).expanduser()


def put_default_first(sources: list[Source], default: str | None) -> list[Source]:
    """Return the models with the default one first: ``default`` (the model of model.path), or else
    the first one that is not a base model.
    """
    for source in sources:
        is_default = source.is_first or source.task != "completion"
        if source.name == default or (default is None and is_default):
            return [source, *(other for other in sources if other is not source)]
    if default is None:
        return sources
    names = ", ".join(source.name for source in sources) or "none"
    raise StartupError(f"models.default is {default}, but the models are {names}")


def is_growing(settings: Settings) -> bool:
    """Return whether models may be added while the server runs."""
    return settings.models.folder is not None or serves_hub_cache(settings)


def serves_hub_cache(settings: Settings) -> bool:
    return settings.models.hub_cache or settings.server.allow_pull


def list_found(settings: Settings, others: Sequence[Source]) -> list[Source]:
    """Return the models in models.folder, including subfolders, and in the hub's cache, as far as
    the settings enable these, without ``others``.

    Raises StartupError if there is no such folder.
    """
    sources: list[Source] = []
    if settings.models.folder is not None:
        folder = Path(settings.models.folder).expanduser()
        sources += make_found(settings, catalog.list_folder(folder))
    if serves_hub_cache(settings):
        cached = {name: path for name, path in hub.list_cached().items() if is_model(path)}
        repos = {name.partition(":")[0]: name for name in reversed(cached)}
        for source in make_found(settings, cached):
            names = [source.name, *list_tags(source, is_default=source.name in repos.values())]
            forms = [prefix + each for prefix in ("hf.co/", "hf:") for each in names]
            model = source.settings.model.model_copy(update={"aliases": [*names[1:], *forms]})
            changed = source.settings.model_copy(update={"model": model})
            sources.append(replace(source, settings=changed))
    taken = {source.name.removesuffix(":latest") for source in others}
    files = {source.path.resolve() for source in others if source.path is not None}
    return [
        source
        for source in sources
        if source.name not in taken and source.path and source.path.resolve() not in files
    ]


def list_tags(source: Source, *, is_default: bool) -> list[str]:
    """Return the other names of a model in the hub's cache: with its tag in small letters, with
    fp16 for f16, and with its file. If it ``is_default``, also return its repository alone.
    """
    assert source.path
    repo, _, tag = source.name.partition(":")
    if source.path.is_dir():
        return [f"{repo}:latest"]
    small = tag.lower()
    tags = {small, f"fp{small[1:]}" if small in ("f16", "f32") else small}
    tags.add(SPLIT.sub(".gguf", hub.name_in_repo(source.path)))
    whole = [repo, f"{repo}:latest"] if is_default else []
    return [*whole, *(f"{repo}:{each}" for each in sorted(tags - {tag}))]


def make_found(settings: Settings, paths: Mapping[str, Path]) -> Iterator[Source]:
    """Yield the models of these files, without those whose names cannot be used."""
    for name, path in paths.items():
        try:
            model = ModelSettings(path=str(path), name=name)
        except ValidationError:
            catalog.warn_once(f"{str(path)!r} is not served: its name cannot be a model's")
        else:
            changed = settings.model_copy(update={"model": model})
            yield Source(name, changed, path, is_found=True)
