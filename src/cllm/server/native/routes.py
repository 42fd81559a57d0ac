"""The routes that cLLM has had from its beginning."""

from __future__ import annotations

import math
import secrets
import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cllm import __version__
from cllm.scheduler.trace import MAX_STEPS
from cllm.server.body import Body, documented, read_body
from cllm.server.errors import error_event
from cllm.server.queueing import TermsBody, place_headers
from cllm.server.sse import EventStream, until_disconnect
from cllm.service import Answer, Delta, Generation, Service

router = APIRouter(tags=["cLLM"])

DEFAULT_MAX_TOKENS = 100


class GenerateBody(TermsBody):
    """A plain prompt; what is left out is the operator's default."""

    prompt: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] = DEFAULT_MAX_TOKENS
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stream: bool = False


class EncodeBody(Body):
    text: Annotated[str, Field(min_length=1)]


@router.get("/")
async def root(request: Request) -> dict[str, Any]:
    """What this server is and where its doors are."""
    service: Service = request.app.state.service
    paths = sorted(path for path in request.app.openapi()["paths"] if path != "/")
    return {"name": "cLLM", "version": __version__, "model": service.model_name, "docs": "/docs", "paths": paths}


@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """Alive: 200 even while the engine is not ready, which is then "degraded"."""
    service: Service = request.app.state.service
    ready = service.engine.ready
    return {"status": "healthy" if ready else "degraded", "model_loaded": ready}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken; 503 while the model loads, the engine restarts or the server shuts down."""
    service: Service = request.app.state.service
    if service.ready:
        return JSONResponse({"status": "ready"})
    seconds = max(1, math.ceil(service.engine.seconds_until_ready()))
    return JSONResponse({"status": "draining" if service.draining else "loading"}, 503, {"retry-after": str(seconds)})


@router.get("/model/info")
async def model_info(request: Request) -> dict[str, Any]:
    """The model, the sizes in force, and how the engine stands."""
    service: Service = request.app.state.service
    return {
        "model_name": service.model_name,
        **msgspec.structs.asdict(service.info),
        "stats": msgspec.structs.asdict(service.engine.stats),
    }


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus."""
    service: Service = request.app.state.service
    engine = service.engine
    page = service.metrics.render(engine.stats, ready=service.ready, num_restarts=engine.num_restarts)
    return Response(page, media_type=CONTENT_TYPE_LATEST)


@router.get("/scheduler")
async def scheduler(request: Request, steps: Annotated[int, Query(ge=1, le=MAX_STEPS)] = 20) -> Response:
    """Why: the last steps of the engine, who runs, who waits for what, and what steps have cost."""
    service: Service = request.app.state.service
    explanation = await until_disconnect(request, service.engine.explain(steps))
    return Response(msgspec.json.encode(explanation), media_type="application/json")


@router.post("/encode", openapi_extra=documented(EncodeBody))
async def encode(request: Request) -> dict[str, Any]:
    """Token ids of a text, as the model would read it in a prompt."""
    service: Service = request.app.state.service
    body = await read_body(request, EncodeBody)
    tokens = await service.encode(body.text, "text")
    return {"tokens": tokens, "length": len(tokens)}


@router.post("/generate", openapi_extra=documented(GenerateBody))
async def generate(request: Request) -> Response:
    """Continue a prompt; with ``stream`` the same as /generate_stream."""
    body = await read_body(request, GenerateBody)
    answer = await submit(request, body)
    if body.stream:
        return event_stream(answer)
    with answer:
        content = await until_disconnect(request, collect(answer, body.max_tokens))
    return JSONResponse(content, headers=place_headers(answer.place))


@router.post("/generate_stream", openapi_extra=documented(GenerateBody))
async def generate_stream(request: Request) -> Response:
    """Continue a prompt; events ``{"id", "token", "done"}``, the last with ``done`` true."""
    return event_stream(await submit(request, await read_body(request, GenerateBody)))


async def submit(request: Request, body: GenerateBody) -> Answer:
    service: Service = request.app.state.service
    values = body.model_dump(exclude={"prompt", "stream", "stop", *TermsBody.model_fields})
    params = request.app.state.sampling.params(**values, stop=tuple(body.stop or ()))
    terms = body.terms(request)
    prompt = await service.encode(body.prompt, terms=terms)
    return service.submit(Generation(secrets.token_hex(16), [prompt], params, terms))


def event_stream(answer: Answer) -> EventStream:
    return EventStream(answer, TokenEvents(answer.generation), place_headers(answer.place))


async def collect(answer: Answer, max_tokens: int) -> dict[str, Any]:
    begun = time.perf_counter()
    parts, finish = [], ""
    async for deltas in answer:
        parts += [delta.text for delta in deltas]
        finish = deltas[-1].finish
    seconds = time.perf_counter() - begun
    usage = answer.generation.usage
    return {
        "id": answer.generation.request_id,
        "text": "".join(parts),
        "response_time": seconds,
        "tokens_per_second": usage.completion_tokens / seconds,
        "generated_tokens": usage.completion_tokens,
        "prompt_tokens": usage.prompt_tokens,
        "max_tokens": max_tokens,
        "finish_reason": finish,
    }


class TokenEvents:
    """See Events."""

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
        return self._head + b'"token":"","done":true,"finish_reason":"%s","generated_tokens":%d}\n\n' % last

    def fault(self, error: Exception) -> bytes:
        self._finish = "error"
        return error_event(error) + self.end()
