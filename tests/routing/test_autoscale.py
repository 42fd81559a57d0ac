"""How many replicas a load needs: numbers, times and limits."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from cllm.routing.autoscale import (
    FULL,
    SPARE,
    ReplicaLoad,
    ScalingLimits,
    ScalingState,
    scale,
)

LIMITS = ScalingLimits(max_replicas=16, up_after=10, down_after=300)
AT_ONCE = ScalingLimits(max_replicas=16, up_after=0, down_after=0)
NEW = ScalingState()


def replicas(num: int, num_running: int, waiting_seconds: float = 0.0) -> list[ReplicaLoad]:
    return [ReplicaLoad(num_running, 10, waiting_seconds)] * num


def test_replicas_are_added_when_places_or_queues_are_full() -> None:
    assert scale(replicas(4, 8), 0, AT_ONCE, NEW, 0)[0] == 4
    assert scale(replicas(4, 9), 0, AT_ONCE, NEW, 0)[0] == 5
    assert scale(replicas(4, 10, waiting_seconds=3), 0, AT_ONCE, NEW, 0)[0] == 6


def test_replicas_are_doubled_at_most() -> None:
    assert scale(replicas(4, 10, waiting_seconds=100), 0, AT_ONCE, NEW, 0)[0] == 8
    assert scale(replicas(10, 10, waiting_seconds=100), 0, AT_ONCE, NEW, 0)[0] == 16


def test_starting_replicas_count() -> None:
    """They are not asked for a second time."""
    assert scale(replicas(4, 9), 1, AT_ONCE, NEW, 0)[0] == 5
    assert scale(replicas(4, 10, waiting_seconds=3), 2, AT_ONCE, NEW, 0)[0] == 6


def test_short_peak_adds_no_replica() -> None:
    num, state = scale(replicas(4, 10), 0, LIMITS, NEW, 100)
    assert (num, state.over_since) == (4, 100)
    assert scale(replicas(4, 10), 0, LIMITS, state, 109)[0] == 4
    assert scale(replicas(4, 10), 0, LIMITS, state, 110)[0] == 5
    _, state = scale(replicas(4, 8), 0, LIMITS, state, 105)
    assert scale(replicas(4, 10), 0, LIMITS, state, 110)[0] == 4


def test_replicas_are_removed_to_the_largest_number_that_was_needed() -> None:
    num, state = scale(replicas(8, 2), 0, LIMITS, NEW, 0)
    assert num == 8
    num, state = scale(replicas(8, 4), 0, LIMITS, state, 150)
    assert num == 8
    assert scale(replicas(8, 1), 0, LIMITS, state, 299)[0] == 8
    assert scale(replicas(8, 1), 0, LIMITS, state, 300)[0] == math.ceil(8 * 4 / 7)
    _, state = scale(replicas(8, 7), 0, LIMITS, state, 200)
    assert state == NEW, "one more than the others can hold"


def test_no_replica_is_removed_while_requests_wait() -> None:
    assert scale(replicas(4, 1, waiting_seconds=2), 0, AT_ONCE, NEW, 0)[0] == 4


def test_number_stays_within_its_limits() -> None:
    limits = ScalingLimits(min_replicas=3, max_replicas=5, up_after=0, down_after=0)
    assert scale([], 0, limits, NEW, 0)[0] == 3
    assert scale([], 4, limits, NEW, 0)[0] == 4
    assert scale(replicas(8, 10), 0, limits, NEW, 0)[0] == 5
    assert scale(replicas(5, 0), 0, limits, NEW, 0)[0] == 3


@given(
    st.lists(
        st.builds(ReplicaLoad, st.integers(0, 64), st.just(64), st.floats(0, 100)),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 5),
)
def test_number_holds_the_load_and_comes_to_rest(ready: list[ReplicaLoad], starting: int) -> None:
    limits = ScalingLimits(max_replicas=1000, up_after=0, down_after=0)
    num = len(ready) + starting
    wanted, _ = scale(ready, starting, limits, NEW, 0)
    assert 1 <= wanted <= 2 * num
    running = sum(one.num_running for one in ready)
    if wanted < num:
        assert running <= SPARE * 64 * wanted + 1e-3
    elif wanted == num:
        assert running <= FULL * 64 * num + 1e-3
    if wanted > num:
        assert scale(ready, wanted - len(ready), limits, NEW, 1)[0] >= wanted
