"""The simulated replicas of one model, and the fronts that choose one of them for each request."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from enum import Enum
from functools import partial

import msgspec
import numpy as np

from cllm.bench.simulation.baselines import ROUTERS
from cllm.bench.simulation.replica import Course, Replica
from cllm.bench.simulation.setup import Setup
from cllm.observe.trace_file import TraceEntry
from cllm.routing.autoscale import ReplicaLoad, ScalingLimits, ScalingState, scale
from cllm.routing.prefix_table import choose_landmarks
from cllm.routing.router import Booking, Candidate, RoutingRequest, is_crowded
from cllm.scheduler.report import estimate_waiting_seconds

Action = Callable[[float], None]
"""What happens at an event, called with its time."""


class EventQueue:
    """The coming events, in the order of times and then of numbers."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Action]] = []
        self._added = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def next_time(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def add(self, at: float, number: int, action: Action) -> None:
        heapq.heappush(self._heap, (at, number, next(self._added), action))

    def pop(self) -> tuple[float, Action]:
        at, _, _, action = heapq.heappop(self._heap)
        return at, action


class Status(Enum):
    """LEAVING: the replica drains, and no other one takes its place."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    LEAVING = "leaving"


class Place:
    """A place for a replica: its number for the routers, and its replica, None while it starts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.status = Status.STARTING
        self.replica: Replica | None = None
        self.news: list[list[int]] = []  # prefixes that it has got since its last lease


class SimulatedCluster:
    """The replicas of a model.

    All replicas that have started are in the list ``started``, which clusters share. ``on_end`` is
    called with the number of requests that have ended, and the time.
    """

    def __init__(
        self,
        setup: Setup,
        events: EventQueue,
        started: list[Replica],
        entries: list[TraceEntry],
        on_end: Callable[[int, float], None],
        now: float,
    ) -> None:
        self._setup = setup
        self._events = events
        self._started = started
        self._last_arrival = entries[-1].arrived
        self._on_end = on_end
        self._rng = np.random.default_rng(setup.seed)
        most = max(setup.replicas, setup.max_replicas)
        max_blocks = setup.cells * most // entries[0].block_size
        self._fronts = [
            ROUTERS[setup.routing](max_blocks, seed=setup.seed + i) for i in range(setup.fronts)
        ]
        self._turns = itertools.cycle(range(setup.fronts))
        self._places: dict[int, Place] = {}
        # for each front, the replicas that it may choose
        self._candidates: list[dict[int, Candidate]] = [{} for _ in self._fronts]
        self._by_front: list[list[Candidate]] = [[] for _ in self._fronts]
        self._waiting: list[tuple[str, Course]] = []
        self._scaling = ScalingState()
        for number in range(setup.replicas):
            self._places[number] = Place(number)
            self._start(self._places[number], now)
        if setup.lease_seconds:
            events.add(now + setup.lease_seconds, -1, self._renew_leases)
        if setup.death_seconds:
            self._plan(setup.death_seconds, self._kill_one, now)
        if setup.drain_seconds:
            self._plan(setup.drain_seconds, self._drain_one, now)

    @property
    def is_busy(self) -> bool:
        return any(one.replica is not None and one.replica.courses for one in self._places.values())

    # --- requests --------------------------------------------------------------------------------

    def take(self, name: str, course: Course, now: float) -> None:
        """Give a request to the replica that the next front chooses."""
        front = next(self._turns)
        candidates = self._by_front[front]
        if not candidates:
            self._waiting.append((name, course))
            return
        request = make_routing_request(course.entry)
        booking = self._fronts[front].choose(request, candidates)
        place = self._places[booking.number]
        if len(self._fronts) > 1:
            place.news.append(choose_landmarks(request.blocks))
        replica = place.replica
        assert replica is not None, "it is ready"
        self._give(place, name, course, booking, now)
        # the new one waits until the next step, whether there is room or not
        if self._setup.is_one_server and replica.num_waiting > 1:
            for other in self._list_ready():
                self._relieve(other, now)

    def _give(self, place: Place, name: str, course: Course, booking: Booking, now: float) -> None:
        """Give a request to a replica, which begins to compute if it is idle."""
        replica = place.replica
        assert replica is not None, "it is ready"
        course.replica = replica.number
        version = replica.version
        replica.take(name, course, booking, now)
        if not replica.is_stepping or replica.version != version:
            replica.is_stepping = True
            self._add_end(replica, place)

    def _relieve(self, place: Place, now: float) -> None:
        """Let an engine take over requests that wait for others, as in process/balancer.py."""
        target, most = place.replica, self._setup.max_num_seqs
        candidate = Candidate(place.number, most)
        while target is not None and (least := len(target.courses)) < most:
            sources = [
                one.replica
                for one in self._list_ready()
                if one is not place
                and one.replica is not None
                and one.replica.num_waiting
                and (not least or is_crowded(len(one.replica.courses), least, candidate))
            ]
            source = max(sources, key=lambda one: len(one.courses), default=None)
            if source is None or (moved := source.withdraw()) is None:
                return
            name, course = moved
            booking = self._fronts[0].choose(make_routing_request(course.entry), [candidate])
            self._give(place, name, course, booking, now)

    def _add_end(self, replica: Replica, place: Place) -> None:
        end = partial(self._finish_step, replica, place, replica.version)
        self._events.add(replica.now, replica.number, end)

    def _finish_step(self, replica: Replica, place: Place, version: int, now: float) -> None:
        if replica.version != version:  # the step ends at another time now, or never
            return
        if num_ended := replica.finish_step():
            self._on_end(num_ended, now)
            if self._setup.is_one_server:
                self._relieve(place, now)
        if replica.step():
            self._add_end(replica, place)
            return
        replica.is_stepping = False
        if not replica.courses and place.status in (Status.DRAINING, Status.LEAVING):
            self._replace(place, now)

    # --- replicas --------------------------------------------------------------------------------

    def _start(self, place: Place, now: float) -> None:
        """Let a replica get requests."""
        costs, setup = self._setup.costs, self._setup
        if place.number < setup.slow_replicas:
            parts = {
                name: setup.slow_factor * seconds
                for name, seconds in msgspec.structs.asdict(costs).items()
            }
            costs = type(costs)(**parts)
        place.replica = Replica(setup, len(self._started), costs, now)
        self._started.append(place.replica)
        place.status = Status.READY
        candidate = Candidate(place.number, setup.max_num_seqs, prompt_token_seconds=costs.token)
        for candidates in self._candidates:
            candidates[place.number] = candidate
        self._list_candidates()
        waiting, self._waiting = self._waiting, []
        for name, course in waiting:
            self.take(name, course, now)

    def _list_candidates(self) -> None:
        self._by_front = [list(candidates.values()) for candidates in self._candidates]

    def _withdraw(self, place: Place, status: Status) -> None:
        """Let a replica get no further requests."""
        place.status = status
        for candidates in self._candidates:
            candidates.pop(place.number, None)
        self._list_candidates()

    def _replace(self, place: Place, now: float) -> None:
        """Begin to start another replica in the place of one that has ended, unless it leaves."""
        assert place.replica is not None
        place.replica.stopped = now
        place.replica = None
        place.news.clear()
        for front in self._fronts:
            front.forget(place.number)
        if place.status is Status.LEAVING:
            del self._places[place.number]
        else:
            place.status = Status.STARTING
            self._events.add(now + self._setup.load_seconds, -1, partial(self._start, place))

    def _list_ready(self) -> list[Place]:
        return [one for one in self._places.values() if one.status is Status.READY]

    # --- disturbances ----------------------------------------------------------------------------

    def _plan(self, mean_seconds: float, action: Action, now: float) -> None:
        at = now + self._rng.exponential(mean_seconds)
        if at < self._last_arrival:
            self._events.add(at, -1, action)

    def _kill_one(self, now: float) -> None:
        """End a replica. Other replicas continue its requests."""
        self._plan(self._setup.death_seconds, self._kill_one, now)
        ready = self._list_ready()
        if not ready:
            return
        place = ready[self._rng.integers(len(ready))]
        self._withdraw(place, Status.DRAINING)
        assert place.replica is not None
        left = place.replica.die(now)
        self._replace(place, now)
        for name, course in left:
            course.num_replays += 1
            self.take(name, course, now)

    def _drain_one(self, now: float) -> None:
        self._plan(self._setup.drain_seconds, self._drain_one, now)
        ready = self._list_ready()
        if len(ready) > 1:
            self._drain(ready[self._rng.integers(len(ready))], Status.DRAINING, now)

    def _drain(self, place: Place, status: Status, now: float) -> None:
        self._withdraw(place, status)
        assert place.replica is not None
        if not place.replica.courses:
            self._replace(place, now)

    # --- leases ----------------------------------------------------------------------------------

    def _renew_leases(self, now: float) -> None:
        """Tell all fronts the state of the replicas, and change the number of replicas."""
        setup, loads = self._setup, list[ReplicaLoad]()
        for place in self._list_ready():
            replica = place.replica
            assert replica is not None
            num_seqs = len(replica.courses)
            waiting = estimate_waiting_seconds(replica.scheduler)
            loads.append(
                ReplicaLoad(min(num_seqs, setup.max_num_seqs), setup.max_num_seqs, waiting)
            )
            news, place.news = place.news, []
            for front, candidates in zip(self._fronts, self._candidates, strict=True):
                front.correct(place.number, num_seqs)
                for blocks in news:
                    front.prefixes.add(blocks, place.number)
                share = front.booked(place.number).num_others / num_seqs if num_seqs else 0.0
                if share * waiting != candidates[place.number].waiting_seconds:
                    candidates[place.number] = msgspec.structs.replace(
                        candidates[place.number], waiting_seconds=share * waiting
                    )
        self._list_candidates()
        if setup.max_replicas:
            self._scale(loads, now)
        is_stepping = any(
            one.replica is None or one.replica.is_stepping for one in self._places.values()
        )
        if is_stepping or now < self._last_arrival:
            self._events.add(now + setup.lease_seconds, -1, self._renew_leases)

    def _scale(self, loads: list[ReplicaLoad], now: float) -> None:
        setup = self._setup
        limits = ScalingLimits(
            min_replicas=setup.replicas,
            max_replicas=setup.max_replicas,
            target_queue_seconds=setup.target_queue_seconds,
            up_after=setup.up_after,
            down_after=setup.down_after,
        )
        num_starting = sum(
            one.status in (Status.STARTING, Status.DRAINING) for one in self._places.values()
        )
        wanted, self._scaling = scale(loads, num_starting, limits, self._scaling, now)
        surplus = len(loads) + num_starting - wanted
        free = (number for number in itertools.count() if number not in self._places)
        for _ in range(-surplus):
            place = Place(next(free))
            self._places[place.number] = place
            self._events.add(now + setup.load_seconds, -1, partial(self._start, place))
        emptiest = sorted(
            self._list_ready(), key=lambda one: len(one.replica.courses if one.replica else ())
        )
        for place in emptiest[: max(0, surplus)]:
            self._drain(place, Status.LEAVING, now)


def make_routing_request(entry: TraceEntry) -> RoutingRequest:
    size = entry.block_size
    ends = range(size, size * (len(entry.hash_ids) + 1), size)
    return RoutingRequest(entry.hash_ids, ends, entry.input_length, entry.account)
