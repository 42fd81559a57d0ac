"""A neutral request in, a stream of neutral deltas out. Every dialect is a translation to and from this interface."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from cllm.backends.base import ModelInfo, Vocabulary
from cllm.core.params import SamplingParams
from cllm.core.request import Request, check_prompt
from cllm.core.sequence import FinishReason
from cllm.errors import BadRequest, CLLMError, EngineError, context_length_exceeded
from cllm.observe.metrics import Metrics
from cllm.process.client import EngineClient, Stream
from cllm.text.chat_template import ChatTemplate
from cllm.text.choice import Choice

LONG_TEXT = 16_384  # characters from which tokenizing leaves the event loop
MAX_CHOICES = 1024  # prompts times n of one request

log = logging.getLogger("cllm.service")


class RequestTimeout(CLLMError):
    """The request took longer than scheduler.request_timeout."""


@dataclass(slots=True)
class Delta:
    """New text of one choice. ``finish`` is "" while it goes on, else stop or length, and then nothing follows."""

    index: int
    text: str
    num_tokens: int
    finish: str = ""


@dataclass(slots=True)
class Usage:
    """Tokens of a whole request; complete when its deltas have ended."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Generation:
    """What a dialect asks for: ``prompts`` (token ids), each continued ``params.n`` times.

    Choice ``i * n + j`` is the j-th continuation of the i-th prompt. ``param`` names the prompt's field in errors.
    """

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    param: str = "prompt"
    usage: Usage = field(default_factory=Usage)


class Service:
    """Text in, text out, over one engine."""

    def __init__(
        self,
        engine: EngineClient,
        vocabulary: Vocabulary,
        metrics: Metrics,
        model_name: str,
        request_timeout: float | None = None,
    ) -> None:
        """``request_timeout``: seconds that a request may take from submission to its last token."""
        self.engine = engine
        self.vocabulary = vocabulary
        self.metrics = metrics
        self.model_name = model_name
        self.created = int(time.time())
        self.draining = False
        self._chat_template = ChatTemplate(vocabulary)
        self._request_timeout = request_timeout
        self._longest_piece = max(map(len, [*vocabulary.pieces, *vocabulary.control_tokens]))

    @property
    def ready(self) -> bool:
        return self.engine.ready and not self.draining

    @property
    def info(self) -> ModelInfo:
        """Raises EngineError while the model has never been loaded."""
        if self.engine.info is None:
            raise EngineError("The model is being loaded; please retry.")
        return self.engine.info

    async def encode(self, text: str, param: str = "prompt") -> list[int]:
        """Tokens of a whole prompt, control tokens included that it spells out.

        Raises BadRequest if it can never fit, without tokenizing what is far too long.
        """
        self._check_length(len(text), param)
        if len(text) < LONG_TEXT:
            return self.vocabulary.tokenize(text, add_special=True, parse_special=True)
        return await asyncio.to_thread(self.vocabulary.tokenize, text, add_special=True, parse_special=True)

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **variables: Any
    ) -> list[int]:
        """Tokens of a conversation by the model's template. Raises BadRequest, also if it can never fit."""
        length = sum(len(str(message.get("content") or "")) for message in messages)
        self._check_length(length, "messages")
        if len(str(messages)) + len(str(tools)) < LONG_TEXT:
            return self._chat_template.encode(messages, tools, **variables)
        return await asyncio.to_thread(self._chat_template.encode, messages, tools, **variables)

    def _check_length(self, num_characters: int, param: str) -> None:
        at_least = num_characters // self._longest_piece
        if at_least >= self.info.context_length:
            raise context_length_exceeded(at_least, self.info.context_length, param, at_least=True)

    def check(self, generation: Generation) -> None:
        """Raise BadRequest if it can never be computed, so that a dialect can refuse before the first byte."""
        info = self.info
        generation.params.check_vocabulary(info.vocabulary_size)
        for prompt in generation.prompts:
            check_prompt(prompt, info.vocabulary_size, info.context_length, generation.param)
        if len(generation.prompts) * generation.params.n > MAX_CHOICES:
            raise BadRequest(
                f"At most {MAX_CHOICES} choices can be asked for at once.", param="n", code="invalid_value"
            )
        if self.draining:
            raise EngineError("The server is shutting down.")
        if not self.engine.ready:
            raise EngineError("The engine is not ready; please retry.")

    async def generate(self, generation: Generation) -> AsyncGenerator[list[Delta], None]:
        """The deltas of a request as they come, those of one step together; ends when every choice has finished.

        Close it (contextlib.aclosing) to abort. Raises what ``check`` raises, EngineError and RequestTimeout.
        """
        self.check(generation)
        begun = time.monotonic()
        requests = [
            Request(f"{generation.request_id}-{i}", prompt, generation.params)
            for i, prompt in enumerate(generation.prompts)
        ]
        generation.usage.prompt_tokens = sum(map(len, generation.prompts))
        stream = self.engine.submit(requests)
        timer = self._start_timer(stream)
        outcome = "abort"
        try:
            self.metrics.begun(generation.usage.prompt_tokens)
            async with aclosing(self._deltas(generation, stream)) as all_deltas:
                async for deltas in all_deltas:
                    yield deltas
            outcome = "finished"
        except CLLMError as error:
            outcome = "timeout" if isinstance(error, RequestTimeout) else "error"
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self.engine.close_stream(stream)
            seconds, usage = time.monotonic() - begun, generation.usage
            self.metrics.ended(outcome, seconds)
            log.debug(
                "%s %s: %d prompt tokens, %d cached, %d generated, %.3f s",
                generation.request_id,
                outcome,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                seconds,
            )

    def _start_timer(self, stream: Stream) -> asyncio.TimerHandle | None:
        # not asyncio.timeout: that would cancel the reader's task even where it is busy with something else
        if self._request_timeout is None:
            return None
        error = RequestTimeout(f"The request took longer than {self._request_timeout:g} seconds.")

        def expire() -> None:
            self.engine.close_stream(stream)
            stream.fail(error)

        return asyncio.get_running_loop().call_later(self._request_timeout, expire)

    async def _deltas(self, generation: Generation, stream: Stream) -> AsyncGenerator[list[Delta], None]:
        params, pieces = generation.params, self.vocabulary.pieces
        choices = {
            (request.request_id, j): Choice(i * params.n + j, pieces, params.stop)
            for i, request in enumerate(stream.requests)
            for j in range(params.n)
        }
        going = len(choices)
        last = time.monotonic()
        while going:
            outputs = await stream.get()
            now = time.monotonic()
            first = generation.usage.completion_tokens == 0
            deltas: dict[int, Delta] = {}
            for output in outputs:
                choice = choices[output.request_id, output.index]
                if choice.finish:  # sampled before the engine heard of the stop string
                    continue
                if output.finish == FinishReason.ERROR:
                    raise EngineError("The engine failed to compute this request; please retry.")
                generation.usage.cached_tokens += output.num_cached_tokens
                text, finish = choice.feed(output)
                delta = deltas.setdefault(choice.index, Delta(choice.index, "", 0))
                delta.text += text
                delta.num_tokens += 1
                delta.finish = finish
                generation.usage.completion_tokens += 1
                if finish:
                    going -= 1
                    self.metrics.finished(finish)
                    if not output.finish:
                        self.engine.abort(output.request_id, output.index)
            if deltas:
                self.metrics.tokens(sum(delta.num_tokens for delta in deltas.values()), now - last, first=first)
                last = now
                yield list(deltas.values())
