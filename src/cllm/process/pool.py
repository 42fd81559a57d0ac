"""The engines of one model, from the API process's point of view. The pool keeps each request until
it is answered, whatever happens to an engine process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from cllm.core.model_info import ModelInfo
from cllm.core.output import EmbeddingOutput, Stats, combine_stats
from cllm.core.request import EmbeddingRequest, Priority, Request
from cllm.core.segments import Segment
from cllm.core.vocabulary import VocabularyTable
from cllm.engine.commands import (
    Abort,
    Add,
    AddPrefix,
    Command,
    Embed,
    EndReasoning,
    InjectedFault,
    LoadAdapter,
    SetFaults,
    SetWeights,
    SetYielding,
    Withdrawn,
)
from cllm.engine.params import EngineParams
from cllm.errors import CLLMError, EngineError, FatalRequest
from cllm.models.memory import measure_available_bytes
from cllm.process.assignments import Assignments
from cllm.process.backlog import NO_CLAIM, Backlog, QueueLimits
from cllm.process.balancer import Balancer
from cllm.process.embeddings import InFlightEmbeddings, Waiter
from cllm.process.in_flight import Begun, InFlightRequests
from cllm.process.in_flight_request import InFlightRequest, OutputStream
from cllm.process.launch import ONE_ENGINE, EngineSpec
from cllm.process.member import Member
from cllm.process.messages import Failed, Loading, Ready, Stepped, Tokenized, frame
from cllm.process.pending_tokens import Texts
from cllm.process.queue_load import QueueLoad
from cllm.process.reservations import Claim, Newcomer
from cllm.process.results import ResultCache
from cllm.process.supervisor import Death, Event
from cllm.scheduler.policy import make_policy
from cllm.scheduler.trace import Explanation

log = logging.getLogger("cllm.process")

MAX_FAILED_STARTS = 8  # in a row, in about a minute, before all requests get an error


class Pool:
    """Owns the requests in flight, and the engines that compute them.

    Several engines have one queue. Each request goes to the engine that has most of its prompt in
    the cache, unless that engine is crowded. If another engine becomes idle, it takes the request
    over. When an engine has died, its requests continue after the tokens that they have delivered,
    in the other engines. If there are no others, or if a request may have caused the death, it
    continues in the next engine.
    """

    def __init__(
        self,
        params: EngineParams,
        on_loading: Callable[[float], None] | None = None,
        limits: QueueLimits | None = None,
        results: ResultCache | None = None,
        specs: Sequence[EngineSpec] = ONE_ENGINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_loading`` gets the loaded share of the model, 0 to 1. Without ``limits`` the queue
        has none, and without ``results`` there is no result cache. There is an engine for each of
        ``specs``. ``clock`` returns seconds. Raises StartupError for an unknown policy.
        """
        self.params = params
        self._shares = [0.0] * len(specs)  # loaded share of each engine's model
        self._on_loading = on_loading
        self._embeddings = InFlightEmbeddings(limits or QueueLimits())
        backlog = Backlog(
            limits or QueueLimits(),
            make_policy(params.policy, params.weights),
            params.weights,
            clock,
        )
        ends = Counter[str]()  # see Suspects
        self.members = [Member(params, self, spec, ends, clock) for spec in specs]
        self._assignments = Assignments(self.members)
        self._texts = Texts(self.members, lambda member: member.resume())
        self._in_flight = InFlightRequests(
            backlog, ResultCache() if results is None else results, self._assignments.remove
        )
        self._balancer = Balancer(
            self.members, self._assignments, self._in_flight, self._embeddings, clock
        )
        # called when something arrives while the engines are unloaded
        self.on_wanted: Callable[[], None] = lambda: None
        self.draining = False  # whether the server shuts down, and accepts no further requests
        self._faults: list[InjectedFault] = []
        self.more_adapters: dict[str, str] = {}  # paths of those that were loaded meanwhile

    @property
    def info(self) -> ModelInfo | None:
        """Information about the model; None until an engine has been ready. Of several engines, the
        one with the shortest context provides it.
        """
        infos = [info for member in self.members if (info := member.supervisor.info)]
        return min(infos, key=lambda info: info.context_length, default=None)

    @property
    def vocabulary(self) -> VocabularyTable | None:
        """The model's vocabulary; None until an engine has been ready."""
        return next((one for m in self.members if (one := m.supervisor.vocabulary)), None)

    @property
    def ready(self) -> bool:
        """Whether an engine is ready now."""
        return any(member.supervisor.ready for member in self.members)

    @property
    def stats(self) -> Stats:
        """The latest statistics of the engines that are ready, or of all if none is."""
        return combine_stats([one.stats for one in self._assignments.list_ready() or self.members])

    @property
    def stats_since_start(self) -> Stats:
        """``stats``, with totals over all engines of this pool."""
        return self.stats.with_totals(combine_stats([m.stats_since_start for m in self.members]))

    def may_start(self, stream: OutputStream) -> bool:
        """Return whether the first request of ``stream`` has started, or can start soon because its
        engine has got it and responds.
        """
        name = stream.requests[0].request_id
        if (entry := stream.in_flight.get(name)) is None or entry.has_begun:
            return True
        member = self._assignments.find(entry.request.request_id)
        return member is not None and not member.is_stuck_with(entry.request.request_id)

    @property
    def unloaded(self) -> bool:
        """Whether ``unload`` has ended the engines, and ``start`` has not started others."""
        return any(member.supervisor.unloaded for member in self.members)

    @property
    def num_bytes(self) -> int:
        """The memory that the engines take, or took when they were loaded last; 0 if unknown."""
        return sum(member.supervisor.num_bytes for member in self.members)

    @property
    def pid(self) -> int | None:
        """The process of the first engine."""
        return self.members[0].supervisor.pid

    @property
    def num_restarts(self) -> int:
        return sum(member.supervisor.num_restarts for member in self.members)

    @property
    def num_unfinished(self) -> int:
        """The number of unfinished requests, including those for embeddings."""
        return len(self._in_flight) + len(self._embeddings)

    @property
    def loaded_share(self) -> float:
        """The share of the model that the engines have loaded, 0 to 1."""
        return sum(self._shares) / len(self._shares)

    @property
    def shares_cores(self) -> bool:
        """Whether its engines leave a part of the cores to those of other models."""
        return bool(self.params.cores_file) and self.info is not None and not self.info.on_gpu

    @property
    def has_requests(self) -> bool:
        """Whether requests or texts to tokenize wait for an engine or are in one."""
        return bool(self.num_unfinished or self._texts.pending)

    async def start(self, max_bytes: int = 0) -> None:
        """Start the engines, which may take ``max_bytes`` of memory together (0 for any amount),
        and wait until all are ready.

        Raises StartupError if one cannot load the model.
        """
        number = len(self.members)
        if number > 1 and not max_bytes and not any(one.place.variables for one in self.members):
            max_bytes = measure_available_bytes() or 0
        starts = (member.supervisor.start(max_bytes // number) for member in self.members)
        ends = await asyncio.gather(*starts, return_exceptions=True)
        errors = [end for end in ends if end is not None]
        if errors:
            await self.unload()
            raise errors[0]

    async def unload(self) -> None:
        """End the engine processes until ``start`` is called again. They have ended when this
        returns.

        Requests in flight, and those that arrive meanwhile, continue in the next engines;
        ``on_wanted`` is called for each that arrives.
        """
        self.set_unloaded()  # before anything else can arrive
        self._shares = [0.0] * len(self.members)
        error = EngineError("The model was unloaded; please retry.")
        for member in self.members:
            member.forget_step(error)
            self._balancer.cancel(member)
            self._assignments.forget_prefixes(member)
        self._in_flight.backlog.pause()
        await asyncio.gather(*(member.supervisor.unload() for member in self.members))
        for member in self.members:
            member.forget_step(error)  # what the engines were asked before they were to end

    async def close(self) -> None:
        """End the engine processes, and everything that waits for them. They have ended when this
        returns.
        """
        try:
            await asyncio.gather(*(member.supervisor.close() for member in self.members))
        finally:
            self.end_all(EngineError("The engine has been closed."))

    def set_unloaded(self) -> None:
        """Let requests wait for the first engine, in the same state as after ``unload``."""
        for member in self.members:
            member.supervisor.unloaded = True

    def seconds_until_ready(self) -> float:
        """Return the expected seconds until the first engine is ready; see Supervisor."""
        return min(member.supervisor.seconds_until_ready() for member in self.members)

    # --- messages of the engines -----------------------------------------------------------------

    def take(self, member: Member, event: Event) -> None:
        """See Owner."""
        match event:
            case Stepped():
                self._in_flight.backlog.observe(self.stats)
                self._in_flight.put(event.outputs, member.number)
                if len(self.members) > 1:
                    self._balancer.balance()
            case EmbeddingOutput():
                self._embeddings.put(event)
            case Tokenized():
                self._texts.put(event)
            case Withdrawn():
                self._balancer.take(event)
            case Loading(share):
                self._shares[member.number] = share
                if self._on_loading is not None and self.info is None:  # nobody watches a restart
                    self._on_loading(self.loaded_share)
            case Ready():
                self._give_work(member)
            case Death():
                self._continue_requests(member, event)
            case Failed():
                self._handle_failed_start(member)

    def knows(self, request_id: str) -> bool:
        """See Owner."""
        return self._in_flight.knows(request_id) or self._embeddings.knows(request_id)

    def make_commands(self, request_id: str) -> list[Command]:
        """See Owner."""
        embed = self._embeddings.make_command(request_id)
        return [embed] if embed else self._in_flight.make_commands(request_id)

    def has_texts(self, member: Member) -> bool:
        """See Owner."""
        return self._texts.has(member)

    def is_separating_texts(self, member: Member) -> bool:
        """See Owner."""
        return self._texts.is_separating(member)

    def _give_work(self, member: Member) -> None:
        """Send an engine that has become ready its own requests, and those that wait for others."""
        self._assignments.measure_caches()
        self._in_flight.backlog.observe(self.stats)
        if self._faults:
            member.write(frame(SetFaults(self._faults)))
        member.write(frame(SetWeights(dict(self.params.weights))))  # they change with the accounts
        for name, path in self.more_adapters.items():  # before the requests that name them
            member.write(frame(LoadAdapter(name, path)))
        self._texts.resend(member)
        member.resume_all()
        for other in self.members:
            if not other.ready:
                self._balancer.move_all(other)
        self._balancer.relieve_others(member)

    def _continue_requests(self, member: Member, death: Death) -> None:
        """Let the requests of an engine that has died continue, in others or in the next one. A
        request that is known to kill engines gets an error instead.
        """
        error = EngineError(f"The engine died ({death.cause}); please retry.", death.retry_after)
        member.forget_step(error)
        self._balancer.cancel(member)
        self._assignments.forget_prefixes(member)
        if not self.ready:
            self._in_flight.backlog.pause()
        in_step = [name for name in death.in_step if name in member.bookings and self.knows(name)]
        self._in_flight.note_retry(member.list_received())
        in_step.sort(key=self._in_flight.estimate_turn)
        self._in_flight.note_begun(in_step)
        # a text that was tokenized at the same time may also be the cause
        had_texts = self._texts.record_death(member, is_own_fault=death.is_own_fault)
        fatal = member.find_fatal_request(death._replace(in_step=in_step), is_certain=not had_texts)
        if fatal is not None:
            fault = FatalRequest("The engine died twice while it computed this request alone.")
            self._in_flight.fail_one(fatal, fault)
            self._embeddings.fail_one(fatal, fault)
        self._balancer.move_all(member)

    def _handle_failed_start(self, member: Member) -> None:
        """End the requests that wait for an engine that has failed to start too often."""
        if member.supervisor.num_failed < MAX_FAILED_STARTS:
            return
        error = EngineError("The engine cannot be started.", self.seconds_until_ready())
        if all(one.supervisor.num_failed >= MAX_FAILED_STARTS for one in self.members):
            self.end_all(error)
        else:  # other engines take over the requests that can be moved
            self.fail(member, {*member.bookings}.difference(member.list_harmless()), error)

    def fail(self, member: Member, request_ids: Iterable[str], error: EngineError) -> None:
        """See Owner."""
        for request_id in request_ids:
            self._in_flight.fail_one(request_id, error)
            self._embeddings.fail_one(request_id, error)
        member.forget_suspects(request_ids)
        self._texts.fail(error, member)

    @property
    def backlog(self) -> Backlog:
        """What is known of the requests without a token."""
        return self._in_flight.backlog

    def end_all(self, error: CLLMError) -> None:
        """End everything that waits for the engine with ``error``: streams, requests for
        embeddings, texts to tokenize and explanations.
        """
        self._in_flight.fail(error)
        self._embeddings.fail(error)
        for member in self.members:
            member.forget_all(error)
        self._texts.fail(error)

    def check_room(
        self, num_tokens: int, account: str, priority: Priority, claim: Claim = NO_CLAIM
    ) -> None:
        """Raise QueueFull if a prompt of ``num_tokens`` would be rejected now, and EngineError if
        there is no engine.

        Equal requests whose computation it could share are ignored.
        """
        self.check_available()
        load = QueueLoad(num_requests=1, num_seqs=1, num_tokens=num_tokens)
        self._in_flight.backlog.check(Newcomer(account, priority, load, num_tokens), claim)

    def submit(
        self,
        requests: list[Request],
        claim: Claim = NO_CLAIM,
        begun: Begun | None = None,
        ends_reasoning: bool = False,
    ) -> OutputStream:
        """Send requests to the engine, or find their results.

        The caller must call ``close_stream`` later. Requests that another pool has ``begun``
        continue after what that has delivered, and end their reasoning at once if their client has
        asked for that (``ends_reasoning``).

        Raises QueueFull if the queue is full, and EngineError if there is no engine.
        """
        self.check_available()
        stream, new = self._in_flight.submit(requests, claim, begun, ends_reasoning)
        frames: dict[Member, list[bytes]] = {}
        for request in new:
            member, booked = self._assignments.assign(request)
            member.give(request.request_id, booked)
            if member.has(request.request_id):
                commands = begun and self._in_flight.make_commands(request.request_id)
                frames.setdefault(member, []).extend(map(frame, commands or [Add(request)]))
        for member, own in frames.items():
            member.write(b"".join(own))
        self._send_yielding(stream)  # it may read what no other client reads
        return stream

    def stop(self, stream: OutputStream, request_id: str, index: int) -> None:
        """End one of a request's sequences in the engine's next step, because its reader needs no
        more tokens.
        """
        engine_id = self._in_flight.stop(stream, request_id, index)
        if engine_id is not None:
            self._assignments.tell(engine_id, Abort(engine_id, index))

    def end_reasoning(self, request_id: str) -> None:
        """Let the sequences of a request end their reasoning, also in later engines."""
        self._in_flight.end_reasoning(request_id)
        self._assignments.tell(request_id, EndReasoning(request_id))

    def set_yielding(self, stream: OutputStream, *, yields: bool) -> None:
        """Let a stream's requests yield their places to all others while its client does not
        read.
        """
        self._in_flight.set_unread(stream, is_unread=yields)
        self._send_yielding(stream)

    def _send_yielding(self, stream: OutputStream) -> None:
        """Tell the engine which requests of ``stream`` yield to others now, or no longer."""
        for request_id, yields in self._in_flight.take_yielding(stream):
            self._assignments.tell(request_id, SetYielding(request_id, yields))

    def close_stream(self, stream: OutputStream) -> None:
        """Forget the stream's requests.

        Unfinished requests that no other stream reads are aborted.
        """
        for request_id in self._in_flight.leave(stream):
            self._assignments.remove(request_id, abort=True)
        self._send_yielding(stream)

    def embed(self, request: EmbeddingRequest) -> Waiter:
        """Send texts to the engine. The caller must call ``forget`` later.

        Raises QueueFull, and EngineError if there is no engine.
        """
        self.check_available()
        waiter = self._embeddings.begin(request)
        member, booked = self._assignments.assign(request)
        member.give(request.request_id, booked)
        if member.has(request.request_id):
            member.write(frame(Embed(request)))
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting for these vectors. An unfinished request is aborted."""
        is_unfinished = self._embeddings.forget(waiter)
        self._assignments.remove(waiter.request.request_id, abort=is_unfinished)

    async def tokenize(self, texts: list[list[Segment]]) -> list[list[int]]:
        """Return the token ids of each text.

        Raises EngineError if there is no engine, or if several die meanwhile; and for long texts if
        too many characters wait already.
        """
        self.check_available()
        return await self._texts.tokenize(texts)

    def list_requests(self) -> list[tuple[Member | None, InFlightRequest]]:
        """Return the unanswered requests, without those to embed, each with its engine."""
        find = self._assignments.find
        return [(find(one.request.request_id), one) for one in self._in_flight.list_all()]

    async def explain(self, num_steps: int, number: int = 0) -> Explanation:
        """Return the last ``num_steps`` steps of an engine, and what runs or waits there and why.

        Raises EngineError without an engine, and IndexError for a number that none has.
        """
        return await self.members[number].explain(num_steps)

    async def load_adapter(self, name: str, path: str) -> str:
        """Let all engines load a LoRA adapter, also those that are started later. Return why one of
        them failed to load it, or "".

        Raises EngineError if no engine is ready, or if one dies meanwhile.
        """
        if not (ready := self._assignments.list_ready()):
            raise EngineError("The engine is not ready; please retry.", self.seconds_until_ready())
        self.more_adapters[name] = path
        for error in await asyncio.gather(*(one.load_adapter(name, path) for one in ready)):
            if error:
                self.more_adapters.pop(name, None)
                return error
        return ""

    def add_prefix(self, name: str) -> None:
        """Let all engines use a prefix that is now in a file ``name`` of the disk cache."""
        for member in self.members:
            member.write(frame(AddPrefix(name)))

    def set_faults(self, faults: list[InjectedFault]) -> None:
        """Cause ``faults`` in the first engine, instead of those that were set before. Faults that
        depend on a token are caused in all engines, including later ones.
        """
        self._faults = [fault for fault in faults if fault.token is not None]
        for member in self.members:
            member.write(frame(SetFaults(self._faults if member.number else faults)))

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use these shares of accounts from now on, and 1 for all others."""
        if weights == self.params.weights:
            return
        self.params.weights.clear()  # the policy and the backlog have the same mapping
        self.params.weights.update(weights)
        self.backlog.note_weights()
        for member in self.members:
            member.write(frame(SetWeights(dict(weights))))

    def check_available(self) -> None:
        """Raise EngineError unless there is an engine, or one is being started after a death, or
        will be started because it was unloaded.
        """
        supervisors = [member.supervisor for member in self.members]
        is_closing = any(one.closing for one in supervisors)
        if self.unloaded and not is_closing:
            self.on_wanted()
        have_failed = all(one.num_failed and not one.ready for one in supervisors)
        if is_closing or self.info is None or have_failed:
            raise EngineError("The engine is not ready; please retry.", self.seconds_until_ready())
