"""The engine as the API process sees it: takes requests, and keeps them until they are answered,
whatever happens to the engine process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count

import msgspec

from cllm.core.model_info import ModelInfo
from cllm.core.output import EmbeddingOutput, Stats
from cllm.core.request import EmbeddingRequest, Priority, Request
from cllm.core.segments import Segment, count_characters
from cllm.core.vocabulary import VocabularyTable
from cllm.engine.commands import (
    Abort,
    Add,
    Embed,
    Explain,
    Fault,
    SetFaults,
    SetWeights,
    SetYielding,
)
from cllm.engine.params import EngineParams
from cllm.errors import CLLMError, EngineError, FatalRequest
from cllm.process.backlog import NO_CLAIM, Backlog, QueueLimits
from cllm.process.embeddings import Embeddings, Waiter
from cllm.process.in_flight import InFlightRequests, Stream
from cllm.process.launch import Popen
from cllm.process.messages import Abandon, Explained, FromChild, Stepped, Tokenize, Tokenized, frame
from cllm.process.pending_tokens import PendingTokens, resolve
from cllm.process.reservations import Claim, Newcomer, QueueLoad
from cllm.process.results import ResultCache
from cllm.process.supervisor import HEALTHY_AFTER, Death, Supervisor
from cllm.process.suspects import Suspects
from cllm.process.tokenizing import LONG
from cllm.scheduler.policy import make_policy
from cllm.scheduler.trace import Explanation

log = logging.getLogger("cllm.process")

MAX_DEATHS_OF_TEXT = 3  # of engines that had to tokenize a text, before it gets an error
MAX_FAILED_STARTS = 8  # in a row, in about a minute, before all requests get an error
MAX_WAITING_CHARACTERS = 64_000_000  # of all texts that wait to be tokenized


class Pool:
    """Owns the requests in flight, and an engine that computes them.

    When the engine has died, each request continues in the next one after the tokens that it has
    delivered. ``stats`` are the engine's latest statistics.
    """

    def __init__(
        self,
        params: EngineParams,
        on_loading: Callable[[float], None] | None = None,
        limits: QueueLimits | None = None,
        results: ResultCache | None = None,
        launched: Popen[bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        """``limits``: of the queue; none by default. ``results``: the result cache; off by default.
        ``launched``: a process that becomes the first engine. ``clock`` returns seconds.
        ``on_wanted`` is called when something arrives while the engine is unloaded. Raises
        StartupError for an unknown policy.
        """
        self.stats = Stats()
        self.params = params
        self._earlier_stats = Stats()  # of the engines that have died
        self._supervisor = Supervisor(
            params,
            self._take,
            self._resume_all,
            self._record_death,
            self._record_failure,
            self._has_work,
            on_loading,
            launched,
            clock,
        )
        self._embeddings = Embeddings(limits or QueueLimits())
        backlog = Backlog(
            limits or QueueLimits(),
            make_policy(params.policy, params.weights),
            params.weights,
            clock,
        )
        self._in_flight = InFlightRequests(backlog, ResultCache() if results is None else results)
        self._suspects = Suspects()
        self._has_suspects = False
        self._held: set[str] = set()  # requests that this engine has not got yet
        self._ready_since = 0.0
        self._clock = clock
        self.on_wanted = on_wanted
        self.draining = False  # whether the server shuts down, and accepts no further requests
        # the engine answers in this order
        self._pending_explanations: deque[asyncio.Future[Explanation]] = deque()
        self._pending_tokens: dict[int, PendingTokens] = {}
        self._numbers = count()
        self._faults: list[Fault] = []

    @property
    def info(self) -> ModelInfo | None:
        """What is known about the model; None until an engine has been ready."""
        return self._supervisor.info

    @property
    def vocabulary(self) -> VocabularyTable | None:
        """The model's vocabulary; None until an engine has been ready."""
        return self._supervisor.vocabulary

    @property
    def ready(self) -> bool:
        """Whether the engine is ready now."""
        return self._supervisor.ready

    def may_start(self, stream: Stream) -> bool:
        """Return whether the first request of ``stream`` has started or can start soon: the engine
        has got it and responds.
        """
        name = stream.requests[0].request_id
        if (entry := stream.in_flight.get(name)) is None or entry.has_begun:
            return True
        return entry.request.request_id not in self._held and self._supervisor.is_responding()

    @property
    def unloaded(self) -> bool:
        """Whether ``unload`` has ended the engine, and ``start`` has not started another one."""
        return self._supervisor.unloaded

    @property
    def num_bytes(self) -> int:
        """The memory that the engine takes, or took when it was loaded last; 0 if unknown."""
        return self._supervisor.num_bytes

    @property
    def pid(self) -> int | None:
        return self._supervisor.pid

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def num_unfinished(self) -> int:
        """The number of requests that have not been answered completely, including those for
        embeddings.
        """
        return len(self._in_flight) + len(self._embeddings)

    @property
    def has_requests(self) -> bool:
        """Whether requests or texts to tokenize wait for the engine or are in it."""
        return bool(self.num_unfinished or self._pending_tokens)

    def _has_work(self) -> bool:
        return self.num_unfinished > len(self._held)

    async def start(self, max_bytes: int = 0) -> None:
        """See Supervisor."""
        await self._supervisor.start(max_bytes)

    async def unload(self) -> None:
        """End the engine process until ``start`` is called again. It has ended when this returns.

        Requests in flight, and those that arrive meanwhile, continue in the next engine;
        ``on_wanted`` is called for each that arrives.
        """
        self._forget_step(EngineError("The model was unloaded; please retry."))
        await self._supervisor.unload()

    async def close(self) -> None:
        """End the engine process, and everything that waits for it. It has ended when this
        returns.
        """
        try:
            await self._supervisor.close()
        finally:
            self.end_all(EngineError("The engine has been closed."))

    def set_unloaded(self) -> None:
        """Let requests wait for the first engine, as after ``unload``."""
        self._supervisor.unloaded = True

    def seconds_until_ready(self) -> float:
        """See Supervisor."""
        return self._supervisor.seconds_until_ready()

    def _take(self, message: FromChild) -> None:
        """Handle a message of the engine."""
        match message:
            case Stepped():
                self.stats = message.stats
                self._in_flight.backlog.observe(message.stats)
                self._in_flight.put(message.outputs)
                if self._has_suspects:
                    self._release_suspects({output.request_id for output in message.outputs})
            case EmbeddingOutput():
                self._embeddings.put(message)
                if self._has_suspects and (message.vectors or message.error):
                    self._release_suspects({message.request_id})
            case Tokenized():
                if (pending := self._pending_tokens.get(message.number)) is not None:
                    pending.put(message)
            case Explained():
                resolve(self._pending_explanations.popleft(), message.explanation)

    # --- the death of an engine ------------------------------------------------------------------

    def _record_death(self, death: Death) -> None:
        """Prepare to continue all requests in the next engine, except one that kills engines."""
        error = EngineError(f"The engine died ({death.cause}); please retry.", death.retry_after)
        self._forget_step(error)
        in_step = [name for name in death.in_step if self._knows(name)]
        self._in_flight.note_begun(in_step)
        self._has_suspects = True
        if death.is_own_fault:
            # a text that is tokenized at the same time may be the cause as well
            for pending in self._pending_tokens.values():
                pending.num_deaths += 1
            is_certain = not self._pending_tokens
            culprit = self._suspects.record_death(in_step, is_certain=is_certain)
        else:
            culprit = self._suspects.record_end(in_step)
        if culprit is not None:
            log.error("the engine died twice because of %s alone; it gets an error", culprit)
            fatal = FatalRequest("The engine died twice while it computed this request alone.")
            self._in_flight.fail_one(culprit, fatal)
            self._embeddings.fail_one(culprit, fatal)

    def _forget_step(self, error: EngineError) -> None:
        """Forget what only this engine knows. Explanations that it owes get ``error``."""
        self.stats = without_work(self.stats)
        for explanation in self._pending_explanations:
            resolve(explanation, error)
        self._pending_explanations.clear()  # the next engine does not answer them
        self._in_flight.backlog.pause()

    def _record_failure(self) -> None:
        if self._supervisor.num_failed >= MAX_FAILED_STARTS:
            self.end_all(EngineError("The engine cannot be started.", self.seconds_until_ready()))

    def _knows(self, request_id: str) -> bool:
        return self._in_flight.knows(request_id) or self._embeddings.knows(request_id)

    def _resume_all(self) -> None:
        """Send everything that waits to an engine that has become ready."""
        assert self.info is not None
        self._earlier_stats = self.stats_since_start
        self.stats = Stats(num_seq_ids=self.info.max_num_seqs, num_cells=self.info.num_cells)
        self._in_flight.backlog.observe(self.stats)
        self._ready_since = self._clock()
        if self._faults:
            self.set_faults(self._faults)
        self._write(frame(SetWeights(dict(self.params.weights))))  # they change with the accounts
        for number, pending in [*self._pending_tokens.items()]:
            if pending.num_deaths < MAX_DEATHS_OF_TEXT:
                pending.begin()
                self._write(frame(Tokenize(number, pending.texts)))
            else:
                reason = "The engine died repeatedly while it tokenized this text."
                resolve(pending.future, EngineError(reason))
        waiting = [*self._in_flight.list_ids(), *self._embeddings.list_ids()]
        self._held = {*waiting}
        self._resume(waiting)

    def _resume(self, request_ids: Iterable[str]) -> None:
        """Send held requests to the engine, except those that must wait for others."""
        if not self.ready:
            return
        for request_id in request_ids:
            if request_id not in self._held or self._suspects.must_wait(request_id):
                continue
            self._held.remove(request_id)
            command = self._in_flight.make_command(request_id) or self._embeddings.make_command(
                request_id
            )
            if command is not None:
                self._write(frame(command))
                if self._in_flight.yields(request_id):
                    self._write(frame(SetYielding(request_id, True)))
            else:  # it has ended meanwhile
                self._resume(self._suspects.forget(request_id))

    def _release_suspects(self, request_ids: set[str]) -> None:
        """Let suspects continue that have waited for these requests, which have got a token or have
        ended.
        """
        for request_id in request_ids:
            if self._knows(request_id):
                self._resume(self._suspects.record_token(request_id))
            else:
                self._resume(self._suspects.forget(request_id))
        healthy = self._clock() - self._ready_since >= HEALTHY_AFTER
        if healthy and not self._suspects.is_searching:
            self._has_suspects, self._suspects = False, Suspects()

    @property
    def stats_since_start(self) -> Stats:
        """``stats``, with totals over all engines of this pool."""
        return self.stats.add_totals(self._earlier_stats)

    @property
    def reservations(self) -> Mapping[str, int]:
        """See Reservations.counts."""
        return self._in_flight.backlog.reservations.counts

    def end_all(self, error: CLLMError) -> None:
        """End everything that waits for the engine with ``error``: streams, requests for
        embeddings, texts to tokenize and explanations.
        """
        self.stats = without_work(self.stats)
        self._held.clear()
        self._in_flight.fail(error)
        self._embeddings.fail(error)
        for pending in self._pending_tokens.values():
            resolve(pending.future, error)
        for explanation in self._pending_explanations:
            resolve(explanation, error)

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

    def submit(self, requests: list[Request], claim: Claim = NO_CLAIM) -> Stream:
        """Send requests to the engine, or find their results.

        The caller must call ``close_stream`` later.

        Raises QueueFull if the queue is full, and EngineError if there is no engine.
        """
        self.check_available()
        stream, new = self._in_flight.submit(requests, claim)
        if new and self.ready:
            self._write(b"".join(frame(Add(request)) for request in new))
        self._send_yielding(stream)  # it may read what no other client reads
        return stream

    def stop(self, stream: Stream, request_id: str, index: int) -> None:
        """End one of a request's sequences in the engine's next step, because its reader needs no
        more tokens.
        """
        engine_id = self._in_flight.stop(stream, request_id, index)
        if engine_id is not None and self.ready and engine_id not in self._held:
            self._write(frame(Abort(engine_id, index)))

    def set_yielding(self, stream: Stream, *, yields: bool) -> None:
        """Let a stream's requests yield their places to all others while its client does not
        read.
        """
        self._in_flight.set_unread(stream, is_unread=yields)
        self._send_yielding(stream)

    def _send_yielding(self, stream: Stream) -> None:
        """Tell the engine which requests of ``stream`` yield to others now, or no longer."""
        for request_id, yields in self._in_flight.take_yielding(stream):
            if self.ready and request_id not in self._held:
                self._write(frame(SetYielding(request_id, yields)))

    def close_stream(self, stream: Stream) -> None:
        """Forget the stream's requests.

        Unfinished requests that no other stream reads are aborted.
        """
        for request_id in self._in_flight.leave(stream):
            self._abort(request_id)
        self._send_yielding(stream)

    def embed(self, request: EmbeddingRequest) -> Waiter:
        """Send texts to the engine. The caller must call ``forget`` later.

        Raises QueueFull, and EngineError if there is no engine.
        """
        self.check_available()
        waiter = self._embeddings.begin(request)
        if self.ready:
            self._write(frame(Embed(request)))
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting for these vectors. An unfinished request is aborted."""
        if self._embeddings.forget(waiter):
            self._abort(waiter.request.request_id)

    def _abort(self, request_id: str) -> None:
        if self.ready and request_id not in self._held:
            self._write(frame(Abort(request_id)))
        self._held.discard(request_id)
        if self._has_suspects:
            self._resume(self._suspects.forget(request_id))

    async def tokenize(self, texts: list[list[Segment]]) -> list[list[int]]:
        """Return the token ids of each text.

        Raises EngineError if there is no engine, or if several die meanwhile; and for long texts if
        too many characters wait already.
        """
        self.check_available()
        size = count_characters(texts)
        others = [pending.num_characters for pending in self._pending_tokens.values()]
        if size > LONG and others and sum(others) + size > MAX_WAITING_CHARACTERS:
            message = "Too many long texts are waiting to be tokenized; please retry."
            raise EngineError(message, reason="large")
        number = next(self._numbers)
        pending = self._pending_tokens[number] = PendingTokens(texts, size)
        try:
            if self.ready:
                self._write(frame(Tokenize(number, texts)))
            return await pending.future
        finally:
            del self._pending_tokens[number]
            if pending.future.cancelled() and self.ready:
                self._write(frame(Abandon(number)))

    async def explain(self, num_steps: int) -> Explanation:
        """Return the last ``num_steps`` steps, and what runs or waits and why.

        Raises EngineError without an engine.
        """
        if not self.ready:
            raise EngineError("The engine is not ready; please retry.", self.seconds_until_ready())
        future: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._pending_explanations.append(future)
        self._write(frame(Explain(num_steps)))
        return await future

    def set_faults(self, faults: list[Fault]) -> None:
        """Cause ``faults`` in the engine, and none that were set before. Those that depend on a
        token are caused in the next engines too.
        """
        self._faults = [fault for fault in faults if fault.token is not None]
        self._write(frame(SetFaults(faults)))

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use these shares of accounts from now on, and 1 for all others."""
        if weights == self.params.weights:
            return
        # the policy and the backlog have the same mapping
        self.params.weights.clear()
        self.params.weights.update(weights)
        if self.ready:
            self._write(frame(SetWeights(dict(weights))))

    def check_available(self) -> None:
        """Raise EngineError unless there is an engine, or the next one is being started after a
        death, or is started because this one was unloaded.
        """
        supervisor = self._supervisor
        if supervisor.unloaded and not supervisor.closing:
            self.on_wanted()
        has_failed = supervisor.num_failed > 0 and not self.ready
        if supervisor.closing or self.info is None or has_failed:
            raise EngineError("The engine is not ready; please retry.", self.seconds_until_ready())

    def _write(self, data: bytes) -> None:
        self._supervisor.write(data)


def without_work(stats: Stats) -> Stats:
    """Return ``stats`` for an engine that computes nothing."""
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
