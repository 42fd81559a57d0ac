"""POST /benchmark: a short load test of the server's engine, if the operator allows it."""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm.core.params import SamplingParams
from cllm.errors import BadRequest, CLLMError
from cllm.server.body import Body, describe_route, example, read_body
from cllm.server.http.sse import until_disconnect
from cllm.server.resolve import check_enabled, service_for
from cllm.server.state import get_state
from cllm.serving.answer import Generation, SchedulingOptions
from cllm.serving.service import Service

router = APIRouter(tags=["cLLM"])

TIME_LIMIT = 60.0  # seconds; requests that have not finished by then have failed


class BenchmarkBody(Body):
    """The number of requests, and how many run concurrently. Prompts are random tokens."""

    model_config = example(requests=16, concurrency=4, prompt_tokens=32, max_tokens=50)

    model: str | None = None
    requests: Annotated[int, Field(ge=1, le=256)] = 16
    concurrency: Annotated[int, Field(ge=1, le=64)] = 4
    prompt_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    max_tokens: Annotated[int, Field(ge=1, le=1024)] = 50


@dataclass(slots=True)
class BenchmarkRun:
    """One request: seconds to its first and to its last token, and its number of tokens."""

    first: float = 0.0
    seconds: float = 0.0
    num_tokens: int = 0
    succeeded: bool = False


class Benchmark(TypedDict):
    """Times are in seconds. ``throughput`` is in tokens per second, of all requests together."""

    total_requests: int
    successful_requests: int
    failed_requests: int
    success_rate: float
    total_time: float
    average_response_time: float
    minimum_response_time: float
    maximum_response_time: float
    average_time_to_first_token: float
    throughput: float
    average_tokens_per_second: float
    total_prompt_tokens: int
    total_generated_tokens: int
    average_generated_tokens: float
    steps: int
    average_batch_size: float


@router.post("/benchmark", openapi_extra=describe_route(BenchmarkBody, Benchmark))
async def benchmark(request: Request) -> Response:
    """Measure this server for a minute at most: response times, throughput, time to the first
    token, batch sizes.

    Rejected unless ``server.benchmark`` is set (403), and while another one runs (409). Its
    requests wait in the queue like all others.
    """
    check_enabled(request, "benchmark")
    body = await read_body(request, BenchmarkBody)
    service = await service_for(request, body.model)
    with service.admission():
        service.engine.check_available()
    if body.prompt_tokens + body.max_tokens > service.info.context_length:
        message = (
            f"Invalid 'prompt_tokens': together with max_tokens it must be at most "
            f"{service.info.context_length}, the context length of the model, "
            f"not {body.prompt_tokens + body.max_tokens}."
        )
        raise BadRequest(message, param="prompt_tokens", code="context_length_exceeded")
    state = get_state(request)
    with state.only("benchmark"):
        content = await until_disconnect(request, measure(service, body))
    return Response(to_json(content), media_type="application/json")


async def measure(service: Service, body: BenchmarkBody) -> Benchmark:
    steps, begun = service.engine.stats.num_steps, time.monotonic()
    runs = [BenchmarkRun() for _ in range(body.requests)]
    waiting = iter(runs)

    async def client() -> None:
        for run in waiting:
            await run_request(service, body, run, begun + TIME_LIMIT - time.monotonic())

    await asyncio.gather(*(client() for _ in range(min(body.concurrency, body.requests))))
    return summarize(body, runs, time.monotonic() - begun, service.engine.stats.num_steps - steps)


async def run_request(
    service: Service, body: BenchmarkBody, run: BenchmarkRun, seconds_left: float
) -> None:
    """Run one request. Its prompt is random, so none of it is cached."""
    if seconds_left <= 0:
        return
    pieces = service.vocabulary.pieces
    prompt: list[int] = []
    while len(prompt) < body.prompt_tokens:
        token = random.randrange(len(pieces))
        if pieces[token]:
            prompt.append(token)
    params = SamplingParams(max_tokens=body.max_tokens, ignore_eos=True, temperature=0.0)
    generation = Generation(
        f"bench-{secrets.token_hex(12)}", [prompt], params, SchedulingOptions(deadline=seconds_left)
    )
    begun = time.monotonic()
    try:
        with service.submit(generation) as answer:
            async for _ in answer:
                run.seconds = time.monotonic() - begun
                run.first = run.first or run.seconds
                run.num_tokens = generation.usage.completion_tokens
            run.succeeded = True
    except CLLMError:
        run.seconds = time.monotonic() - begun


def summarize(
    body: BenchmarkBody, runs: list[BenchmarkRun], seconds: float, num_steps: int
) -> Benchmark:
    """Return the results, under the names in cLLM's first reports."""
    good = [run for run in runs if run.succeeded]
    times = [run.seconds for run in good] or [0.0]
    num_tokens = sum(run.num_tokens for run in runs)
    return {
        "total_requests": len(runs),
        "successful_requests": len(good),
        "failed_requests": len(runs) - len(good),
        "success_rate": len(good) / len(runs),
        "total_time": seconds,
        "average_response_time": statistics.fmean(times),
        "minimum_response_time": min(times),
        "maximum_response_time": max(times),
        "average_time_to_first_token": statistics.fmean([run.first for run in good] or [0.0]),
        "throughput": num_tokens / seconds,
        "average_tokens_per_second": statistics.fmean(
            [run.num_tokens / run.seconds for run in good] or [0.0]
        ),
        "total_prompt_tokens": body.prompt_tokens * len(good),
        "total_generated_tokens": num_tokens,
        "average_generated_tokens": num_tokens / len(runs),
        "steps": num_steps,
        "average_batch_size": num_tokens / num_steps if num_steps else 0.0,
    }
