"""One engine of a pool, and the requests that it was given."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import msgspec

from cllm.core.model_info import ModelInfo
from cllm.core.output import EmbeddingOutput, Stats
from cllm.core.request import Priority
from cllm.core.timeline import Timeline
from cllm.engine.commands import (
    Abort,
    AdapterLoaded,
    Command,
    Explain,
    Explained,
    LoadAdapter,
    RecordTimeline,
    TakeTimeline,
    TimelineTaken,
)
from cllm.engine.params import EngineParams
from cllm.errors import CLLMError, EngineError
from cllm.observe.step_histograms import StepHistograms
from cllm.process.futures import resolve
from cllm.process.launch import EngineSpec
from cllm.process.messages import Ready, Stepped, frame
from cllm.process.supervisor import HEALTHY_AFTER, Death, Event, Supervisor
from cllm.process.suspects import Suspects
from cllm.routing.router import Booking, Candidate, is_crowded
from cllm.scheduler.trace import Explanation

log = logging.getLogger("cllm.process")


class Owner(Protocol):
    """The pool, as its members see it."""

    def knows(self, request_id: str) -> bool:
        """Return whether a request has not been answered completely."""
        ...

    def make_commands(self, request_id: str) -> list[Command]:
        """Return the commands that make another engine compute the rest of a request; none if it
        has ended.
        """
        ...

    def has_texts(self, member: Member) -> bool:
        """Return whether texts wait to be tokenized by an engine."""
        ...

    def is_separating_texts(self, member: Member) -> bool:
        """Return whether an engine has to tokenize texts before it computes requests."""
        ...

    def take(self, member: Member, event: Event) -> None:
        """Handle a message of an engine, or its death. After Ready, the engine is ready. After
        Failed, a restart has failed.
        """
        ...

    def fail(self, member: Member, request_ids: Iterable[str], error: EngineError) -> None:
        """End requests of an engine, and the texts that it is to tokenize, with ``error``."""
        ...


class AssignedRequest(NamedTuple):
    """A request of an engine: its booking, if there are several engines, its class, and its number
    of sequences.
    """

    booking: Booking | None
    priority: Priority
    num_seqs: int


class Member:
    """One engine of a pool, and the requests that it was given.

    ``stats`` are its latest statistics. ``bookings`` has the requests that it computes or will
    compute, in the order in which it got them. ``num_seqs`` counts their sequences by class. It
    includes sequences that other engines were asked to withdraw for this one, and excludes those
    that this one was asked to withdraw. ``steps`` describes the steps of all its engines.
    """

    def __init__(
        self,
        params: EngineParams,
        owner: Owner,
        spec: EngineSpec,
        ends: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        """``ends`` is the counter that the Suspects of all members share. ``clock`` returns
        seconds.
        """
        self.number = spec.number
        self.place = spec.place
        self.stats = Stats()
        self.bookings: dict[str, AssignedRequest] = {}
        self.num_seqs = [0] * len(Priority)
        self.supervisor = Supervisor(params, self, spec, clock)
        self._owner = owner
        self._earlier_stats = Stats()  # of the engines that have died
        self.steps = StepHistograms()
        self._ends = ends
        self._suspects = Suspects(ends)
        self._has_suspects = False
        self._held: set[str] = set()  # requests that were not sent to this engine yet
        self._ready_since = 0.0
        self._file = ""  # a hash of the file that the last engine had
        self._clock = clock
        # the engine answers in this order
        self._pending_explanations: deque[asyncio.Future[Explanation]] = deque()
        self._pending_timelines: deque[asyncio.Future[Timeline]] = deque()
        self._pending_adapters: dict[str, list[asyncio.Future[str]]] = {}

    @property
    def ready(self) -> bool:
        """Whether the engine is ready now."""
        return self.supervisor.ready

    @property
    def stats_since_start(self) -> Stats:
        """``stats``, with totals over all engines of this member."""
        return self.stats.add_totals(self._earlier_stats)

    @property
    def num_requests(self) -> int:
        """The number of requests that the engine has received and not answered completely."""
        return len(self.bookings) - len(self._held)

    def count_seqs(self, priority: Priority) -> int:
        """Return the number of sequences that would be served before one of this class."""
        return sum(self.num_seqs[: priority + 1])

    def has_room(self, priority: Priority) -> bool:
        """Return whether a sequence of this class would start at once, if necessary instead of one
        of a lower class.
        """
        count, stats = self.count_seqs(priority), self.stats
        waits = stats.num_waiting > 0 and count >= stats.num_running  # for memory
        return count < stats.num_seq_ids and not waits

    def should_relieve(self, other: Member, priority: Priority) -> bool:
        """Return whether this engine should take over requests of a class that wait for ``other``.

        It should if it has no requests of this class or higher ones, or far fewer than ``other``.
        """
        count, stats = other.count_seqs(priority), other.stats
        if not stats.num_waiting or count <= min(stats.num_seq_ids, stats.num_running):
            return False
        least = self.count_seqs(priority)
        return not least or is_crowded(count, least, Candidate(other.number, stats.num_seq_ids))

    def has_work(self) -> bool:
        """See EngineClient."""
        asked = self._pending_explanations or self._pending_timelines or self._pending_adapters
        return self.num_requests > 0 or bool(asked)

    def owes_answers(self) -> bool:
        """See EngineClient."""
        return self.has_work() or self._owner.has_texts(self)

    def has(self, request_id: str) -> bool:
        """Return whether the engine has received a request, and is ready."""
        return self.ready and request_id not in self._held

    def is_stuck_with(self, request_id: str) -> bool:
        """Return whether a request cannot start soon, because the engine has not received it or
        does not respond.
        """
        return request_id in self._held or not self.supervisor.is_responding()

    def seems_to_hang(self) -> bool:
        """Return whether the engine has requests and makes no steps."""
        return self.num_requests > 0 and not self.supervisor.is_responding()

    def write(self, data: bytes) -> None:
        """Send frames to the engine, if it is ready."""
        if self.ready:
            self.supervisor.write(data)

    # --- requests --------------------------------------------------------------------------------

    @property
    def is_searching(self) -> bool:
        """Whether requests wait until the one that kills engines has been found."""
        return self._suspects.is_searching or self._owner.is_separating_texts(self)

    def give(self, request_id: str, booked: AssignedRequest) -> None:
        """Note that a request belongs to this engine. The caller must send it if ``has`` is then
        true.
        """
        self.bookings[request_id] = booked
        self.num_seqs[booked.priority] += booked.num_seqs
        if self.is_searching:
            self._held.add(request_id)

    def take_over(self, request_id: str, booked: AssignedRequest) -> None:
        """Continue a request of another engine."""
        self.give(request_id, booked)
        if self.ready:
            self._held.add(request_id)
            self.resume()

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended."""
        if (booked := self.bookings.pop(request_id, None)) is not None:
            self.num_seqs[booked.priority] -= booked.num_seqs
            if booked.booking is not None:
                booked.booking.release()
        self._held.discard(request_id)
        del self._ends[request_id]

    def abort(self, request_id: str) -> None:
        """End a request in the engine, and forget it."""
        if self.has(request_id):
            self.write(frame(Abort(request_id)))
        self.remove(request_id)
        if self._has_suspects and self._suspects.forget(request_id):
            self.resume()

    def leave(self, request_id: str) -> None:
        """Forget a request that another engine continues and that this process no longer has."""
        num_ends = self._ends[request_id]
        self.remove(request_id)
        if self._has_suspects and self._suspects.forget(request_id):
            self.resume()
        if num_ends:
            self._ends[request_id] = num_ends

    def forget_suspects(self, request_ids: Iterable[str]) -> None:
        """Stop suspecting ``request_ids``, which have got an error: no request waits for them."""
        for request_id in request_ids:
            self._suspects.forget(request_id)

    def list_received(self) -> list[str]:
        """Return the requests that its engine got, if it is or was ready."""
        return [name for name in self.bookings if name not in self._held]

    def list_harmless(self) -> list[str]:
        """Return the requests that are not suspected of having caused a death."""
        return [name for name in self.bookings if not self._suspects.is_suspect(name)]

    async def explain(self, num_steps: int) -> Explanation:
        """Return the last ``num_steps`` steps, the running and the waiting sequences, and why these
        wait.

        Raises EngineError if no engine is ready.
        """
        if not self.ready:
            seconds = self.supervisor.seconds_until_ready()
            raise EngineError("The engine is not ready; please retry.", seconds)
        future: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._pending_explanations.append(future)
        self.write(frame(Explain(num_steps)))
        return await future

    async def record_timeline(self, seconds: float) -> Timeline:
        """Return what the engine does during ``seconds``.

        Raises EngineError if no engine is ready, or if it dies meanwhile.
        """
        self.write(frame(RecordTimeline()))
        try:
            await asyncio.sleep(seconds)
        finally:  # also if the caller is cancelled
            future: asyncio.Future[Timeline] = asyncio.get_running_loop().create_future()
            if self.ready:
                self._pending_timelines.append(future)
                self.write(frame(TakeTimeline()))
        if not self.ready:
            seconds = self.supervisor.seconds_until_ready()
            raise EngineError("The engine is not ready; please retry.", seconds)
        return await future

    async def load_adapter(self, name: str, path: str) -> str:
        """Let the engine load an adapter. Return why that failed, or "".

        Raises EngineError if it dies meanwhile.
        """
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending_adapters.setdefault(name, []).append(future)
        self.write(frame(LoadAdapter(name, path)))
        return await future

    def forget_step(self, error: CLLMError) -> None:
        """Discard state that only this engine process had. Callers that wait for its answers get
        ``error``.
        """
        self.stats = without_work(self.stats)
        for explanation in self._pending_explanations:
            resolve(explanation, error)
        for timeline in self._pending_timelines:
            resolve(timeline, error)
        for futures in self._pending_adapters.values():
            for future in futures:
                resolve(future, error)

    # --- messages of the engine ------------------------------------------------------------------

    def take(self, event: Event) -> None:
        """See EngineClient."""
        match event:
            case Stepped():
                self.steps.observe(self.stats, event.stats)
                self.stats = event.stats
                self._owner.take(self, event)
                if self._ends:
                    for output in event.outputs:
                        if output.token >= 0:
                            del self._ends[output.request_id]
                if self._has_suspects:
                    self._release_suspects({output.request_id for output in event.outputs})
            case EmbeddingOutput():
                self._owner.take(self, event)
                if self._has_suspects and (event.vectors or event.error):
                    self._release_suspects({event.request_id})
            case AdapterLoaded(name, error):
                if error:
                    log.warning("%s", error)
                for future in self._pending_adapters.pop(name, ()):
                    resolve(future, error)
            case Explained():
                resolve(self._pending_explanations.popleft(), event.explanation)
            case TimelineTaken():
                resolve(self._pending_timelines.popleft(), event.timeline)
            case Ready(info):
                self._begin(info)
                self._owner.take(self, event)
            case _:
                self._owner.take(self, event)

    def find_fatal_request(self, death: Death, *, is_certain: bool) -> str | None:
        """Note which requests may have caused a death; only the others may continue in other
        engines. Return the request that must not be computed again, if it is known.

        ``is_certain`` says that only a request can have caused the death.
        """
        self._has_suspects = True
        if death.is_own_fault:
            fatal = self._suspects.record_death(death.in_step, is_certain=is_certain)
        else:
            fatal = self._suspects.record_end(death.in_step)
        if fatal is not None:
            log.error("the engine died twice because of %s alone; it gets an error", fatal)
        return fatal

    def _begin(self, info: ModelInfo) -> None:
        """Discard state of the last engine process, because the next one is ready."""
        file = info.fingerprint.partition(" ")[0]
        if self._file not in ("", file):
            log.error("the model's file has changed; requests that had begun get an error")
            error = EngineError("The model's file has changed; please retry.")
            self._owner.fail(self, [*self.bookings], error)
        self._file = file
        self.forget_step(EngineError("The engine has been restarted; please retry."))
        self._pending_explanations.clear()  # this engine does not know them
        self._pending_timelines.clear()
        self._pending_adapters.clear()
        self._earlier_stats = self.stats_since_start
        self.stats = Stats(num_seq_ids=info.max_num_seqs, num_cells=info.num_cells)
        self._ready_since = self._clock()

    def resume_all(self) -> None:
        """Send all requests to an engine that has none yet, except those that must wait for other
        requests.
        """
        self._held = {*self.bookings}
        self.resume()

    def resume(self) -> None:
        """Send held requests to the engine, except those that must wait for other requests."""
        if not self.ready or self._owner.is_separating_texts(self):
            return
        for request_id in [name for name in self.bookings if name in self._held]:
            if request_id not in self._held or self._suspects.must_wait(request_id):
                continue
            self._held.remove(request_id)
            commands = self._owner.make_commands(request_id)
            if commands:
                self.write(b"".join(map(frame, commands)))
            elif self._suspects.forget(request_id):  # it has ended meanwhile
                self.resume()

    def _release_suspects(self, request_ids: set[str]) -> None:
        """Let requests continue that waited for these, which have got a token or have ended."""
        may_continue = [
            self._suspects.record_token(request_id)
            if self._owner.knows(request_id)
            else self._suspects.forget(request_id)
            for request_id in request_ids
        ]
        if any(may_continue):
            self.resume()
        healthy = self._clock() - self._ready_since >= HEALTHY_AFTER
        if healthy and not self._suspects.is_searching:
            self._has_suspects, self._suspects = False, Suspects(self._ends)

    def forget_all(self, error: CLLMError) -> None:
        """Forget all requests, to which the caller gives an error. Callers that wait for other
        answers get ``error``.
        """
        self.forget_step(error)
        for request_id in [*self.bookings]:
            self.remove(request_id)
        self._has_suspects, self._suspects = False, Suspects(self._ends)


def without_work(stats: Stats) -> Stats:
    """Return ``stats`` as they are for an engine that computes nothing."""
    return msgspec.structs.replace(
        stats,
        num_running=0,
        num_waiting=0,
        num_seq_ids_in_use=0,
        num_cells_held=0,
        num_cells_idle=0,
        num_waiting_tokens=0,
        waiting_seconds=0.0,
    )
