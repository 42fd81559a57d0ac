"""Decides how many replicas a model needs, from the load of those that it has.

Cluster deployments (``cluster/``) and simulations use this rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

FULL = 0.8  # share of the places in use at which replicas are added
SPARE = 0.7  # the remaining replicas must hold the load with this share of their places


class ReplicaLoad(msgspec.Struct, frozen=True):
    """The load of a ready replica, as its lease states it.

    ``num_running`` of ``max_num_seqs`` sequences run. A new request would wait for
    ``waiting_seconds``.
    """

    num_running: int
    max_num_seqs: int
    waiting_seconds: float = 0.0


class ScalingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the rule.

    ``target_queue_seconds`` is the longest mean wait of a new request. Replicas are added if more
    are needed for ``up_after`` seconds, and removed if fewer are enough for ``down_after`` seconds.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_queue_seconds: float = 2.0
    up_after: float = 10.0
    down_after: float = 300.0


class ScalingState(msgspec.Struct, frozen=True):
    """What the rule remembers.

    More replicas are needed since ``over_since``, and fewer are enough since ``under_since``, in
    seconds of the caller's clock. ``most_needed`` is the largest number that was needed since then.
    """

    over_since: float | None = None
    under_since: float | None = None
    most_needed: int = 0


def scale(
    ready: Sequence[ReplicaLoad],
    num_starting: int,
    limits: ScalingLimits,
    state: ScalingState,
    now: float,
) -> tuple[int, ScalingState]:
    """Return the number of replicas that there should be, and the state for the next call.

    ``num_starting`` replicas will be ready soon, and count as idle ones of the usual size. At most
    as many replicas are added as there are.
    """
    num = len(ready) + num_starting
    least = max(0, limits.min_replicas)
    most = max(least, limits.max_replicas)
    if not least <= num <= most or not ready:
        return min(max(num, least), most), ScalingState()
    num_running = sum(one.num_running for one in ready)
    places = max(1.0, sum(one.max_num_seqs for one in ready) / len(ready))  # of one replica
    num_queued = sum(one.waiting_seconds for one in ready) / limits.target_queue_seconds
    wanted = math.ceil(round(max(num_running / (FULL * places), num_queued), 6))
    wanted = min(wanted, 2 * num, most)
    if wanted > num:
        since = now if state.over_since is None else state.over_since
        if now - since < limits.up_after:
            return num, ScalingState(over_since=since)
        return wanted, ScalingState()
    enough = math.ceil(round(num_running / (SPARE * places), 6))
    needed = max(least, wanted, enough)
    if needed >= num:
        return num, ScalingState()
    since = now if state.under_since is None else state.under_since
    needed = max(needed, state.most_needed)
    if now - since < limits.down_after:
        return num, ScalingState(under_since=since, most_needed=needed)
    return needed, ScalingState()
