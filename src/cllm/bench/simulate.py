"""Replays a trace through the real scheduler with a simulated clock.

Engines, schedulers, policies and the KV cache ledger are the real code. Only the model and the time
are simulated: each step takes the time that the cost model gives. Events happen in global order. A
request that arrives in the middle of a replica's step is seen by the next step. The outputs of a
step are known when it ends.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal

import msgspec
import numpy as np

from cllm.backends.base import Logits
from cllm.backends.fake import VOCABULARY_SIZE, Costs, FakeBackend
from cllm.bench.distribution import Distribution
from cllm.core.batch import Batch
from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.engine.build import build_engine
from cllm.engine.commands import Add
from cllm.engine.params import EngineParams
from cllm.errors import StartupError
from cllm.observe.trace_file import Entry
from cllm.scheduler.policy import OUTPUT_WEIGHT

# a model of 0.6 billion weights on two cores
SMALL_MODEL = Costs(step=0.012, row=0.012, token=0.0066)
MAX_SEQ_IDS = 256  # libllama's limit; in the unified layout, spare seq_ids can keep prefixes
NEVER = 1 << 62
CROWDED = 2  # times the least load; above it, a replica gets no requests for its prefixes

TOO_LONG = "the prompt does not fit into the context"
STUCK = "never served: the scheduler is stuck"

Progress = Callable[[int], None]
"""Called with the number of requests that have ended."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated system.

    Sizes are those of one replica. ``num_cells`` is for the unified layout only.

    Raises StartupError for inconsistent sizes.
    """

    context: int
    policy: str = "fair"
    replicas: int = 1
    routing: Literal["least-loaded", "prefix", "round-robin"] = "least-loaded"
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    layout: Literal["partitioned", "unified"] = "partitioned"
    num_cells: int | None = None
    ram_cache_tokens: int = 0
    target_itl_ms: float | None = 1000.0
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
                "--num-cells needs --layout unified: else each sequence has --context cells of "
                "its own"
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

    def __init__(self, entry: Entry) -> None:
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
        self._sleep(self._costs.of(batch))
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

    def __init__(self, setup: Setup) -> None:
        unified = setup.layout == "unified"
        backend = (FakeBackend if setup.check else Timekeeper)(
            context_length=setup.context,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            num_cells=setup.cells if unified else None,
            num_spare_ids=max(0, MAX_SEQ_IDS - setup.max_num_seqs) if unified else 0,
            length=NEVER,
            costs=setup.costs,
            sleep=self._sleep,
        )
        params = EngineParams(
            policy=setup.policy,
            target_itl=None if setup.target_itl_ms is None else setup.target_itl_ms / 1000,
            speculation=setup.speculation,
            ram_cache_bytes=setup.ram_cache_tokens * backend.info.state_bytes_per_token,
            check=setup.check,
        )
        self.now = 0.0
        self.is_stepping = False
        self.courses: dict[str, Course] = {}
        self.engine = build_engine(backend, params, lambda: self.now)
        self.scheduler = self.engine.scheduler
        self._outputs: list[TokenOutput] = []  # of the last step, known at ``now``

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def load(self) -> int:
        return len(self.courses)

    def take(self, name: str, course: Course) -> None:
        """Add a request that arrives. If a step is in progress, the next step sees the request."""
        entry = course.entry
        if not self.is_stepping:
            self.now = entry.arrived
        self.courses[name] = course
        params = SamplingParams(
            max_tokens=entry.output_length, temperature=0, seed=0, ignore_eos=True
        )
        deadline = None if entry.deadline_ms is None else entry.deadline_ms / 1000
        request = Request(name, entry.prompt(), params, entry.key, entry.service_class, deadline)
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
                num_ended += 1
        self._outputs = []
        return num_ended

    def step(self) -> bool:
        """Begin the next step, which ends at ``now``. Return False if there is none."""
        if not self.scheduler.has_work():
            return False
        num_steps = self.scheduler.num_steps
        self._outputs = self.engine.step()
        return self.scheduler.num_steps > num_steps or bool(self._outputs)


class Router:
    """Chooses a replica for each request."""

    def __init__(self, setup: Setup, replicas: list[Replica], block_size: int) -> None:
        self._routing = setup.routing
        self._replicas = replicas
        self._rng = random.Random(setup.seed)
        self._last = -1
        # block -> bit mask of replicas, least recently used first
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._max_seen = setup.cells * setup.replicas // block_size

    def choose(self, entry: Entry) -> int:
        if self._routing == "round-robin":
            self._last = (self._last + 1) % len(self._replicas)
            return self._last
        loads = [replica.load for replica in self._replicas]
        least = min(loads)
        if self._routing == "prefix":
            chosen = min(self._homes(entry), key=lambda i: (loads[i], i), default=None)
            if chosen is None or loads[chosen] > CROWDED * max(least, 1):
                chosen = self._any(loads, least)
            self._remember(entry, chosen)
            return chosen
        return self._any(loads, least)

    def _any(self, loads: list[int], least: int) -> int:
        return self._rng.choice([i for i, load in enumerate(loads) if load == least])

    def _homes(self, entry: Entry) -> list[int]:
        """Return the replicas that have seen the longest prefix of the request's blocks; empty if
        none has seen any.
        """
        bits = (1 << len(self._replicas)) - 1
        found = 0
        for block_id in entry.hash_ids:
            bits &= self._seen.get(block_id, 0)
            if not bits:
                break
            found = bits
        return [i for i in range(len(self._replicas)) if found >> i & 1]

    def _remember(self, entry: Entry, replica: int) -> None:
        for block_id in entry.hash_ids:
            self._seen[block_id] = self._seen.pop(block_id, 0) | 1 << replica
        while len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)


def simulate(
    entries: list[Entry], setup: Setup, progress: Progress = lambda _: None
) -> tuple[list[Course], list[Replica]]:
    """Run ``entries``, which are in order of time, on the replicas until all requests have
    ended.
    """
    replicas = [Replica(setup) for _ in range(setup.replicas)]
    router = Router(setup, replicas, entries[0].block_size)
    courses = [Course(entry) for entry in entries]
    stepping: list[tuple[float, int]] = []  # heap of (end of the step, index of the replica)
    num_arrived = num_ended = 0
    while num_arrived < len(courses) or stepping:
        if num_arrived < len(courses) and (
            not stepping or entries[num_arrived].arrived <= stepping[0][0]
        ):
            course = courses[num_arrived]
            num_arrived += 1
            if course.entry.input_length >= setup.context:
                course.failure = TOO_LONG
                num_ended += 1
                continue
            course.replica = router.choose(course.entry)
            replica = replicas[course.replica]
            replica.take(f"r{num_arrived}", course)
            if not replica.is_stepping:
                replica.is_stepping = True
                heapq.heappush(stepping, (replica.now, course.replica))
            continue
        index = heapq.heappop(stepping)[1]
        replica = replicas[index]
        if ended := replica.finish_step():
            num_ended += ended
            progress(num_ended)
        if replica.step():
            heapq.heappush(stepping, (replica.now, index))
        else:
            replica.is_stepping = False
    return courses, replicas


# --- results ------------------------------------------------------------------------------------


class Limits(msgspec.Struct, frozen=True):
    """The limits within which a request counts as good, in milliseconds. None: no limit."""

    ttft: float | None = None
    tpot: float | None = None

    def kept(self, course: Course) -> bool:
        return (self.ttft is None or ttft(course) * 1000 <= self.ttft) and (
            self.tpot is None or tpot(course) * 1000 <= self.tpot
        )


class KeyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one key. ``served``: prompt tokens computed for it plus OUTPUT_WEIGHT times the
    tokens of its answers, as the policy fair counts.
    """

    num_requests: int
    num_succeeded: int
    served: int
    mean_ttft_ms: float | None
    mean_e2e_ms: float | None


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """What the compared keys were served while each of them had a request that waited for its first
    token.

    jain_index: 1 if all got the same, 1 / (number of keys) if one got everything, None if none got
    anything.
    """

    seconds: float
    served: dict[str, int]
    jain_index: float | None


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The object that ``--json`` prints.

    Latencies are those of successful requests, as in bench/report.py.

    num_cut: answers cut short by the context length. prefill_tokens: prompt tokens computed in all,
    including what parked sequences computed again. Rates are over ``wall_s``, simulated seconds
    from the first arrival to the last end. Good requests are those within the limits.
    """

    trace: str
    settings: dict[str, Any]
    num_requests: int
    num_succeeded: int
    num_failed: int
    failures: dict[str, int]
    num_cut: int
    wall_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    good_requests_per_s: float
    good_share: float
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    num_steps: int
    num_parked: int
    requests_per_replica: list[int]
    keys: dict[str, KeyReport]
    fairness: Fairness | None


def ttft(course: Course) -> float:
    return course.times[0] - course.entry.arrived


def tpot(course: Course) -> float:
    """Return the seconds per token after the first; 0 if there is none."""
    return (course.ended - course.times[0]) / max(1, len(course.times) - 1)


def e2e(course: Course) -> float:
    return course.ended - course.entry.arrived


def summarize(
    courses: list[Course],
    replicas: list[Replica],
    *,
    trace: str,
    settings: dict[str, Any],
    limits: Limits = Limits(),  # noqa: B008  # immutable
    keys: Sequence[str] = (),
) -> SimulationReport:
    """Return the report.

    ``keys``: keys of the trace to compare for fairness; by default all, if there are several.
    """
    good = [course for course in courses if not course.failure]
    bad = [course for course in courses if course.failure]
    wall = max(max(course.ended for course in courses) - courses[0].entry.arrived, 1e-9)
    num_tokens = sum(len(course.times) for course in good)
    num_kept = sum(map(limits.kept, good))
    by_key: dict[str, list[Course]] = {}
    for course in courses:
        by_key.setdefault(course.entry.key, []).append(course)
    compared = {key: by_key[key] for key in keys or by_key}
    schedulers = [replica.scheduler for replica in replicas]
    return SimulationReport(
        trace=trace,
        settings=settings,
        num_requests=len(courses),
        num_succeeded=len(good),
        num_failed=len(bad),
        failures=dict(Counter(course.failure for course in bad).most_common()),
        num_cut=sum(len(course.times) < course.entry.output_length for course in good),
        wall_s=round(wall, 4),
        output_tokens=num_tokens,
        output_tokens_per_s=round(num_tokens / wall, 2),
        requests_per_s=round(len(good) / wall, 3),
        good_requests_per_s=round(num_kept / wall, 3),
        good_share=round(num_kept / len(courses), 4),
        ttft_ms=Distribution.of(map(ttft, good)),
        itl_ms=Distribution.of(
            np.concatenate([np.diff(course.times) for course in good] or [np.zeros(0)])
        ),
        tpot_ms=Distribution.of(tpot(course) for course in good if len(course.times) > 1),
        e2e_ms=Distribution.of(map(e2e, good)),
        prompt_tokens=sum(course.entry.input_length for course in good),
        cached_tokens=sum(course.num_cached for course in good),
        prefill_tokens=sum(scheduler.num_prefill_tokens for scheduler in schedulers),
        num_steps=sum(scheduler.num_steps for scheduler in schedulers),
        num_parked=sum(scheduler.num_parked for scheduler in schedulers),
        requests_per_replica=[
            sum(course.replica == i for course in courses) for i in range(len(replicas))
        ],
        keys={key: key_report(of_key) for key, of_key in sorted(by_key.items())},
        fairness=fairness(compared) if len(compared) > 1 else None,
    )


def key_report(courses: list[Course]) -> KeyReport:
    good = [course for course in courses if not course.failure]
    return KeyReport(
        num_requests=len(courses),
        num_succeeded=len(good),
        served=served(courses, [(-math.inf, math.inf)]),
        mean_ttft_ms=round(fmean(map(ttft, good)) * 1000, 3) if good else None,
        mean_e2e_ms=round(fmean(map(e2e, good)) * 1000, 3) if good else None,
    )


Interval = tuple[float, float]
"""(begin, end], without begin and with end, because the outputs of a step belong to the time
before it ends.
"""


def fairness(compared: dict[str, list[Course]]) -> Fairness:
    common = [(-math.inf, math.inf)]
    for courses in compared.values():
        common = overlap(common, backlog(courses))
    amounts = {key: served(courses, common) for key, courses in compared.items()}
    squares = sum(amount**2 for amount in amounts.values())
    return Fairness(
        seconds=round(sum(end - begin for begin, end in common), 4),
        served=amounts,
        jain_index=round(sum(amounts.values()) ** 2 / (len(amounts) * squares), 4)
        if squares
        else None,
    )


def backlog(courses: list[Course]) -> list[Interval]:
    """Return the intervals in which a request waited for its first token, in order and disjoint."""
    waits = [
        (course.entry.arrived, course.times[0] if course.times else course.ended)
        for course in courses
    ]
    merged: list[Interval] = []
    for begin, end in sorted(waits):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def overlap(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the intersection of two lists of intervals, which are in order."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def served(courses: list[Course], intervals: list[Interval]) -> int:
    """Return what was served in these intervals, as in KeyReport.

    A prompt counts at the time of the first token.
    """
    begins, ends = (np.array([interval[side] for interval in intervals]) for side in (0, 1))
    amount = 0
    for course in courses:
        # the last interval that began before each token
        at = np.searchsorted(begins, course.times) - 1
        inside = (
            (at >= 0) & (np.array(course.times) <= ends[at])
            if len(intervals)
            else np.zeros(len(at), bool)
        )
        amount += OUTPUT_WEIGHT * int(inside.sum())
        if len(inside) and inside[0]:
            amount += course.entry.input_length - course.num_cached
    return amount
