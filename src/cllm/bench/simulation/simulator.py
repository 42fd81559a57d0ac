"""Replays a trace through the real scheduler with a simulated clock.

Engines, schedulers, policies and the KV cache are the real code. Only the model and the time
are simulated: each step takes the time that the cost model gives. Events happen in global order. A
request that arrives in the middle of a replica's step is seen by the next step. The outputs of a
step are known when it ends.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from cllm.backends.base import Logits
from cllm.backends.fake.backend import Costs, FakeBackend
from cllm.backends.fake.vocabulary import VOCABULARY_SIZE
from cllm.core.batch import Batch
from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import CPU_PREFILL_SHARE, build_engine
from cllm.engine.commands import Add
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.observe.trace_file import TraceEntry
from cllm.routing.residency import choose_to_drain, choose_to_unload, compute_stay
from cllm.routing.router import Booking, Candidate, Router, Routing, RoutingRequest

# a model of 0.6 billion weights on two cores
SMALL_MODEL = Costs(step=0.012, row=0.012, token=0.0066)
MAX_SEQ_IDS = 256  # libllama's limit; in the unified layout, spare seq_ids can keep prefixes
NEVER = 1 << 62

TOO_LONG = "the prompt does not fit into the context"
STUCK = "never served: the scheduler is stuck"

Progress = Callable[[int], None]
"""Called with the number of requests that have ended."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated system.

    Sizes are those of one replica. Each model has ``replicas`` of them. ``num_cells`` is for
    layouts in which sequences share cells. ``models`` is the number of models that can be loaded at
    the same time; 0 means all, which are then loaded from the beginning.

    Raises StartupError for inconsistent sizes.
    """

    context: int
    policy: str = "fair"
    replicas: int = 1
    models: int = 0
    load_seconds: float = 5.0
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

    @property
    def cells(self) -> int:
        """The number of cells of one replica."""
        return self.num_cells or self.context * self.max_num_seqs


class Course:
    """The course of one request.

    Times are in seconds of the trace; ``times`` are those of its tokens.
    """

    __slots__ = ("ended", "entry", "failure", "num_cached", "replica", "times")

    def __init__(self, entry: TraceEntry) -> None:
        self.entry = entry
        self.times: list[float] = []
        self.ended = entry.arrived
        self.failure = STUCK  # until it has ended
        self.num_cached = 0
        self.replica = -1


class Timekeeper(FakeBackend):
    """Has the costs and outputs of the fake backend, but is much faster: it keeps no cells and
    checks nothing.
    """

    def forward(self, batch: Batch) -> Logits:
        self.num_steps += 1
        self._sleep(self._costs.compute_seconds(batch))
        last = [
            token
            for row in batch.rows
            if row.num_samples
            for token in (row.seq.tokens[row.start + row.num_tokens - 1], *row.draft)
        ]
        logits = np.zeros((len(last), VOCABULARY_SIZE), np.float32)
        for i, token in enumerate(last):
            logits[i, (token + 1) % 256] = 20
        return logits


class Replica:
    """An engine, its clock, and its unfinished requests."""

    def __init__(self, setup: Setup, number: int) -> None:
        self.number = number
        unified = setup.layout == "unified"
        backend = (FakeBackend if setup.check else Timekeeper)(
            context_length=setup.context,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            layout=setup.layout,
            num_cells=setup.cells,
            num_spare_ids=max(0, MAX_SEQ_IDS - setup.max_num_seqs) if unified else 0,
            length=NEVER,
            costs=setup.costs,
            sleep=self._sleep,
        )
        params = EngineParams(
            policy=setup.policy,
            prefill_share=setup.prefill_share,
            target_itl=math.inf if setup.target_itl_ms is None else setup.target_itl_ms / 1000,
            speculation=setup.speculation,
            ram_cache_bytes=setup.ram_cache_tokens * backend.info.state_bytes_per_token,
            check=setup.check,
        )
        self.now = 0.0
        self.is_stepping = False
        self.courses: dict[str, Course] = {}
        self._bookings: dict[str, Booking] = {}
        self.engine = build_engine(backend, params, lambda: self.now)
        self.scheduler = self.engine.scheduler
        self._outputs: list[TokenOutput] = []  # of the last step, known at ``now``

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def take(self, name: str, course: Course, booking: Booking, now: float) -> None:
        """Add a request. If a step is in progress, the next step sees it."""
        entry = course.entry
        if not self.is_stepping:
            self.now = now
        self.courses[name] = course
        self._bookings[name] = booking
        params = SamplingParams(
            max_tokens=entry.output_length, temperature=0, seed=0, ignore_eos=True
        )
        deadline = None
        if entry.deadline_ms is not None:
            deadline = entry.arrived + entry.deadline_ms / 1000 - now
        request = Request(
            name, entry.make_prompt(), params, entry.account, entry.service_class, deadline
        )
        self._outputs += self.engine.handle(Add(request))

    def finish_step(self) -> int:
        """Record the outputs of the step that ends now.

        Return the number of requests that end with it.
        """
        num_ended = 0
        for output in self._outputs:
            course = self.courses[output.request_id]
            if output.token >= 0:
                course.times.append(self.now)
                course.num_cached += output.num_cached_tokens
            if output.finish:
                course.ended = self.now
                course.failure = "" if output.token >= 0 else str(output.finish)
                del self.courses[output.request_id]
                self._bookings.pop(output.request_id).release()
                num_ended += 1
        self._outputs = []
        return num_ended

    def step(self) -> bool:
        """Begin the next step, which ends at ``now``. Return False if there is none."""
        if not self.scheduler.sequences.has_work():
            return False
        num_steps = self.scheduler.statistics.num_steps
        self._outputs = self.engine.step()
        return self.scheduler.statistics.num_steps > num_steps or bool(self._outputs)


def routing_request(entry: TraceEntry) -> RoutingRequest:
    size = entry.block_size
    ends = range(size, size * (len(entry.hash_ids) + 1), size)
    return RoutingRequest(entry.hash_ids, ends, entry.input_length, entry.account)


def simulate(
    entries: list[TraceEntry], setup: Setup, progress: Progress = lambda _: None
) -> tuple[list[Course], list[Replica]]:
    """Run ``entries``, which are in order of time, on the replicas of their models until all
    requests have ended.
    """
    courses = [Course(entry) for entry in entries]
    events = EventQueue()
    models = SimulatedModels(entries, setup, events)
    num_arrived = num_ended = 0
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
        now, item = events.pop()
        if isinstance(item, Replica):
            if ended := item.finish_step():
                num_ended += ended
                models.note_use(item, now)
                progress(num_ended)
            if item.step():
                events.add(item.now, item.number, item)
            else:
                item.is_stepping = False
        elif isinstance(item, SimulatedModel):
            models.finish_load(item, now)
        models.make_room(now)
    return courses, models.replicas


class EventQueue:
    """The coming events, in the order of times and then of numbers. An event is a replica whose
    step ends, a model whose load ends, or None for a time at which a model may be unloaded.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Replica | SimulatedModel | None]] = []
        self._added = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def next_time(self) -> float:
        return self._heap[0][0] if self._heap else math.inf

    def add(self, at: float, number: int, item: Replica | SimulatedModel | None) -> None:
        heapq.heappush(self._heap, (at, number, next(self._added), item))

    def pop(self) -> tuple[float, Replica | SimulatedModel | None]:
        at, _, _, item = heapq.heappop(self._heap)
        return at, item


class SimulatedModel:
    """A model of the trace: its replicas while it is loaded, and the requests that wait for it.

    ``last_used`` is the time when its last request came or ended.
    """

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self.is_loading = self.is_draining = False
        self.last_used = self.stays_until = 0.0
        self.waiting: list[tuple[str, Course]] = []
        self.router: Router | None = None
        self.candidates: list[Candidate] = []

    @property
    def is_busy(self) -> bool:
        return any(replica.courses for replica in self.replicas)


class SimulatedModels:
    """The models of a trace. They are loaded when a request names them, one after the other, if not
    all fit; see routing/residency.py. A model that is unloaded loses its cached prefixes.
    """

    def __init__(self, entries: list[TraceEntry], setup: Setup, events: EventQueue) -> None:
        self.replicas: list[Replica] = []  # those of unloaded models too
        self._setup = setup
        self._events = events
        self._block_size = entries[0].block_size
        self._models = {
            name: SimulatedModel() for name in sorted({entry.model for entry in entries})
        }
        self._max_loaded = setup.models or len(self._models)
        self._wanted: list[SimulatedModel] = []  # in the order in which they are loaded
        self._drained: SimulatedModel | None = None
        self._next_look = 0.0  # when a model that must stay now may be unloaded
        if self._max_loaded >= len(self._models):
            for model in self._models.values():
                self._start(model)

    def take(self, name: str, course: Course) -> None:
        """Give an arriving request to a replica of its model, or let it wait until there is one."""
        model, now = self._models[course.entry.model], course.entry.arrived
        model.last_used = now
        if model.replicas and not model.is_draining:
            self._place(model, name, course, now)
            return
        model.waiting.append((name, course))
        if not model.replicas:
            self._want(model)
        self.make_room(now)

    def make_room(self, now: float) -> None:
        """Begin to load the next model. If there is no room, unload another one first, or wait."""
        if not self._wanted or self._wanted[0].is_loading:
            return
        loaded = [model for model in self._models.values() if model.replicas]
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
                        self._events.add(self._next_look, -1, None)
                return
            leaving.replicas = []
            if leaving.waiting:
                self._want(leaving)
            if self._drained is not None:
                self._drained.is_draining = False
                if self._drained.replicas:
                    self._deliver(self._drained, now)
                self._drained = None
        self._wanted[0].is_loading = True
        self._events.add(now + self._setup.load_seconds, -1, self._wanted[0])

    def finish_load(self, model: SimulatedModel, now: float) -> None:
        """Start the replicas of a model that is loaded, and give it the requests that wait."""
        self._wanted.remove(model)
        model.is_loading = False
        self._start(model)
        model.last_used, model.stays_until = now, compute_stay(now, self._setup.load_seconds)
        self._deliver(model, now)

    def note_use(self, replica: Replica, now: float) -> None:
        """Note that a replica's model has been busy until ``now``."""
        for model in self._models.values():
            if replica in model.replicas:
                model.last_used = now

    def _want(self, model: SimulatedModel) -> None:
        if model not in self._wanted:
            self._wanted.append(model)

    def _start(self, model: SimulatedModel) -> None:
        setup, begin = self._setup, len(self.replicas)
        model.replicas = [Replica(setup, begin + i) for i in range(setup.replicas)]
        self.replicas += model.replicas
        model.candidates = [
            Candidate(i, setup.max_num_seqs, prompt_token_seconds=setup.costs.token)
            for i in range(setup.replicas)
        ]
        max_blocks = setup.cells * setup.replicas // self._block_size
        model.router = Router(setup.routing, max_blocks, seed=setup.seed)

    def _deliver(self, model: SimulatedModel, now: float) -> None:
        waiting, model.waiting = model.waiting, []
        for name, course in waiting:
            self._place(model, name, course, now)

    def _place(self, model: SimulatedModel, name: str, course: Course, now: float) -> None:
        assert model.router is not None
        booking = model.router.choose(routing_request(course.entry), model.candidates)
        replica = model.replicas[booking.number]
        course.replica = replica.number
        replica.take(name, course, booking, now)
        if not replica.is_stepping:
            replica.is_stepping = True
            self._events.add(replica.now, replica.number, replica)
