"""The system that is simulated."""

from __future__ import annotations

from typing import Literal

import msgspec

from cllm.backends.fake.backend import Costs
from cllm.bench.simulation.baselines import Routing
from cllm.engine.build import CPU_PREFILL_SHARE
from cllm.errors import StartupError
from cllm.routing.autoscale import ScalingLimits

# a model of 0.6 billion weights on two cores
SMALL_MODEL = Costs(step=0.012, row=0.012, token=0.0066)


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated system.

    Sizes are those of one replica. Each model has ``replicas`` of them. ``num_cells`` is for
    layouts in which sequences share cells. ``models`` is the number of models that can be loaded at
    the same time; 0 means all, which are then loaded from the beginning.

    Requests come to ``fronts`` in turn. Each has a router of its own, which knows the state of the
    replicas as of the last lease. Leases come every ``lease_seconds``; with 0, the router knows
    nothing but what it has booked, and the replicas of one front are engines of one server: a
    request that waits moves to one that has room, see process/balancer.py. The first
    ``slow_replicas`` take ``slow_factor`` times as long. On average, a replica dies every
    ``death_seconds``, and one is drained every ``drain_seconds``; 0 means never. Another one takes
    its place after ``load_seconds``. If ``max_replicas`` is not 0, there are between ``replicas``
    and that many, as routing/autoscale.py decides.

    Raises StartupError for inconsistent sizes.
    """

    context: int
    policy: str = "fair"
    replicas: int = 1
    models: int = 0
    load_seconds: float = 5.0
    fronts: int = 1
    lease_seconds: float = 0.0
    slow_replicas: int = 0
    slow_factor: float = 2.0
    death_seconds: float = 0.0
    drain_seconds: float = 0.0
    max_replicas: int = 0
    target_queue_seconds: float = ScalingLimits().target_queue_seconds
    up_after: float = ScalingLimits().up_after
    down_after: float = ScalingLimits().down_after
    routing: Routing = "least-loaded"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    layout: Literal["paged", "partitioned", "unified"] = "paged"
    num_cells: int | None = None
    ram_cache_tokens: int = 0
    target_itl_ms: float | None = 1000.0
    prefill_share: float = CPU_PREFILL_SHARE
    speculation: Literal["off", "prompt_lookup"] = "off"
    costs: Costs = SMALL_MODEL
    seed: int = 0
    check: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must not be below "
                f"--max-num-seqs {self.max_num_seqs}"
            )
        if self.num_cells is not None and self.layout == "partitioned":
            raise StartupError(
                "--num-cells cannot be combined with --layout partitioned, in which each sequence "
                "has --context cells of its own"
            )
        if self.num_cells is not None and self.num_cells < self.context:
            raise StartupError(
                f"--num-cells {self.num_cells} must not be below --context {self.context}"
            )

        if self.max_replicas and self.max_replicas < self.replicas:
            raise StartupError(
                f"--max-engines {self.max_replicas} must not be below --engines {self.replicas}"
            )
        if self.max_replicas and not self.lease_seconds:
            raise StartupError("--max-engines needs leases, so set --lease-seconds")
        if self.models and (self.max_replicas or self.death_seconds or self.drain_seconds):
            raise StartupError(
                "--models cannot be combined with --max-engines, --death-seconds or --drain-seconds"
            )

    @property
    def is_one_server(self) -> bool:
        """Whether the replicas are the engines of one server."""
        return self.fronts == 1 and not self.lease_seconds

    @property
    def cells(self) -> int:
        """The number of cells of one replica."""
        return self.num_cells or self.context * self.max_num_seqs
