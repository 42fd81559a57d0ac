"""The lease of a replica: what its fronts know of it. They pull it every second."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cllm import __version__
from cllm.config.settings import SchedulerSettings
from cllm.models.task import Task
from cllm.private_files import lock
from cllm.server.cluster.recent_prefixes import MAX_REQUESTS
from cllm.serving.registry import Registry
from cllm.serving.served_model import ServedModel
from cllm.store.charges import Count

LEASE_PATH = "/internal/lease"
NAME_FILE = "replica_name"  # in the storage folder
NAME_BYTES = 5  # the name has twice as many hex digits

MAX_NAME = 300  # characters in the name of a model
MAX_BLOCKS = 256  # of a prompt that have names

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z]{1,32}\Z")]
Names = Annotated[list[int], msgspec.Meta(max_length=MAX_BLOCKS)]
Status = Literal["ready", "loading", "draining"]


class ModelLease(msgspec.Struct, frozen=True):
    """A model of a replica. The default model is the first one.

    ``fingerprint`` is "" until the model has been loaded. ``origin`` is the name of the model that
    computes for it. The other fields are those of Stats and ModelInfo, over all engines.
    """

    name: Name
    aliases: list[Name]
    task: Task
    origin: Name
    fingerprint: str
    is_loaded: bool
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    num_cells: Count
    num_running: Count
    num_waiting: Count
    waiting_seconds: Seconds
    prompt_token_seconds: Seconds


class Lease(msgspec.Struct, frozen=True):
    """The state of a replica.

    ``name`` stays the same as long as the replica's storage folder exists; ``epoch`` is another one
    after each start. Requests that would wait longer than ``max_queue_seconds`` are rejected; None
    means no limit. ``prefixes`` has the names of prefixes of requests that other fronts have sent
    since the last lease of the same front, one list for each; ``num_noted`` tells how many requests
    there have been, and comes back as the next query's ``after``.
    """

    name: Hex
    epoch: Hex
    version: str
    status: Status
    models: list[ModelLease]
    max_queue_seconds: float | None = None
    num_noted: Count = 0
    prefixes: Annotated[list[Names], msgspec.Meta(max_length=MAX_REQUESTS)] = []


class ReplicaIdentity:
    """The name and the epoch of this server."""

    def __init__(self, folder: str | None, name_file: str = NAME_FILE) -> None:
        """``folder`` is the storage folder; without one, the name is random."""
        self._name_file = name_file
        self.epoch = secrets.token_hex(8)
        self._folder = folder
        self._name = ""

    @property
    def name(self) -> str:
        """Its name, which is read or created when it is asked for the first time."""
        if not self._name:
            self._name = self._read_name() or secrets.token_hex(NAME_BYTES)
        return self._name

    def _read_name(self) -> str:
        """Return the name in the storage folder, "" if another server has it, or without a
        folder.
        """
        if self._folder is None:
            return ""
        path = Path(self._folder).expanduser() / self._name_file
        with suppress(OSError, UnicodeDecodeError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                lock(file)  # until this process ends, which closes the file
            except OSError:
                os.close(file)
                raise
            name = os.read(file, 100).decode("ascii").strip()
            if not name:
                name = secrets.token_hex(NAME_BYTES)
                os.write(file, name.encode() + b"\n")
            return name
        return ""


def write_lease(
    identity: ReplicaIdentity,
    registry: Registry,
    scheduler: SchedulerSettings,
    num_noted: int,
    prefixes: list[list[int]],
) -> bytes:
    """Return the present lease of this server as JSON."""
    status: Status = "ready" if registry.ready else "loading"
    if registry.loaded.draining:
        status = "draining"
    lease = Lease(
        identity.name,
        identity.epoch,
        __version__,
        status,
        [describe(model, scheduler.max_num_seqs) for model in registry.models],
        scheduler.max_queue_seconds,
        num_noted,
        prefixes,
    )
    return msgspec.json.encode(lease)


def describe(model: ServedModel, max_num_seqs: int) -> ModelLease:
    """Return the lease of a model. An engine of it will run ``max_num_seqs`` sequences at most."""
    engine, info = model.engine, model.info
    stats = None if engine is None else engine.stats
    num_engines = 1 if engine is None else len(engine.members)
    return ModelLease(
        name=model.name,
        aliases=[*model.aliases],
        task=model.task,
        origin=model.origin.name,
        fingerprint="" if info is None else info.fingerprint,
        is_loaded=model.is_loaded and engine is not None and engine.ready,
        max_num_seqs=num_engines * (max_num_seqs if info is None else info.max_num_seqs),
        num_cells=0 if stats is None else stats.num_cells,
        num_running=0 if stats is None else stats.num_running,
        num_waiting=0 if stats is None else stats.num_waiting,
        waiting_seconds=0.0 if stats is None else max(0.0, stats.waiting_seconds),
        prompt_token_seconds=0.0 if stats is None else max(0.0, stats.prompt_token_seconds),
    )
