"""The API process's side: starts the engine process, sends it requests, distributes tokens, and
restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, TypeVar

import msgspec

from cllm.core.model_info import ModelInfo
from cllm.core.output import EmbeddingOutput, Stats
from cllm.core.request import EmbeddingRequest, Priority, Request
from cllm.core.segments import Segment, count_characters
from cllm.core.vocabulary import VocabularyTable
from cllm.engine.commands import Abort, Add, Close, Embed, Explain
from cllm.engine.params import EngineParams
from cllm.errors import EngineError, StartupError
from cllm.process.backlog import NO_CLAIM, Backlog, QueueLimits
from cllm.process.embeddings import Embeddings, Waiter
from cllm.process.in_flight import InFlightRequests, Stream
from cllm.process.launch import Popen
from cllm.process.messages import (
    Abandon,
    Explained,
    Failed,
    FromChild,
    Loading,
    Ready,
    Stepped,
    Tokenize,
    Tokenized,
    frame,
)
from cllm.process.reservations import Claim, Newcomer, QueueLoad
from cllm.process.results import ResultCache
from cllm.process.spawn import EngineProcess, spawn
from cllm.process.tokenizing import LONG
from cllm.scheduler.policy import make_policy
from cllm.scheduler.trace import Explanation

T = TypeVar("T")

log = logging.getLogger("cllm.process")

FIRST_BACKOFF, LONGEST_BACKOFF = 0.5, 30.0  # seconds between a death and the next start
# seconds of service after which the next death starts with FIRST_BACKOFF again
HEALTHY_AFTER = 60.0
CLOSE_TIMEOUT = 5.0
MAX_WAITING_CHARACTERS = 64_000_000  # of all texts that wait to be tokenized
USUAL_LOAD_SECONDS = 5.0  # assumed load time of a model, until it is measured


class EngineClient:
    """Owns the engine process.

    ``info`` and ``vocabulary`` are set once the engine has been ready. ``ready`` says whether it is
    ready now.
    ``stats`` are its latest statistics.
    """

    def __init__(
        self,
        params: EngineParams,
        on_loading: Callable[[float], None] | None = None,
        limits: QueueLimits | None = None,
        results: ResultCache | None = None,
        launched: Popen[bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``limits``: of the queue; none by default. ``results``: the result cache; off by default.
        ``launched``: a process that becomes the first engine. ``clock`` returns seconds. Raises
        StartupError for an unknown policy.
        """
        self.info: ModelInfo | None = None
        self.vocabulary: VocabularyTable | None = None
        self.ready = False
        self.stats = Stats()
        self._earlier_stats = Stats()  # of the engines that have died
        self.num_restarts = 0
        self.pid: int | None = None
        self.params = params
        self._launched = launched
        self._on_loading = on_loading
        self._embeddings = Embeddings(limits or QueueLimits())
        backlog = Backlog(
            limits or QueueLimits(),
            make_policy(params.policy, params.weights),
            params.weights,
            clock,
        )
        self._in_flight = InFlightRequests(backlog, ResultCache() if results is None else results)
        # the engine answers in this order
        self._pending_explanations: deque[asyncio.Future[Explanation]] = deque()
        self._pending_tokens: dict[int, PendingTokens] = {}
        self._numbers = count()
        self._process: EngineProcess | None = None
        self._loaded: asyncio.Future[Ready]
        self._watch: asyncio.Task[None] | None = None
        self._closing = False
        self._backoff = FIRST_BACKOFF  # before the next start
        self._clock = clock
        # _started: during the back-off, the time of the next start
        self._started = self._ready_since = clock()
        self._load_seconds = USUAL_LOAD_SECONDS

    @property
    def num_unfinished(self) -> int:
        """The number of requests that the engine has not answered completely, including those for
        embeddings.
        """
        return len(self._in_flight) + len(self._embeddings)

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises StartupError if it cannot load the model.
        """
        await self._spawn()
        self._watch = asyncio.create_task(self._serve_and_restart())

    async def _spawn(self) -> None:
        self._loaded = asyncio.get_running_loop().create_future()
        self._started = self._clock()
        launched, self._launched = self._launched, None
        process = self._process = await spawn(self._take, launched)
        self.pid = process.pid
        process.write(frame(self.params))
        ended: asyncio.Future[Any] = asyncio.ensure_future(process.ended.wait())
        try:
            await asyncio.wait((self._loaded, ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._loaded.done():
                raise StartupError(
                    f"the engine died ({process.describe_end()}) while loading "
                    f"{self.params.path or 'the model'}: "
                    "the file may be damaged; run `cllm doctor` to check this machine"
                )
            ready = self._loaded.result()
            self.info, self.vocabulary = ready.info, ready.vocabulary
        except BaseException:
            await process.stop()
            raise
        finally:
            ended.cancel()
            if not self._loaded.cancel():
                self._loaded.exception()  # so that asyncio does not report it as never retrieved
        self._earlier_stats = self.stats_since_start
        self.stats = Stats(num_seq_ids=self.info.max_num_seqs, num_cells=self.info.num_cells)
        self._in_flight.backlog.observe(self.stats)
        self._ready_since = self._clock()
        self._load_seconds = self._ready_since - self._started
        self.ready = True

    def _take(self, message: FromChild) -> None:
        """Handle a message of the engine."""
        match message:
            case Stepped():
                self.stats = message.stats
                self._in_flight.backlog.observe(message.stats)
                self._in_flight.put(message.outputs)
            case EmbeddingOutput():
                self._embeddings.put(message)
            case Tokenized():
                if (pending := self._pending_tokens.get(message.number)) is not None:
                    pending.put(message)
            case Explained():
                resolve(self._pending_explanations.popleft(), message.explanation)
            case Loading():
                if self._on_loading:
                    self._on_loading(message.share)
            case Ready() if not self._loaded.done():
                self._loaded.set_result(message)
            case Failed() if not self._loaded.done():
                self._loaded.set_exception(StartupError(message.reason))

    @property
    def stats_since_start(self) -> Stats:
        """``stats``, with totals over all engine processes of this client."""
        return self.stats.add_totals(self._earlier_stats)

    @property
    def reservations(self) -> Mapping[str, int]:
        """See Reservations.counts."""
        return self._in_flight.backlog.reservations.counts

    def seconds_until_ready(self) -> float:
        """Return the rest of the back-off plus the duration of the last load, at least 1; 0 if the
        engine is ready.
        """
        return 0.0 if self.ready else max(1.0, self._load_seconds - (self._clock() - self._started))

    async def _serve_and_restart(self) -> None:
        while True:
            process = self._process
            assert process is not None
            await process.ended.wait()
            self.ready = False
            if self._closing:
                self.end_all(EngineError("The engine has been closed."))
                return
            if self._clock() - self._ready_since >= HEALTHY_AFTER:
                self._backoff = FIRST_BACKOFF
            cause = process.describe_end()
            message = "the engine died (%s) with %d requests in flight; restarting it in %.1f s"
            log.error(message, cause, len(self._in_flight), self._backoff)
            reason = f"The engine died ({cause}) and is restarting; please retry."
            died = EngineError(reason, self._backoff + self._load_seconds)
            self.end_all(died)
            self._pending_explanations.clear()  # the next engine does not answer them
            while not self.ready:
                self._started = self._clock() + self._backoff
                await asyncio.sleep(self._backoff)
                self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)
                try:
                    await self._spawn()
                except (StartupError, OSError) as error:
                    log.error(
                        "the engine failed to start: %s; next attempt in %.1f s",
                        error,
                        self._backoff,
                    )
            self.num_restarts += 1
            log.warning("the engine is ready again")

    def end_all(self, error: EngineError) -> None:
        """End everything that waits for the engine with ``error``: streams, requests for
        embeddings, texts to tokenize and explanations.
        """
        self.stats = msgspec.structs.replace(
            self.stats,
            num_running=0,
            num_waiting=0,
            num_seq_ids_in_use=0,
            num_cells_held=0,
            num_cells_idle=0,
            num_waiting_tokens=0,
            waiting_seconds=0.0,
        )
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
        self.check_ready()
        load = QueueLoad(num_requests=1, num_seqs=1, num_tokens=num_tokens)
        self._in_flight.backlog.check(Newcomer(account, priority, load, num_tokens), claim)

    def submit(self, requests: list[Request], claim: Claim = NO_CLAIM) -> Stream:
        """Send requests to the engine, or find their results.

        The caller must call ``close_stream`` later.

        Raises QueueFull if the queue is full, and EngineError if there is no engine.
        """
        self.check_ready()
        stream, new = self._in_flight.submit(requests, claim)
        if new:
            self._write(b"".join(frame(Add(request)) for request in new))
        return stream

    def stop(self, stream: Stream, request_id: str, index: int) -> None:
        """End one of a request's sequences in the engine's next step, because its reader needs no
        more tokens.
        """
        engine_id = self._in_flight.stop(stream, request_id, index)
        if engine_id is not None and self.ready:
            self._write(frame(Abort(engine_id, index)))

    def close_stream(self, stream: Stream) -> None:
        """Forget the stream's requests.

        Unfinished requests that no other stream reads are aborted.
        """
        for request_id in self._in_flight.leave(stream):
            if self.ready:
                self._write(frame(Abort(request_id)))

    def embed(self, request: EmbeddingRequest) -> Waiter:
        """Send texts to the engine. The caller must call ``forget`` later.

        Raises QueueFull, and EngineError if there is no engine.
        """
        self.check_ready()
        waiter = self._embeddings.begin(request)
        self._write(frame(Embed(request)))
        return waiter

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting for these vectors. An unfinished request is aborted."""
        if self._embeddings.forget(waiter) and self.ready:
            self._write(frame(Abort(waiter.request.request_id)))

    async def tokenize(self, texts: list[list[Segment]]) -> list[list[int]]:
        """Return the token ids of each text.

        Raises EngineError if there is no engine, or if it dies; and for long texts if too many
        characters wait already.
        """
        self.check_ready()
        size = count_characters(texts)
        others = [pending.num_characters for pending in self._pending_tokens.values()]
        if size > LONG and others and sum(others) + size > MAX_WAITING_CHARACTERS:
            message = "Too many long texts are waiting to be tokenized; please retry."
            raise EngineError(message, reason="large")
        number = next(self._numbers)
        pending = self._pending_tokens[number] = PendingTokens(size)
        try:
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
        self.check_ready()
        future: asyncio.Future[Explanation] = asyncio.get_running_loop().create_future()
        self._pending_explanations.append(future)
        self._write(frame(Explain(num_steps)))
        return await future

    def check_ready(self) -> None:
        """Raise EngineError if there is no engine."""
        if not self.ready:
            raise EngineError("The engine is not ready; please retry.", self.seconds_until_ready())

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        self._process.write(data)

    async def close(self) -> None:
        """End the engine process. It has ended when this returns."""
        self._closing = True
        if self._watch is not None and self._watch.done() is False and not self.ready:
            self._watch.cancel()
        if self._process is not None and not self._process.ended.is_set():
            self._write(frame(Close()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.ended.wait(), CLOSE_TIMEOUT)
            await self._process.stop()
        if self._watch is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch


class PendingTokens:
    """The tokens of texts, as far as they have arrived; ``future`` gets them all.

    ``num_characters``: of the texts.
    """

    def __init__(self, num_characters: int = 0) -> None:
        self.num_characters = num_characters
        self.future: asyncio.Future[list[list[int]]] = asyncio.get_running_loop().create_future()
        self._texts: list[list[int]] = []
        self._is_continued = False

    def put(self, message: Tokenized) -> None:
        if message.tokens is None:
            failed = EngineError("The engine failed to tokenize this text; please retry.")
            resolve(self.future, failed)
            return
        begin = 0
        if self._is_continued:
            self._texts[-1] += message.tokens[0]
            begin = 1
        self._texts += message.tokens[begin:]
        self._is_continued = message.more
        if not message.more:
            resolve(self.future, self._texts)


def resolve(future: asyncio.Future[T], answer: T | EngineError) -> None:
    """Set the result or the exception of ``future``, unless its caller has been cancelled."""
    if future.done():
        return
    if isinstance(answer, EngineError):
        future.set_exception(answer)
    else:
        future.set_result(answer)
