"""The types of a dialect's requests to the service, and of the streamed answers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Self

import msgspec

from cllm.core.output import FinishReason, Logprobs, TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.errors import BadRequest, CLLMError, EngineError
from cllm.observe.metrics import Metrics
from cllm.observe.trace_file import Recorder
from cllm.process.backlog import NO_CLAIM, Place
from cllm.process.client import EngineClient
from cllm.process.in_flight import Stream
from cllm.process.reservations import Claim
from cllm.text.alignment import TokenLogprob
from cllm.text.chat import Channel
from cllm.text.chat_form import OutputPlan
from cllm.text.choice import Choice
from cllm.text.grammar import Checked

log = logging.getLogger("cllm.service")


class RequestTimeout(CLLMError):
    """The request took longer than it may; ``code`` names the limit that expired."""

    def __init__(self, message: str, code: str = "request_timeout") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """How a generation is scheduled: its account (``key``), its priority, and its time limits in
    seconds.

    What is computed for it is shared only with requests that have the same ``cache_salt``.
    ``claim``: to a reserved place in the queue.
    """

    key: str = ""
    priority: Priority = Priority.NORMAL
    deadline: float | None = None
    queue_timeout: float | None = None
    cache_salt: str = ""
    claim: Claim = NO_CLAIM


class Delta(msgspec.Struct, gc=False):
    """New text of one choice, in one channel. The deltas of a choice are in order.

    finish: "" while the choice continues; else stop, length or tool_calls, and no delta follows.
    stop: the stop string that ended it. channel: whether the text is the visible answer, reasoning,
    or the arguments of the ``call``-th tool call. The function's ``name`` comes with the first
    delta of its call; the texts of a call form one JSON object. logprobs: the tokens that begin in
    this text, if the request's params ask for logprobs.
    """

    index: int
    text: str
    num_tokens: int
    finish: str = ""
    stop: str = ""
    channel: Channel = Channel.TEXT
    call: int = 0
    name: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Usage:
    """Token counts of a whole request, complete when its deltas have ended.

    Reasoning tokens are completion tokens.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


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
    """A dialect's request: ``prompts`` (token ids), each continued ``params.n`` times.

    Choice ``i * n + j`` is the j-th continuation of the i-th prompt. ``param`` names the prompt's
    field in errors. ``Service.prepare`` makes the generation of a chat's next message; ``plan``
    then says how to parse it, if it is more than text. ``unenforced``: schema keywords that could
    not be enforced and were left out.
    """

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    terms: SchedulingOptions = SchedulingOptions()
    param: str = "prompt"
    plan: OutputPlan | None = None
    usage: Usage = field(default_factory=Usage)
    times: Times = field(default_factory=Times)
    unenforced: tuple[str, ...] = ()

    def bind(self, answer: Checked) -> None:
        """Constrain the text by a grammar."""
        self.params = msgspec.structs.replace(self.params, grammar=answer.grammar)
        self.unenforced = answer.unenforced


class Answer:
    """The streamed answer to a generation.

    Iterate over it, or call listen() and take(); close it, or generation continues unread.
    ``place`` is its queue position at submission. ``prompt_logprobs`` are those of each prompt's
    tokens from the second one on, if the params ask for them; they are complete with the first
    delta of the prompt's first continuation.
    """

    def __init__(
        self,
        generation: Generation,
        stream: Stream,
        engine: EngineClient,
        metrics: Metrics,
        pieces: list[bytes],
        timeout: float | None,
        recorder: Recorder | None,
    ) -> None:
        self.generation = generation
        self._stream = stream
        self._engine = engine
        self._metrics = metrics
        self._recorder = recorder
        if plan := generation.plan:
            pieces = plan.pieces
        self._choices = {
            (request.request_id, j): Choice(
                i * generation.params.n + j,
                pieces,
                generation.params,
                plan.parser() if plan else None,
            )
            for i, request in enumerate(stream.requests)
            for j in range(generation.params.n)
        }
        self._num_going = len(self._choices)
        self.prompt_logprobs: list[list[Logprobs]] = [[] for _ in stream.requests]
        times = generation.times
        self._begun = times.submitted = times.first = times.latest = time.monotonic()
        self._outcome = "abort"
        self._closed = False
        self._error: CLLMError | None = None  # why the engine ended it; raised by the next take
        self._timer: asyncio.TimerHandle | None = None
        if timeout is not None:
            # not asyncio.timeout, which would cancel the reader's task even while it does something
            # else
            self._timer = asyncio.get_running_loop().call_later(timeout, self._expire, timeout)

    @property
    def place(self) -> Place:
        return self._stream.place

    def _expire(self, timeout: float) -> None:
        self._engine.close_stream(self._stream)
        self._stream.fail(RequestTimeout(f"The request took longer than {timeout:g} seconds."))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort whatever has not finished. May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._engine.close_stream(self._stream)
        seconds, usage = time.monotonic() - self._begun, self.generation.usage
        self._metrics.ended(self._outcome, seconds)
        if self._recorder is not None:
            for request in self._stream.requests:
                choices = [self._choices[request.request_id, j] for j in range(request.params.n)]
                self._recorder.record(request, seconds, [choice.num_tokens for choice in choices])
        log.debug(
            "%s %s: %d prompt tokens, %d cached, %d generated, %.3f s",
            self.generation.request_id,
            self._outcome,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            seconds,
        )

    def stop(self) -> None:
        """End the generation early; it counts as finished, not as aborted."""
        self._outcome = "finished"
        self.close()

    @property
    def finished(self) -> bool:
        """Whether every choice has finished."""
        return not self._num_going

    def listen(self, wake: Callable[[], None] | None) -> None:
        """Call ``wake`` whenever there may be something to take; None: stop calling."""
        self._stream.listen(wake)

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
        """Return the deltas since the last call, or None: one for each choice, or for each parsed
        part of a choice.

        A delta may contain many tokens. Raises EngineError, RequestTimeout, and BadRequest for a
        grammar that allows no further token, after all deltas that arrived before.
        """
        try:
            if self._error is not None:
                raise self._error
            outputs = self._stream.take()
            if not outputs:
                return None
            now, before = time.monotonic(), self.generation.usage.completion_tokens
            deltas = self._feed(outputs)
            if count := self.generation.usage.completion_tokens - before:
                times = self.generation.times
                self._metrics.tokens(count, now - times.latest, first=before == 0)
                times.latest = now
                if before == 0:
                    times.first = now
        except Exception as error:
            self._outcome = "timeout" if isinstance(error, RequestTimeout) else "error"
            raise
        if self.finished:
            self._outcome = "finished"
        return deltas

    def _feed(self, outputs: list[TokenOutput]) -> list[Delta]:
        """Return one delta for each choice of ``outputs``, or one for each part of a choice that is
        parsed.
        """
        usage = self.generation.usage
        deltas: dict[int, Delta] = {}
        parsed: list[Delta] = []
        for output in outputs:
            choice = self._choices[output.request_id, output.index]
            if choice.finish:  # sampled before the engine heard of the stop string
                continue
            if output.finish == FinishReason.ERROR:
                self._error = EngineError(
                    "The engine failed to compute this request; please retry."
                )
                break
            if output.finish == FinishReason.GRAMMAR:
                self._error = grammar_error()
                break
            if output.finish == FinishReason.TIMEOUT:
                self._error = self._timeout()
                break
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[choice.index // self.generation.params.n] += (
                    output.prompt_logprobs
                )
                continue
            count = int(output.token >= 0)
            usage.cached_tokens += output.num_cached_tokens
            usage.completion_tokens += count
            if choice.parser:
                finish = self._parse(choice, output, parsed)
            else:
                text, finish = choice.feed(output)
                if (delta := deltas.get(choice.index)) is None:
                    delta = deltas[choice.index] = Delta(choice.index, text, count, finish)
                else:
                    delta.text += text
                    delta.num_tokens += count
                    delta.finish = finish
                if choice.token_logprobs:
                    delta.logprobs += tuple(choice.token_logprobs)
            if finish:
                self._num_going -= 1
                (parsed[-1] if choice.parser else deltas[choice.index]).stop = choice.stop
                self._metrics.finished(finish)
                if not output.finish:
                    self._engine.stop(self._stream, output.request_id, output.index)
        return [*deltas.values(), *parsed]

    def _parse(self, choice: Choice, output: TokenOutput, deltas: list[Delta]) -> str:
        """Add to ``deltas`` what ``output`` adds to a choice with a parser.

        Returns the reason if it has finished.
        """
        assert choice.parser
        if choice.parser.channel == Channel.REASONING:
            self.generation.usage.reasoning_tokens += 1
        last = deltas[-1] if deltas and deltas[-1].index == choice.index else None
        for part in choice.parts(output):
            if last and last.channel == part.channel and last.call == part.call and not part.name:
                last.text += part.text
            else:
                last = Delta(
                    choice.index, part.text, 0, channel=part.channel, call=part.call, name=part.name
                )
                deltas.append(last)
        if last is None:
            last = Delta(choice.index, "", 0)
            deltas.append(last)
        last.num_tokens += output.token >= 0
        last.finish = choice.finish
        if choice.token_logprobs:
            said = next(delta for delta in reversed(deltas) if delta.channel == Channel.TEXT)
            said.logprobs += tuple(choice.token_logprobs)
        return choice.finish

    def _timeout(self) -> RequestTimeout:
        """Return the error for the limit in ``terms`` that has ended the generation."""
        terms = self.generation.terms
        deadline = math.inf if terms.deadline is None else terms.deadline
        # The engine's clock started earlier, so elapsed may be below a deadline that has expired.
        elapsed = time.monotonic() - self._begun
        if (
            terms.queue_timeout is not None
            and terms.queue_timeout < deadline
            and elapsed < deadline
        ):
            limit = round(terms.queue_timeout * 1000)
            return RequestTimeout(
                f"The request waited longer than its queue_timeout_ms, {limit}.", "queue_timeout"
            )
        limit = round((terms.deadline or 0) * 1000)
        return RequestTimeout(
            f"The request took longer than its deadline_ms, {limit}.", "deadline_exceeded"
        )


def grammar_error() -> BadRequest:
    """Return the error for a grammar that passed the checks, but could not be followed to its
    end.
    """
    return BadRequest(
        "The grammar or schema of this request allows no further token.", code="grammar_dead_end"
    )


def request_of(
    request_id: str, prompt: list[int], params: SamplingParams, terms: SchedulingOptions
) -> Request:
    return Request(
        request_id,
        prompt,
        params,
        terms.key,
        terms.priority,
        terms.deadline,
        terms.queue_timeout,
        terms.cache_salt,
    )
