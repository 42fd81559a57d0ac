"""llama-server's routes: /completion, /infill and /props, /models/load and /models/unload."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm import __version__
from cllm.server.body import Body, describe_route, example, read_body
from cllm.server.call import get_call
from cllm.server.errors import Dialect, Fault, error_event, openai_error
from cllm.server.http.sse import EventStream, until_disconnect
from cllm.server.infill import Snippet, build_infill_prompt
from cllm.server.openai.chat import json_answer, make_headers
from cllm.server.openai.schema import GenerationBody, list_prompts
from cllm.server.resolve import (
    check_enabled,
    known_service_for,
    may_bench,
    model_for,
    service_for,
)
from cllm.server.state import get_state
from cllm.server.timings import Timings, build_progress, build_timings
from cllm.serving.answer import Answer, Generation
from cllm.serving.service import Service
from cllm.text.output_reader import Delta

router = APIRouter(tags=["llama-server"])

MAX_SNIPPETS = 1000
StopType = Literal["eos", "limit", "word"]
STOP_TYPES: dict[str, StopType] = {"length": "limit", "stop": "eos"}
PATHS = ("/completion", "/infill")  # paths whose errors have llama-server's form


def llama_server_error(fault: Fault, request_id: str) -> tuple[int, Mapping[str, Any]]:
    """Build an error answer in OpenAI's form. For a prompt that is too long, it has llama-server's
    form, in which that server's clients find both numbers.
    """
    if fault.prompt_tokens is None:
        return openai_error(fault, request_id)
    num_tokens, max_tokens = fault.prompt_tokens
    context = max_tokens + 1  # one token must be left to generate
    error = {
        "code": fault.status,
        "message": f"request ({num_tokens} tokens) exceeds the available context size ({context} "
        "tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": num_tokens,
        "n_ctx": context,
    }
    return fault.status, {"error": error}


DIALECT = Dialect(lambda path, _: path in PATHS, llama_server_error)


class LlamaServerBody(GenerationBody):
    """Fields that /completion and /infill have in common."""

    ignored: ClassVar = {
        "cache_prompt": "the prefix cache is always on",
        "id_slot": "there are no slots; the prefix cache finds what can be reused",
        "n_indent": "answers are not edited",
        "n_keep": "the context never shifts",
        "n_probs": "send the prompt to /v1/completions, with logprobs",
        "samplers": "the order of the sampling steps is fixed",
        "t_max_prompt_ms": "llama-server ignores it too",
    }

    response_fields: Annotated[list[str], Field(max_length=100)] | None = Field(
        default=None,
        description="Return only these fields; timings/prompt_ms is prompt_ms within timings.",
    )
    t_max_predict_ms: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Milliseconds after the first token at which an answer that has a whole line "
        "ends; 0 is off. Streams are not limited.",
    )
    n: Literal[1] | None = None


class PromptBody(LlamaServerBody):
    model_config = example(prompt="27 plus 45 is", n_predict=16, temperature=0)

    prompt: str | list[str] | list[int] | list[list[int]] = Field(
        description="One or more prompts. Several have a list of answers and cannot be streamed."
    )


class InfillBody(LlamaServerBody):
    """The text before and after the cursor, and sampling parameters."""

    model_config = example(
        input_prefix="def add(a, b):\n    return ", input_suffix="\n", n_predict=16, temperature=0
    )

    input_prefix: str = ""
    input_suffix: str = ""
    prompt: str = Field(default="", description="The text between the prefix and the cursor.")
    input_extra: Annotated[list[Snippet], Field(max_length=MAX_SNIPPETS)] = Field(
        default=[],
        description="Parts of other files, the most important one last. Those that do not fit "
        "are dropped.",
    )


class SamplingSettings(TypedDict):
    n_predict: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class PlainSettings(SamplingSettings):
    n_ctx: int


class PlainAnswer(TypedDict, total=False):
    """Has all fields, or those that ``response_fields`` names."""

    index: int
    content: str
    stop: bool
    model: str
    stop_type: StopType
    stopping_word: str
    has_new_line: bool
    tokens_evaluated: int
    tokens_predicted: int
    tokens_cached: int
    truncated: bool
    generation_settings: PlainSettings
    timings: Timings


class Done(TypedDict):
    success: Literal[True]


class PropsSettings(TypedDict):
    n_ctx: int
    params: SamplingSettings


class Modalities(TypedDict):
    vision: bool
    audio: bool


class Props(TypedDict):
    default_generation_settings: PropsSettings
    total_slots: int
    model_alias: str
    modalities: Modalities
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    endpoint_bench: bool


@router.post(
    "/infill", openapi_extra=describe_route(InfillBody, PlainAnswer, stream="text/event-stream")
)
async def infill(request: Request) -> Response:
    """Fill in the text between a prefix and a suffix. 400 if the model has no tokens for that.

    A prompt that is too long is shortened, and ``truncated`` is true, because editors may send more
    than fits.
    """
    body = await read_body(request, InfillBody)
    service = await service_for(request, body.model)
    params = await body.params(service)
    scheduling = body.scheduling_options(get_call(request))
    bound = await body.grammar(service, scheduling)
    before = body.input_prefix + body.prompt
    prompt, is_short = await until_disconnect(
        request,
        build_infill_prompt(
            service, before, body.input_suffix, body.input_extra, params.max_tokens, scheduling
        ),
    )
    generation = Generation(new_id(), [prompt], params, scheduling, "input_prefix")
    generation.bind(bound)
    return await respond(request, service, body, generation, is_short=is_short)


@router.post(
    "/completion",
    openapi_extra=describe_route(PromptBody, PlainAnswer, stream="text/event-stream"),
)
async def completion(request: Request) -> Response:
    """Continue a prompt, to the end of the context unless ``n_predict`` limits it."""
    body = await read_body(request, PromptBody)
    given = list_prompts(body.prompt)
    if body.stream and len(given) > 1:
        raise body.refuse("stream", "several prompts cannot be streamed")
    service = await service_for(request, body.model)
    params = await body.params(service)
    scheduling = body.scheduling_options(get_call(request))
    bound = await body.grammar(service, scheduling)
    prompts = await until_disconnect(
        request, service.encode_all([("prompt", prompt) for prompt in given], scheduling)
    )
    generations = [Generation(new_id(), [prompt], params, scheduling) for prompt in prompts]
    for generation in generations:
        generation.bind(bound)
    if len(generations) == 1:
        return await respond(request, service, body, generations[0], is_short=False)
    with ExitStack() as stack:
        answers = [stack.enter_context(service.submit(generation)) for generation in generations]
        contents = await until_disconnect(request, collect_all(service, body, answers))
    return json_answer(contents, make_headers(answers[0]))


def new_id() -> str:
    return f"cmpl-{secrets.token_hex(12)}"


async def respond(
    request: Request,
    service: Service,
    body: LlamaServerBody,
    generation: Generation,
    *,
    is_short: bool,
) -> Response:
    """Generate the answer. If ``is_short``, it says that the prompt was shortened."""
    answer = service.submit(generation)
    events = PlainEvents(service, generation, body, is_short=is_short)
    if body.stream:
        return EventStream(answer, events, make_headers(answer))
    with answer:
        content = await until_disconnect(
            request, collect(answer, events, body.t_max_predict_ms or 0)
        )
    return json_answer(content, make_headers(answer))


async def collect_all(
    service: Service, body: PromptBody, answers: list[Answer]
) -> list[Mapping[str, Any]]:
    """Return the whole answers, each with its own figures."""
    return await asyncio.gather(
        *(
            collect(
                answer,
                PlainEvents(service, answer.generation, body, is_short=False),
                body.t_max_predict_ms or 0,
            )
            for answer in answers
        )
    )


async def collect(answer: Answer, events: PlainEvents, time_limit: int) -> Mapping[str, Any]:
    """Return the whole answer.

    Stop early once ``time_limit`` milliseconds have passed and a line is complete.

    A limit of 0 is off.
    """
    texts: list[str] = []
    async for deltas in answer:
        events.deltas(deltas)
        texts += [delta.text for delta in deltas]
        spent = (time.monotonic() - answer.generation.times.first) * 1000
        if time_limit and spent > time_limit and any("\n" in text for text in texts):
            answer.stop()
            break
    return events.content("".join(texts), is_last=True)


class PlainEvents:
    """An answer in llama-server's format; implements AnswerEvents."""

    def __init__(
        self, service: Service, generation: Generation, body: LlamaServerBody, *, is_short: bool
    ) -> None:
        self._service = service
        self._generation = generation
        self._fields = body.response_fields
        self._is_short = is_short
        self._last = Delta(0, "", 0, "length")
        self._has_new_line = False

    def content(self, text: str, *, is_last: bool) -> Mapping[str, Any]:
        """Return the object for ``text``. The last one also has the figures of the whole answer."""
        answer: PlainAnswer = {"index": 0, "content": text, "stop": is_last}
        if is_last:
            generation, last = self._generation, self._last
            answer |= {
                "model": self._service.model_name,
                "tokens_evaluated": generation.usage.prompt_tokens,
                "truncated": self._is_short,
                "generation_settings": {
                    "n_ctx": self._service.info.context_length,
                    **describe_sampling(generation.params),
                },
                "tokens_predicted": generation.usage.completion_tokens,
                "tokens_cached": generation.usage.cached_tokens,
                "stop_type": "word" if last.stop else STOP_TYPES.get(last.finish, "limit"),
                "stopping_word": last.stop,
                "has_new_line": "\n" in text or self._has_new_line,
                "timings": build_timings(generation),
            }
        if self._fields is None:
            return answer
        return {
            path: value for path in self._fields if (value := value_at(answer, path)) is not None
        }

    def begin(self) -> bytes:
        return b""

    def deltas(self, deltas: list[Delta]) -> bytes:
        self._last = deltas[-1]
        self._has_new_line |= any("\n" in delta.text for delta in deltas)
        return b"".join(map(self._encode, deltas))

    def _encode(self, delta: Delta) -> bytes:
        content = self.content(delta.text, is_last=False)
        if delta.prefill is not None:
            return event({**content, "prompt_progress": build_progress(delta.prefill)})
        return event(content) if delta.text else b""

    def end(self) -> bytes:
        return event(self.content("", is_last=True))

    def fault(self, error: Exception) -> bytes:
        return error_event(error)


def event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(content) + b"\n\n"


def value_at(content: Any, path: str) -> Any:
    """Return the value at ``path`` (a/b is b within a), or None if it does not exist."""
    for name in path.split("/"):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def describe_sampling(params: Any) -> SamplingSettings:
    """Return the settings in ``params``, SamplingParams or the operator's defaults, under
    llama-server's names.
    """
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
    }


@router.get("/props")
async def props(request: Request, model: str | None = None) -> Props:
    """Return the model's context length, chat template and input modalities, and whether the
    request may use /bench.
    """
    service = await known_service_for(request, model)
    info, vocabulary = service.info, service.vocabulary
    return {
        "default_generation_settings": {
            "n_ctx": info.context_length,
            "params": describe_sampling(service.sampling),
        },
        "total_slots": info.max_num_seqs,
        "model_alias": service.model_name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": vocabulary.chat_template or "",
        "bos_token": vocabulary.special_texts["bos_token"],
        "eos_token": vocabulary.special_texts["eos_token"],
        "build_info": f"cllm-{__version__}",
        "endpoint_bench": may_bench(request),
    }


class ModelBody(Body):
    model_config = example(model="cllm-builtin")

    model: str


@router.post("/models/load", openapi_extra=describe_route(ModelBody))
async def load_model(request: Request) -> Done:
    """Load a model, and answer once it is loaded.

    Rejected unless ``server.allow_model_changes`` is set (403).
    """
    check_enabled(request, "allow_model_changes")
    body = await read_body(request, ModelBody)
    get_call(request).audit("load", model=body.model)
    await service_for(request, body.model)
    return {"success": True}


@router.post("/models/unload", openapi_extra=describe_route(ModelBody))
async def unload_model(request: Request) -> Done:
    """Unload a model once its requests have ended; the next request loads it again.

    Rejected unless ``server.allow_model_changes`` is set (403).
    """
    check_enabled(request, "allow_model_changes")
    body = await read_body(request, ModelBody)
    model = model_for(request, body.model)
    get_call(request).audit("unload", model=model.name)
    await until_disconnect(request, get_state(request).registry.loaded.unload(model))
    return {"success": True}
