"""A model that a server has, loaded or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from cllm.backends.registry import BACKENDS
from cllm.config.settings import Sampling
from cllm.core.model_info import ModelInfo
from cllm.core.request import AdapterFile
from cllm.errors import CLLMError
from cllm.models.task import Task
from cllm.observe.request_record import RequestRecord
from cllm.process.pool import Pool
from cllm.serving.adapter_use import NO_ADAPTERS, AdapterUse
from cllm.serving.service import Service


@dataclass(eq=False, slots=True, kw_only=True)
class ServedModel:
    """A model that the server has under ``name``, loaded or not.

    ``aliases`` are other names, or patterns of names. ``open`` makes the model's service without
    starting its engine, and sets ``path``, ``backend`` and ``min_bytes``, the memory that must be
    free for the model. The model is unloaded ``keep_alive`` seconds after its last request, or
    never if that is None. The last request may have changed that time; ``stay`` is the one in
    effect. A ``pinned`` model is never unloaded to make room. ``is_found`` says that the scan of a
    folder found the model, and ``is_created`` that a client created it.

    ``parent`` is the model that computes for this one, if the two differ only in their names,
    system messages, defaults of sampling parameters, and adapters. ``adapter_key`` is the engine's
    name for the adapter, and ``adapter_file`` describes the adapter's file; they are "" and None
    without an adapter. ``path`` is the model's file, "" if unknown, and ``file_task`` the purpose
    of that file. ``recipe`` is everything that the engine and the service are made from; they are
    replaced if it changes. ``successor`` is the model that is being loaded to replace this one.
    """

    name: str
    aliases: Sequence[str] = ()
    open: Callable[[ServedModel], Awaitable[Service]] | None = None
    service: Service | None = None
    keep_alive: float | None = None
    stay: float | None = field(init=False)
    pinned: bool = False
    preload: bool = False
    is_found: bool = False
    parent: ServedModel | None = None
    is_created: bool = False
    system: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    adapter_use: AdapterUse = NO_ADAPTERS
    adapter_key: str = ""
    adapter_file: AdapterFile | None = None
    min_bytes: int = 0
    path: str = ""
    file_task: Task = "chat"
    recipe: object = None
    backend: str = BACKENDS[0]
    created: int = field(default_factory=lambda: int(time.time()))
    num_loads: int = 0
    last_used: float = 0.0
    stays_until: float = 0.0
    is_draining: bool = False  # it is to be unloaded, and gets no further requests until then
    failure: tuple[float, CLLMError] | None = None  # when a load failed, and why
    is_removed: bool = False
    successor: ServedModel | None = field(default=None, repr=False)
    loading: asyncio.Task[Service] | None = field(default=None, repr=False)
    waiting: list[RequestRecord] = field(default_factory=list, repr=False)  # for its load
    _derived: Service | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.stay = self.keep_alive

    @property
    def origin(self) -> ServedModel:
        """The model whose engine computes: the parent, or this model if it has none."""
        return self.parent or self

    @property
    def engine(self) -> Pool | None:
        """The engine that computes for it; None until it has been made."""
        service = self.origin.service
        return None if service is None else service.engine

    @property
    def is_loaded(self) -> bool:
        """Whether it takes memory: its engine runs, or is being restarted."""
        engine = self.engine
        return engine is not None and self.origin.num_loads > 0 and not engine.unloaded

    @property
    def info(self) -> ModelInfo | None:
        """Information from the engine; None until the model has been loaded for the first time."""
        return None if self.engine is None else self.engine.info

    @property
    def task(self) -> Task:
        """Its purpose, such as "completion" for a base model, which only continues texts."""
        engine = self.engine
        if engine is None or engine.info is None or engine.vocabulary is None:
            return self.origin.file_task
        if not engine.info.generates:
            return "embedding"
        return "chat" if engine.vocabulary.has_template else "completion"

    @property
    def is_loading(self) -> bool:
        """Whether requests wait for its load."""
        loading = self.origin.loading
        return loading is not None and not loading.done()

    @property
    def status(self) -> Literal["loaded", "loading", "unloaded"]:
        if self.is_loading:
            return "loading"
        return "loaded" if self.is_loaded else "unloaded"

    @property
    def loaded_share(self) -> float:
        """The share of the model that has been loaded, 0 to 1."""
        return 0.0 if self.engine is None else self.engine.loaded_share

    @property
    def is_starting(self) -> bool:
        """Whether its engine is being started or restarted, and requests would be rejected."""
        engine = self.engine
        return engine is not None and not engine.unloaded and not engine.ready

    @property
    def is_busy(self) -> bool:
        """Whether it has requests, or texts to tokenize for them."""
        return self.engine is not None and self.engine.has_requests

    @property
    def num_bytes(self) -> int:
        """The memory that it takes while it is loaded; 0 if unknown."""
        return 0 if self.engine is None else self.engine.num_bytes

    @property
    def expires_at(self) -> float | None:
        """The time when it is unloaded if no request comes; None means never."""
        origin = self.origin
        return None if origin.stay is None else origin.last_used + origin.stay

    def view(self, service: Service) -> Service:
        """Return the service of ``origin`` with this model's name, defaults and adapters."""
        if self.parent is None and not self.adapter_use.adapters:
            return service
        derived = self._derived
        if (
            derived is None
            or derived.texts is not service.texts
            or derived.adapter_use != self.adapter_use
        ):
            derived = self._derived = replace(
                service,
                model_name=self.name,
                system=self.system,
                sampling=self.sampling,
                adapter_use=self.adapter_use,
            )
        return derived

    def is_named(self, name: str) -> bool:
        """Return whether this is its own name, with or without :latest."""
        return name.removesuffix(":latest") == self.name.removesuffix(":latest")
