"""Texts and tokens in cLLM's own form: /generate, /encode and /decode."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Literal, NotRequired, cast

from fastapi import APIRouter
from pydantic import Field, with_config
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from cllm.errors import BadRequest
from cllm.server.body import Body, describe_route, example, read_body
from cllm.server.body_limits import MAX_VALUES
from cllm.server.call import get_call
from cllm.server.errors import error_event
from cllm.server.http.sse import EventStream, until_disconnect
from cllm.server.off_loop import off_loop
from cllm.server.queueing import SchedulingBody, answer_headers
from cllm.server.resolve import service_for
from cllm.server.sampling import add_sampling_fields, build_params, read_sampling_values
from cllm.serving.answer import Answer, Generation
from cllm.text.output_reader import Delta

router = APIRouter(tags=["cLLM"])

DEFAULT_MAX_TOKENS = 100
MAX_PROMPTS = 128


Prompt = Annotated[str, Field(min_length=1)]
ModelName = Annotated[
    str | None, Field(description="The model's name; the default model without one.")
]
Prompts = Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]


@add_sampling_fields("native")
class GenerateBody(SchedulingBody):
    """One or more plain prompts.

    Sampling parameters that are left out get the operator's defaults.
    """

    model_config = example(prompt="27 plus 45 is", max_tokens=20, temperature=0)

    model: ModelName = None
    prompt: Prompt | Prompts | None = None
    prompts: Prompts | None = None
    max_tokens: Annotated[int, Field(ge=1)] = Field(
        default=DEFAULT_MAX_TOKENS,
        description="The operator's limit, if there is one, replaces the default.",
    )
    stop: list[str] | None = None
    stream: bool = False

    def texts(self) -> dict[str, str]:
        """Return the prompts by their names in errors.

        Raises BadRequest if there are none, or in both fields.
        """
        if self.prompt is not None and self.prompts is not None:
            message = "Only one of 'prompt' and 'prompts' can be given."
            raise BadRequest(message, param="prompts", code="invalid_value")
        given = self.prompts if self.prompt is None else self.prompt
        if given is None:
            message = "Missing required parameter: 'prompt' or 'prompts'."
            raise BadRequest(message, param="prompt", code="missing_required_parameter")
        if isinstance(given, str):
            return {"prompt": given}
        name = "prompts" if self.prompt is None else "prompt"
        return {f"{name}[{i}]": prompt for i, prompt in enumerate(given)}

    @property
    def is_list(self) -> bool:
        """Whether the prompts are in a list, even if it has only one."""
        return self.prompts is not None or isinstance(self.prompt, list)


class EncodeBody(Body):
    model_config = example(text="Hi")

    model: ModelName = None
    text: Annotated[str, Field(min_length=1)]


class DecodeBody(Body):
    model_config = example(tokens=[72, 105])

    model: ModelName = None
    tokens: Annotated[list[int], Field(min_length=1, max_length=MAX_VALUES)]


@with_config(example(tokens=[72, 105], length=2))
class EncodeAnswer(TypedDict):
    tokens: list[int]
    length: int


@with_config(example(text="Hi", length=2))
class DecodeAnswer(TypedDict):
    text: str
    length: int


class TextAnswer(TypedDict):
    text: str
    generated_tokens: int
    finish_reason: Literal["stop", "length"]


class GeneratedTexts(TypedDict):
    text: NotRequired[str]
    finish_reason: NotRequired[Literal["stop", "length"]]
    results: NotRequired[list[TextAnswer]]


@with_config(
    example(
        id="1",
        text=" 72",
        response_time=0.05,
        tokens_per_second=60.0,
        generated_tokens=3,
        prompt_tokens=9,
        max_tokens=100,
        finish_reason="stop",
    )
)
class GenerateAnswer(GeneratedTexts):
    """The answer to one prompt.

    For several, ``results`` has the answer to each, and the numbers are totals.
    """

    id: str
    response_time: float
    tokens_per_second: float
    generated_tokens: int
    prompt_tokens: int
    max_tokens: int | None


@router.post("/encode", openapi_extra=describe_route(EncodeBody, EncodeAnswer))
async def encode(request: Request) -> Response:
    """Return the token ids of a text, as the model would read it in a prompt."""
    body = await read_body(request, EncodeBody)
    service = await service_for(request, body.model)
    tokens = await until_disconnect(request, service.encode(body.text, "text"))
    answer = EncodeAnswer(tokens=tokens, length=len(tokens))
    return Response(to_json(answer), media_type="application/json")


@router.post("/decode", openapi_extra=describe_route(DecodeBody, DecodeAnswer))
async def decode(request: Request) -> Response:
    """Return the text of token ids, as an answer of the model would show it: control tokens have no
    text.
    """
    body = await read_body(request, DecodeBody)
    service = await service_for(request, body.model)
    size = service.vocabulary.size
    if min(body.tokens) < 0 or max(body.tokens) >= size:
        message = f"Invalid 'tokens': token ids must be between 0 and {size - 1}."
        raise BadRequest(message, param="tokens", code="invalid_value")
    pieces = service.vocabulary.pieces
    data = await off_loop(
        get_call(request), lambda: b"".join([pieces[token] for token in body.tokens])
    )
    text = data.decode("utf-8", "replace")
    answer = DecodeAnswer(text=text, length=len(body.tokens))
    return Response(to_json(answer), media_type="application/json")


@router.post(
    "/generate",
    openapi_extra=describe_route(GenerateBody, GenerateAnswer, stream="text/event-stream"),
)
async def generate(request: Request) -> Response:
    """Continue one or more prompts. With ``stream``, this is the same as /generate_stream."""
    body = await read_body(request, GenerateBody)
    if body.is_list and body.stream:
        raise BadRequest(
            "Several prompts cannot be streamed.", param="stream", code="invalid_value"
        )
    answer = await submit(request, body)
    if body.stream:
        return event_stream(answer)
    with answer:
        content = await until_disconnect(request, collect(answer))
    return JSONResponse(content, headers=answer_headers(answer))


@router.post(
    "/generate_stream", openapi_extra=describe_route(GenerateBody, stream="text/event-stream")
)
async def generate_stream(request: Request) -> Response:
    """Continue a prompt as a stream of events ``{"id", "token", "done"}``.

    The last one has ``done`` true.
    """
    body = await read_body(request, GenerateBody)
    if body.is_list:
        param = "prompts" if body.prompt is None else "prompt"
        raise BadRequest("Several prompts cannot be streamed.", param=param, code="invalid_value")
    return event_stream(await submit(request, body))


async def submit(request: Request, body: GenerateBody) -> Answer:
    service = await service_for(request, body.model)
    defaults = service.sampling
    has_limit = "max_tokens" in body.model_fields_set or defaults.max_tokens is None
    own = {
        "max_tokens": body.max_tokens if has_limit else None,
        "stop": tuple(body.stop or ()),
    }
    params = build_params(defaults, read_sampling_values(body, "native") | own)
    scheduling = body.scheduling_options(get_call(request))
    prompts = await until_disconnect(
        request, service.encode_all([*body.texts().items()], scheduling)
    )
    return service.submit(Generation(secrets.token_hex(16), prompts, params, scheduling))


def event_stream(answer: Answer) -> EventStream:
    return EventStream(answer, TokenEvents(answer.generation), answer_headers(answer))


async def collect(answer: Answer) -> GenerateAnswer:
    begun = time.perf_counter()
    results: list[TextAnswer] = [
        {"text": "", "generated_tokens": 0, "finish_reason": "stop"}
        for _ in answer.generation.prompts
    ]
    async for deltas in answer:
        for delta in deltas:
            result = results[delta.index]
            result["text"] += delta.text
            result["generated_tokens"] += delta.num_tokens
            result["finish_reason"] = cast("Literal['stop', 'length']", delta.finish)
    seconds = time.perf_counter() - begun
    usage = answer.generation.usage
    more: GeneratedTexts
    if len(results) == 1:
        more = {"text": results[0]["text"], "finish_reason": results[0]["finish_reason"]}
    else:
        more = {"results": results}
    return {
        "id": answer.generation.request_id,
        **more,
        "response_time": seconds,
        "tokens_per_second": usage.completion_tokens / seconds,
        "generated_tokens": usage.completion_tokens,
        "prompt_tokens": usage.prompt_tokens,
        "max_tokens": answer.generation.params.max_tokens,
    }


class TokenEvents:
    """The events of one stream; implements AnswerEvents."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._head = b'data: {"id":"%s",' % generation.request_id.encode()
        self._finish = ""

    def begin(self) -> bytes:
        return b""

    def deltas(self, deltas: list[Delta]) -> bytes:
        self._finish = deltas[-1].finish
        texts = (to_json(delta.text) for delta in deltas if delta.text)
        return b"".join(self._head + b'"token":' + text + b',"done":false}\n\n' for text in texts)

    def end(self) -> bytes:
        last = self._finish.encode(), self._generation.usage.completion_tokens
        return (
            self._head
            + b'"token":"","done":true,"finish_reason":"%s","generated_tokens":%d}\n\n' % last
        )

    def fault(self, error: Exception) -> bytes:
        self._finish = "error"
        return error_event(error) + self.end()
