"""POST /v1/completions: plain prompts, echoed or filled in if that is wanted, one or the best of several answers."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cllm.answer import Answer, Delta, Generation
from cllm.core.params import SamplingParams
from cllm.server.body import documented, read_body
from cllm.server.infill import infill
from cllm.server.openai.answers import Completion
from cllm.server.openai.logprobs import completion_logprobs, joined, prompt_logprobs, said
from cllm.server.openai.routes import check_model, head_of, headers_of, json_answer
from cllm.server.openai.schema import CompletionBody
from cllm.server.openai.stream import Chunks, Counted, usage_object
from cllm.server.sse import EventStream, until_disconnect
from cllm.server.timings import build_timings
from cllm.service import Service
from cllm.text.alignment import ToldToken

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/completions", openapi_extra=documented(CompletionBody, Completion, stream="text/event-stream"))
async def completions(request: Request) -> Response:
    """A prompt, or some, continued; with ``stream`` as server-sent events."""
    service: Service = request.app.state.service
    body = await read_body(request, CompletionBody)
    check_model(body.model, service)
    body.check()
    params = body.with_breakers(body.params(request.app.state.sampling), service.dry_breakers)
    bound = await body.grammar(service)
    terms = body.terms(request)
    texts = body.prompts()
    prompts = []
    for text in texts:
        plain = body.suffix is not None
        tokens = await service.encode(text, terms=terms, plain=plain) if isinstance(text, str) else text
        prompts.append(tokens if body.suffix is None else await infill(service, tokens, body.suffix, terms))
    generation = Generation(f"cmpl-{secrets.token_hex(12)}", prompts, params, terms)
    generation.bind(bound)
    answer = service.submit(generation)
    echoed = [text if isinstance(text, str) else said(service.vocabulary, text) for text in texts]
    words = Words(service, body, answer, echoed if body.echo else [""] * len(prompts))
    head = head_of(service, generation, "text_completion")
    if body.stream:
        chunks = CompletionChunks(words, head)
        return EventStream(answer, Counted(chunks) if body.counts_always else chunks, headers_of(answer))
    with answer:
        choices = await until_disconnect(request, collect(answer, words))
    figures = {"usage": usage_object(generation.usage), "timings": build_timings(generation)}
    return json_answer({**head, "choices": choices, **figures}, headers_of(answer))


class Words:
    """Choices as OpenAI words them. ``echoed``: what comes before the answers to each prompt."""

    def __init__(self, service: Service, body: CompletionBody, answer: Answer, echoed: list[str]) -> None:
        self.body = body
        self.answer = answer
        self._vocabulary = service.vocabulary
        self._echoed = echoed

    @property
    def params(self) -> SamplingParams:
        return self.answer.generation.params

    def echoed(self, index: int) -> str:
        """What comes before the text of the choice ``index``."""
        return self._echoed[index // self.params.n]

    def knows_prompt(self, index: int) -> bool:
        """Whether the logprobs of its prompt are there, if they are wanted."""
        i = index // self.params.n
        wanted = self.params.prompt_logprobs is not None
        return not wanted or len(self.answer.prompt_logprobs[i]) >= len(self.answer.generation.prompts[i]) - 1

    def logprobs(self, index: int, told: list[ToldToken], *, with_prompt: bool) -> dict[str, Any] | None:
        """The object ``logprobs`` of tokens of the choice ``index``; ``with_prompt``: and of what is echoed."""
        if self.body.logprobs is None:
            return None
        own = completion_logprobs(self._vocabulary, told, len(self.echoed(index)))
        if not with_prompt or self.params.prompt_logprobs is None:
            return own
        i = index // self.params.n
        prompt = self.answer.generation.prompts[i]
        return joined(prompt_logprobs(self._vocabulary, prompt, self.answer.prompt_logprobs[i]), own)


async def collect(answer: Answer, words: Words) -> list[dict[str, Any]]:
    """All choices of a generation, whole; of those that only compete for the best, the best ones."""
    params = answer.generation.params
    count = len(answer.generation.prompts) * params.n
    texts: list[list[str]] = [[] for _ in range(count)]
    told: list[list[ToldToken]] = [[] for _ in range(count)]
    finish = [""] * count
    async for deltas in answer:
        for delta in deltas:
            texts[delta.index].append(delta.text)
            told[delta.index] += delta.logprobs
            finish[delta.index] = delta.finish
    chosen = [*range(count)]
    if words.body.chooses:
        chosen = [i for first in range(0, count, params.n) for i in best(told, first, params.n, words.body.n or 1)]
    return [
        {
            "index": place,
            "text": words.echoed(i) + "".join(texts[i]),
            "logprobs": words.logprobs(i, told[i], with_prompt=True),
            "finish_reason": finish[i],
        }
        for place, i in enumerate(chosen)
    ]


def best(told: list[list[ToldToken]], first: int, count: int, num_wanted: int) -> list[int]:
    """Of ``count`` choices from ``first`` those with the highest log probability per token, the highest first."""

    def mean(i: int) -> float:
        return sum(one.logprobs.logprob for one in told[i]) / max(1, len(told[i]))

    return sorted(range(first, first + count), key=mean, reverse=True)[:num_wanted]


class CompletionChunks(Chunks):
    """The chunks of a stream of completions: the first one of a choice brings what is echoed."""

    def __init__(self, words: Words, head: dict[str, Any]) -> None:
        options = words.body.stream_options
        include_usage = options is not None and options.include_usage
        super().__init__(words.answer.generation, head, chat=False, include_usage=include_usage)
        self._words = words
        self._begun: set[int] = set()
        self._is_plain = not words.body.echo and words.body.logprobs is None
        self._held: list[Delta] = []  # until the logprobs of their prompt have come

    def deltas(self, deltas: list[Delta]) -> bytes:
        if self._is_plain:
            return super().deltas(deltas)
        waiting, self._held = [*self._held, *deltas], []
        return super().deltas(waiting)

    def of(self, delta: Delta) -> bytes:
        if self._is_plain:
            return super().of(delta)
        index, is_first = delta.index, delta.index not in self._begun
        if not self._words.knows_prompt(index):
            self._held.append(delta)
            return b""
        self._begun.add(index)
        text = (self._words.echoed(index) if is_first else "") + delta.text
        logprobs = self._words.logprobs(index, list(delta.logprobs), with_prompt=is_first)
        data = self.text(index, text, logprobs) if text or delta.logprobs or is_first else b""
        return data + self.finish(index, delta.finish) if delta.finish else data
