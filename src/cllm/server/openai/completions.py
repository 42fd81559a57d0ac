"""POST /v1/completions: continues plain prompts, with options to echo them, fill in text or return
the best answers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, Literal, cast

from fastapi import APIRouter
from pydantic import with_config
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm.core.params import SamplingParams
from cllm.errors import BadRequest
from cllm.server.body import describe_route, example, read_body
from cllm.server.call import Call, get_call
from cllm.server.http.sse import EventStream, until_disconnect
from cllm.server.infill import build_suffix_prompts
from cllm.server.openai.chat import AnswerHead, collect, encode_choices, make_head, make_headers
from cllm.server.openai.logprobs import (
    completion_logprobs,
    join_logprobs,
    plain_text,
    prompt_logprobs,
)
from cllm.server.openai.schema import CompletionBody, list_prompts
from cllm.server.openai.stream import ChoiceAccumulator, Chunks, TokenUsage
from cllm.server.resolve import service_for
from cllm.server.timings import EXAMPLE_TIMINGS, Timings
from cllm.serving.answer import Answer, Generation
from cllm.serving.service import Service
from cllm.text.alignment import TokenLogprob
from cllm.text.output_reader import Delta

router = APIRouter(prefix="/v1", tags=["OpenAI"])

MAX_ECHOED = 1_000_000  # logprobs for the echoed prompts of one request
MAX_STREAMED = 50_000  # the same for a streamed request


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


@with_config(
    example(
        id="cmpl-1",
        object="text_completion",
        created=1735689600,
        model="cllm-builtin",
        system_fingerprint="fp_0123456789ab",
        choices=[{"index": 0, "text": " 72", "logprobs": None, "finish_reason": "stop"}],
        usage={"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
        timings=EXAMPLE_TIMINGS,
    )
)
class TextCompletion(AnswerHead):
    choices: list[CompletionChoice]
    usage: TokenUsage
    timings: Timings


@router.post(
    "/completions",
    openapi_extra=describe_route(CompletionBody, TextCompletion, stream="text/event-stream"),
)
async def completions(request: Request) -> Response:
    """Continue one or more prompts. With ``stream``, the answer is server-sent events."""
    body = await read_body(request, CompletionBody)
    service = await service_for(request, body.model)
    generation = await until_disconnect(
        request, completion_generation(get_call(request), service, body)
    )
    answer = service.submit(generation)
    formatter = CompletionFormatter(service, body, answer)
    if body.stream:
        chunks = CompletionChunks(formatter, make_head(service, generation, "text_completion"))
        return EventStream(answer, chunks, make_headers(answer))
    with answer:
        content = await until_disconnect(request, completion(formatter))
    return Response(content, headers=make_headers(answer), media_type="application/json")


async def completion_generation(call: Call, service: Service, body: CompletionBody) -> Generation:
    """Return the generation for the prompts of ``body``, ready to be submitted."""
    body.check()
    params = await body.params(service)
    scheduling = body.scheduling_options(call)
    bound = await body.grammar(service, scheduling)
    given = list_prompts(body.prompt)
    prompts = (
        await service.encode_all([("prompt", prompt) for prompt in given], scheduling)
        if body.suffix is None
        else await build_suffix_prompts(service, given, body.suffix, scheduling)
    )
    check_echo(body, prompts)
    generation = Generation(f"cmpl-{secrets.token_hex(12)}", prompts, params, scheduling)
    generation.bind(bound)
    return generation


async def completion(formatter: CompletionFormatter) -> bytes:
    """Return the whole answer to prompts, as JSON."""
    answer = formatter.answer
    head = make_head(formatter.service, answer.generation, "text_completion")
    collected = await collect(answer)
    chosen = formatter.choose(collected)
    choices: Iterable[CompletionChoice] = (
        {
            "index": place,
            "text": formatter.prompt_text(index) + "".join(collected[index].text),
            "logprobs": formatter.logprobs(
                index, collected[index].token_logprobs, with_prompt=True
            ),
            "finish_reason": cast("Literal['stop', 'length']", collected[index].finish),
        }
        for place, index in enumerate(chosen)
    )
    num_tokens = sum(len(collected[index].token_logprobs) for index in chosen)
    if formatter.params.prompt_logprobs is not None:
        num_tokens += sum(map(len, answer.generation.prompts)) * formatter.params.n
    return await encode_choices(answer, head, choices, num_tokens)


def check_echo(body: CompletionBody, prompts: list[list[int]]) -> None:
    """Raise BadRequest if the echoed prompts would have too many logprobs. A stream sends all
    logprobs of a prompt in one chunk.
    """
    if not body.echo or body.logprobs is None:
        return
    count, limit = (
        sum(map(len, prompts)) * (1 + body.logprobs),
        MAX_STREAMED if body.stream else MAX_ECHOED,
    )
    if count > limit:
        where = "a stream" if body.stream else "one answer"
        message = (
            f"Invalid 'logprobs': the echoed prompts would have {count} logprobs, and at most "
            f"{limit} are allowed in {where}."
        )
        raise BadRequest(message, param="logprobs", code="too_many_logprobs")


class CompletionFormatter:
    """Formats choices as OpenAI does, with the prompt before each answer if ``body`` says so."""

    def __init__(self, service: Service, body: CompletionBody, answer: Answer) -> None:
        self.service = service
        self.body = body
        self.answer = answer
        self._vocabulary = service.vocabulary
        self._given = prompts = list_prompts(body.prompt)
        self._prompt_texts = (
            [
                text if isinstance(text, str) else plain_text(self._vocabulary, text)
                for text in prompts
            ]
            if body.echo
            else [""] * len(prompts)
        )

    @property
    def params(self) -> SamplingParams:
        return self.answer.generation.params

    def prompt_text(self, index: int) -> str:
        """Return the text before that of the choice ``index``."""
        return self._prompt_texts[index // self.params.n]

    def knows_prompt(self, index: int) -> bool:
        """Return whether the logprobs of the choice's prompt are complete, or were not
        requested.
        """
        i = index // self.params.n
        wanted = self.params.prompt_logprobs is not None
        return (
            not wanted
            or len(self.answer.prompt_logprobs[i]) >= len(self.answer.generation.prompts[i]) - 1
        )

    def choose(self, choices: list[ChoiceAccumulator]) -> list[int]:
        """Return the indexes of the choices to return: all of them, or with ``best_of`` the best
        ones of each prompt, best first.
        """
        indexes = range(len(choices))
        if not self.body.chooses:
            return [*indexes]
        means = [mean_logprob(choice.token_logprobs) for choice in choices]
        groups = (indexes[first : first + self.params.n] for first in indexes[:: self.params.n])
        best = (sorted(group, key=lambda index: -means[index]) for group in groups)
        return [index for group in best for index in group[: self.body.n or 1]]

    def logprobs(
        self, index: int, token_logprobs: list[TokenLogprob], *, with_prompt: bool
    ) -> dict[str, Any] | None:
        """Return the ``logprobs`` object for tokens of the choice ``index``, if ``with_prompt``
        after those of its prompt.
        """
        if self.body.logprobs is None:
            return None
        own = completion_logprobs(self._vocabulary, token_logprobs, len(self.prompt_text(index)))
        if not with_prompt or self.params.prompt_logprobs is None:
            return own
        i = index // self.params.n
        prompt, given = self.answer.generation.prompts[i], self._given[i]
        text = given if isinstance(given, str) else None
        logprobs = self.answer.prompt_logprobs[i]
        return join_logprobs(prompt_logprobs(self._vocabulary, prompt, logprobs, text), own)


def mean_logprob(token_logprobs: list[TokenLogprob]) -> float:
    return sum(one.logprobs.logprob for one in token_logprobs) / max(1, len(token_logprobs))


class CompletionChunks(Chunks):
    """The chunks of a stream of completions.

    The first chunk of a choice contains the echoed prompt.
    """

    def __init__(self, formatter: CompletionFormatter, head: AnswerHead) -> None:
        super().__init__(
            formatter.answer.generation, head, chat=False, options=formatter.body.stream_options
        )
        self._formatter = formatter
        self._begun: set[int] = set()
        self._is_plain = not formatter.body.echo and formatter.body.logprobs is None
        self._held: list[Delta] = []  # until the logprobs of their prompt have arrived

    def deltas(self, deltas: list[Delta]) -> bytes:
        if self._is_plain:
            return super().deltas(deltas)
        waiting, self._held = [*self._held, *deltas], []
        return super().deltas(waiting)

    def encode(self, delta: Delta) -> bytes:
        if self._is_plain or delta.prefill is not None:
            return super().encode(delta)
        index, is_first = delta.index, delta.index not in self._begun
        if not self._formatter.knows_prompt(index):
            self._held.append(delta)
            return b""
        self._begun.add(index)
        text = (self._formatter.prompt_text(index) if is_first else "") + delta.text
        logprobs = self._formatter.logprobs(index, list(delta.logprobs), with_prompt=is_first)
        data = self.text(index, text, logprobs) if text or delta.logprobs or is_first else b""
        return data + self.finish(index, delta.finish) if delta.finish else data
