"""Replays a trace through the real scheduler with a simulated clock.

Engines, schedulers, policies and the KV cache are the real code. Only the model and the time
are simulated: each step takes the time that the cost model gives. Events happen in global order. A
request that arrives in the middle of a replica's step is seen by the next step. The outputs of a
step are known when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cllm.bench.simulation.cluster import EventQueue, SimulatedCluster
from cllm.bench.simulation.replica import Course, Replica
from cllm.bench.simulation.setup import Setup
from cllm.observe.trace_file import TraceEntry
from cllm.routing.residency import choose_to_drain, choose_to_unload, compute_stay

TOO_LONG = "the prompt does not fit into the context"

Progress = Callable[[int], None]
"""Called with the number of requests that have ended."""


def simulate(
    entries: list[TraceEntry], setup: Setup, progress: Progress = lambda _: None
) -> tuple[list[Course], list[Replica]]:
    """Run ``entries``, which are in order of time, on the replicas of their models until all
    requests have ended.
    """
    courses = [Course(entry) for entry in entries]
    events = EventQueue()
    num_arrived = num_ended = 0

    def on_end(num: int) -> None:
        nonlocal num_ended
        num_ended += num
        progress(num_ended)

    models = SimulatedModels(entries, setup, events, on_end)
    while num_arrived < len(courses) or events:
        if num_arrived < len(courses) and entries[num_arrived].arrived <= events.next_time:
            course = courses[num_arrived]
            num_arrived += 1
            if course.entry.input_length >= setup.context:
                course.failure = TOO_LONG
                num_ended += 1
            else:
                models.take(f"r{num_arrived}", course)
            continue
        now, act = events.pop()
        act(now)
        models.make_room(now)
    return courses, models.replicas


class SimulatedModel:
    """A model of the trace: its replicas while it is loaded, and the requests that wait for it.

    ``last_used`` is the time when its last request came or ended.
    """

    def __init__(self) -> None:
        self.cluster: SimulatedCluster | None = None
        self.is_loading = self.is_draining = False
        self.last_used = self.stays_until = 0.0
        self.waiting: list[tuple[str, Course]] = []

    @property
    def is_busy(self) -> bool:
        return self.cluster is not None and self.cluster.is_busy


class SimulatedModels:
    """The models of a trace. They are loaded when a request names them, one after the other, if not
    all fit; see routing/residency.py. A model that is unloaded loses its cached prefixes.
    """

    def __init__(
        self,
        entries: list[TraceEntry],
        setup: Setup,
        events: EventQueue,
        on_end: Callable[[int], None],
    ) -> None:
        """``on_end`` is called with the number of requests that have ended."""
        self.replicas: list[Replica] = []  # those of unloaded models too
        self._setup = setup
        self._events = events
        self._entries = entries
        self._on_end = on_end
        self._models = {
            name: SimulatedModel() for name in sorted({entry.model for entry in entries})
        }
        self._max_loaded = setup.models or len(self._models)
        self._wanted: list[SimulatedModel] = []  # in the order in which they are loaded
        self._drained: SimulatedModel | None = None
        self._next_look = 0.0  # when a model that must stay now may be unloaded
        if self._max_loaded >= len(self._models):
            for model in self._models.values():
                self._start(model, 0.0)

    def take(self, name: str, course: Course) -> None:
        """Give an arriving request to a replica of its model, or let it wait until there is one."""
        model, now = self._models[course.entry.model], course.entry.arrived
        model.last_used = now
        if model.cluster is not None and not model.is_draining:
            model.cluster.take(name, course, now)
            return
        model.waiting.append((name, course))
        if model.cluster is None:
            self._want(model)
        self.make_room(now)

    def make_room(self, now: float) -> None:
        """Begin to load the next model. If there is no room, unload another one first, or wait."""
        if not self._wanted or self._wanted[0].is_loading:
            return
        loaded = [model for model in self._models.values() if model.cluster is not None]
        if len(loaded) >= self._max_loaded:
            leaving = choose_to_unload(loaded, now)
            if leaving is None:
                if self._drained is None:
                    self._drained = choose_to_drain(loaded, now)
                    if self._drained is not None:
                        self._drained.is_draining = True
                    elif self._next_look <= now:
                        stays = [one.stays_until for one in loaded if one.stays_until > now]
                        self._next_look = min(stays)
                        self._events.add(self._next_look, -1, self.make_room)
                return
            leaving.cluster = None
            if leaving.waiting:
                self._want(leaving)
            if self._drained is not None:
                self._drained.is_draining = False
                if self._drained.cluster is not None:
                    self._deliver(self._drained, now)
                self._drained = None
        self._wanted[0].is_loading = True
        load = partial(self._finish_load, self._wanted[0])
        self._events.add(now + self._setup.load_seconds, -1, load)

    def _finish_load(self, model: SimulatedModel, now: float) -> None:
        """Start the replicas of a model that is loaded, and give it the requests that wait."""
        self._wanted.remove(model)
        model.is_loading = False
        self._start(model, now)
        model.last_used, model.stays_until = now, compute_stay(now, self._setup.load_seconds)
        self._deliver(model, now)

    def _want(self, model: SimulatedModel) -> None:
        if model not in self._wanted:
            self._wanted.append(model)

    def _start(self, model: SimulatedModel, now: float) -> None:
        def end(num_ended: int, at: float) -> None:
            model.last_used = at
            self._on_end(num_ended)

        model.cluster = SimulatedCluster(
            self._setup, self._events, self.replicas, self._entries, end, now
        )

    def _deliver(self, model: SimulatedModel, now: float) -> None:
        waiting, model.waiting = model.waiting, []
        assert model.cluster is not None
        for name, course in waiting:
            model.cluster.take(name, course, now)
