"""A snapshot: the state of all models, engines and unfinished requests at one time.

Times are in seconds, except for those named ms. ``cllm top`` reads snapshots too, so this module
imports little.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cllm.scheduler.trace import SequenceState


class Latencies(msgspec.Struct, frozen=True):
    """``num_requests`` have ended within a minute, ``num_failed`` of them with an error. Each list
    has the 50th, 90th and 99th percentile in seconds; [] if there is nothing to measure. ``ttft``
    is the time to the first token, ``itl`` the time between two tokens.
    """

    num_requests: int = 0
    num_failed: int = 0
    ttft: list[float] = []
    itl: list[float] = []


class LiveStep(msgspec.Struct, frozen=True):
    """A step: its duration, its decoding rows, its prompt tokens, and what limited it."""

    number: int
    ms: float
    num_rows: int
    num_prefill_tokens: int
    limited_by: str


class EngineState(msgspec.Struct, frozen=True):
    """An engine. ``stage_ms`` has the mean time of each stage of a step since the last snapshot.
    ``steps`` are the latest ones. It is expected to be ready in ``seconds_until_ready``.
    ``prompts`` has the ends of the prompts by the ids of their requests, if ``server.live_prompts``
    is set.
    """

    number: int
    is_ready: bool
    seconds_until_ready: float
    num_restarts: int
    num_running: int
    num_waiting: int
    num_seq_ids: int
    num_cells: int
    num_cells_held: int
    num_cells_idle: int
    num_cells_shared: int
    stage_ms: dict[str, float]
    steps: list[LiveStep]
    sequences: list[SequenceState]
    prompts: dict[str, str] = {}


class QueueEntry(msgspec.Struct, frozen=True, rename={"account": "key"}):
    """The requests of an account in one class that have no token yet."""

    priority: str
    account: str
    num_requests: int
    num_tokens: int


class ModelState(msgspec.Struct, frozen=True):
    """A model. While it is loading, its engines have read ``loaded_share`` of it, 0 to 1. The rates
    are those since the last snapshot. ``replica`` names the server of a cluster that has it. The
    requests that are ``waiting`` have no engine yet, because the model is being loaded.
    """

    name: str
    status: str
    loaded_share: float
    num_bytes: int
    num_requests: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    queue: list[QueueEntry]
    engines: list[EngineState]
    replica: str = ""
    waiting: list[SequenceState] = []


ReplicaStatus = Literal["ready", "loading", "draining", "slow", "lost"]


class ReplicaState(msgspec.Struct, frozen=True):
    """A server of a cluster, as its front sees it. ``trouble`` says why it is slow or lost. What is
    shown of it is ``seconds_old``; None if nothing is. It answers ``num_requests`` of the front.
    """

    name: str
    status: ReplicaStatus
    trouble: str
    seconds_old: float | None
    num_requests: int


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a server ``at`` a time in seconds since 1970. If it ``has_bench``, an
    administrator can start load runs.

    A front of a cluster shows the models of its ``replicas``, and as ``at_front`` the requests that
    no replica has now. ``journeys`` has sentences about what the front did with unfinished requests
    that it had to send more than once, by their id.
    """

    at: float
    version: str
    is_ready: bool
    models: list[ModelState]
    last_minute: Latencies
    is_draining: bool = False
    replicas: list[ReplicaState] = []
    at_front: list[SequenceState] = []
    journeys: dict[str, list[str]] = {}
    has_bench: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs, waits or is being loaded."""
        return not self.at_front and not any(
            model.num_requests or model.status == "loading" for model in self.models
        )
