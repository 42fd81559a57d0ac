"""A simulated engine, and the requests that it computes."""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left, bisect_right

import numpy as np

from cllm.backends.base import Logits
from cllm.backends.fake.backend import Costs, FakeBackend
from cllm.backends.fake.vocabulary import VOCABULARY_SIZE
from cllm.bench.simulation.fast_forward import FastForward
from cllm.bench.simulation.setup import Setup
from cllm.core.batch import Batch
from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Request, SequenceProgress
from cllm.engine.build import build_engine
from cllm.engine.commands import Add, Resume
from cllm.engine.params import EngineParams
from cllm.observe.trace_file import TraceEntry
from cllm.routing.router import Booking

MAX_SEQ_IDS = 256  # libllama's limit; in the unified layout, spare seq_ids can keep prefixes
NEVER = 1 << 62
STUCK = "never served: the scheduler is stuck"


class Course:
    """The course of one request.

    Times are in seconds of the trace; ``times`` are those of its tokens. ``replica`` is the last
    one that computed it. Before that, ``num_replays`` others died.
    """

    __slots__ = ("ended", "entry", "failure", "num_cached", "num_replays", "replica", "times")

    def __init__(self, entry: TraceEntry) -> None:
        self.entry = entry
        self.times = array("d")
        self.ended = entry.arrived
        self.failure = STUCK  # until it has ended
        self.num_cached = 0
        self.num_replays = 0
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
    """An engine, its clock, and its unfinished requests.

    It runs from ``started`` to ``stopped``, in seconds.
    """

    def __init__(self, setup: Setup, number: int, costs: Costs, started: float = 0.0) -> None:
        self.number = number
        self.started, self.stopped = started, math.inf
        self.costs = costs
        unified = setup.layout == "unified"
        backend = (FakeBackend if setup.check else Timekeeper)(
            context_length=setup.context,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            layout=setup.layout,
            num_cells=setup.cells,
            num_spare_ids=max(0, MAX_SEQ_IDS - setup.max_num_seqs) if unified else 0,
            length=NEVER,
            costs=costs,
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
        self.version = 0  # grows when the end of its steps changes
        # the ends of the decode steps that are being computed as one; see FastForward
        self._ends: list[float] = []
        self._forward = FastForward(
            self.engine,
            costs,
            setup.prefill_share,
            saves=setup.ram_cache_tokens > 0,
            is_possible=not setup.check and setup.speculation == "off",
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def take(self, name: str, course: Course, booking: Booking, now: float) -> None:
        """Add a request. If a step is in progress, the next step sees it."""
        entry = course.entry
        if not self.is_stepping:
            self.now = now
        elif self._ends:
            self._cut(now)
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
        if course.times:
            self._outputs += self.engine.handle(
                Resume(request, {0: list_delivered(course, request)})
            )
        else:
            self._outputs += self.engine.handle(Add(request))

    def finish_step(self) -> int:
        """Record the outputs of the step that ends now.

        Return the number of requests that end with it.
        """
        if self._ends:
            for seq in self._forward.advance(len(self._ends)):
                self.courses[seq.request.request_id].times.extend(self._ends)
            self._ends = []
        num_ended = 0
        for output in self._outputs:
            course = self.courses[output.request_id]
            if output.token >= 0:
                if not course.times:
                    self._bookings[output.request_id].finish_prompt()
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
        """Begin the next step, or several that only decode. They end at ``now``. Return False if
        there is none.
        """
        if not self.scheduler.sequences.has_work():
            return False
        if num_joined := self._forward.count_steps(self.now):
            seconds = self._forward.seconds
            self._ends = list(itertools.accumulate([seconds] * num_joined, initial=self.now))[1:]
            self.now = self._ends[-1]
            return True
        num_steps = self.scheduler.statistics.num_steps
        self._outputs = self.engine.step()
        return self.scheduler.statistics.num_steps > num_steps or bool(self._outputs)

    def _cut(self, now: float) -> None:
        """End the joined steps with the one that is in progress at ``now``."""
        del self._ends[bisect_left(self._ends, now) + 1 :]
        if self.now != self._ends[-1]:
            self.now = self._ends[-1]
            self.version += 1

    def withdraw(self) -> tuple[str, Course] | None:
        """Forget the first request that has not begun, and return it, None if there is none."""
        name = next(filter(self.scheduler.sequences.withdraw, self.courses), None)
        if name is None:
            return None
        self._bookings.pop(name).release()
        return name, self.courses.pop(name)

    @property
    def num_waiting(self) -> int:
        """The number of requests that do not run."""
        return len(self.courses) - len(self.scheduler.sequences.running)

    def die(self, now: float) -> list[tuple[str, Course]]:
        """End at ``now``, and return the requests that have not ended."""
        self.version += 1
        for at in self._ends[: bisect_right(self._ends, now)]:
            for seq in self.scheduler.sequences.running:
                self.courses[seq.request.request_id].times.append(at)
        for booking in self._bookings.values():
            booking.release()
        left, self.courses, self._bookings = [*self.courses.items()], {}, {}
        return left


def list_delivered(course: Course, request: Request) -> SequenceProgress:
    """Return the tokens that the client of a request has: those that the fake backend counts."""
    last = request.prompt[-1] + 1
    return SequenceProgress([(last + i) % 256 for i in range(len(course.times))])
