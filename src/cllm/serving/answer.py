"""The types of a dialect's requests to the service, and of the streamed answers."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from cllm.core.account import ANONYMOUS, Account
from cllm.core.output import FinishReason, Logprobs, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.errors import BadRequest, CLLMError, EngineError
from cllm.observe.metrics import Metrics
from cllm.observe.request_record import NOT_TIMED, RequestRecord
from cllm.observe.trace_file import Recorder
from cllm.process.backlog import NO_CLAIM, QueuePosition
from cllm.process.in_flight_request import OutputStream
from cllm.process.pool import Pool
from cllm.process.reservations import Claim
from cllm.serving.adapter_use import NO_ADAPTERS, AdapterUse
from cllm.serving.delivered import Delivered, Origin, ProgressRecorder, digest_inputs
from cllm.store.charges import Charge
from cllm.text.chat_format import OutputPlan
from cllm.text.grammar import CheckedGrammar
from cllm.text.output_reader import Delta, OutputReader, Usage

LOOK_SECONDS = 0.1  # between checks of an engine that may not respond


class RequestTimeout(CLLMError):
    """The request took longer than it may; ``code`` names the limit that expired."""

    def __init__(self, message: str, code: str = "request_timeout") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """How a generation is scheduled: its account, its priority, and its time limits in seconds.

    Its cached prefixes and results are shared only with requests that have the same ``cache_salt``.
    ``claim`` identifies a reserved place in the queue. Time limits count from ``arrived``. If
    another server has begun the answer, its client has the part ``delivered``. What becomes of the
    request is noted in ``record``. If it ``reports_prefill``, deltas tell how far the prompt is.
    """

    account: Account = ANONYMOUS
    priority: Priority = Priority.NORMAL
    deadline: float | None = None
    queue_timeout: float | None = None
    cache_salt: str = ""
    claim: Claim = NO_CLAIM
    arrived: float = field(default_factory=time.monotonic, compare=False)
    delivered: Delivered | None = None
    record: RequestRecord | None = field(default=None, compare=False)
    reports_prefill: bool = False

    def timing(self, name: str) -> AbstractContextManager[None]:
        """Note a step of the request's preparation in its record; see RequestRecord."""
        return NOT_TIMED if self.record is None else self.record.timing(name)

    def compute_remaining(self, seconds: float | None) -> float | None:
        """Return what is left of a time limit, at least 0; None without a limit."""
        return None if seconds is None else max(0.0, seconds - (time.monotonic() - self.arrived))


class Limit(NamedTuple):
    """A time limit of a request, which expires at ``at`` on the monotonic clock.

    A limit ``is_for_start`` if the request must only have started by then. Only the engine knows
    whether it has, so such a limit counts here only while the engine does not respond.
    """

    at: float
    error: RequestTimeout
    is_for_start: bool = False


@dataclass(slots=True)
class Times:
    """When a generation was submitted, and when its first and its latest token arrived; seconds,
    monotonic clock.
    """

    submitted: float = 0.0
    first: float = 0.0
    latest: float = 0.0


@dataclass(slots=True)
class Generation:
    """A dialect's request: each of the ``prompts`` (token ids) is continued ``params.n`` times.

    Choice ``i * n + j`` is the j-th continuation of the i-th prompt. Errors call the prompt's field
    ``param``. ``Service.prepare`` makes the generation of a chat's next message. If the message may
    be more than text, ``plan`` says how to parse it. ``unenforced`` are the schema keywords that
    were left out because they cannot be enforced. Later prompts are expected to agree with this one
    up to one of the ``boundaries``. The answer was ``created`` at a time in seconds
    since 1970. If another server has begun it, it keeps its id and that time.
    """

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    scheduling: SchedulingOptions = SchedulingOptions()
    param: str = "prompt"
    plan: OutputPlan | None = None
    usage: Usage = field(default_factory=Usage)
    times: Times = field(default_factory=Times)
    unenforced: tuple[str, ...] = ()
    boundaries: tuple[int, ...] = ()
    model: str = ""  # set by the service, and
    adapters: str = ""  # the ``contents`` of its AdapterUse
    created: float = field(default_factory=time.time)
    engine_id: str = field(init=False)  # the request id in this server's engines, never used again

    def __post_init__(self) -> None:
        self.engine_id = self.request_id
        if (delivered := self.scheduling.delivered) is not None:
            self.request_id, self.created = delivered.origin.request_id, delivered.origin.created
            self.engine_id = delivered.origin.make_engine_id()

    def derive_id(self, *place: int, digits: int = 24) -> str:
        """Return hex digits that identify a part of the answer, such as a call. They are always the
        same for the same ``place``, also if another server continues the answer.
        """
        name = "-".join((self.request_id, *map(str, place))).encode()
        return hashlib.blake2b(name, digest_size=digits // 2).hexdigest()

    def bind(self, answer: CheckedGrammar) -> None:
        """Constrain the text by a grammar."""
        self.params = self.params.replace_unchecked(grammar=answer.grammar)
        self.unenforced = answer.unenforced


class Answer:
    """The streamed answer to a generation.

    Iterate over it, or call listen() and take(). Close it; otherwise generation continues unread.
    ``queue_position`` is the position at submission. If another server has begun the answer,
    ``delivered`` has the deltas that its client has already, in the same parts; ``take`` returns
    the rest.
    """

    def __init__(
        self,
        generation: Generation,
        stream: OutputStream,
        engine: Pool,
        metrics: Metrics,
        reader: OutputReader,
        timeout: float | None,
        recorder: Recorder | None,
        charge: Charge | None = None,
        delivered: list[list[Delta]] | None = None,
    ) -> None:
        """``timeout`` limits the seconds that the answer may take. ``charge`` is the amount that
        its account has reserved for it.
        """
        self.generation = generation
        self._stream = stream
        self._engine = engine
        self._metrics = metrics
        self._recorder = recorder
        self._charge = charge
        if charge is not None:
            charge.end = self._fail
        self._reader = reader
        self.delivered = delivered
        self._progress: ProgressRecorder | None = None
        self.record = generation.scheduling.record or RequestRecord()
        times, before = generation.times, generation.scheduling.delivered
        self._begun = times.latest = time.monotonic()
        times.submitted = times.first = self._begun - (0.0 if before is None else before.elapsed)
        self._outcome = "abort"
        self._closed = False
        self._begin_record()
        self._error: CLLMError | None = None  # why the engine ended it; raised by the next take
        self._limits = list_limits(timeout, generation.scheduling)
        if generation.usage.completion_tokens:  # it has started on another server
            self._limits = [limit for limit in self._limits if not limit.is_for_start]
        # asyncio.timeout would cancel the reader's task even while that does something else
        self._timers = {
            limit: asyncio.get_running_loop().call_later(
                limit.at - self._begun, self._expire, limit
            )
            for limit in self._limits
        }

    def _begin_record(self) -> None:
        record, generation, stream = self.record, self.generation, self._stream
        scheduling = generation.scheduling
        record.submitted = self._begun
        record.answer_id, record.account = generation.request_id, scheduling.account.name
        record.priority = scheduling.priority.name.lower()
        record.model = generation.model
        record.adapter = ",".join(name for name, _ in stream.requests[0].adapters)
        record.prompt_tokens = generation.usage.prompt_tokens
        record.queue_position = stream.queue_position.position
        record.num_ahead, record.busiest = stream.num_ahead, stream.busiest

    def _end_record(self) -> None:
        """Complete the record, except for what concerns HTTP."""
        record, usage = self.record, self.generation.usage
        record.outcome = self._outcome
        record.cached_tokens = usage.cached_tokens
        record.completion_tokens = usage.completion_tokens
        entries = [*self._stream.in_flight.values()]
        record.num_retries = sum(entry.num_retries for entry in entries)
        record.num_parked = sum(
            times.num_parked for entry in entries for times in entry.times.values()
        )
        if entries and entries[0].times:
            record.engine = entries[0].engine
            record.times = entries[0].times.get(0, record.times)

    @property
    def queue_position(self) -> QueuePosition:
        return self._stream.queue_position

    def _expire(self, limit: Limit) -> None:
        """End the generation because a limit has expired, even if the engine does not end it."""
        if limit not in self._limits:
            return
        if limit.is_for_start and self._engine.may_start(self._stream):
            loop = asyncio.get_running_loop()
            self._timers[limit] = loop.call_later(LOOK_SECONDS, self._expire, limit)
            return
        self._fail(limit.error)

    def _fail(self, error: CLLMError) -> None:
        """End the generation with ``error``, whatever the engine does."""
        self._engine.close_stream(self._stream)
        self._stream.fail(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort whatever has not finished. May be called again."""
        if self._closed:
            return
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._engine.close_stream(self._stream)
        if self._charge is not None:
            outcome = self._outcome
            self._charge.settle(finished=outcome == "finished", failed=outcome == "error")
        seconds = time.monotonic() - self._begun
        self._end_record()
        self._metrics.observe_request(self.record)
        if self._recorder is not None:
            for request in self._stream.requests:
                num_tokens = self._reader.num_tokens(request.request_id)
                self._recorder.record(request, seconds, num_tokens, self.generation.model)

    def set_yielding(self, *, yields: bool) -> None:
        """Let the generation yield its place to all others while its client does not read."""
        if not self._closed:
            self._engine.set_yielding(self._stream, yields=yields)

    def stop(self) -> None:
        """End the generation early; it counts as finished, not as aborted."""
        self._outcome = "finished"
        self.close()

    @property
    def finished(self) -> bool:
        """Whether every choice has finished."""
        return self._reader.finished

    @property
    def prompt_logprobs(self) -> list[list[Logprobs]]:
        """See OutputReader."""
        return self._reader.prompt_logprobs

    def listen(self, wake: Callable[[], None] | None) -> None:
        """Call ``wake`` whenever there may be something to take. None stops the calls."""
        self._stream.listen(wake)

    def record_progress(self) -> ProgressRecorder:
        """Record from now on what ``take`` reads, so that another server can continue."""
        generation, requests = self.generation, self._stream.requests
        origin = Origin(
            generation.request_id,
            generation.created,
            [request.params.seed for request in requests],
            digest_inputs(self._engine.info, requests, generation.adapters),
            generation.usage.cached_tokens,
            generation.usage.prompt_tokens,
        )
        self._progress = ProgressRecorder(requests, origin, generation.usage)
        return self._progress

    async def __aiter__(self) -> AsyncGenerator[list[Delta], None]:
        """Yield the deltas as they arrive, those of one step together, until every choice has
        finished.

        Raises what ``take`` raises.
        """
        while not self.finished:
            if self._error is None:
                await self._stream.arrival()
            if deltas := self.take():
                yield deltas

    def take(self) -> list[Delta] | None:
        """Return the deltas since the last call, or None. There is one for each choice, or for each
        parsed part of a choice.

        A delta may contain many tokens. Raises EngineError, RequestTimeout, and BadRequest for a
        grammar that allows no further token, after all deltas that arrived before. Deltas that
        have not been taken when a time limit expires are dropped.
        """
        try:
            for limit in self._limits:  # what arrives later comes too late
                if limit.at <= time.monotonic() and not limit.is_for_start:
                    self._engine.close_stream(self._stream)
                    raise limit.error
            if self._error is not None:
                raise self._error
            outputs = self._stream.take()
            if not outputs:
                return None
            if self._progress is not None:
                self._progress.add(outputs)
                if self._stream.ends_reasoning:
                    self._progress.end_reasoning()
            now, before = time.monotonic(), self.generation.usage.completion_tokens
            deltas = self._read(outputs)
            if (steps := self.record.steps) is not None:
                steps.detokenizing.add(time.monotonic() - now)
            if count := self.generation.usage.completion_tokens - before:
                times = self.generation.times
                self._metrics.observe_tokens(count, now - times.latest, first=before == 0)
                self.record.last_token = now
                if before == 0:
                    times.first = self.record.first_token = now
                    self._limits = [one for one in self._limits if not one.is_for_start]
                else:
                    self.record.gaps.append(now - times.latest)
                times.latest = now
        except Exception as error:
            self._outcome = "timeout" if isinstance(error, RequestTimeout) else "error"
            self.record.error_code = getattr(error, "code", None) or type(error).__name__
            raise
        if self.finished:
            self._outcome = "finished"
        return deltas

    def _read(self, outputs: list[TokenOutput]) -> list[Delta]:
        deltas, ended = self._reader.read(outputs)
        for choice in ended:
            self.record.finish_reasons.append(choice.finish)
            self._metrics.count_finish(choice.finish)
            if not choice.is_known:
                self._engine.stop(self._stream, choice.request_id, choice.index)
        if self._reader.failure is not None:
            self._error = self._error_for(self._reader.failure)
        return deltas

    def _error_for(self, failure: FinishReason) -> CLLMError:
        if failure == FinishReason.GRAMMAR:
            return grammar_error()
        if failure == FinishReason.TIMEOUT:
            return self._timeout()
        return EngineError("The engine failed to compute this request; please retry.")

    def _timeout(self) -> RequestTimeout:
        """Return the error for the limit in ``scheduling`` that has ended the generation."""
        scheduling = self.generation.scheduling
        deadline = math.inf if scheduling.deadline is None else scheduling.deadline
        # The engine's clock started later, so elapsed may be below a deadline that has expired.
        elapsed = time.monotonic() - scheduling.arrived
        if (
            scheduling.queue_timeout is not None
            and scheduling.queue_timeout < deadline
            and elapsed < deadline
        ):
            return waited_too_long(scheduling.queue_timeout)
        return missed_deadline(scheduling.deadline or 0)


def list_limits(timeout: float | None, scheduling: SchedulingOptions) -> list[Limit]:
    """Return the time limits of a generation that is submitted now and may take ``timeout``
    seconds, including those that another server has spent on it.
    """
    limits, before = [], scheduling.delivered
    if timeout is not None:
        left = timeout if before is None else timeout - before.elapsed
        limits.append(Limit(time.monotonic() + left, took_too_long(timeout)))
    if (seconds := scheduling.deadline) is not None:
        limits.append(Limit(scheduling.arrived + seconds, missed_deadline(seconds)))
    if (seconds := scheduling.queue_timeout) is not None:
        limits.append(Limit(scheduling.arrived + seconds, waited_too_long(seconds), True))
    return limits


def took_too_long(seconds: float) -> RequestTimeout:
    """Return the error for a request that took longer than the server allows."""
    return RequestTimeout(f"The request took longer than {seconds:g} seconds.")


def missed_deadline(seconds: float) -> RequestTimeout:
    """Return the error for a request that took longer than its client allows."""
    message = f"The request took longer than its deadline_ms, {round(seconds * 1000)}."
    return RequestTimeout(message, "deadline_exceeded")


def waited_too_long(seconds: float) -> RequestTimeout:
    """Return the error for a request that waited longer than its client allows."""
    message = f"The request waited longer than its queue_timeout_ms, {round(seconds * 1000)}."
    return RequestTimeout(message, "queue_timeout")


def grammar_error() -> BadRequest:
    """Return the error for a grammar that passed the checks, but then allowed no further token."""
    return BadRequest(
        "The grammar or schema of this request allows no further token.", code="grammar_dead_end"
    )


def make_request(
    request_id: str,
    prompt: list[int],
    params: SamplingParams,
    scheduling: SchedulingOptions,
    use: AdapterUse = NO_ADAPTERS,
    plan: OutputPlan | None = None,
    boundaries: tuple[int, ...] = (),
) -> Request:
    num_base_tokens = use.find_begin(prompt)
    if num_base_tokens is None:
        use, num_base_tokens = NO_ADAPTERS, 0
    return Request(
        request_id,
        prompt,
        params,
        scheduling.account.name,
        scheduling.priority,
        scheduling.compute_remaining(scheduling.deadline),
        scheduling.compute_remaining(scheduling.queue_timeout),
        scheduling.cache_salt if num_base_tokens else use.salt(scheduling.cache_salt),
        use.adapters,
        num_base_tokens,
        scheduling.reports_prefill,
        plan.name if plan else "",
        is_traced=scheduling.record is not None and scheduling.record.steps is not None,
        boundaries=boundaries,
    )
